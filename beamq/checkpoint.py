"""READ: a checkpoint folder as headers plus byte ranges; nothing is loaded that nobody asked for.

In: a folder of safetensors files, possibly written by a stranger. Out: a `Checkpoint`: its
config, every tensor's dtype, shape, file and byte range, and positional reads of those ranges.

Headers are treated as hostile: sizes are bounded by the file before anything is allocated,
every offset is checked against its neighbours and against dtype x shape, names may not leave
the folder. Data is read with `preadv` into the caller's buffer: thread safe, no file position,
no whole-file load, and (unlike mmap) a file that shrinks under us is an error rather than a
crash. Pickle formats are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from beamq.config import read_config, read_json_object
from beamq.errors import CheckpointError, TensorError

if TYPE_CHECKING:
    import torch

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
FLOAT_SOURCES = ("BF16", "F16", "F32")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_INDEX_BYTES = 1 << 30
MAX_OPEN_FILES = 64
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where a tensor lies. `offset` counts from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint. Reads are thread safe; `close` (or `with`) releases the files."""

    root: Path
    config: dict[str, Any]
    tensors: dict[str, TensorSpec]
    files: tuple[str, ...]
    metadata: dict[str, dict[str, str]]
    has_index: bool
    _fds: _OpenFiles = field(repr=False)

    def read_into(self, spec: TensorSpec, out: memoryview, start: int = 0) -> None:
        """Fill `out` (bytes) with the tensor's bytes from `start`.

        Raises `CheckpointError` when the file ends early or the device fails.
        """
        if start < 0 or start + out.nbytes > spec.nbytes:
            raise ValueError(f"{spec.name}: range {start}+{out.nbytes} of {spec.nbytes} bytes")
        self._fds.read(spec.file, spec.offset + start, out, spec.name)

    def read(self, name: str) -> bytearray:
        """All bytes of one tensor, in a new buffer."""
        spec = self.spec(name)
        buffer = bytearray(spec.nbytes)
        self.read_into(spec, memoryview(buffer))
        return buffer

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, with the dtype it has on disk."""
        from beamq.torch_dtypes import tensor_from_bytes  # torch takes seconds to import

        spec = self.spec(name)
        return tensor_from_bytes(self.read(name), spec.dtype, spec.shape)

    def spec(self, name: str) -> TensorSpec:
        """The record of one tensor. Raises `TensorError` if the checkpoint lacks it."""
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorError(f"{self.root}: tensor {name} is missing") from None

    def advise(self, spec: TensorSpec, start: int, nbytes: int) -> None:
        """Ask the kernel to read part of a tensor ahead; a hint, free to fail."""
        self._fds.advise(spec.file, spec.offset + start, nbytes)

    def fingerprint(self) -> str:
        """SHA-256 over config, names, dtypes, shapes, places, sizes and modification times.

        Tells "the same files" from "changed since"; content is covered by per-shard checksums.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in self.files:
            status = os.stat(self.root / file)
            digest.update(f"\n{file}\t{status.st_size}\t{status.st_mtime_ns}".encode())
        digest.update(self.layout_digest().encode())
        return digest.hexdigest()

    def layout_digest(self) -> str:
        """SHA-256 over every tensor's name, dtype, shape and place; the same on any machine."""
        digest = hashlib.sha256()
        for spec in self.tensors.values():
            line = f"{spec.name}\t{spec.dtype}\t{spec.shape}\t{spec.file}\t{spec.offset}\n"
            digest.update(line.encode())
        return digest.hexdigest()

    def content_digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and samples of the values; tells models apart.

        4 KiB from the middle of every tensor, of packed and per-expert weights every 16th: a few
        thousand reads for a 501B model. The same for copies and for other shardings.
        """
        digest = hashlib.sha256()
        for position, name in enumerate(sorted(self.tensors)):
            spec = self.tensors[name]
            digest.update(f"{name}\t{spec.dtype}\t{spec.shape}\n".encode())
            if ".experts." in name and position % 16:
                continue
            size = min(spec.nbytes, SAMPLE_BYTES)
            sample = bytearray(size)
            self.read_into(spec, memoryview(sample), (spec.nbytes - size) // 2)
            digest.update(sample)
        return digest.hexdigest()

    def close(self) -> None:
        """Close every open file."""
        self._fds.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read a folder's config, index and all headers; no tensor data.

    Raises `CheckpointError` for anything broken, with the file's name; `ConfigError` for
    config.json.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such folder; expected a checkpoint folder")
    config = read_config(root)
    files, weight_map = _weight_files(root)
    tensors: dict[str, TensorSpec] = {}
    metadata: dict[str, dict[str, str]] = {}
    for file in files:
        specs, meta = read_header(root / file, file)
        metadata[file] = meta
        for spec in specs:
            earlier = tensors.get(spec.name)
            if earlier is not None:
                raise CheckpointError(
                    f"{spec.name}: stored twice, in {earlier.file} and {file}; remove one"
                )
            tensors[spec.name] = spec
    if weight_map is not None:
        _check_index(root, weight_map, tensors)
    return Checkpoint(
        root=root,
        config=config,
        tensors=tensors,
        files=tuple(files),
        metadata=metadata,
        has_index=weight_map is not None,
        _fds=_OpenFiles(root),
    )


def _weight_files(root: Path) -> tuple[list[str], dict[str, str] | None]:
    """The safetensors files to read: those the index names, else the single file."""
    index_path = root / INDEX_NAME
    if index_path.exists() or index_path.is_symlink():
        index = read_json_object(index_path, CheckpointError, MAX_INDEX_BYTES)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path}: no weight_map; expected tensor name -> file")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not safe_file_name(file):
                raise CheckpointError(
                    f"{index_path}: {name} points to {str(file)[:80]!r}; expected the name of a"
                    " .safetensors file in the same folder"
                )
        files = sorted(set(weight_map.values()))
        missing = [file for file in files if not (root / file).exists()]
        if missing:
            raise CheckpointError(
                f"{index_path}: {len(missing)} of {len(files)} shards are missing:"
                f" {_few(missing)}; finish the download"
            )
        return files, weight_map
    single = root / SINGLE_NAME
    if single.exists() or single.is_symlink():
        return [SINGLE_NAME], None
    found = sorted(path.name for path in root.glob("*.safetensors"))
    if found:
        raise CheckpointError(
            f"{root}: {len(found)} safetensors files but no {INDEX_NAME} and no {SINGLE_NAME};"
            " restore the index"
        )
    pickles = sorted(path.name for path in root.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{root}: only pickle files ({_few(pickles)}); beamq never unpickles."
            " Save the model as safetensors first"
        )
    raise CheckpointError(f"{root}: no {SINGLE_NAME} and no {INDEX_NAME}; not a checkpoint")


def safe_file_name(name: str) -> bool:
    """Whether a name from an index is a plain safetensors file name that stays in its folder."""
    return (
        name.endswith(".safetensors")
        and "/" not in name
        and "\\" not in name
        and "\0" not in name
        and not name.startswith(".")
        and len(name) < 256
    )


def _check_index(root: Path, weight_map: dict[str, str], tensors: dict[str, TensorSpec]) -> None:
    problems = [
        f"{name} (index says {file}, "
        f"{'found in ' + tensors[name].file if name in tensors else 'not there'})"
        for name, file in weight_map.items()
        if name not in tensors or tensors[name].file != file
    ]
    problems += [f"{name} (in {tensors[name].file}, not in the index)"
                 for name in tensors if name not in weight_map]  # fmt: skip
    if problems:
        raise CheckpointError(
            f"{root / INDEX_NAME}: {len(problems)} entries disagree with the shards:"
            f" {_few(problems)}"
        )


def read_header(path: Path, file: str) -> tuple[list[TensorSpec], dict[str, str]]:
    """Read and check one safetensors header; `file` is the name to record.

    Returns the specs in file order and `__metadata__`. Raises `CheckpointError`.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            lead = stream.read(8)
            if len(lead) < 8:
                raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors file")
            length = int.from_bytes(lead, "little")
            if lead.startswith(b"version "):
                raise CheckpointError(
                    f"{path}: a git-LFS pointer, not the weights; run `git lfs pull`"
                )
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError(
                    f"{path}: header says {length} bytes but the file has {size}; cut off while"
                    " downloading, or not a safetensors file"
                )
            raw = stream.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found, or a link that points nowhere") from None
    except OSError as fault:
        raise CheckpointError(f"{path}: cannot be read: {fault.strerror or fault}") from fault
    header = _parse_header(path, raw)
    meta = header.pop("__metadata__", {})
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise CheckpointError(f"{path}: header __metadata__ must map names to strings")
    specs = [_spec(path, file, 8 + length, name, entry) for name, entry in header.items()]
    specs.sort(key=lambda spec: (spec.offset, spec.nbytes))
    _check_ranges(path, specs, 8 + length, size)
    return specs, meta


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            double = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError(f"{path}: header names {_few(double)} twice")
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as fault:
        raise CheckpointError(f"{path}: header is not valid JSON: {str(fault)[:100]}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is not a JSON object")
    return header


