"""The scale sweep on NVIDIA GPUs: Triton code that gives the bytes of formats/nvfp4.py.

In:  a contiguous CUDA tensor in BF16, F16 or FP32, [N, K] or a stack [G, N, K]; global scales.
Out: codes and block scales, as `gpu.nvfp4_quantize` but with each block's scale swept; counts.

The one idea: as in gpu_nvfp4.py a thread owns a block, so its 16 magnitudes stay in registers while
candidate scales pass by, seven or eight instructions a value each. Errors are the twin's, operation
by operation, so the compiler must not fuse a product with a sum (`enable_fp_fusion=False`); what is
fused here is fused by name, where the product is exact.

Not every candidate is looked at. Below the `max` rule's scale the largest value is clipped, and
rounding is monotone: a block's error is at least this one value's squared distance from 6, as
computed. Scales above come first, therefore, then those below, and one of these is passed over
where that bound already exceeds the least error in all blocks of a warp. A program is one warp, so
that this costs a vote and no barrier. What is chosen is the same, ties included.

Bound by arithmetic all the same. Weights are left to the CPU and to plain torch.
Limits: as gpu.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from beamq.formats.kernels.triton_nvfp4 import (
    _FAST_HIGH16,
    _FAST_HIGH32,
    _FAST_LOW,
    BF16,
    F16,
    F32,
    _block_scale,
    _eight,
    _eight_pairs,
    as_float,
    block_amax,
    half_to_float,
    load_words,
)
from beamq.formats.numerics import NVFP4_BLOCK
from beamq.formats.nvfp4 import ABOVE, BELOW, LARGEST, SMALLEST, QuantizedTensor

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_TILE = 32  # blocks of a program, one a thread: a warp

_ABS = tl.constexpr(0x7FFFFFFF)
_ABS16 = tl.constexpr(0x7FFF7FFF)
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
            value = as_float(words[i] & _ABS)
        else:
            both = words[i // 2] & _ABS16
            if DTYPE == F16:
                value = half_to_float((both >> (16 * (i % 2))) & 0x7FFF)
            else:
                value = as_float((both << (16 * (1 - i % 2))) & 0x7FFF0000)
        values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005 - no unpacking
    return values


@triton.jit
def _square(x: tl.tensor, reciprocal: tl.tensor, CLIP: tl.constexpr) -> tl.tensor:
    """Squared distance of x * reciprocal from the nearest E2M1 value; above 7 it has to CLIP.

    2^22 times a number of q's own binade has units of the grid's spacing there, so adding and
    taking it away rounds q to that spacing (1/2 below 2, 1 below 4, 2 above). Of a tie's two
    neighbours it may be the other one, which is as far away.
    """
    q = x * reciprocal
    if CLIP:  # noqa: SIM108 - Triton's own if
        inside = tl.minimum(q, 6.0)
    else:
        inside = q
    base = tl.maximum(inside, 1.5)
    distance = q - tl.fma(base, _UP, tl.fma(base, _DOWN, inside))
    return distance * distance


@triton.jit
def _four(values: tl.tuple, AT: tl.constexpr, r: tl.tensor, CLIP: tl.constexpr) -> tl.tensor:
    first = _square(values[AT], r, CLIP) + _square(values[AT + 1], r, CLIP)
    return first + (_square(values[AT + 2], r, CLIP) + _square(values[AT + 3], r, CLIP))


@triton.jit
def _value(code: tl.tensor) -> tl.tensor:
    """FP32 of an E4M3 code from 1 to 126."""
    normal = as_float((code << 20) + (120 << 23))
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _error(values: tl.tuple, scale: tl.tensor, r: tl.tensor, CLIP: tl.constexpr) -> tl.tensor:
    low = _four(values, 0, r, CLIP) + _four(values, 4, r, CLIP)
    high = _four(values, 8, r, CLIP) + _four(values, 12, r, CLIP)
    return (low + high) * (scale * scale)


@triton.jit
def _best_above(
    values: tl.tuple, middle: tl.tensor, global_scale: tl.tensor, CLIP: tl.constexpr
) -> tl.tensor:
    """(least error, its code) of the `max` rule's scale and those above it."""
    chosen = middle
    best = tl.zeros_like(values[0])
    for offset in range(_ABOVE + 1):
        code = tl.minimum(middle + offset, _LARGEST)
        scale = _value(code)
        error = _error(values, scale, tl.div_rn(1.0, scale * global_scale), CLIP)
        better = (error < best) | (offset == 0)  # the first even if it is NaN
        best = tl.where(better, error, best)
        chosen = tl.where(better, code, chosen)
    return best, chosen


