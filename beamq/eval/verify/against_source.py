"""The source a checkpoint was made from: is everything of it accounted for, and where does it lie?

In: the checkpoint's `Folder`, its `Inventory`, and an opened source. Out: the source range behind
each stored weight (packed 3-D experts cut into rows), and findings under `source.accounted`,
`source.config` and `source.files`. Reads headers and the small companion files, no weights.

The source is the caller's input: if it is broken or quantized itself, that is an exception.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from beamq.beam.config import BeamConfig
from beamq.errors import TensorError, UsageError
from beamq.eval.verify.checks import Ledger
from beamq.eval.verify.folder import LARGEST_GLOBAL, SMALLEST_NORMAL, Folder, Inventory
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import Checkpoint
from beamq.io.safetensors_header import TensorSpec
from beamq.plan.layout import quantized_tensors
from beamq.plan.sources import SourceRange, companion_files, map_sources, restored_name

# A quantized checkpoint read as the BF16 tensors that it decodes to.
#
# In: an opened checkpoint, NVFP4 or FP8, in the layouts beamq writes. Out: a `Decoded`: specs of
# what `beamq dequantize` makes of it, and positional reads of those values, decoded as they are
# asked for. So a dequantized folder is held against its source like any copy: to the bit.
#
# The decoding is that of the kernels (FP32 products of code and scales, rounded to BF16 once); that
# these agree with other libraries is `values.second-opinion`'s business.

BF16_BYTES = 2
SCALES = (".weight_scale", ".weight_scale_2", ".input_scale")


class Decoded:
    """See the module. Reads are thread safe. Raises `TensorError` for parts that do not fit."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._formats: dict[str, str] = {}
        self.tensors = {spec.name: spec for spec in map(self._spec, self._stored())}

    @property
    def quantized(self) -> bool:
        """Whether anything had to be decoded."""
        return bool(self._formats)

    def _stored(self) -> list[TensorSpec]:
        """Every tensor but the scales that decoding uses up."""
        tensors = self.checkpoint.tensors
        return [
            spec
            for spec in tensors.values()
            if not any(
                spec.name.endswith(suffix) and f"{spec.name.removesuffix(suffix)}.weight" in tensors
                for suffix in SCALES
            )
        ]

    def _spec(self, spec: TensorSpec) -> TensorSpec:
        """A tensor as it is, or as BF16 [n, k] where a scale stands beside it."""
        module = spec.name.removesuffix(".weight")
        if not spec.name.endswith(".weight") or len(spec.shape) != 2:
            return spec
        if f"{module}.weight_scale" not in self.checkpoint.tensors:
            return spec
        fmt = "nvfp4" if spec.dtype == "U8" else "fp8"
        n, k = spec.shape[0], spec.shape[1] * (2 if fmt == "nvfp4" else 1)
        for name, dtype, shape in quantized_tensors(module, fmt, n, k):
            if name.endswith(".input_scale"):
                continue  # of no use here
            found = self.checkpoint.spec(name)
            if (found.dtype, found.shape) != (dtype, shape):
                raise TensorError(
                    f"{found.file}: {name} is {found.dtype} {list(found.shape)}, expected {dtype}"
                    f" {list(shape)}; is this the folder that was dequantized?"
                )
        self._formats[spec.name] = fmt
        return replace(spec, dtype="BF16", shape=(n, k), nbytes=n * k * BF16_BYTES)

    def read_into(self, spec: TensorSpec, out: memoryview, start: int = 0) -> None:
        """Fill `out` with a tensor's bytes from `start`, decoded where it is quantized."""
        fmt = self._formats.get(spec.name)
        if fmt is None:
            self.checkpoint.read_into(spec, out, start)
            return
        line = spec.shape[1] * BF16_BYTES
        first, last = start // line, -(-(start + out.nbytes) // line)
        rows = memoryview(bytearray((last - first) * line))
        self._decode(spec, fmt, first, last - first, rows)
        begin = start - first * line
        out[:] = rows[begin : begin + out.nbytes]

    def _decode(self, spec: TensorSpec, fmt: str, first: int, rows: int, out: memoryview) -> None:
        """Rows first .. first + rows - 1 of a linear [n, k] as BF16."""
        k = spec.shape[1]
        module = spec.name.removesuffix(".weight")
        codes = self._rows(f"{module}.weight", first, rows)
        scales = self._rows(f"{module}.weight_scale", first, rows)
        if fmt == "nvfp4":
            name = f"{module}.weight_scale_2"
            global_scale: float = struct.unpack("<f", self.checkpoint.read(name))[0]
            if not SMALLEST_NORMAL <= global_scale <= LARGEST_GLOBAL:
                raise TensorError(
                    f"{spec.file}: {name} is {global_scale}, which no weight can have; `beamq"
                    " verify` on that folder tells what is broken"
                )
            cpu.nvfp4_dequantize(codes, scales, k, global_scale, out, "BF16")
        else:
            cpu.fp8_dequantize_rows(codes, scales, k, out, "BF16")

    def _rows(self, name: str, first: int, rows: int) -> bytearray:
        spec = self.checkpoint.spec(name)
        line = spec.nbytes // spec.shape[0]
        buffer = bytearray(rows * line)
        self.checkpoint.read_into(spec, memoryview(buffer), first * line)
        return buffer