def _spec(path: Path, file: str, base: int, name: str, entry: Any) -> TensorSpec:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: header entry {name[:100]!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise CheckpointError(
            f"{path}: {name[:100]} has dtype {str(dtype)[:40]!r}, expected one of"
            f" {', '.join(ITEMSIZE)}"
        )
    if not _naturals(shape) or len(shape) > 8:
        raise CheckpointError(f"{path}: {name[:100]} has shape {str(shape)[:80]}")
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{path}: {name[:100]} has data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    wanted = math.prod(shape) * ITEMSIZE[dtype]
    if end - begin != wanted:
        raise CheckpointError(
            f"{path}: {name[:100]} spans {end - begin} bytes, but {dtype} {list(shape)} takes"
            f" {wanted}"
        )
    return TensorSpec(
        name=name, dtype=dtype, shape=tuple(shape), file=file, offset=base + begin, nbytes=wanted
    )


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < (1 << 62) for item in value
    )


def _check_ranges(path: Path, specs: Iterable[TensorSpec], base: int, size: int) -> None:
    """Ranges must tile the data section exactly, as the safetensors library demands."""
    position = base
    for spec in specs:
        if spec.offset != position:
            what = "overlaps its neighbour" if spec.offset < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: {spec.name} at byte {spec.offset} {what}")
        position += spec.nbytes
    if position > size:
        raise CheckpointError(
            f"{path}: {position - size} bytes are missing at the end ({size} of {position});"
            " download it again"
        )
    if position < size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor")