@triton.jit
def _best(
    values: tl.tuple, peak: tl.tensor, middle: tl.tensor, global_scale: tl.tensor
) -> tl.tensor:
    """The code of the least error; a tie is the `max` rule's, then the smallest's."""
    highest = peak * tl.div_rn(1.0, _value(middle) * global_scale)
    if tl.max(tl.where(highest <= _NEAR, 0, 1), axis=0) == 0:
        best, chosen = _best_above(values, middle, global_scale, False)
    else:
        best, chosen = _best_above(values, middle, global_scale, True)
    for offset in range(1, _BELOW + 1):
        code = tl.maximum(middle - offset, _SMALLEST)
        scale = _value(code)
        r = tl.div_rn(1.0, scale * global_scale)
        clipped = tl.maximum(peak * r - 6.0, 0.0)
        least = (clipped * clipped) * (scale * scale)
        # Where it equals the least so far, a lower scale wins against all but the `max` rule's.
        hopeless = tl.where(chosen == middle, least >= best, least > best)
        if tl.max(tl.where(hopeless, 0, 1), axis=0) > 0:
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
    """Blocks of one tensor of a stack; grid (tiles, tensors), one global scale a tensor."""
    WORDS: tl.constexpr = 16 if DTYPE == F32 else 8
    tensor = tl.program_id(1).to(tl.int64)
    src += tensor * blocks * WORDS
    codes += tensor * blocks * 2
    scales += tensor * blocks
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = block < blocks
    words = load_words(src, block * WORDS, inside, WORDS, TILE, EVEN)
    peak = block_amax(words, WORDS, DTYPE)
    global_scale = tl.load(global_scales + tensor)
    ideal = tl.div_rn(peak, 6.0 * global_scale)
    by_max, _ = _block_scale(ideal, global_scale)
    middle = by_max.to(tl.int8, bitcast=True).to(tl.int32)
    chosen = _best(_magnitudes(words, DTYPE), peak, middle, global_scale)
    step = _value(chosen) * global_scale
    limit = _FAST_HIGH32 if DTYPE == F32 else _FAST_HIGH16
    if (global_scale >= _FAST_LOW) & (global_scale <= limit):
        reciprocal = tl.div_rn(1.0, step)
        if DTYPE == BF16:
            low = _eight_pairs(words, 0, step, reciprocal)
            high = _eight_pairs(words, 4, step, reciprocal)
        else:
            low = _eight(words, 0, step, reciprocal, DTYPE, True)
            high = _eight(words, WORDS // 2, step, reciprocal, DTYPE, True)
    else:
        low = _eight(words, 0, step, step, DTYPE, False)
        high = _eight(words, WORDS // 2, step, step, DTYPE, False)
    tl.store(
        codes + (block[:, None] * 2 + tl.arange(0, 2)[None, :]),
        tl.join(low, high),
        mask=inside[:, None],
    )
    tl.store(scales + block, chosen.to(tl.int8), mask=inside)
    # As in gpu_nvfp4.quantize_kernel, of the `max` rule's scales.
    finite = peak < float("inf")
    odd = (ideal > 464.0) | (ideal <= 2.0**-10) | (finite == 0)
    kind = tl.where(finite, tl.where(peak == 0, 2, tl.where(ideal > 1.0, 0, 1)), 3)
    odd = odd & inside & ((ideal > 0) | (kind >= 2))
    tl.atomic_add(counts + kind, 1, mask=odd, sem="relaxed")


def nvfp4_sweep(
    w: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    out: QuantizedTensor | None = None,
    counts: torch.Tensor | None = None,
) -> QuantizedTensor:
    """`nvfp4.quantize(scale_rule="sweep")` of a matrix or a stack; `global_scale` FP32 [] or [G].

    `counts` int32 [4] is added to, as by `gpu.nvfp4_quantize`.
    """
    if w.dtype not in _DTYPES or not w.is_contiguous():
        raise ValueError(f"{w.dtype}, contiguous {w.is_contiguous()}; expected BF16, F16 or FP32")
    lead, n, k = w.shape[:-2], *w.shape[-2:]
    if k % NVFP4_BLOCK:
        raise ValueError(f"K is {k}; NVFP4 needs a multiple of {NVFP4_BLOCK}")
    blocks = n * k // NVFP4_BLOCK
    tensors = w.numel() // max(1, n * k)
    scales = global_scale.to(w.device, torch.float32).reshape(-1)
    if scales.numel() not in (1, tensors):
        raise ValueError(f"{scales.numel()} global scales for {tensors} tensors")
    if out is None:
        out = QuantizedTensor(
            codes=torch.empty(*lead, n, k // 2, dtype=torch.uint8, device=w.device),
            block_scale=w.new_empty(*lead, n, k // NVFP4_BLOCK, dtype=torch.float8_e4m3fn),
            global_scale=global_scale,
        )
    if counts is None:
        counts = torch.zeros(4, dtype=torch.int32, device=w.device)
    if w.numel():
        sweep_kernel[(triton.cdiv(blocks, _TILE), tensors)](
            w.view(torch.int32),
            out.codes.view(torch.int32),
            out.block_scale.view(torch.int8),
            scales.expand(tensors).contiguous(),
            counts,
            blocks,
            DTYPE=_DTYPES[w.dtype],
            TILE=_TILE,
            EVEN=blocks % _TILE == 0,
            num_warps=_TILE // 32,
            enable_fp_fusion=False,
        )
    return out
