"""A quantized checkpoint read as the BF16 tensors that it decodes to.

In: an opened checkpoint, NVFP4 or FP8, in the layouts beamq writes. Out: a `Decoded`: specs of
what `beamq dequantize` makes of it, and positional reads of those values, decoded as they are
asked for. So a dequantized folder is held against its source like any copy: to the bit.

The decoding is that of the kernels (FP32 products of code and scales, rounded to BF16 once); that
these agree with other libraries is `values.second-opinion`'s business.
"""

from __future__ import annotations

import struct
from dataclasses import replace

from beamq.checkpoint import Checkpoint
from beamq.errors import TensorError
from beamq.eval.structure import LARGEST_GLOBAL, SMALLEST_NORMAL
from beamq.formats.kernels import cpu
from beamq.formats.layout import quantized_tensors
from beamq.header import TensorSpec

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