OWN_KEYS = ("quantization_config", "dtype", "torch_dtype")  # config keys a conversion may change
CHUNK = 1 << 20


def trace_source(
    folder: Folder, inventory: Inventory, source: Checkpoint, ledger: Ledger
) -> dict[str, SourceRange]:
    """Output tensor name -> where its values lie in the source.

    Raises `TensorError`, `AlreadyQuantizedError` or `ConfigError` for a source that is no
    high-precision Beam.
    """
    mapping = map_sources(source, BeamConfig.from_dict(source.config))
    _check_config(folder.raw_config, source.config, ledger)
    _check_files(folder, source, _targets(source), ledger)
    ranges = {role.name: found for role, found in mapping.found}
    for spec in mapping.extra:
        ranges[spec.name] = _whole(spec)
    _check_accounted(inventory, ranges, len(mapping.dropped), ledger)
    return ranges


def trace_decoded(
    folder: Folder, inventory: Inventory, source: Decoded, ledger: Ledger
) -> dict[str, SourceRange]:
    """The same for a folder that was dequantized: the values that its quantized source decodes to.

    Raises `UsageError` for a source that is not quantized.
    """
    checkpoint = source.checkpoint
    if not source.quantized:
        raise UsageError(
            f"--source {checkpoint.name} is not quantized, and {folder.root} is not either; give"
            " the quantized folder that it was decoded from, or leave out --source"
        )
    _check_config(folder.raw_config, checkpoint.config, ledger)
    _check_files(folder, checkpoint, _restored(checkpoint), ledger)
    ranges = {name: _whole(spec) for name, spec in source.tensors.items()}
    _check_accounted(inventory, ranges, 0, ledger)
    return ranges


def _whole(spec: TensorSpec) -> SourceRange:
    return SourceRange(spec=spec, start=0, nbytes=spec.nbytes, shape=spec.shape)


def _check_accounted(
    inventory: Inventory, ranges: Mapping[str, SourceRange], dropped: int, ledger: Ledger
) -> None:
    stored: dict[str, tuple[int, ...]] = {
        linear.role.name: linear.shape for linear in inventory.linears if linear.parts
    }
    for spec in [spec for _, spec in inventory.precise] + inventory.unknown:
        stored[spec.name] = spec.shape
    ledger.examined("source.accounted", len(ranges) + dropped, "source tensors")
    for name, found in ranges.items():
        if name not in stored:
            ledger.fault("source.accounted", name, "is in the source, but not here")
        elif stored[name] != found.shape:
            ledger.fault(
                "source.accounted",
                name,
                f"is {list(stored[name])} here and {list(found.shape)} in the source",
            )
    for name in stored:
        if name not in ranges:
            ledger.fault("source.accounted", name, "is here, but not in the source")


def _check_config(ours: Mapping[str, Any], theirs: Mapping[str, Any], ledger: Ledger) -> None:
    keys = (ours.keys() | theirs.keys()).difference(OWN_KEYS)
    ledger.examined("source.config", len(keys), "keys")
    for key in sorted(keys):
        if ours.get(key) != theirs.get(key):
            ledger.fault(
                "source.config",
                key,
                f"is {str(ours.get(key))[:60]!r}, in the source {str(theirs.get(key))[:60]!r}",
            )


def _targets(source: Checkpoint) -> dict[str, str]:
    """What became of each file that travels with the weights: its name there -> here."""
    return {each.source: each.target for each in companion_files(source.source)}


def _restored(source: Checkpoint) -> dict[str, str]:
    """The same for decoding, which gives cards their old names back and drops the newest."""
    found = {each.source: restored_name(each) for each in companion_files(source.source)}
    return {name: target for name, target in found.items() if target is not None}


def _check_files(
    folder: Folder, source: Checkpoint, targets: Mapping[str, str], ledger: Ledger
) -> None:
    """Tokenizer, templates and the like must be the source's, bit for bit."""
    ledger.examined("source.files", len(targets), "files")
    for name, here in targets.items():
        target = folder.root / here
        if not target.is_file():
            ledger.fault("source.files", here, "is missing; the source has it")
        elif not _same_bytes(source.source.path(name), target):
            ledger.fault("source.files", here, "differs from the source's")
    if not targets:
        ledger.skip("source.files", "the source has no other files")


def _same_bytes(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as left, b.open("rb") as right:
        while True:
            chunk = left.read(CHUNK)
            if chunk != right.read(CHUNK):
                return False
            if not chunk:
                return True
