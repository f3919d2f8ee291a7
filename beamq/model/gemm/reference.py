"""The reference GEMM: emulates every format exactly, in plain torch, on any device.

In: activations `x_TK` in the activation dtype and a weight. Out: `y_TN` in the same dtype.

    DenseWeight    y = x w^T
    Fp8Weight      x quantized per token (scale = amax/448); y = (x8 w8^T) * scale_x * scale_w
    GroupFp8Weight x quantized for each token by groups of as many columns as the weight's, by the
                   same rule; groups' products are added with their scales in FP32, or (MXFP8) the
                   powers of two are a part of the operands
    Nvfp4Weight    x quantized by blocks of 16 under the static `input_scale`;
                   y = (x4 w4^T) * input_scale * global_scale, where x4 and w4 are
                   code * block_scale, not yet multiplied by their global scales

The one idea: E4M3 values, and products E2M1 x E4M3 (6 significant bits, at most 2688), are exact
in BF16, and so are their pairwise products in FP32. A plain GEMM of decoded operands with FP32
accumulation, scaled afterwards, is therefore what an FP8 or FP4 tensor core computes, up to the
order of FP32 sums. On a CPU the operands are decoded to FP32 (its BF16 GEMM would round the sum
before the scales); on CUDA to BF16 with an FP32 result. All experts of a layer share one
`input_scale`, the maximum over them, as the serving engines do.

Limits: weights are decoded at every call, so memory stays that of the stored format.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from beamq.formats import fp8
from beamq.formats.numerics import E2M1_MAX, E4M3_MAX, E4M3_MIN, NVFP4_BLOCK, e2m1_values, to_e4m3
from beamq.model.gemm.backend import (
    DenseWeight,
    Fp8Weight,
    Gemm,
    GroupFp8Weight,
    Groups,
    LinearWeight,
    Nvfp4Weight,
    static_scale,
    stored,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedInput:
    """Activations decoded without their outer scale: value = `operand_TK` * `scale`.

    `scale` is [T, 1] (FP8: one a token), [T, groups] (blocks of FP8) or [] (NVFP4: `input_scale`;
    MXFP8: 1).
    """

    operand_TK: torch.Tensor
    scale: torch.Tensor

    def values(self) -> torch.Tensor:
        """FP32 [T, K]."""
        scale, k = self.scale, self.operand_TK.shape[1]
        if scale.dim() and scale.shape[1] > 1:
            scale = scale.repeat_interleave(fp8.FP8_BLOCK, dim=1)[:, :k]
        return self.operand_TK.float() * scale

    def take(self, rows: slice | torch.Tensor) -> QuantizedInput:
        """Some of the rows."""
        scale = self.scale[rows] if self.scale.dim() else self.scale
        return QuantizedInput(operand_TK=self.operand_TK[rows], scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceGemm(Gemm):
    """Exact emulation in plain torch.

    Without `quantize_activations`, activations stay as they are (W4A16, W8A16) and weights are
    decoded to the activation dtype.
    """

    quantize_activations: bool = True

    def linear(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        if isinstance(weight, DenseWeight):
            return product(x_TK, weight.w_NK)
        if not self.quantize_activations:
            return product(x_TK, decode(weight, x_TK.dtype))
        return _multiply(quantize_input(x_TK, weight), weight, x_TK.dtype)

    def grouped(self, x_TK: torch.Tensor, weight: LinearWeight, groups: Groups) -> torch.Tensor:
        """See `Gemm.grouped`. A loop over the experts that have rows, unless one call serves."""
        offsets, rows = groups.offsets, groups.rows
        if isinstance(weight, DenseWeight) and _grouped_mm_serves(x_TK, weight.w_NK, offsets):
            x_SK = x_TK if rows is None else x_TK.index_select(0, rows)
            ends = torch.tensor(offsets[1:], dtype=torch.int32).to(x_TK.device)
            return F.grouped_mm(x_SK, weight.w_NK.transpose(1, 2), offs=ends)
        y_SN = x_TK.new_empty(offsets[-1], stored(weight).shape[1])
        emulated = None
        if not isinstance(weight, DenseWeight) and self.quantize_activations:
            emulated = quantize_input(x_TK, weight)
        for expert, low, high in groups.busy():
            some = slice(low, high) if rows is None else rows[low:high]
            own = weight.expert(expert)
            if emulated is None or isinstance(own, DenseWeight):
                y_SN[low:high] = self.linear(x_TK[some], own)
            else:
                y_SN[low:high] = _multiply(emulated.take(some), own, x_TK.dtype)
        return y_SN


def quantize_input(
    x_TK: torch.Tensor, weight: Fp8Weight | GroupFp8Weight | Nvfp4Weight
) -> QuantizedInput:
    """Activations as an engine would quantize them for `weight`, decoded again.

    Raises `TensorError` for NVFP4 weights that came without an `input_scale`.
    """
    dtype = torch.bfloat16 if x_TK.device.type == "cuda" else torch.float32
    if isinstance(weight, Fp8Weight):
        codes, scale_T1 = fp8.quantize_rows(x_TK)
        return QuantizedInput(operand_TK=codes.to(dtype), scale=scale_T1)
    if isinstance(weight, GroupFp8Weight):
        if weight.scale.dtype == torch.uint8:
            operand_TK = fp8.dequantize_mx(*fp8.quantize_mx(x_TK), dtype)
            return QuantizedInput(operand_TK=operand_TK, scale=x_TK.new_ones(()).float())
        codes, scale_TC = fp8.quantize_groups(x_TK)
        return QuantizedInput(operand_TK=codes.to(dtype), scale=scale_TC)
    input_scale = static_scale(weight.input_scale)
    operand_TK = nvfp4_operand(x_TK, input_scale).to(dtype)
    return QuantizedInput(operand_TK=operand_TK, scale=input_scale)


def nvfp4_operand(x_TK: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """FP32 code * block_scale of `nvfp4.quantize(x_TK, global_scale, flush=True)`, not packed.

    `torch.round` ties to even, and on the grid's three spacings (1/2 below 2, 1 below 4, 2 above)
    that is the tie to the even code.
    """
    x_TB16 = x_TK.float().view(x_TK.shape[0], x_TK.shape[1] // NVFP4_BLOCK, NVFP4_BLOCK)
    ideal_TB1 = x_TB16.abs().amax(-1, keepdim=True) / (E2M1_MAX * global_scale)
    kept_TB1 = ~(ideal_TB1 <= E4M3_MIN / 2)  # a NaN stays
    scale_TB1 = to_e4m3(ideal_TB1.clamp(E4M3_MIN, E4M3_MAX)).float()
    code = x_TB16 / (scale_TB1 * global_scale)
    size = code.abs()
    grid = torch.where(size < 2, code.mul(2).round_().div_(2), code.round())
    grid = torch.where(size < 4, grid, code.div_(2).round_().mul_(2).clamp_(-E2M1_MAX, E2M1_MAX))
    return grid.mul_(scale_TB1 * kept_TB1).flatten(1)


def decode(weight: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight's values [N, K], rounded once to `dtype`."""
    if isinstance(weight, DenseWeight):
        return weight.w_NK.to(dtype)
    if isinstance(weight, GroupFp8Weight):
        scale_NC = group_scales(weight)
        spread_NK = scale_NC.repeat_interleave(weight.group, -1)[..., : weight.codes.shape[-1]]
        return weight.codes.float().mul_(spread_NK).to(dtype)
    operand_NK, scale_N1 = weight_operand(weight, torch.float32)
    return operand_NK.mul(scale_N1).to(dtype)


