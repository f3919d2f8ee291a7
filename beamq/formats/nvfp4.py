"""NVFP4 in plain torch: 4-bit codes, an E4M3 scale per 16 values of a row, FP32 scale per tensor.

In:  a weight [N, K] in BF16, F16 or FP32 (K a multiple of 16) and its global scale, which several
     tensors may share.
Out: `QuantizedTensor`. With the `max` rule its bytes equal those of NVIDIA ModelOpt 0.47's
     `NVFP4QTensor.quantize` for the same global scale:

    block_scale = E4M3(clamp(amax_block / (6 * global_scale), 2^-9, 448)),  1.0 for a zero block
    code        = E2M1(w / (block_scale * global_scale))

Codes are computed from the stored scale: codes for the ideal scale would shift every value of a
block when the rounded one is stored. All arithmetic is FP32 from the values as stored, one IEEE
operation per step, so that other implementations can match every bit.

Activations differ in one thing: the engines' kernels round a block scale of at most 2^-10 to 0, and
the block to zeros (`flush`). A weight's block keeps 2^-9, as in ModelOpt.

This is the readable statement of the rule; kernels/ has the fast ones, and tests hold them equal.
Values must be finite: a block with a NaN or an infinity gets a finite scale and saturated codes
here, but the kernels count it and callers refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from beamq.formats.numerics import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN,
    NVFP4_BLOCK,
    NVFP4_RANGE,
    e2m1_codes,
    e2m1_values,
    pack_nibbles,
    scale_from_amax,
    to_e4m3,
    unpack_nibbles,
)

# The scale sweep. The `max` rule puts the largest of 16 values on the grid's end, 6, and the others
# fall where they may. Since only codes and scales are stored, every stored scale from 7 codes below
# to 8 above can be tried, and the least squared error wins. A smaller scale clips the largest value
# and refines the rest; a larger one moves it from 6 to the next grid value, 4. No data is needed;
# `weight_K` (second moments of the inputs, say) weighs the columns' errors. On ties, the `max`
# rule's scale wins, then the smaller one.
#
# So that other implementations match every bit, the error is FP32 arithmetic in one order:
#
#     r       = 1 / (s * global_scale)                        s the candidate; two roundings
#     q       = |w| * r                                       not |w| / step: a sixth of the time
#     d       = q - nearest E2M1 value of min(q, 6)
#     error   = (s * s) * sum of (d * d) [* weight]           neighbours first, then pairs, ...
#
# Codes are then computed from the stored scale by IEEE division. Effect and alternatives:
# docs/results.md, ADR 8. Related searches: OCTAV, arXiv:2206.06501; "Four Over Six",
# arXiv:2512.02010. Limits: with a global scale below 2^-117, `r` may overflow, and the `max` rule's
# scale stays.

BELOW, ABOVE = 7, 8
SMALLEST, LARGEST = 1, 126  # E4M3 codes of 2^-9 and 448


def sweep_scales(
    w_NB16: torch.Tensor,
    max_scale_NB: torch.Tensor,
    global_scale: torch.Tensor,
    weight_B16: torch.Tensor | None = None,
) -> torch.Tensor:
    """E4M3 [N, B] for FP32 `w_NB16`; `max_scale_NB` are the `max` rule's scales, E4M3."""
    magnitude_NB16 = w_NB16.abs()
    middle_NB = max_scale_NB.view(torch.uint8).to(torch.int16)
    best_NB, chosen_NB = torch.zeros_like(middle_NB, dtype=torch.float32), middle_NB
    for offset in candidate_offsets():
        code_NB = (middle_NB + offset).clamp(SMALLEST, LARGEST)
        error_NB = _error(magnitude_NB16, code_NB, global_scale, weight_B16)
        better_NB = error_NB < best_NB if offset else torch.ones_like(best_NB, dtype=torch.bool)
        best_NB = torch.where(better_NB, error_NB, best_NB)
        chosen_NB = torch.where(better_NB, code_NB, chosen_NB)
    return chosen_NB.to(torch.uint8).view(torch.float8_e4m3fn)


def candidate_offsets() -> tuple[int, ...]:
    """Offsets from the `max` rule's code, in the order in which ties are decided."""
    return (0, *range(-BELOW, 0), *range(1, ABOVE + 1))


def _error(
    magnitude_NB16: torch.Tensor,
    code_NB: torch.Tensor,
    global_scale: torch.Tensor,
    weight_B16: torch.Tensor | None,
) -> torch.Tensor:
    scale_NB = code_NB.to(torch.uint8).view(torch.float8_e4m3fn).float()
    step_NB = scale_NB * global_scale
    q_NB16 = magnitude_NB16 * (torch.ones_like(step_NB) / step_NB).unsqueeze(-1)
    # A NaN stays NaN, and is never better than the first candidate.
    distance_NB16 = q_NB16 - e2m1_values(e2m1_codes(q_NB16.clamp(max=E2M1_MAX)))
    term = distance_NB16 * distance_NB16
    if weight_B16 is not None:
        term = term * weight_B16
    while term.shape[-1] > 1:
        term = term[..., 0::2] + term[..., 1::2]
    return term.squeeze(-1) * (scale_NB * scale_NB)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTensor:
    """value[n, k] = code[n, k] * block_scale[n, k // 16] * global_scale; or a stack, [G] first."""

    codes: torch.Tensor
    """U8 [N, K/2], two codes to a byte, the even k in the low nibble."""
    block_scale: torch.Tensor
    """F8_E4M3 [N, K/16], row-major (not swizzled), always positive."""
    global_scale: torch.Tensor
    """F32 [], a multiplier: the amax it was made from divided by 2688."""


