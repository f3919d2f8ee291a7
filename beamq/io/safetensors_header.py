"""The header of an untrusted safetensors file.

In: a file. Out: its tensors' names, dtypes, shapes and byte ranges, or a `CheckpointError` that
names the file and the fault.

Nothing is allocated beyond the header's own size, which the file's size bounds; offsets must tile
the data section exactly, as the safetensors library demands; each range must be dtype x shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from beamq.errors import CheckpointError, printable
from beamq.io.files import open_file, parse_json, unreadable

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
CODE_DTYPES = ("U8", "I8", "F8_E4M3", "F8_E5M2")  # what quantized weights are stored in
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where a tensor is. `offset` counts from the start of the file, in bytes."""

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


def read_header(path: Path, file: str) -> tuple[list[TensorSpec], dict[str, str]]:
    """Read and check one safetensors header; `file` is the name to record.

    Returns the specs in file order and `__metadata__`. Raises `CheckpointError`.
    """
    try:
        descriptor, status = open_file(path)
        with open(descriptor, "rb") as stream:
            return parse_header(path, file, status.st_size, stream.read)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found, or a link that points nowhere") from None
    except (OSError, ValueError) as fault:
        raise unreadable(path, fault, CheckpointError) from fault


def parse_header(
    path: Path | str, file: str, size: int, read: Callable[[int], bytes]
) -> tuple[list[TensorSpec], dict[str, str]]:
    """The same for a file that is not here: `path` names it in messages, `size` is its bytes,
    `read(n)` gives the next n bytes from its start."""
    lead = read(8)
    if len(lead) < 8:
        raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors file")
    length = int.from_bytes(lead, "little")
    if lead.startswith(b"version "):
        raise CheckpointError(f"{path}: a git-LFS pointer, not the weights; run `git lfs pull`")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        raise CheckpointError(
            f"{path}: header says {length} bytes but the file has {size}; cut off while"
            " downloading, or not a safetensors file"
        )
    header = _parse_json(path, read(length))
    meta = header.pop("__metadata__", {})
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise CheckpointError(f"{path}: header __metadata__ must map names to strings")
    specs = [_spec(path, file, 8 + length, name, entry) for name, entry in header.items()]
    specs.sort(key=lambda spec: (spec.offset, spec.nbytes))
    _check_ranges(path, specs, 8 + length, size)
    return specs, meta


def _parse_json(path: Path | str, raw: bytes) -> dict[str, Any]:
    try:
        header = parse_json(raw, unique=True)
    except ValueError as fault:
        raise CheckpointError(f"{path}: header is not valid JSON: {str(fault)[:200]}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is not a JSON object")
    return header


def _spec(path: Path | str, file: str, base: int, name: str, entry: Any) -> TensorSpec:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: header entry {name[:100]!r} is not an object")
    if not _is_text(name):
        raise CheckpointError(f"{path}: name {name[:100]!r} cannot be written as UTF-8")
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


def _is_text(name: str) -> bool:
    """Whether a name can be written again: JSON lets half a surrogate pair through."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < (1 << 62) for item in value
    )


def _check_ranges(path: Path | str, specs: Iterable[TensorSpec], base: int, size: int) -> None:
    """Ranges must tile the data section exactly, as the safetensors library demands."""
    position = base
    for spec in specs:
        if spec.offset != position:
            what = "overlaps its neighbour" if spec.offset < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: {spec.name[:100]} at byte {spec.offset} {what}")
        position += spec.nbytes
    if position > size:
        raise CheckpointError(
            f"{path}: {position - size} bytes are missing at the end ({size} of {position});"
            " download it again"
        )
    if position < size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor")


def few(items: Sequence[str], count: int = 3) -> str:
    """The first few of many names, for a message."""
    shown = ", ".join(printable(item, 120) for item in items[:count])
    return shown + (f" and {len(items) - count} more" if len(items) > count else "")
