"""NVFP4 back to values on NVIDIA GPUs: Triton code that gives what formats/nvfp4.py gives.

In:  words of eight codes, E4M3 block scales, a global scale on the device.
Out: BF16 or FP32 values, fl((code * block scale) * global scale), the product in parentheses exact.

The one idea: a thread decodes one word, so that its eight values are one 16-byte store. A code's
three magnitude bits, put at the top of a mantissa and the bottom of an exponent, are an FP32 number
2^-126 times the code's value: subnormals included, no table is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from beamq.formats.kernels.gpu_nvfp4 import BF16, as_float


@triton.jit(do_not_specialize=["words"])
def dequantize_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    global_scales: tl.tensor,
    out: tl.tensor,
    words: tl.tensor,
    OUT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A thread decodes a word of eight codes; grid (tiles, tensors)."""
    tensor = tl.program_id(1).to(tl.int64)
    codes += tensor * words
    scales += tensor * (words // 2)
    out += tensor * words * 8
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < words
    word = tl.load(codes + at, mask=inside, other=0)
    block = tl.load(scales + at // 2, mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
    factor = block.to(tl.float32)
    global_scale = tl.load(global_scales + tensor)
    v0, v4 = (
        _decode(word, 0, factor, global_scale, OUT),
        _decode(word, 4, factor, global_scale, OUT),
    )
    v1, v5 = (
        _decode(word, 1, factor, global_scale, OUT),
        _decode(word, 5, factor, global_scale, OUT),
    )
    v2, v6 = (
        _decode(word, 2, factor, global_scale, OUT),
        _decode(word, 6, factor, global_scale, OUT),
    )
    v3, v7 = (
        _decode(word, 3, factor, global_scale, OUT),
        _decode(word, 7, factor, global_scale, OUT),
    )
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    eight = tl.reshape(tl.join(even, odd), (TILE, 8))
    place = out + (at[:, None].to(tl.int64) * 8 + tl.arange(0, 8)[None, :])
    tl.store(place, eight, mask=inside[:, None])


@triton.jit
def _decode(
    word: tl.tensor, AT: tl.constexpr, factor: tl.tensor, global_scale: tl.tensor, OUT: tl.constexpr
) -> tl.tensor:
    """fl((code * block scale) * global scale); a code's bits are an FP32 number times 2^-126."""
    nibble = (word >> (4 * AT)) & 15
    tiny = as_float(((nibble & 7) << 22) | ((nibble & 8) << 28))
    value = (tiny * 8.507059173023462e37) * factor * global_scale
    if OUT == BF16:
        return value.to(tl.bfloat16)
    else:
        return value
