"""The `triton` back end: experts of every format through one kernel, and NVFP4 by emulation.

In:  BF16 activations and weights as loaded. Out: BF16 products.

The one idea: E2M1 codes times E4M3 block scales are exact in BF16, so NVFP4 is a BF16 product of
decoded operands with two FP32 scales after the sum: the arithmetic of the reference, at the speed
of BF16. Weights are decoded some experts at a time; memory stays near that of the stored format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from beamq import devices
from beamq.formats.nvfp4 import QuantizedTensor
from beamq.model.gemm.backend import (
    DeviceFacts,
    Fp8Rows,
    Fp8Weight,
    GemmBackend,
    GroupFp8Weight,
    Groups,
    LinearWeight,
    Nvfp4Weight,
    Tokens,
    static_scale,
)
from beamq.model.gemm.backend import swiglu as plain_swiglu
from beamq.model.gemm.operands import fp8_rows, take

DECODE_BYTES = 1 << 30
"""Weights that the NVFP4 emulation decodes at a time."""


class Triton(GemmBackend):
    """beamq's own kernel: experts of every format, and NVFP4 linears by emulation."""

    name: ClassVar[str] = "triton"
    swizzles: ClassVar[bool] = False

    def __init__(self, *, fast: bool = False) -> None:
        self._fast = fast

    def refusal(self, op: str, facts: DeviceFacts) -> str | None:
        if facts.kind == "cuda" and facts.triton is None:
            return "Triton is not installed"
        return facts.below(devices.LEAST_CAPABILITY)

    def dense(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """One linear as one group."""
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only NVFP4 linears are served")
        one_group = Groups([0, x_TK.shape[0]])
        return self.grouped(self.tokens(x_TK, weight), weight.expert(None), one_group)

    def tokens(self, x_TK: torch.Tensor, weight: LinearWeight) -> Tokens:
        """FP8: quantized. NVFP4: quantized and decoded again, without `input_scale`."""
        if isinstance(weight, Fp8Weight):
            return fp8_rows(x_TK)
        if isinstance(weight, Nvfp4Weight):
            from beamq.formats.kernels import gpu  # Triton may be missing

            q = gpu.nvfp4_quantize(x_TK, static_scale(weight.input_scale))
            return gpu.nvfp4_dequantize(replace(q, global_scale=torch.ones_like(q.global_scale)))
        return x_TK

    def gated(
        self, tokens: Tokens, gate_up: LinearWeight, down: LinearWeight, groups: Groups
    ) -> Tokens:
        """See `GemmBackend.gated`.

        SwiGLU is fused into the product, except into FP8's fast sums, which are faster without.
        """
        if not (isinstance(gate_up, Fp8Weight) and self._fast):
            return self.tokens(self.grouped(tokens, gate_up, groups, swiglu=True), down)
        gate_up_SN = self.grouped(tokens, gate_up, groups)
        if isinstance(down, Fp8Weight):
            return fp8_rows(gate_up_SN, swiglu=True)
        return self.tokens(plain_swiglu(gate_up_SN), down)

    def grouped(
        self,
        tokens: Tokens,
        weight: LinearWeight,
        groups: Groups,
        out: torch.Tensor | None = None,
        *,
        swiglu: bool = False,
    ) -> torch.Tensor:
        """See `GemmBackend.grouped`; with `swiglu`, SwiGLU of the products with [gate | up]."""
        from beamq.model.gemm.triton_grouped import grouped_gemm  # Triton may be missing

        x = take(tokens, groups.rows)
        if isinstance(x, Fp8Rows) and isinstance(weight, Fp8Weight):
            return grouped_gemm(
                x.codes,
                weight.codes,
                groups.offsets,
                row_scale=x.scale,
                column_scale=weight.scale,
                fast=self._fast,
                swiglu=swiglu,
                out=out,
            )
        if not isinstance(x, torch.Tensor) or isinstance(weight, (Fp8Weight, GroupFp8Weight)):
            raise TypeError("tokens were made for a weight of another format")
        if isinstance(weight, Nvfp4Weight):
            return self._emulated(x, weight, groups.offsets, swiglu=swiglu, out=out)
        return grouped_gemm(x, weight.w_NK, groups.offsets, swiglu=swiglu, out=out)

    def _emulated(
        self,
        operand_SK: torch.Tensor,
        weight: Nvfp4Weight,
        offsets: Sequence[int],
        *,
        swiglu: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Decode a few experts at a time, only those with rows, and multiply in BF16.

        Both global scales are applied after the sum.
        """
        from beamq.formats.kernels import gpu  # Triton may be missing
        from beamq.model.gemm.triton_grouped import grouped_gemm

        _, n, half = weight.codes.shape
        if out is None:
            out = operand_SK.new_empty(offsets[-1], n // 2 if swiglu else n)
        one = torch.ones((), dtype=torch.float32, device=operand_SK.device)
        input_scale = static_scale(weight.input_scale)
        busy = [expert for expert, _, _ in Groups(offsets).busy()]
        step = max(1, DECODE_BYTES // (n * half * 4))  # a byte of codes gives two BF16 values
        for start in range(0, len(busy), step):
            some = busy[start : start + step]
            low, high = offsets[some[0]], offsets[some[-1] + 1]
            codes, scales, factor = (
                _experts(t, some)
                for t in (weight.codes, weight.block_scale.view(torch.uint8), weight.global_scale)
            )
            block_scale = scales.view(torch.float8_e4m3fn)
            q = QuantizedTensor(codes=codes, block_scale=block_scale, global_scale=one)
            grouped_gemm(
                operand_SK[low:high],
                gpu.nvfp4_dequantize(q),
                [*(offsets[e] - low for e in some), high - low],
                column_scale=factor * input_scale,
                swiglu=swiglu,
                out=out[low:high],
            )
        return out


def _experts(stack: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
    """The chosen experts, in ascending order; a view where they are neighbours."""
    first, last = chosen[0], chosen[-1]
    if last - first + 1 == len(chosen):
        return stack[first : last + 1]
    return stack.index_select(0, torch.tensor(chosen).to(stack.device))
