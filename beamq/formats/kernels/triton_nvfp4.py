"""NVFP4 on NVIDIA GPUs: Triton kernels that give the bytes of formats/nvfp4.py.

In:  the words (int32) of contiguous rows in BF16, F16 or FP32, and a global scale on the device.
Out: codes, block scales and counts; or values, decoded from codes.

The one idea: a thread owns a block of 16 values, so threads exchange nothing, and every step is
the cheapest that is still exact. A plain kernel would be bound by arithmetic, not by memory: seven
comparisons and an IEEE division for each value. Instead:

- A quotient costs one reciprocal per block, r = 1/s, and for each value f = x*r and
  q = f + (x - f*s)*r with two fused multiply-adds. This is the correctly rounded x/s (Markstein)
  unless something leaves the normal range; where the global scale makes that possible, IEEE
  division is used.
- Rounding to E2M1 is min(2q, q+2, q/2+4), a concave line through all codes. Each branch is rounded
  to the nearest even integer by adding 1.5 * 2^23 in the same multiply-add.
- Codes are packed by adding these sums as shifted integers; their constant upper bits are
  subtracted once.
- Signs are taken from two values at a time, in the packed source words.

Limits: the E4M3 cast of block scales needs compute capability 8.9. A block with a NaN or infinity
is counted, and its bytes mean nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from beamq.formats.kernels.triton_fp8 import swiglu
from beamq.formats.numerics import NVFP4_BLOCK

BF16, F16, F32 = (tl.constexpr(i) for i in range(3))

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: the low bits of a sum are the nearest integer
# The bits of _MAGIC (0x4B400000) added up at eight nibble places, modulo 2^32, as an int32.
_MAGIC_NIBBLES = tl.constexpr(
    ((sum(0x4B400000 << 4 * i for i in range(8)) + 2**31) % 2**32) - 2**31
)
ABS = tl.constexpr(0x7FFFFFFF)
ABS16 = tl.constexpr(0x7FFF7FFF)  # of two 16-bit values in a word
_SIGN16 = tl.constexpr(0x80008000 - 2**32)
_TOP_SIGNS = tl.constexpr(0x88000000 - 2**32)
_E4M3_MIN = tl.constexpr(2.0**-9)
_TWO_126 = tl.constexpr(2.0**126)
# Between these global scales no quotient that matters, and no sign, is lost to underflow.
_FAST_LOW = tl.constexpr(2.0**-81)
_FAST_HIGH16 = tl.constexpr(2.0**7)
_FAST_HIGH32 = tl.constexpr(2.0**-9)


@triton.jit
def as_float(bits: tl.tensor) -> tl.tensor:
    """The FP32 number with these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def half_to_float(half: tl.tensor) -> tl.tensor:
    """FP32 of F16 bits in the low half of an int32."""
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_value(code: tl.tensor) -> tl.tensor:
    """FP32 of an E4M3 code from 1 to 126 (int32)."""
    # Three mantissa bits to the top of FP32's, and the exponent's bias from 7 to 127.
    normal = as_float((code << 20) + (120 << 23))
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)  # subnormals: times 2^-9


