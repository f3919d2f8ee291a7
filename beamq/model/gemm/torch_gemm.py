"""The `cutlass` and `cublaslt` back ends: kernels that torch ships.

In:  BF16 activations and weights as loaded. Out: BF16 products.

FP8 is row-wise: a scale a token and one an output. NVFP4 has two levels, block scales in the
swizzled order and global ones; for experts, activations are padded to 128 rows a group in their
scales only. CUTLASS serves a dense linear as one group.

Limits: no NVFP4 call of this file has been run on the hardware it is for (Blackwell). Their
arguments are tested against a double that undoes the layout and multiplies in FP32, which is what
`calls` is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from beamq.model.gemm.device import OPS, DeviceFacts, needs, sm
from beamq.model.gemm.operands import (
    Fp4Operand,
    Fp8Rows,
    Gated,
    Tokens,
    fp4_tokens,
    fp4_weight,
    fp8_rows,
    take,
)
from beamq.model.gemm.products import ExpertRows
from beamq.model.gemm.products import swiglu as plain_swiglu
from beamq.model.gemm.reference import DenseWeight, Fp8Weight, LinearWeight, Nvfp4Weight


class _Torch:
    """What torch's back ends share: nothing is fused but SwiGLU with the next quantization."""

    def __init__(self, calls: Any = F) -> None:
        self.calls = calls

    def fuses(self, weight: LinearWeight, *, fast: bool) -> bool:
        """Never."""
        return False

    def tokens(self, x_TK: torch.Tensor, weight: LinearWeight) -> Tokens:
        """FP8: quantized. NVFP4 operands depend on the groups and are made by `grouped`."""
        return fp8_rows(x_TK) if isinstance(weight, Fp8Weight) else x_TK

    def gated(self, gate_up_SN: torch.Tensor, weight: LinearWeight) -> Tokens:
        """Rows for the second product, from [gate | up]."""
        if isinstance(weight, Fp8Weight):
            return fp8_rows(gate_up_SN, swiglu=True)
        if isinstance(weight, Nvfp4Weight):
            return Gated(gate_up_SN=gate_up_SN)
        return plain_swiglu(gate_up_SN)


