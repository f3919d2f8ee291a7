"""The `triton` back end: experts of every format through one kernel, and NVFP4 by emulation.

In:  BF16 activations and weights as loaded. Out: BF16 products.

The one idea: E2M1 codes times E4M3 block scales are exact in BF16, so NVFP4 is a BF16 product of
decoded operands with two FP32 scales after the sum: the arithmetic of the reference, at the speed
of BF16. Weights are decoded some experts at a time; memory stays near that of the stored format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from beamq import devices
from beamq.formats.nvfp4 import QuantizedTensor
from beamq.model.gemm.device import DeviceFacts, needs
from beamq.model.gemm.operands import Fp8Rows, Tokens, decoded_fp4_tokens, fp8_rows, take
from beamq.model.gemm.products import swiglu as plain_swiglu
from beamq.model.gemm.reference import Fp8Weight, LinearWeight, Nvfp4Weight, static_scale

DECODE_BYTES = 1 << 30
"""Weights that the NVFP4 emulation decodes at a time."""


class Triton:
    """beamq's own kernel: experts of every format, and NVFP4 linears by emulation."""

    name: ClassVar[str] = "triton"
    ops: ClassVar[tuple[str, ...]] = ("bf16-grouped", "fp8-grouped", "nvfp4-dense", "nvfp4-grouped")

    def refusal(self, op: str, facts: DeviceFacts) -> str | None:
        """See the module."""
        if facts.kind == "cuda" and facts.triton is None:
            return "Triton is not installed"
        return needs(facts, devices.LEAST_CAPABILITY)

    def fuses(self, weight: LinearWeight, *, fast: bool) -> bool:
        """Fused, FP8's slow sums cost nothing more; its fast ones are faster apart."""
        return not (isinstance(weight, Fp8Weight) and fast)

    def tokens(self, x_TK: torch.Tensor, weight: LinearWeight) -> Tokens:
        """Quantized; for NVFP4 decoded again, without `input_scale`."""
        if isinstance(weight, Fp8Weight):
            return fp8_rows(x_TK)
        if isinstance(weight, Nvfp4Weight):
            return decoded_fp4_tokens(x_TK, weight.input_scale)
        return x_TK

    def gated(self, gate_up_SN: torch.Tensor, weight: LinearWeight) -> Tokens:
        """Rows for the second product, from [gate | up]."""
        if isinstance(weight, Fp8Weight):
            return fp8_rows(gate_up_SN, swiglu=True)
        return self.tokens(plain_swiglu(gate_up_SN), weight)

    def dense(self, x_TK: torch.Tensor, weight: LinearWeight, *, fast: bool) -> torch.Tensor:
        """One linear as one group."""
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only NVFP4 linears are served")
        one = Nvfp4Weight(
            codes=weight.codes.unsqueeze(0),
            block_scale=weight.block_scale.unsqueeze(0),
            global_scale=weight.global_scale.unsqueeze(0),
            input_scale=weight.input_scale,
        )
        return self.grouped(self.tokens(x_TK, one), None, one, [0, x_TK.shape[0]], fast=fast)

    def grouped(
        self,
        tokens: Tokens,
        rows: torch.Tensor | None,
        weight: LinearWeight,
        offsets: Sequence[int],
        *,
        fast: bool,
        swiglu: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Products of `tokens[rows]`; with `swiglu`, of [gate | up] weights."""
        from beamq.model.gemm.triton_grouped import grouped_gemm

        x = take(tokens, rows)
        if isinstance(x, Fp8Rows) and isinstance(weight, Fp8Weight):
            return grouped_gemm(
                x.codes,
                weight.codes,
                offsets,
                row_scale=x.scale,
                column_scale=weight.scale,
                fast=fast,
                swiglu=swiglu,
                out=out,
            )
        if not isinstance(x, torch.Tensor) or isinstance(weight, Fp8Weight):
            raise TypeError("tokens were made for a weight of another format")
        if isinstance(weight, Nvfp4Weight):
            return self._emulated(x, weight, offsets, swiglu=swiglu, out=out)
        return grouped_gemm(x, weight.w_NK, offsets, swiglu=swiglu, out=out)

    def _emulated(
        self,
        operand_SK: torch.Tensor,
        weight: Nvfp4Weight,
        offsets: Sequence[int],
        *,
        swiglu: bool,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Weights are decoded a few experts at a time, those with rows only; both global scales
        come after the sum."""
        from beamq.formats.kernels import gpu
        from beamq.model.gemm.triton_grouped import grouped_gemm

        _, n, half = weight.codes.shape
        if out is None:
            out = operand_SK.new_empty(offsets[-1], n // 2 if swiglu else n)
        one = torch.ones((), device=operand_SK.device)
        input_scale = static_scale(weight.input_scale)
        busy = [e for e in range(len(offsets) - 1) if offsets[e + 1] > offsets[e]]
        step = max(1, DECODE_BYTES // (n * half * 4))
        for start in range(0, len(busy), step):
            some = busy[start : start + step]
            low, high = offsets[some[0]], offsets[some[-1] + 1]
            codes, scales, factor = (
                _experts(t, some)
                for t in (weight.codes, weight.block_scale.view(torch.uint8), weight.global_scale)
            )
            q = QuantizedTensor(
                codes=codes, block_scale=scales.view(torch.float8_e4m3fn), global_scale=one
            )
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
    """Some experts in ascending order; a view where they are neighbours."""
    first, last = chosen[0], chosen[-1]
    if last - first + 1 == len(chosen):
        return stack[first : last + 1]
    return stack.index_select(0, torch.tensor(chosen).to(stack.device))