def weight_operand(
    weight: Fp8Weight | Nvfp4Weight, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(operand [N, K], scale [N, 1]) with value = operand * scale, the operand exact in BF16."""
    if isinstance(weight, Fp8Weight):
        return weight.codes.to(dtype), weight.scale
    n, half = weight.codes.shape
    every = torch.arange(256, dtype=torch.uint8, device=weight.codes.device)
    pairs = e2m1_values(torch.stack((every & 0x0F, every >> 4), dim=1)).to(dtype)  # [256, 2]
    values = pairs.index_select(0, weight.codes.flatten().int()).view(n, -1, NVFP4_BLOCK)
    return values.mul_(weight.block_scale.to(dtype).unsqueeze(-1)).view(n, 2 * half), (
        weight.global_scale
    )


def group_scales(weight: GroupFp8Weight) -> torch.Tensor:
    """FP32 [N, groups]."""
    mx = weight.scale.dtype == torch.uint8
    return fp8.mx_scale_values(weight.scale) if mx else weight.scale


def _group_product(x: QuantizedInput, weight: GroupFp8Weight) -> torch.Tensor:
    """FP32 [T, N]."""
    dtype = x.operand_TK.dtype
    if not x.scale.dim():
        return _product32(x.operand_TK, decode(weight, dtype))
    sum_TN = x.operand_TK.new_zeros(
        x.operand_TK.shape[0], weight.codes.shape[0], dtype=torch.float32
    )
    for index in range(x.scale.shape[1]):
        columns = slice(index * weight.group, (index + 1) * weight.group)
        part_TN = _product32(x.operand_TK[:, columns], weight.codes[:, columns].to(dtype))
        sum_TN += part_TN.mul_(x.scale[:, index : index + 1] * weight.scale[:, index])
    return sum_TN


def _product32(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    if x_TK.dtype == torch.float32:
        return x_TK @ w_NK.t()
    return torch.mm(x_TK, w_NK.t(), out_dtype=torch.float32)


def _multiply(
    x: QuantizedInput, weight: Fp8Weight | GroupFp8Weight | Nvfp4Weight, dtype: torch.dtype
) -> torch.Tensor:
    if isinstance(weight, GroupFp8Weight):
        return _group_product(x, weight).to(dtype)
    operand_NK, scale_N1 = weight_operand(weight, x.operand_TK.dtype)
    sum_TN = _product32(x.operand_TK, operand_NK)
    return sum_TN.mul_(x.scale).mul_(scale_N1.t()).to(dtype)


def _grouped_mm_serves(x_TK: torch.Tensor, w_ENK: torch.Tensor, offsets: Sequence[int]) -> bool:
    """Whether torch's grouped product takes them: BF16, some rows, both widths multiples of 8."""
    return (
        offsets[-1] > 0
        and not widens(x_TK)
        and x_TK.dtype == w_ENK.dtype == torch.bfloat16
        and w_ENK.shape[1] % 8 == 0
        and w_ENK.shape[2] % 8 == 0
    )


# `product` is y = x w^T, but not torch's BF16 product where the CPU has no fast one: on x86 before
# AVX-512, torch multiplies BF16 6 to 14 times slower than FP32. There, operands are widened to
# FP32, which loses nothing, and sums are rounded once. A few rows times a large weight are left to
# torch, since widening the weight would cost more.
#
# FP32 products add the last one to three rows (of a thread's part) in another order than the
# others, so rows are filled up to multiples of `GRAIN`: results do not depend on batch size.

GRAIN = 16
MANY_ROWS = 32
LARGE_WEIGHT = 1 << 22  # values
BLOCK_VALUES = 1 << 24  # of either operand widened at a time: 64 MiB


def product(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """y [T, N] in the dtype that both have."""
    rows = x_TK.shape[0]
    if not widens(x_TK) or (rows < MANY_ROWS and w_NK.numel() > LARGE_WEIGHT):
        return F.linear(x_TK, w_NK)
    y_TN = x_TK.new_empty(rows, w_NK.shape[0])
    step = max(1, BLOCK_VALUES // w_NK.shape[1] // GRAIN) * GRAIN
    for n in range(0, w_NK.shape[0], step):
        w32_KN = w_NK[n : n + step].float().t()
        for t in range(0, rows, step):
            y_TN[t : t + step, n : n + step] = _widened(x_TK[t : t + step], w32_KN)
    return y_TN


def _widened(x_TK: torch.Tensor, w32_KN: torch.Tensor) -> torch.Tensor:
    """FP32 [T, N]."""
    rows = x_TK.shape[0]
    x32_TK = x_TK.new_zeros(-(-rows // GRAIN) * GRAIN, x_TK.shape[1], dtype=torch.float32)
    x32_TK[:rows] = x_TK
    return (x32_TK @ w32_KN)[:rows]


def widens(x: torch.Tensor) -> bool:
    """Whether products of `x` are taken in FP32: BF16 on a CPU that lacks it."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and cpu_lacks_bf16()


@cache
def cpu_lacks_bf16() -> bool:
    """Whether torch has no fast BF16 product on this CPU: x86 without AVX-512."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and torch.backends.cpu.get_cpu_capability() != "AVX512"