class Cutlass(_Torch):
    """torch's CUTLASS kernels, all through `scaled_grouped_mm`; a dense linear is one group."""

    name: ClassVar[str] = "cutlass"
    ops: ClassVar[tuple[str, ...]] = OPS

    def refusal(self, op: str, facts: DeviceFacts) -> str | None:
        """See the module."""
        if facts.kind == "cuda" and op.startswith("fp8") and facts.capability > (9, 0):
            return "torch's FP8 grouped kernel is for sm_90 alone; elsewhere it traps"
        if facts.kind == "cuda" and op.startswith("nvfp4"):
            if facts.capability not in ((10, 0), (10, 3)):
                return f"torch's FP4 kernels are for sm_100 and sm_103; this is {sm(facts)}"
            return None
        return needs(facts, (9, 0))

    def dense(self, x_TK: torch.Tensor, weight: LinearWeight, *, fast: bool) -> torch.Tensor:
        """One linear as one group."""
        offsets = [0, x_TK.shape[0]]
        if isinstance(weight, Fp8Weight):
            one = Fp8Weight(codes=weight.codes.unsqueeze(0), scale=weight.scale.unsqueeze(0))
            return self.grouped(fp8_rows(x_TK), None, one, offsets, fast=fast)
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only quantized linears are served")
        own = fp4_weight(weight)
        stack = Fp4Operand(
            codes=own.codes.unsqueeze(0),
            block_scale=own.block_scale.unsqueeze(0),
            global_scale=own.global_scale,
        )
        return self._nvfp4(fp4_tokens(x_TK, weight.input_scale), stack, offsets)

    def grouped(
        self,
        tokens: Tokens,
        rows: torch.Tensor | None,
        weight: LinearWeight,
        offsets: Sequence[int],
        *,
        fast: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Products of `tokens[rows]`."""
        if isinstance(weight, Nvfp4Weight):
            x = fp4_tokens(tokens, weight.input_scale, rows=rows, offsets=offsets)
            return _into(out, self._nvfp4(x, fp4_weight(weight), offsets))
        some = take(tokens, rows)
        if isinstance(weight, DenseWeight):
            ends = _ends(offsets, weight.w_NK.device)
            return _into(out, self.calls.grouped_mm(some, weight.w_NK.transpose(1, 2), offs=ends))
        if not isinstance(some, Fp8Rows):
            raise TypeError("tokens were made for a weight of another format")
        rowwise = F.ScalingType.RowWise
        y = self.calls.scaled_grouped_mm(
            some.codes,
            weight.codes.transpose(1, 2),
            some.scale.view(-1),
            rowwise,
            weight.scale.squeeze(-1),
            rowwise,
            offs=_ends(offsets, weight.codes.device),
            output_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
        return _into(out, y)

    def _nvfp4(self, x: Fp4Operand, w: Fp4Operand, offsets: Sequence[int]) -> torch.Tensor:
        recipe, order = _fp4_recipe()
        y: torch.Tensor = self.calls.scaled_grouped_mm(
            x.codes.view(torch.float4_e2m1fn_x2),
            w.codes.view(torch.float4_e2m1fn_x2).transpose(1, 2),
            [x.block_scale, x.global_scale],
            recipe,
            [w.block_scale, w.global_scale],
            recipe,
            swizzle_a=order,
            swizzle_b=order,
            offs=_ends(offsets, x.codes.device),
            output_dtype=torch.bfloat16,
        )
        return y


class CublasLt(_Torch):
    """torch's cuBLASLt for dense linears; of FP8 experts, one call for each that has rows."""

    name: ClassVar[str] = "cublaslt"
    ops: ClassVar[tuple[str, ...]] = ("fp8-dense", "fp8-grouped", "nvfp4-dense")

    def refusal(self, op: str, facts: DeviceFacts) -> str | None:
        """See the module."""
        if op == "nvfp4-dense" and facts.kind == "cuda" and facts.capability < (10, 0):
            return f"FP4 tensor cores came with sm_100; this is {sm(facts)}"
        return needs(facts, (9, 0))

    def dense(self, x_TK: torch.Tensor, weight: LinearWeight, *, fast: bool) -> torch.Tensor:
        """One linear."""
        if isinstance(weight, Fp8Weight):
            return self._fp8(fp8_rows(x_TK), weight, fast)
        if not isinstance(weight, Nvfp4Weight):
            raise TypeError("only quantized linears are served")
        x, w = fp4_tokens(x_TK, weight.input_scale), fp4_weight(weight)
        recipe, order = _fp4_recipe()
        y: torch.Tensor = self.calls.scaled_mm(
            x.codes.view(torch.float4_e2m1fn_x2),
            w.codes.view(torch.float4_e2m1fn_x2).t(),
            [x.block_scale, x.global_scale],
            recipe,
            [w.block_scale, w.global_scale],
            recipe,
            swizzle_a=order,
            swizzle_b=order,
            output_dtype=torch.bfloat16,
        )
        return y

    def grouped(
        self,
        tokens: Tokens,
        rows: torch.Tensor | None,
        weight: LinearWeight,
        offsets: Sequence[int],
        *,
        fast: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Expert by expert."""
        x = take(tokens, rows)
        if not (isinstance(x, Fp8Rows) and isinstance(weight, Fp8Weight)):
            raise TypeError("only FP8 experts are served")
        if out is None:
            out = x.scale.new_empty(offsets[-1], weight.codes.shape[1], dtype=torch.bfloat16)
        for expert in range(len(offsets) - 1):
            low, high = offsets[expert], offsets[expert + 1]
            if low < high:
                # cuBLASLt wants scales to start at a multiple of 16 bytes.
                part = x.part(low, high)
                part = Fp8Rows(codes=part.codes, scale=part.scale.clone())
                out[low:high] = self._fp8(part, weight.expert(expert), fast)
        return out

    def _fp8(self, x: Fp8Rows, w: Fp8Weight, fast: bool) -> torch.Tensor:
        rowwise = F.ScalingType.RowWise
        y: torch.Tensor = self.calls.scaled_mm(
            x.codes,
            w.codes.t(),
            x.scale,
            rowwise,
            w.scale.t(),
            rowwise,
            output_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
        return y


def _into(out: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    return y if out is None else out.copy_(y)


def _fp4_recipe() -> tuple[list[Any], list[Any]]:
    """Two levels of scales; only the first is swizzled."""
    scaling = F.ScalingType
    order = F.SwizzleType
    return [scaling.BlockWise1x16, scaling.TensorWise], [order.SWIZZLE_32_4_4, order.NO_SWIZZLE]


def _ends(offsets: Sequence[int], device: torch.device) -> torch.Tensor:
    if isinstance(offsets, ExpertRows):
        return offsets.ends_E
    return torch.tensor(offsets[1:], dtype=torch.int32).to(device)