def _few(items: list[str], count: int = 3) -> str:
    shown = ", ".join(item[:120] for item in items[:count])
    return shown + (f" and {len(items) - count} more" if len(items) > count else "")


class _OpenFiles:
    """A bounded set of read-only descriptors, opened on first use, closed oldest first.

    A descriptor in use is never closed under its reader: reads hold a count on it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: dict[str, int] = {}

    def _acquire(self, file: str) -> int:
        with self._lock:
            descriptor = self._open.get(file)
            if descriptor is None:
                try:
                    descriptor = os.open(self._root / file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as fault:
                    raise CheckpointError(
                        f"{self._root / file}: cannot be opened: {fault.strerror}"
                    ) from fault
                self._open[file] = descriptor
                self._evict()
            self._open.move_to_end(file)
            self._users[file] = self._users.get(file, 0) + 1
            return descriptor

    def _release(self, file: str) -> None:
        with self._lock:
            self._users[file] -= 1

    def _evict(self) -> None:
        for file in list(self._open):
            if len(self._open) <= MAX_OPEN_FILES:
                return
            if not self._users.get(file):
                os.close(self._open.pop(file))

    def read(self, file: str, offset: int, out: memoryview, name: str) -> None:
        descriptor = self._acquire(file)
        try:
            done, view = 0, out.cast("B") if out.format != "B" or out.ndim != 1 else out
            while done < view.nbytes:
                got = os.preadv(descriptor, [view[done:]], offset + done)
                if got == 0:
                    raise CheckpointError(
                        f"{self._root / file}: ended while reading {name}; the file changed"
                        " after its header was read"
                    )
                done += got
        except OSError as fault:
            raise CheckpointError(
                f"{self._root / file}: reading {name} failed: {fault.strerror or fault}"
            ) from fault
        finally:
            self._release(file)

    def advise(self, file: str, offset: int, nbytes: int) -> None:
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        descriptor = self._acquire(file)
        try:
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
        except OSError:
            return
        finally:
            self._release(file)

    def close(self) -> None:
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()
