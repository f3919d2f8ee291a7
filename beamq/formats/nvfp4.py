"""NVFP4 in plain torch: 4-bit codes, an E4M3 scale per 16 values of a row, FP32 scale per tensor.

In:  a weight [N, K] in BF16, F16 or FP32 (K a multiple of 16) and its global scale, which several
     tensors may share.
Out: `QuantizedTensor`, whose bytes equal those of NVIDIA ModelOpt 0.47's `NVFP4QTensor.quantize`
     for the same global scale (the `max` rule), or have block scales by sweep.py instead:

    block_scale = E4M3(clamp(amax_block / (6 * global_scale), 2^-9, 448)),  1.0 for a zero block
    code        = E2M1(w / (block_scale * global_scale))

The stored scale is what codes are computed from: choosing codes for the ideal scale and then
storing a rounded one would shift every value of a block. All arithmetic is FP32 from the values as
stored, one IEEE operation per step, so that other implementations can match every bit.

This is the readable statement of the rule; kernels/ has the fast ones, and tests hold them equal.
Values must be finite: a block with a NaN or an infinity gets a finite scale and saturated codes
here, but the kernels count it and callers refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from beamq.formats.numerics import (
    E4M3_MAX,
    E4M3_MIN,
    NVFP4_BLOCK,
    NVFP4_RANGE,
    SCALE_FLOOR,
    e2m1_codes,
    e2m1_values,
    pack_nibbles,
    to_e4m3,
    unpack_nibbles,
)
from beamq.formats.sweep import sweep_scales


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTensor:
    """value[n, k] = code[n, k] * block_scale[n, k // 16] * global_scale."""

    codes: torch.Tensor
    """U8 [N, K/2], two codes to a byte, the even k in the low nibble."""
    block_scale: torch.Tensor
    """F8_E4M3 [N, K/16], row-major (not swizzled), always positive."""
    global_scale: torch.Tensor
    """F32 [], a multiplier: the amax it was made from divided by 2688."""


def global_scale_from_amax(amax: torch.Tensor | float) -> torch.Tensor:
    """FP32 scale at which `amax` is just representable: amax / 2688.

    An amax of zero counts as 1.0, as nothing is known of the scale then; a tiny one gives the
    smallest normal FP32 value. So the result is never zero or denormal, and its reciprocal is
    finite. Works elementwise.
    """
    value = torch.as_tensor(amax, dtype=torch.float32)
    # A tensor divisor: with a Python number CUDA multiplies by the reciprocal instead.
    scale = torch.where(value == 0, 1.0, value) / torch.full_like(value, NVFP4_RANGE)
    return scale.clamp(min=SCALE_FLOOR)


def quantize(
    w_NK: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    scales: str = "max",
    weight_K: torch.Tensor | None = None,
) -> QuantizedTensor:
    """`w_NK` [N, K] by the `max` rule, or with block scales by `sweep` (see sweep.py).

    `global_scale` is a scalar from 2^-126 to 2^117. `weight_K` (FP32, for `sweep` only) weighs the
    squared errors of the columns.
    """
    n, k = w_NK.shape
    if k % NVFP4_BLOCK:
        raise ValueError(f"K is {k}; NVFP4 needs a multiple of {NVFP4_BLOCK}")
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=w_NK.device).reshape(())
    w_NB16 = w_NK.float().view(n, k // NVFP4_BLOCK, NVFP4_BLOCK)
    block_scale_NB = max_block_scales(w_NB16, scale)
    if scales == "sweep":
        weight_B16 = None if weight_K is None else weight_K.float().view(-1, NVFP4_BLOCK)
        block_scale_NB = sweep_scales(w_NB16, block_scale_NB, scale, weight_B16)
    step_NB = block_scale_NB.float() * scale
    codes_NK = e2m1_codes(w_NB16 / step_NB.unsqueeze(-1)).view(n, k)
    return QuantizedTensor(
        codes=pack_nibbles(codes_NK), block_scale=block_scale_NB, global_scale=scale.clone()
    )


def max_block_scales(w_NB16: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """E4M3 block scales [...] of FP32 blocks [..., 16] by the `max` rule."""
    amax_NB = w_NB16.abs().amax(dim=-1)
    ideal_NB = torch.nan_to_num(amax_NB / (6.0 * global_scale), nan=torch.inf, posinf=torch.inf)
    ideal_NB = torch.where(ideal_NB == 0, 1.0, ideal_NB)
    return to_e4m3(ideal_NB.clamp(E4M3_MIN, E4M3_MAX))


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[N, K] values in `dtype`.

    code * block_scale is exact in FP32 (6 significant bits), so one FP32 rounding remains, by the
    product with the global scale, and then the one to `dtype`. ModelOpt and the engines multiply
    the two scales first and round twice: their FP32 results differ from these by at most one unit
    in the last place.
    """
    n, half = q.codes.shape
    values_NB16 = e2m1_values(unpack_nibbles(q.codes)).view(n, -1, NVFP4_BLOCK)
    exact_NB16 = values_NB16 * q.block_scale.float().unsqueeze(-1)
    return (exact_NB16 * q.global_scale).view(n, half * 2).to(dtype)
