"""GEMM back ends for GPUs: an ordered list for each op, and `Gemm`s that use the best that works.

In:  a name and a device. Out: an `EngineGemm`, which is a `Gemm` (linear.py).

    auto        for each op the first of `ORDER` that is not refused and passed its check
    triton, cutlass, cublaslt, quack
                that one alone; an op it cannot serve on this device raises `DeviceError`
    NAME+fast   FP8 products are added inside the tensor cores in some 14 bits: up to a third
                faster, error 2.0e-3 to 3.9e-3 instead of 1.7e-3

The one idea: a back end is a claim until it has been checked. `refusal` rules out what a device
cannot do; what is left multiplies a small problem in a process of its own (gemm_probe.py), against
the emulation, before it is used for anything. `reference` is never refused and always last.

What a call cannot serve (activations that are not BF16, widths that are no multiple of 16) goes to
the reference as well: nothing about results depends on it but speed.

Experts pass in ranges of at most `CHUNK_BYTES` of input rows, so that what lies between the GEMMs
stays small beside the layer's weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from beamq.errors import DeviceError
from beamq.model.expert_rows import part_of
from beamq.model.gemm_operands import fp4_part
from beamq.model.gemm_quack import Quack
from beamq.model.gemm_torch import CublasLt, Cutlass
from beamq.model.gemm_triton import Triton
from beamq.model.linear import (
    DenseWeight,
    Fp8Weight,
    LinearWeight,
    Nvfp4Weight,
    ReferenceGemm,
)

ENGINES = ("auto", "triton", "cutlass", "cublaslt", "quack")
FAST = "+fast"
ORDER: Mapping[str, tuple[str, ...]] = {
    "bf16-grouped": ("triton", "cutlass", "reference"),
    "fp8-dense": ("cublaslt", "cutlass", "reference"),
    "fp8-grouped": ("triton", "cutlass", "cublaslt", "reference"),
    "nvfp4-dense": ("cublaslt", "cutlass", "quack", "triton", "reference"),
    "nvfp4-grouped": ("cutlass", "quack", "triton", "reference"),
}
"""Fastest first, as measured on an H200 (docs/results.md); on Blackwell, as expected."""
CHUNK_BYTES = 450 << 20

_REFERENCE = ReferenceGemm()
_FORMATS = {Fp8Weight: "fp8", Nvfp4Weight: "nvfp4"}


def backends() -> dict[str, Any]:
    """One of each class of gemm_triton.py, gemm_torch.py and gemm_quack.py, by name."""
    return {kernel.name: kernel for kernel in (Triton(), Cutlass(), CublasLt(), Quack())}


def engine(name: str) -> EngineGemm:
    """The `Gemm` of that name; what it can do is found out at its first use on a device."""
    return EngineGemm(name=name.removesuffix(FAST), fast=name.endswith(FAST))


@dataclass(slots=True, kw_only=True)
class EngineGemm:
    """A `Gemm` that sends each op to one of `kernels`, by `choices` of a device."""

    name: str
    fast: bool = False
    kernels: Mapping[str, Any] = field(default_factory=backends)
    choices: dict[tuple[str, torch.device], str] = field(default_factory=dict)

    def linear(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """See `Gemm.linear`."""
        kernel = None
        if not isinstance(weight, DenseWeight) and x_TK.shape[0] and _fits(x_TK, weight):
            kernel = self._kernel(f"{_FORMATS[type(weight)]}-dense", x_TK.device)
        if kernel is None:
            return _REFERENCE.linear(x_TK, weight)
        y: torch.Tensor = kernel.dense(x_TK, weight, fast=self.fast)
        return y

    def grouped(
        self,
        x_TK: torch.Tensor,
        rows: torch.Tensor | None,
        weight: LinearWeight,
        offsets: Sequence[int],
    ) -> torch.Tensor:
        """See `Gemm.grouped`."""
        kernel = self._grouped_kernel(x_TK, weight, offsets)
        if kernel is None:
            return _REFERENCE.grouped(x_TK, rows, weight, offsets)
        tokens = kernel.tokens(x_TK, weight)
        y: torch.Tensor = kernel.grouped(tokens, rows, weight, offsets, fast=self.fast)
        return y

    def experts(
        self,
        x_TK: torch.Tensor,
        rows: torch.Tensor | None,
        gate_up: LinearWeight,
        down: LinearWeight,
        offsets: Sequence[int],
    ) -> torch.Tensor:
        """See `Gemm.experts`."""
        kernel = self._grouped_kernel(x_TK, gate_up, offsets)
        other = self._grouped_kernel(x_TK, down, offsets)
        if kernel is None or other is None or other.name != kernel.name:
            return _REFERENCE.experts(x_TK, rows, gate_up, down, offsets)
        y_SK = x_TK.new_empty(offsets[-1], _stored(down).shape[1])
        tokens = kernel.tokens(x_TK, gate_up)
        if rows is None:
            rows = torch.arange(offsets[-1], device=x_TK.device)
        for first, last in _ranges(offsets, CHUNK_BYTES // (x_TK.shape[1] * x_TK.itemsize)):
            low, high = offsets[first], offsets[last]
            part = part_of(offsets, first, last)
            wide, narrow = (_some(kernel, w, first, last) for w in (gate_up, down))
            fused = {"swiglu": True} if kernel.fuses(gate_up, fast=self.fast) else {}
            between = kernel.grouped(tokens, rows[low:high], wide, part, fast=self.fast, **fused)
            active = kernel.tokens(between, down) if fused else kernel.gated(between, down)
            del between
            kernel.grouped(active, None, narrow, part, fast=self.fast, out=y_SK[low:high])
            del active
        return y_SK

    def _grouped_kernel(
        self, x_TK: torch.Tensor, weight: LinearWeight, offsets: Sequence[int]
    ) -> Any | None:
        if not offsets[-1] or not _fits(x_TK, weight):
            return None
        return self._kernel(f"{_FORMATS.get(type(weight), 'bf16')}-grouped", x_TK.device)

    def _kernel(self, op: str, device: torch.device) -> Any | None:
        """The class that serves `op` on `device`, None for the reference. Raises `DeviceError`."""
        chosen = self.choices.get((op, device))
        if chosen is None:
            chosen = self.choices[op, device] = self._choose(op, device)
        return self.kernels.get(chosen)

    def _choose(self, op: str, device: torch.device) -> str:
        from beamq.model.gemm_probe import verdicts  # which imports this module

        if self.name != "auto" and self.name not in ORDER[op]:
            return next(v.backend for v in verdicts(op, device) if v.usable)
        reasons = []
        for verdict in verdicts(op, device):
            if self.name in ("auto", verdict.backend):
                if verdict.usable:
                    return verdict.backend
                reasons.append(f"{verdict.reason}")
        raise DeviceError(
            f"gemm '{self.name}' cannot do {op} on {device}: {'; '.join(reasons)}."
            " Use gemm 'auto' or 'reference'"
        )


def _fits(x_TK: torch.Tensor, weight: LinearWeight) -> bool:
    """BF16 activations, and both widths multiples of 16 (of 32 in packed codes), as kernels ask."""
    n, k = _stored(weight).shape[-2:]
    return (
        x_TK.dtype == torch.bfloat16
        and n % 16 == 0
        and k % 16 == 0
        and (not isinstance(weight, DenseWeight) or weight.w_NK.dtype == torch.bfloat16)
    )


def _stored(weight: LinearWeight) -> torch.Tensor:
    return weight.w_NK if isinstance(weight, DenseWeight) else weight.codes


def _some(kernel: Any, weight: LinearWeight, first: int, last: int) -> LinearWeight:
    """Experts first .. last - 1, as views."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(w_NK=weight.w_NK[first:last])
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(codes=weight.codes[first:last], scale=weight.scale[first:last])
    if not isinstance(kernel, Triton):
        return fp4_part(weight, first, last)
    return Nvfp4Weight(
        codes=weight.codes[first:last],
        block_scale=weight.block_scale[first:last],
        global_scale=weight.global_scale[first:last],
        input_scale=weight.input_scale,
    )


def _ranges(offsets: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """Ranges of experts of at most `rows` rows each, or of one expert that has more."""
    if offsets[-1] <= rows:
        return [(0, len(offsets) - 1)]
    ranges, first = [], 0
    for expert in range(1, len(offsets)):
        if offsets[expert] - offsets[first] > rows and expert - 1 > first:
            ranges.append((first, expert - 1))
            first = expert - 1
    ranges.append((first, len(offsets) - 1))
    return [(a, b) for a, b in ranges if offsets[b] > offsets[a]]