@triton.jit
def _split4(x: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """[TILE, 4] as four [TILE]. This names registers; no data moves."""
    even, odd = tl.split(tl.reshape(x, (TILE, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def load_words(
    src: tl.tensor,
    first: tl.tensor,
    inside: tl.tensor,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """WORDS words (a multiple of 4) from word `first` on for each thread, 16 bytes a load."""
    lane = tl.arange(0, 4)[None, :]
    words = ()
    for part in tl.static_range(WORDS // 4):
        place = src + (first[:, None] + 4 * part + lane)
        if EVEN:  # noqa: SIM108 - a constexpr if: only one branch is compiled
            four = tl.load(place)
        else:
            four = tl.load(place, mask=inside[:, None], other=0)
        words = words + _split4(four, TILE)
    return words


@triton.jit
def block_amax(words: tl.tuple, WORDS: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """FP32 largest magnitude. Magnitudes compare like their bits; NaN is above infinity."""
    if DTYPE == F32:
        peak = words[0] & ABS
        for i in tl.static_range(1, WORDS):
            peak = tl.maximum(peak, words[i] & ABS)
        return as_float(peak)
    high = words[0] & ABS16
    low = high << 16
    for i in tl.static_range(1, WORDS):
        both = words[i] & ABS16
        high = tl.maximum(high, both)  # the upper value decides; the lower one is noise
        low = tl.maximum(low, both << 16)
    peak = tl.maximum(high & 0x7FFF0000, low)  # without that noise
    if DTYPE == F16:
        return half_to_float(peak >> 16)
    return as_float(peak)


@triton.jit
def _divide(x: tl.tensor, by: tl.tensor, reciprocal: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    if FAST:
        first = x * reciprocal
        # The inner result is the exact remainder x - first * by; the outer one corrects `first`.
        return tl.fma(tl.fma(first, by * -1.0, x), reciprocal, first)
    else:
        return tl.div_rn(x, by)


@triton.jit
def _rounded(q: tl.tensor) -> tl.tensor:
    """Bits of 1.5 * 2^23 + the E2M1 code of q >= 0."""
    q = tl.minimum(q, 6.0)  # gives 6 where an overflow made q NaN, too
    low = tl.fma(q, 2.0, _MAGIC)  # the code where values are 1/2 apart: up to 2
    middle = q + (_MAGIC + 2.0)  # 1 apart: from 2 to 4
    high = tl.fma(q, 0.5, _MAGIC + 4.0)  # 2 apart: from 4 to 6
    # Rounding is monotone, so the least of the rounded lines is the rounded least line.
    return tl.minimum(low, tl.minimum(middle, high)).to(tl.int32, bitcast=True)


@triton.jit
def _signed(
    magnitude: tl.tensor,
    sign: tl.tensor,
    step: tl.tensor,
    reciprocal: tl.tensor,
    FAST: tl.constexpr,
) -> tl.tensor:
    """`_rounded` plus 8 where `sign` (bit 31) is set and the quotient is not zero."""
    q = _divide(magnitude, step, reciprocal, FAST)
    # `q != 0`, not `q > 0`: an overflow makes q NaN, and such a large value keeps its sign.
    return _rounded(q) + tl.where(q != 0, (sign >> 28) & 8, 0)


@triton.jit
def _eight_pairs(
    words: tl.tensor, AT: tl.constexpr, step: tl.tensor, reciprocal: tl.tensor
) -> tl.tensor:
    """Eight codes of the four words of BF16 pairs from `AT` on, by the fast division."""
    out = words[AT] * 0 - _MAGIC_NIBBLES
    for j in tl.static_range(4):
        word = words[AT + j]
        both = word & ABS16
        low = _rounded(_divide(as_float(both << 16), step, reciprocal, True))
        high = _rounded(_divide(as_float(both & 0x7FFF0000), step, reciprocal, True))
        out += (low << (8 * j)) + (high << (8 * j + 4))
        # Adding 0x7FFF sets bit 15 of each half that is not zero, so a zero loses its sign. Times
        # 1 + 2^12, the sign bits at 15 and 31 are at 27 and 31: the top bits of two neighbouring
        # nibbles, which a shift moves to the place of this pair.
        signs = (word & (both + ABS16) & _SIGN16) * 4097
        if j < 3:
            out += (signs >> (24 - 8 * j)) & (0x88 << (8 * j))
        else:
            out += signs & _TOP_SIGNS
    return out


@triton.jit
def _eight(
    words: tl.tensor,
    AT: tl.constexpr,
    step: tl.tensor,
    reciprocal: tl.tensor,
    DTYPE: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Eight codes, value by value, from word `AT` on: any dtype, any scale."""
    out = words[0] * 0 - _MAGIC_NIBBLES
    for i in tl.static_range(8):
        if DTYPE == F32:
            word = words[AT + i]
            magnitude = as_float(word & ABS)
        else:
            word = words[AT + i // 2] << (16 * (1 - i % 2))
            if DTYPE == F16:
                magnitude = half_to_float((word >> 16) & 0x7FFF)
            else:
                magnitude = as_float(word & 0x7FFF0000)
        out += _signed(magnitude, word, step, reciprocal, FAST) << (4 * i)
    return out


@triton.jit
def fast_fits(global_scale: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Whether the fast division is exact for every quotient that matters."""
    limit = _FAST_HIGH32 if DTYPE == F32 else _FAST_HIGH16
    return (global_scale >= _FAST_LOW) & (global_scale <= limit)


@triton.jit
def block_codes(
    words: tl.tensor, step: tl.tensor, WORDS: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """(low, high): words of eight codes each, of values divided by `step`."""
    reciprocal = tl.div_rn(1.0, step) if FAST else step  # without FAST it is not used
    if FAST and DTYPE == BF16:
        low = _eight_pairs(words, 0, step, reciprocal)
        high = _eight_pairs(words, 4, step, reciprocal)
    else:
        low = _eight(words, 0, step, reciprocal, DTYPE, FAST)
        high = _eight(words, WORDS // 2, step, reciprocal, DTYPE, FAST)
    return low, high


@triton.jit
def encode_block(
    words: tl.tensor,
    peak: tl.tensor,
    global_scale: tl.tensor,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """(low codes, high codes, E4M3 block scale, FP32 ideal scale) of each thread's block."""
    six = 6.0 * global_scale
    if fast_fits(global_scale, DTYPE):
        # The minimum also replaces a NaN, which an overflow in `_divide` makes.
        ideal = tl.minimum(_divide(peak, six, tl.div_rn(1.0, six), True), 1e38)
        scale, step = max_scale(ideal, global_scale)
        low, high = block_codes(words, step, WORDS, DTYPE, True)
    else:
        ideal = tl.div_rn(peak, six)
        scale, step = max_scale(ideal, global_scale)
        low, high = block_codes(words, step, WORDS, DTYPE, False)
    return low, high, scale, ideal


@triton.jit
def max_scale(ideal: tl.tensor, global_scale: tl.tensor) -> tl.tensor:
    """(block scale by the `max` rule as E4M3, that scale times the global one as FP32)."""
    one_if_zero = tl.where(ideal == 0, 1.0, ideal)
    scale = tl.minimum(tl.maximum(one_if_zero, _E4M3_MIN), 448.0).to(tl.float8e4nv)
    return scale, scale.to(tl.float32) * global_scale


@triton.jit
def store_block(
    codes: tl.tensor,
    scales: tl.tensor,
    block: tl.tensor,
    pair: tl.tensor,
    scale_bits: tl.tensor,
    inside: tl.tensor,
    EVEN: tl.constexpr,
) -> None:
    """Each thread's two words of codes ([TILE, 2], one 8-byte store) and its scale's byte."""
    place = codes + (block[:, None] * 2 + tl.arange(0, 2)[None, :])
    if EVEN:
        tl.store(place, pair)
        tl.store(scales + block, scale_bits)
    else:
        tl.store(place, pair, mask=inside[:, None])
        tl.store(scales + block, scale_bits, mask=inside)


@triton.jit
def count_blocks(counts: tl.tensor, ideal: tl.tensor, peak: tl.tensor, inside: tl.tensor) -> None:
    """Add to `counts`: 0 saturated, 1 raised from underflow, 2 zero, 3 not finite."""
    finite = peak < float("inf")
    # 464 lies between 448 and what would follow it; 2^-10 is the last that rounds to zero.
    odd = (ideal > 464.0) | (ideal <= 2.0**-10) | (finite == 0)
    kind = tl.where(finite, tl.where(peak == 0, 2, tl.where(ideal > 1.0, 0, 1)), 3)
    # `ideal` can underflow to 0 for a block that is not zero. As on the CPU, this is not counted.
    odd = odd & inside & ((ideal > 0) | (kind >= 2))
    tl.atomic_add(counts + kind, 1, mask=odd, sem="relaxed")


@triton.jit(do_not_specialize=["blocks"])
def quantize_kernel(
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
    low, high, scale, ideal = encode_block(words, peak, global_scale, WORDS, DTYPE)
    bits = scale.to(tl.int8, bitcast=True)
    store_block(codes, scales, block, tl.join(low, high), bits, inside, EVEN)
    count_blocks(counts, ideal, peak, inside)


@triton.jit(do_not_specialize=["words"])
def amax_kernel(
    src: tl.tensor,
    peaks: tl.tensor,
    words: tl.tensor,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """max |value| of each tensor of a stack into `peaks` (FP32 bits, zeros at the start)."""
    tensor = tl.program_id(1).to(tl.int64)
    src += tensor * words
    first = tl.program_id(0) * (TILE * STEPS) + tl.arange(0, TILE)
    high = tl.zeros((TILE,), tl.int32)
    low = high
    for step in tl.static_range(STEPS):
        at = first + step * TILE
        word = tl.load(src + at, mask=at < words, other=0)
        if DTYPE == F32:
            high = tl.maximum(high, word & ABS)
        else:
            both = word & ABS16
            high = tl.maximum(high, both)
            low = tl.maximum(low, both << 16)
    if DTYPE == F32:  # noqa: SIM108
        peak = high
    else:
        peak = tl.maximum(high & 0x7FFF0000, low)
    best = tl.max(peak, axis=0)
    if DTYPE == F16:
        best = half_to_float(best >> 16).to(tl.int32, bitcast=True)
    tl.atomic_max(peaks + tensor, best, sem="relaxed")


# Activations: codes, and block scales in the order in which tensor cores read them.
#
# In:  BF16 tokens [T, K] (or gate and up side by side, [T, 2K]), the static global scale, and for
#      experts which token each row reads and where its scales go.
# Out: codes [S, K/2] row by row, and E4M3 block scales in the swizzled order of formats/nvfp4.py
#      (`swizzle`). Each group of rows (an expert's tokens) starts at a tile boundary, so each group
#      is padded to 128 rows on its own; padding keeps what the buffer held (zeros).
#
# These kernels encode blocks with the same code as weights, so they give the bytes of
# `nvfp4.quantize` with `flush`. SwiGLU's product is rounded to BF16 first, as in the forward pass
# that calibration observes.

_WORDS = tl.constexpr(8)


@triton.jit
def _bits(value: tl.tensor) -> tl.tensor:
    """BF16 bits in the low half of an int32."""
    return value.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _swiglu_words(gate: tl.tuple, up: tl.tuple) -> tl.tuple:
    """SwiGLU of packed BF16 pairs, packed again."""
    out = ()
    for i in tl.static_range(_WORDS):
        low_gate = as_float(gate[i] << 16).to(tl.bfloat16)
        low = swiglu(low_gate, as_float(up[i] << 16))
        high_gate = as_float(gate[i] & -65536).to(tl.bfloat16)
        high = swiglu(high_gate, as_float(up[i] & -65536))
        pair = _bits(low) | (_bits(high) << 16)
        out = out + (pair,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's have none
    return out


@triton.jit
def _flush(codes: tl.tensor, ideal: tl.tensor) -> tl.tensor:
    """Zeros where the block scale would round to 0: 2^-10 is the last that does."""
    return tl.where(ideal <= 2.0**-10, 0, codes)


@triton.jit(do_not_specialize=["blocks"])
def quantize_tokens_kernel(
    src: tl.tensor,
    rows: tl.tensor,
    scale_rows: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    global_scale: tl.tensor,
    blocks: tl.tensor,
    PER_ROW: tl.constexpr,
    GATHER: tl.constexpr,
    PLACED: tl.constexpr,
    SWIGLU: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One block a thread, `blocks` = rows * PER_ROW. With GATHER, row s reads token rows[s]; with
    PLACED, its scales go to row scale_rows[s] of the swizzled buffer, otherwise to row s."""
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = block < blocks
    row = block // PER_ROW
    column = (block % PER_ROW).to(tl.int32)
    token = row
    if GATHER:
        token = tl.load(rows + row, mask=inside, other=0).to(tl.int64)
    if SWIGLU:
        first = (token * (2 * PER_ROW) + column) * _WORDS
        gate = load_words(src, first, inside, _WORDS, TILE, False)
        up = load_words(src, first + PER_ROW * _WORDS, inside, _WORDS, TILE, False)
        words = _swiglu_words(gate, up)
    else:
        words = load_words(src, (token * PER_ROW + column) * _WORDS, inside, _WORDS, TILE, False)
    peak = block_amax(words, _WORDS, BF16)
    low, high, scale, ideal = encode_block(words, peak, tl.load(global_scale), _WORDS, BF16)
    low, high = _flush(low, ideal), _flush(high, ideal)
    place = codes + (block[:, None] * 2 + tl.arange(0, 2)[None, :])
    tl.store(place, tl.join(low, high), mask=inside[:, None])
    if PLACED:
        row = tl.load(scale_rows + row, mask=inside, other=0).to(tl.int64)
    # Tiles of 128 rows by 4 blocks, 512 bytes each; rows r, r + 32, r + 64, r + 96 are neighbours.
    tiles: tl.constexpr = (PER_ROW + 3) // 4
    tile = (row // 128) * tiles + column // 4
    lane = (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4
    tl.store(scales + tile * 512 + lane, scale.to(tl.int8, bitcast=True), mask=inside)


# Decoding: fl((code * block scale) * global scale) as BF16 or FP32, the product in parentheses
# exact. A thread decodes one word of eight codes, so that its values are one 16-byte store.


@triton.jit
def _decoded(word: tl.tensor, AT: tl.constexpr, scale: tl.tensor) -> tl.tensor:
    """Code * scale in FP32, exact, for the code in nibble AT of each word."""
    nibble = (word >> (4 * AT)) & 15
    # The code's mantissa bit at the top of a mantissa and its two exponent bits at the bottom of
    # an exponent are an FP32 number 2^-126 times its value, subnormals included: no table.
    tiny = as_float(((nibble & 7) << 22) | ((nibble & 8) << 28))
    return (tiny * _TWO_126) * scale


@triton.jit
def _two_values(
    word: tl.tensor, AT: tl.constexpr, scale: tl.tensor, global_scale: tl.tensor, OUT: tl.constexpr
) -> tl.tensor:
    """[TILE, 2]: the values in nibbles AT and AT + 4."""
    pair = tl.join(_decoded(word, AT, scale), _decoded(word, AT + 4, scale)) * global_scale
    if OUT == BF16:
        return pair.to(tl.bfloat16)
    else:
        return pair


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
    # Joins interleave, so the order is that of bits reversed: 0 4 2 6, then 1 5 3 7.
    even = tl.join(
        _two_values(word, 0, factor, global_scale, OUT),
        _two_values(word, 2, factor, global_scale, OUT),
    )
    odd = tl.join(
        _two_values(word, 1, factor, global_scale, OUT),
        _two_values(word, 3, factor, global_scale, OUT),
    )
    eight = tl.reshape(tl.join(even, odd), (TILE, 8))
    place = out + (at[:, None].to(tl.int64) * 8 + tl.arange(0, 8)[None, :])
    tl.store(place, eight, mask=inside[:, None])


# Activations as the values that a tensor core would multiply: BF16 [T, K], code * block scale of
# `nvfp4.quantize` with `flush`, which is exact. A token with a NaN or infinity becomes all zeros.
#
# Codes are decoded at once, so 32 bytes are read for each block and 32 written, where plain torch
# passes over FP32 copies a dozen times. A program owns a token, so it knows whether all of it is
# finite.


@triton.jit
def _four_pairs(word: tl.tensor, scale: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """[TILE, 4] words of BF16 pairs from a word of eight codes."""
    p0 = _pair(word, 0, scale)
    p1 = _pair(word, 2, scale)
    p2 = _pair(word, 4, scale)
    p3 = _pair(word, 6, scale)
    return tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), (TILE, 4))


@triton.jit
def _pair(word: tl.tensor, AT: tl.constexpr, scale: tl.tensor) -> tl.tensor:
    """Two values as BF16 in one word: their FP32 bits without the lower halves, which are zero."""
    low = _decoded(word, AT, scale).to(tl.int32, bitcast=True)
    high = _decoded(word, AT + 1, scale).to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & -65536)


@triton.jit
def operand_kernel(
    src: tl.tensor,
    out: tl.tensor,
    global_scale: tl.tensor,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One token of BLOCKS blocks a program, one block a thread."""
    block = tl.arange(0, TILE)
    inside = block < BLOCKS
    src += tl.program_id(0).to(tl.int64) * (BLOCKS * _WORDS)
    out += tl.program_id(0).to(tl.int64) * (BLOCKS * _WORDS)
    words = load_words(src, block * _WORDS, inside, _WORDS, TILE, False)
    peak = block_amax(words, _WORDS, BF16)
    # Blocks beyond the row are zeros. A NaN is not less than infinity.
    finite = tl.min((peak < float("inf")).to(tl.int32), axis=0)
    low, high, scale, ideal = encode_block(words, peak, tl.load(global_scale), _WORDS, BF16)
    low, high = _flush(low, ideal), _flush(high, ideal)
    factor = scale.to(tl.float32)
    place = out + (block[:, None] * _WORDS + tl.arange(0, 4)[None, :])
    tl.store(place, _four_pairs(low, factor, TILE) * finite, mask=inside[:, None])
    tl.store(place + 4, _four_pairs(high, factor, TILE) * finite, mask=inside[:, None])


def nvfp4_operand(x_TK: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Code * block scale of BF16 tokens [T, K], and zeros for tokens that are not finite.

    `global_scale` is FP32 [] on the device. Raises `ValueError` for what is not contiguous BF16
    [T, K], K a multiple of 16.
    """
    if x_TK.dtype != torch.bfloat16 or x_TK.dim() != 2 or not x_TK.is_contiguous():
        raise ValueError(f"tokens {list(x_TK.shape)} {x_TK.dtype}; expected contiguous BF16 [T, K]")
    if x_TK.shape[1] % NVFP4_BLOCK:
        raise ValueError(f"K is {x_TK.shape[1]}; NVFP4 needs a multiple of {NVFP4_BLOCK}")
    out_TK = torch.empty_like(x_TK)
    blocks = x_TK.shape[1] // NVFP4_BLOCK
    tile = max(32, triton.next_power_of_2(blocks))
    if out_TK.numel():
        operand_kernel[(x_TK.shape[0],)](
            x_TK.view(torch.int32),
            out_TK.view(torch.int32),
            global_scale.reshape(1),
            BLOCKS=blocks,
            TILE=tile,
            num_warps=min(16, tile // 32),
        )
    return out_TK
