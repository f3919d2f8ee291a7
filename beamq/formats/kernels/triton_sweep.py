"""The scale sweep on NVIDIA GPUs: a Triton kernel that gives the bytes of formats/nvfp4.py.

In:  the words (int32) of contiguous rows in BF16, F16 or FP32; global scales. `gpu.nvfp4_quantize`
     and `gpu.nvfp4_group` launch it.
Out: codes and block scales, each scale the best of 16 candidates (`nvfp4.sweep_scales`); counts.

The one idea: as in triton_nvfp4.py a thread owns a block, so its 16 magnitudes stay in registers
while candidate scales are tried, at seven or eight instructions per value. Errors are computed
operation by operation as in the plain torch twin, so the compiler must not fuse a product with a
sum (`enable_fp_fusion=False`). The fused operations here are explicit, where the product is exact.

Not every candidate is tried. A scale below the `max` rule's clips the largest value, so a block's
error is at least this value's squared distance from 6. Scales above are tried first, and one below
is skipped where this bound exceeds the least error in all blocks of a warp. A program is one warp,
so the test costs a vote and no barrier. The choice is the same, ties included.

Limits: bound by arithmetic; no weights for columns (the CPU kernels and plain torch have them);
compute capability 8.9.
"""

from __future__ import annotations

import triton
import triton.language as tl

from beamq.formats.kernels.triton_nvfp4 import (
    ABS,
    ABS16,
    F16,
    F32,
    as_float,
    block_amax,
    block_codes,
    count_blocks,
    e4m3_value,
    fast_fits,
    half_to_float,
    load_words,
    max_scale,
    store_block,
)
from beamq.formats.nvfp4 import ABOVE, BELOW, LARGEST, SMALLEST

TILE = 32  # blocks of a program, one a thread: a warp

_BELOW, _ABOVE = tl.constexpr(BELOW), tl.constexpr(ABOVE)
_SMALLEST, _LARGEST = tl.constexpr(SMALLEST), tl.constexpr(LARGEST)
_UP = tl.constexpr(4194304.0)  # 2^22
_DOWN = tl.constexpr(-4194304.0)
_NEAR = tl.constexpr(7.0)  # up to here the nearest multiple of 2 is as far away as 6 is


