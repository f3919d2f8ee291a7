"""The scale sweep on NVIDIA GPUs: Triton code that gives the bytes of formats/sweep.py.

In:  a contiguous CUDA tensor in BF16, F16 or FP32, [N, K] or a stack [G, N, K]; global scales.
Out: codes and block scales, as `gpu.nvfp4_quantize` but with each block's scale swept; counts.

The one idea: as in gpu_nvfp4.py a thread owns a block, so its 16 magnitudes stay in registers while
16 candidate scales pass by, ten instructions a value each, and nothing is exchanged or read again.
The error is the twin's, operation by operation, so the compiler must not fuse a product with a sum
(`enable_fp_fusion=False`); what encodes the block afterwards asks for its fused steps by name.

Bound by arithmetic: some 185 instructions a value, about seven times what the `max` kernel takes to
move its bytes. Weights are left to the CPU and to plain torch.
Limits: as gpu.py. Run in Triton's interpreter against the twin; not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from beamq.formats.kernels.gpu_nvfp4 import (
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
from beamq.formats.nvfp4 import QuantizedTensor

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_TILE = 128  # blocks of a program, one a thread

_ABS = tl.constexpr(0x7FFFFFFF)
_ABS16 = tl.constexpr(0x7FFF7FFF)
_EXPONENT = tl.constexpr(0x7F800000)
_ONE = tl.constexpr(0x3F800000)
_SIX = tl.constexpr(0x40C00000)
_MAGIC_ABOVE = tl.constexpr((22 << 23) + 0x400000)  # from 2^e to 1.5 * 2^(22 + e)


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
def _square(x: tl.tensor, reciprocal: tl.tensor) -> tl.tensor:
    """Squared distance of x * reciprocal from the nearest E2M1 value."""
    q = x * reciprocal
    inside = tl.minimum(q.to(tl.int32, bitcast=True), _SIX)
    magic = as_float((tl.maximum(inside, _ONE) & _EXPONENT) + _MAGIC_ABOVE)
    distance = q - ((as_float(inside) + magic) - magic)
    return distance * distance


@triton.jit
def _four(values: tl.tuple, AT: tl.constexpr, r: tl.tensor) -> tl.tensor:
    first = _square(values[AT], r) + _square(values[AT + 1], r)
    return first + (_square(values[AT + 2], r) + _square(values[AT + 3], r))


@triton.jit
def _value(code: tl.tensor) -> tl.tensor:
    """FP32 of an E4M3 code from 1 to 126."""
    normal = as_float((code << 20) + (120 << 23))
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _error(values: tl.tuple, code: tl.tensor, global_scale: tl.tensor) -> tl.tensor:
    scale = _value(code)
    r = tl.div_rn(1.0, scale * global_scale)
    low = _four(values, 0, r) + _four(values, 4, r)
    high = _four(values, 8, r) + _four(values, 12, r)
    return (low + high) * (scale * scale)


@triton.jit
def _best(values: tl.tuple, middle: tl.tensor, global_scale: tl.tensor) -> tl.tensor:
    """The code of the least error; a tie is the `max` rule's, then the smallest's."""
    chosen = middle
    best = _error(values, middle, global_scale)
    for i in range(1, 16):  # -7 .. -1, 1 .. 8
        offset = tl.where(i < 8, i - 8, i - 7)
        code = tl.minimum(tl.maximum(middle + offset, 1), 126)
        error = _error(values, code, global_scale)
        better = error < best
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
    chosen = _best(_magnitudes(words, DTYPE), middle, global_scale)
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
    w: torch.Tensor, global_scale: torch.Tensor, *, counts: torch.Tensor | None = None
) -> QuantizedTensor:
    """`nvfp4.quantize(..., scales="sweep")` of a matrix or a stack; `global_scale` FP32 [] or [G].

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
