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
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.config import read_config, read_json_object
from beamq.errors import CheckpointError, TensorError
from beamq.header import TensorSpec, few, read_header
from beamq.open_files import OpenFiles

if TYPE_CHECKING:
    import torch

FLOAT_SOURCES = ("BF16", "F16", "F32")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 1 << 30
SAMPLE_BYTES = 4096


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint. Reads are thread safe; `close` (or `with`) releases the files."""

    root: Path
    config: dict[str, Any]
    tensors: dict[str, TensorSpec]
    files: tuple[str, ...]
    metadata: dict[str, dict[str, str]]
    has_index: bool
    _fds: OpenFiles = field(repr=False)

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
        _fds=OpenFiles(root),
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
                f" {few(missing)}; finish the download"
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
            f"{root}: only pickle files ({few(pickles)}); beamq never unpickles."
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
            f" {few(problems)}"
        )