@triton.jit
def _magnitudes(words: tl.tuple, DTYPE: tl.constexpr) -> tl.tuple:
    """16 FP32 magnitudes, in order."""
    values = ()
    for i in tl.static_range(16):
        if DTYPE == F32:
            value = as_float(words[i] & ABS)
        else:
            both = words[i // 2] & ABS16
            if DTYPE == F16:
                value = half_to_float((both >> (16 * (i % 2))) & 0x7FFF)
            else:
                value = as_float((both << (16 * (1 - i % 2))) & 0x7FFF0000)
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005 - no unpacking
    return values


@triton.jit
def _square(x: tl.tensor, reciprocal: tl.tensor, CLIP: tl.constexpr) -> tl.tensor:
    """Squared distance of x * reciprocal from the nearest E2M1 value; needs CLIP above 7."""
    q = x * reciprocal
    if CLIP:  # noqa: SIM108 - a constexpr if: only one branch is compiled
        inside = tl.minimum(q, 6.0)
    else:
        inside = q
    # 2^22 times a number of q's own binade has units of the grid's spacing there: 1/2 below 2, 1
    # below 4, 2 above. So taking 2^22 * base away and adding it again rounds q to the grid, in two
    # fused operations because the product is exact. A tie may go to the other neighbour than
    # `e2m1_codes` takes, which is as far away.
    base = tl.maximum(inside, 1.5)  # 1.5 * 2^22 has the unit 1/2, for all values below 2
    distance = q - tl.fma(base, _UP, tl.fma(base, _DOWN, inside))
    return distance * distance


@triton.jit
def _four(values: tl.tuple, AT: tl.constexpr, r: tl.tensor, CLIP: tl.constexpr) -> tl.tensor:
    # Neighbours are added first, then pairs: the order of the plain torch twin.
    first = _square(values[AT], r, CLIP) + _square(values[AT + 1], r, CLIP)
    return first + (_square(values[AT + 2], r, CLIP) + _square(values[AT + 3], r, CLIP))


@triton.jit
def _error(values: tl.tuple, scale: tl.tensor, r: tl.tensor, CLIP: tl.constexpr) -> tl.tensor:
    low = _four(values, 0, r, CLIP) + _four(values, 4, r, CLIP)
    high = _four(values, 8, r, CLIP) + _four(values, 12, r, CLIP)
    return (low + high) * (scale * scale)


@triton.jit
def _best_above(
    values: tl.tuple, middle: tl.tensor, global_scale: tl.tensor, CLIP: tl.constexpr
) -> tl.tensor:
    """(least error, its code) among the `max` rule's scale and those above it."""
    chosen = middle
    best = tl.zeros_like(values[0])
    for offset in range(_ABOVE + 1):
        code = tl.minimum(middle + offset, _LARGEST)
        scale = e4m3_value(code)
        error = _error(values, scale, tl.div_rn(1.0, scale * global_scale), CLIP)
        better = (error < best) | (offset == 0)  # the first one even if its error is NaN
        best = tl.where(better, error, best)
        chosen = tl.where(better, code, chosen)
    return best, chosen


@triton.jit
def _best(
    values: tl.tuple, peak: tl.tensor, middle: tl.tensor, global_scale: tl.tensor
) -> tl.tensor:
    """The code of the least error. On ties, the `max` rule's own code wins, then the smaller."""
    highest = peak * tl.div_rn(1.0, e4m3_value(middle) * global_scale)
    # Without clipping where no value of the warp's blocks needs it (a NaN counts as needing it).
    if tl.max(tl.where(highest <= _NEAR, 0, 1), axis=0) == 0:
        best, chosen = _best_above(values, middle, global_scale, False)
    else:
        best, chosen = _best_above(values, middle, global_scale, True)
    for offset in range(1, _BELOW + 1):
        code = tl.maximum(middle - offset, _SMALLEST)
        scale = e4m3_value(code)
        r = tl.div_rn(1.0, scale * global_scale)
        # The error of the largest value alone, computed as `_error` computes it.
        clipped = tl.maximum(peak * r - 6.0, 0.0)
        least = (clipped * clipped) * (scale * scale)
        # On a tie this scale, being smaller, would win against any but the `max` rule's.
        hopeless = tl.where(chosen == middle, least >= best, least > best)
        if tl.max(tl.where(hopeless, 0, 1), axis=0) > 0:  # any block of the warp may gain
            error = _error(values, scale, r, True)
            better = (error < best) | ((error == best) & (chosen != middle))
            best = tl.where(better, error, best)
            chosen = tl.where(better, code, chosen)
    return chosen


@triton.jit(do_not_specialize=["blocks"])
def sweep_kernel(
    src: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    global_scales: tl.tensor,
    counts: tl.tensor,
    blocks: tl.tensor,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """One block a thread; grid (tiles, tensors of a stack); a global scale and counts a tensor."""
    WORDS: tl.constexpr = 16 if DTYPE == F32 else 8
    tensor = tl.program_id(1).to(tl.int64)
    src += tensor * blocks * WORDS
    codes += tensor * blocks * 2
    scales += tensor * blocks
    counts += tensor * 4
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = block < blocks
    words = load_words(src, block * WORDS, inside, WORDS, TILE, EVEN)
    peak = block_amax(words, WORDS, DTYPE)
    global_scale = tl.load(global_scales + tensor)
    ideal = tl.div_rn(peak, 6.0 * global_scale)
    by_max, _ = max_scale(ideal, global_scale)
    middle = by_max.to(tl.int8, bitcast=True).to(tl.int32)
    chosen = _best(_magnitudes(words, DTYPE), peak, middle, global_scale)
    step = e4m3_value(chosen) * global_scale
    if fast_fits(global_scale, DTYPE):
        low, high = block_codes(words, step, WORDS, DTYPE, True)
    else:
        low, high = block_codes(words, step, WORDS, DTYPE, False)
    store_block(codes, scales, block, tl.join(low, high), chosen.to(tl.int8), inside, EVEN)
    count_blocks(counts, ideal, peak, inside)  # by the `max` rule's scales