def global_scale_from_amax(amax: torch.Tensor | float) -> torch.Tensor:
    """FP32 scale at which `amax` is just representable: amax / 2688, elementwise."""
    return scale_from_amax(torch.as_tensor(amax, dtype=torch.float32), NVFP4_RANGE)


def quantize(
    w_NK: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    scale_rule: str = "max",
    weight_K: torch.Tensor | None = None,
    flush: bool = False,
) -> QuantizedTensor:
    """`w_NK` [N, K] with block scales by the rule "max" or "sweep".

    `global_scale` is a scalar from 2^-126 to 2^117. `weight_K` (FP32, for the sweep only) weighs
    the squared errors of the columns. `flush` is for activations: codes of a block whose scale
    rounds to 0 are 0.
    """
    n, k = w_NK.shape
    if k % NVFP4_BLOCK:
        raise ValueError(f"K is {k}; NVFP4 needs a multiple of {NVFP4_BLOCK}")
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=w_NK.device).reshape(())
    w_NB16 = w_NK.float().view(n, k // NVFP4_BLOCK, NVFP4_BLOCK)
    block_scale_NB = max_block_scales(w_NB16, scale)
    if scale_rule == "sweep":
        weight_B16 = None if weight_K is None else weight_K.float().view(-1, NVFP4_BLOCK)
        block_scale_NB = sweep_scales(w_NB16, block_scale_NB, scale, weight_B16)
    step_NB = block_scale_NB.float() * scale
    codes_NB16 = e2m1_codes(w_NB16 / step_NB.unsqueeze(-1))
    if flush:
        codes_NB16[flushed(w_NB16, scale)] = 0
    codes_NK = codes_NB16.view(n, k)
    return QuantizedTensor(
        codes=pack_nibbles(codes_NK), block_scale=block_scale_NB, global_scale=scale.clone()
    )


def max_block_scales(w_NB16: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """E4M3 block scales [...] of FP32 blocks [..., 16] by the `max` rule."""
    amax_NB = w_NB16.abs().amax(dim=-1)
    ideal_NB = torch.nan_to_num(amax_NB / (6.0 * global_scale), nan=torch.inf, posinf=torch.inf)
    ideal_NB = torch.where(ideal_NB == 0, 1.0, ideal_NB)
    return to_e4m3(ideal_NB.clamp(E4M3_MIN, E4M3_MAX))


def flushed(x_NB16: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Which FP32 blocks [..., 16] have a scale that rounds to 0 in E4M3, as bool [...]."""
    return x_NB16.abs().amax(dim=-1) / (6.0 * global_scale) <= E4M3_MIN / 2


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


# The order in which FP4 tensor cores read block scales ("SWIZZLE_32_4_4" in torch, "128x4"
# elsewhere), for kernels only: on disk scales are row by row. Tiles of 128 rows by 4 columns, 512
# bytes each, follow one another row by row. Row r and column c of a tile are at
# (r % 32) * 16 + (r // 32) * 4 + c; missing rows and columns are zeros.

ROWS, COLUMNS = 128, 4


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def swizzle(scales_RC: torch.Tensor) -> torch.Tensor:
    """[..., R, C] bytes or E4M3 -> [..., round_up(R, 128) * round_up(C, 4)]."""
    *lead, rows, columns = scales_RC.shape
    r, c = round_up(rows, ROWS), round_up(columns, COLUMNS)
    padded = torch.zeros(*lead, r, c, dtype=torch.uint8, device=scales_RC.device)
    padded[..., :rows, :columns] = scales_RC.view(torch.uint8)
    tiles = padded.view(*lead, r // ROWS, 4, 32, c // COLUMNS, COLUMNS)
    order = (*range(len(lead)), *(len(lead) + axis for axis in (0, 3, 2, 1, 4)))
    return tiles.permute(order).reshape(*lead, r * c).view(scales_RC.dtype)


def padded_rows(offsets: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Row of each row's scales if every group starts at a multiple of 128 rows; number of rows.

    int64 [S] on the CPU for S = offsets[-1] rows in groups offsets[e]:offsets[e+1].
    """
    ends = torch.tensor(offsets, dtype=torch.int64)
    counts = ends.diff()
    padded = (counts + ROWS - 1) // ROWS * ROWS
    starts = padded.cumsum(0) - padded
    shift = torch.repeat_interleave(starts - ends[:-1], counts)
    return torch.arange(int(ends[-1])) + shift, int(padded.sum())
