"""NVFP4 on NVIDIA GPUs: Triton code that gives the bytes of formats/nvfp4.py.

In:  the words (int32) of contiguous rows in BF16, F16 or FP32, and a global scale on the device.
Out: codes, block scales and counts.

The one idea: a thread owns a block of 16 values, so nothing is exchanged between threads, and
every step is the cheapest that is still exact. A plain kernel is bound by arithmetic, not memory:
seven comparisons and an IEEE division for each value. Here

- a quotient is `r = 1/s` once a block, then `f = x*r; q = f + (x - f*s)*r` with two fused
  multiply-adds, which is the correctly rounded x/s (Markstein) unless something leaves the normal
  range; where the global scale makes that possible, plain division is used instead;
- rounding to E2M1 is min(2q, q+2, q/2+4), a concave line through all codes, each branch rounded
  to the nearest even integer by adding 1.5 * 2^23 in the same multiply-add;
- packing adds these sums as integers, shifted; their constant upper bits are subtracted once;
- signs are taken from two values at a time, in the packed source words.

Limits: Ampere or later for arithmetic, but the E4M3 cast of block scales needs compute capability
8.9. A block with a NaN or infinity is counted and its bytes mean nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

BF16, F16, F32 = (tl.constexpr(i) for i in range(3))

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: the sum's low bits are the nearest integer
_MAGIC_NIBBLES = tl.constexpr(
    ((sum(0x4B400000 << 4 * i for i in range(8)) + 2**31) % 2**32) - 2**31
)
_ABS = tl.constexpr(0x7FFFFFFF)
_ABS16 = tl.constexpr(0x7FFF7FFF)
_SIGN16 = tl.constexpr(0x80008000 - 2**32)
_TOP_SIGNS = tl.constexpr(0x88000000 - 2**32)
_E4M3_MIN = tl.constexpr(2.0**-9)
# Global scales between which no quotient that matters, nor a sign, is lost to underflow.
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
def _split4(x: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """[TILE, 4] as four [TILE]; a matter of naming registers, no data moves."""
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
    """WORDS words (a multiple of 4) from word `first` on, for each thread, 16 bytes at a time."""
    lane = tl.arange(0, 4)[None, :]
    words = ()
    for part in tl.static_range(WORDS // 4):
        place = src + (first[:, None] + 4 * part + lane)
        if EVEN:  # noqa: SIM108 - Triton's own if, with a branch of each kind compiled
            four = tl.load(place)
        else:
            four = tl.load(place, mask=inside[:, None], other=0)
        words = words + _split4(four, TILE)
    return words


@triton.jit
def block_amax(words: tl.tuple, WORDS: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """FP32 largest magnitude; magnitudes compare like their bits, NaN above infinity."""
    if DTYPE == F32:
        peak = words[0] & _ABS
        for i in tl.static_range(1, WORDS):
            peak = tl.maximum(peak, words[i] & _ABS)
        return as_float(peak)
    high = words[0] & _ABS16
    low = high << 16
    for i in tl.static_range(1, WORDS):
        both = words[i] & _ABS16
        high = tl.maximum(high, both)  # decided by the upper half
        low = tl.maximum(low, both << 16)
    peak = tl.maximum(high & 0x7FFF0000, low)
    if DTYPE == F16:
        return half_to_float(peak >> 16)
    return as_float(peak)


@triton.jit
def _divide(x: tl.tensor, by: tl.tensor, reciprocal: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    if FAST:
        first = x * reciprocal
        return tl.fma(tl.fma(first, by * -1.0, x), reciprocal, first)
    else:
        return tl.div_rn(x, by)


@triton.jit
def _rounded(q: tl.tensor) -> tl.tensor:
    """Bits of 1.5 * 2^23 + the E2M1 code of q >= 0."""
    q = tl.minimum(q, 6.0)  # also where an overflow made it NaN
    low = tl.fma(q, 2.0, _MAGIC)
    middle = q + (_MAGIC + 2.0)
    high = tl.fma(q, 0.5, _MAGIC + 4.0)
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
    # An overflow makes it NaN, which is not above 0 but unequal to it: a large value has its sign.
    return _rounded(q) + tl.where(q != 0, (sign >> 28) & 8, 0)


@triton.jit
def _eight_pairs(
    words: tl.tensor, AT: tl.constexpr, step: tl.tensor, reciprocal: tl.tensor
) -> tl.tensor:
    """Codes of four words of BF16 pairs, the fast way."""
    out = words[AT] * 0 - _MAGIC_NIBBLES
    for j in tl.static_range(4):
        word = words[AT + j]
        both = word & _ABS16
        low = _rounded(_divide(as_float(both << 16), step, reciprocal, True))
        high = _rounded(_divide(as_float(both & 0x7FFF0000), step, reciprocal, True))
        out += (low << (8 * j)) + (high << (8 * j + 4))
        # Sign bits of values that are not zero, at 15 and 31; moved to 27 and 31, then into place.
        signs = (word & (both + _ABS16) & _SIGN16) * 4097
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
    """Codes of eight values, value by value: any dtype, any scale."""
    out = words[0] * 0 - _MAGIC_NIBBLES
    for i in tl.static_range(8):
        if DTYPE == F32:
            word = words[AT + i]
            magnitude = as_float(word & _ABS)
        else:
            word = words[AT + i // 2] << (16 * (1 - i % 2))
            if DTYPE == F16:
                magnitude = half_to_float((word >> 16) & 0x7FFF)
            else:
                magnitude = as_float(word & 0x7FFF0000)
        out += _signed(magnitude, word, step, reciprocal, FAST) << (4 * i)
    return out


@triton.jit
def encode_block(
    words: tl.tensor,
    peak: tl.tensor,
    global_scale: tl.tensor,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """(low codes, high codes, E4M3 block scale, FP32 ideal scale) of each thread's block."""
    limit = _FAST_HIGH32 if DTYPE == F32 else _FAST_HIGH16
    six = 6.0 * global_scale
    if (global_scale >= _FAST_LOW) & (global_scale <= limit):
        # The least of both also where an overflow made the first NaN.
        ideal = tl.minimum(_divide(peak, six, tl.div_rn(1.0, six), True), 1e38)
        scale, step = _block_scale(ideal, global_scale)
        reciprocal = tl.div_rn(1.0, step)
        if DTYPE == BF16:
            low = _eight_pairs(words, 0, step, reciprocal)
            high = _eight_pairs(words, 4, step, reciprocal)
        else:
            low = _eight(words, 0, step, reciprocal, DTYPE, True)
            high = _eight(words, WORDS // 2, step, reciprocal, DTYPE, True)
    else:
        ideal = tl.div_rn(peak, six)
        scale, step = _block_scale(ideal, global_scale)
        low = _eight(words, 0, step, step, DTYPE, False)
        high = _eight(words, WORDS // 2, step, step, DTYPE, False)
    return low, high, scale, ideal


@triton.jit
def _block_scale(ideal: tl.tensor, global_scale: tl.tensor) -> tl.tensor:
    one_if_zero = tl.where(ideal == 0, 1.0, ideal)
    scale = tl.minimum(tl.maximum(one_if_zero, _E4M3_MIN), 448.0).to(tl.float8e4nv)
    return scale, scale.to(tl.float32) * global_scale


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
    low, high, scale, ideal = encode_block(words, peak, global_scale, WORDS, DTYPE)
    pair = tl.join(low, high)
    place = codes + (block[:, None] * 2 + tl.arange(0, 2)[None, :])
    scale_bits = scale.to(tl.int8, bitcast=True)
    # Out of the ordinary: 0 saturated, 1 raised from below, 2 zero, 3 not finite.
    finite = peak < float("inf")
    odd = (ideal > 464.0) | (ideal <= 2.0**-10) | (finite == 0)
    kind = tl.where(finite, tl.where(peak == 0, 2, tl.where(ideal > 1.0, 0, 1)), 3)
    if EVEN:
        tl.store(place, pair)
        tl.store(scales + block, scale_bits)
    else:
        tl.store(place, pair, mask=inside[:, None])
        tl.store(scales + block, scale_bits, mask=inside)
        odd = odd & inside
    # `ideal` can underflow to 0 for a block that is not zero; that is no count, as on the CPU.
    odd = odd & ((ideal > 0) | (kind >= 2))
    tl.atomic_add(counts + kind, 1, mask=odd, sem="relaxed")


@triton.jit(do_not_specialize=["words"])
def amax_kernel(
    src: tl.tensor,
    peaks: tl.tensor,
    words: tl.tensor,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """max |value| of one tensor of a stack into `peaks` (bits of FP32, started at 0)."""
    tensor = tl.program_id(1).to(tl.int64)
    src += tensor * words
    first = tl.program_id(0) * (TILE * STEPS) + tl.arange(0, TILE)
    high = tl.zeros((TILE,), tl.int32)
    low = high
    for step in tl.static_range(STEPS):
        at = first + step * TILE
        word = tl.load(src + at, mask=at < words, other=0)
        if DTYPE == F32:
            high = tl.maximum(high, word & _ABS)
        else:
            both = word & _ABS16
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
