"""The source a checkpoint was made from: is all of it accounted for, and where is each value?

In: the checkpoint's `Folder`, its `Inventory`, and an opened source. Out: the source range of each
stored weight (packed 3-D experts are cut into rows), and findings under `source.accounted`,
`source.config` and `source.files`. Reads headers and small files; a broken source is an exception.

A folder that was dequantized has a quantized source. `DecodedCheckpoint` gives the values that this
source decodes to (FP32 products of code and scales, rounded to BF16 once), so that such a folder
can be compared bit for bit like a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from beamq.adapter.record import recorded_adapter
from beamq.beam.config import BeamConfig
from beamq.errors import TensorError, UsageError, shown_value
from beamq.eval.verify.checks import FP8, NVFP4, Ledger
from beamq.eval.verify.folder import Folder
from beamq.eval.verify.inventory import (
    LARGEST_GLOBAL,
    SCALE_SUFFIXES,
    SMALLEST_NORMAL,
    Inventory,
)
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import Checkpoint
from beamq.io.companions import companion_files, restored_name
from beamq.io.manifest import file_checksum
from beamq.io.safetensors_header import TensorSpec
from beamq.plan.layout import WEIGHT_FORMATS, WeightFormat, format_in, quantized_tensors
from beamq.plan.sources import SourceRange, map_sources, whole_range

BF16_BYTES = 2
# Keys of the config that a conversion may change.
OWN_KEYS = ("quantization_config", "dtype", "torch_dtype", "_name_or_path")


class DecodedCheckpoint:
    """A quantized checkpoint read as what `beamq dequantize` makes of it; reads are thread safe.

    `tensors` are the decoded ones by name. Raises `TensorError` for parts that do not fit.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._formats: dict[str, str] = {}
        self.tensors: dict[str, TensorSpec] = {}
        for name, spec in checkpoint.tensors.items():
            module, _, suffix = name.rpartition(".")
            if suffix not in SCALE_SUFFIXES or f"{module}.weight" not in checkpoint.tensors:
                self.tensors[name] = self._decoded(spec)

    @property
    def quantized(self) -> bool:
        """Whether anything had to be decoded."""
        return bool(self._formats)

    def _decoded(self, spec: TensorSpec) -> TensorSpec:
        """A tensor as it is, or as BF16 [n, k] if it has a scale."""
        module = spec.name.removesuffix(".weight")
        if not spec.name.endswith(".weight") or len(spec.shape) != 2:
            return spec
        scales = (f"{module}.weight_scale", f"{module}.weight_scale_inv")
        if not any(scale in self.checkpoint.tensors for scale in scales):
            return spec
        fmt = format_in(self.checkpoint.tensors, module) or FP8
        n, k = spec.shape[0], spec.shape[1] * (2 if fmt == NVFP4 else 1)
        for name, dtype, shape in quantized_tensors(module, fmt, n, k):
            if name.endswith(".input_scale"):
                continue  # decoding does not use it
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
        block = WEIGHT_FORMATS[fmt].block[0]
        first = start // line // block * block
        last = min(spec.shape[0], -(-(start + out.nbytes) // line // block) * block)
        rows = memoryview(bytearray((last - first) * line))
        self._decode(spec, fmt, first, last - first, rows)
        begin = start - first * line
        out[:] = rows[begin : begin + out.nbytes]

    def _decode(self, spec: TensorSpec, fmt: str, first: int, rows: int, out: memoryview) -> None:
        """Rows first .. first + rows - 1 of a linear [n, k] as BF16."""
        k, module, checkpoint = spec.shape[1], spec.name.removesuffix(".weight"), self.checkpoint
        form = WEIGHT_FORMATS[fmt]
        codes = read_rows(checkpoint, checkpoint.spec(f"{module}.weight"), first, rows)
        scales = read_scales(checkpoint, form, spec.shape, module, (first, rows))
        if fmt != NVFP4:
            cpu.fp8_dequantize(form.rounding, codes, scales, k, out, "BF16")
            return
        name = f"{module}.weight_scale_2"
        global_scale: float = struct.unpack("<f", checkpoint.read(name))[0]
        if not SMALLEST_NORMAL <= global_scale <= LARGEST_GLOBAL:
            raise TensorError(
                f"{spec.file}: {name} is {global_scale}, which is not a valid scale; run `beamq"
                " verify` on that folder to find what is broken"
            )
        cpu.nvfp4_dequantize(codes, scales, k, global_scale, out, "BF16")


def read_rows(checkpoint: Checkpoint, spec: TensorSpec, first: int, rows: int) -> bytearray:
    """The bytes of some rows of a stored tensor."""
    line = spec.nbytes // spec.shape[0]
    buffer = bytearray(rows * line)
    checkpoint.read_into(spec, memoryview(buffer), first * line)
    return buffer


def read_scales(
    checkpoint: Checkpoint,
    form: WeightFormat,
    shape: tuple[int, ...],
    module: str,
    rows: tuple[int, int],
) -> bytearray:
    """The scales of rows (first, how many) of a linear [n, k]; whole blocks, or the last ones."""
    first, count = rows
    spec = checkpoint.spec(f"{module}.{form.scale}")
    begin, end = (form.scale_nbytes(row, shape[1]) for row in (first, first + count))
    buffer = bytearray(end - begin)
    checkpoint.read_into(spec, memoryview(buffer), begin)
    return buffer


def trace_source(
    folder: Folder, inventory: Inventory, source: Checkpoint, ledger: Ledger
) -> dict[str, SourceRange]:
    """Output tensor name -> where its values are in the source.

    Raises `TensorError`, `AlreadyQuantizedError` or `ConfigError` for a source that is not a
    high-precision Beam.
    """
    mapping = map_sources(source, BeamConfig.from_dict(source.config))
    _check_config(folder.raw_config, source.config, ledger)
    targets = {each.source: each.target for each in companion_files(source.source.listing())}
    _check_files(folder, source, targets, ledger)
    ranges = {role.name: found for role, found in mapping.found}
    ranges |= {spec.name: whole_range(spec) for spec in mapping.extra}
    _check_accounted(inventory, ranges, len(mapping.dropped), ledger)
    return ranges


def trace_decoded(
    folder: Folder, inventory: Inventory, source: DecodedCheckpoint, ledger: Ledger
) -> dict[str, SourceRange]:
    """The same for a folder that was dequantized and for the values that its source decodes to.

    Raises `UsageError` for a source that is not quantized.
    """
    checkpoint = source.checkpoint
    if not source.quantized:
        raise UsageError(
            f"--source {checkpoint.name} is not quantized, and {folder.root} is not either; give"
            " the quantized folder that it was decoded from, or leave out --source"
        )
    _check_config(folder.raw_config, checkpoint.config, ledger)
    # Decoding gives model cards their old names back, and drops the one that quantizing wrote.
    names = {
        each.source: restored_name(each) for each in companion_files(checkpoint.source.listing())
    }
    targets = {name: target for name, target in names.items() if target is not None}
    _check_files(folder, checkpoint, targets, ledger)
    ranges = {name: whole_range(spec) for name, spec in source.tensors.items()}
    _check_accounted(inventory, ranges, 0, ledger)
    return ranges


def _check_accounted(
    inventory: Inventory, ranges: Mapping[str, SourceRange], dropped: int, ledger: Ledger
) -> None:
    check = "source.accounted"
    stored: dict[str, tuple[int, ...]] = {
        linear.role.name: linear.shape for linear in inventory.linears if linear.parts
    }
    for spec in [spec for _, spec in inventory.high_precision] + inventory.unknown:
        stored[spec.name] = spec.shape
    ledger.examined(check, len(ranges) + dropped)
    for name, found in ranges.items():
        if name not in stored:
            ledger.fault(check, name, "is in the source, but not here")
        elif stored[name] != found.shape:
            shapes = f"{list(stored[name])} here and {list(found.shape)} in the source"
            ledger.fault(check, name, f"is {shapes}")
    for name in stored:
        if name not in ranges:
            ledger.fault(check, name, "is here, but not in the source")


def _check_config(ours: Mapping[str, Any], theirs: Mapping[str, Any], ledger: Ledger) -> None:
    keys = (ours.keys() | theirs.keys()).difference(OWN_KEYS)
    ledger.examined("source.config", len(keys))
    for key in sorted(keys):
        if ours.get(key) != theirs.get(key):
            here, there = str(ours.get(key))[:60], str(theirs.get(key))[:60]
            ledger.fault("source.config", key, f"is {here!r}, but {there!r} in the source")


def refuse_without_adapter(folder: Folder, source: Checkpoint) -> None:
    """Raise `UsageError` for a folder made with an adapter, and a source without it."""
    made_with = None if folder.manifest is None else folder.manifest.adapter
    if made_with is None:
        return
    merged = recorded_adapter(source)
    if merged is not None and merged.get("digest") == made_with.get("digest"):
        return
    raise UsageError(
        f"{folder.root}: beamq.json says that the adapter {shown_value(made_with.get('name'))} is"
        f" merged in, and --source {source.name} is without it; give --adapter ADAPTER, or the"
        " merged model as --source"
    )


def _check_files(
    folder: Folder, source: Checkpoint, targets: Mapping[str, str], ledger: Ledger
) -> None:
    """Tokenizer, templates and the like. `targets` maps their names in the source to ours."""
    check = "source.files"
    if folder.manifest is not None and folder.manifest.adapter and recorded_adapter(source):
        # A folder made with an adapter has the base's model card, a merged source has its own.
        targets = {name: here for name, here in targets.items() if not name.startswith("README")}
    ledger.examined(check, len(targets))
    for name, here in targets.items():
        target = folder.root / here
        if not target.is_file():
            ledger.fault(check, here, "is missing, but the source has it")
        elif file_checksum(source.source.path(name)) != file_checksum(target):
            ledger.fault(check, here, "differs from the source's")
    if not targets:
        ledger.skip("the source has no other files", check)
