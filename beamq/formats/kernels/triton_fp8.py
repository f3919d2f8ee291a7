"""FP8 on NVIDIA GPUs: Triton kernels that give the bytes of formats/fp8.py; SwiGLU.

In:  rows of K values in BF16, F16 or FP32. Out: E4M3 codes [N, K] and scales: FP32 [N], FP32 for
     each block of 128 x 128, or (MXFP8) a byte for 32 values.

The one idea: a program owns a row and keeps it in registers between its two uses, the maximum and
the codes, so each byte crosses the memory bus once. A row is a tuple of chunks whose length is a
power of two that (nearly) divides K, because Triton's blocks are powers of two and padding 5,120 to
8,192 would idle a third of the threads. A quotient costs one reciprocal per row and two fused
multiply-adds per value (see triton_nvfp4.py).

With SWIGLU the row is silu(gate) * up instead, computed in FP32 and rounded once to the source
dtype before anything else uses it, as in the forward pass.

Limits: compute capability 8.9 for the E4M3 cast; K up to a few ten thousand (registers). A row
with a NaN or infinity is counted, and its bytes mean nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

_FAST_LOW = tl.constexpr(2.0**-90)  # below, the remainder in `_encode` may lose bits to underflow
FLOOR = tl.constexpr(2.0**-126)


@triton.jit
def swiglu(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up in FP32, rounded once to gate's dtype."""
    g = gate.to(tl.float32)
    product = g / (1.0 + tl.exp(-g)) * up.to(tl.float32)
    return product.to(gate.dtype)


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _encode(x: tl.tensor, scale: tl.tensor, reciprocal: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    value = x.to(tl.float32)
    if FAST:
        first = value * reciprocal
        # `excess` is the exact first * scale - value. This order of operands keeps the sign of a
        # zero: the last sum is then -0 + -0. Triton's unary minus would lose it, being 0 - x.
        excess = tl.fma(first, scale, value * -1.0)
        quotient = tl.fma(excess, reciprocal * -1.0, first)
    else:
        quotient = tl.div_rn(value, scale)
    # The scale comes from the largest value, so this is at most 448 and a rounding: never NaN.
    return quotient.to(tl.float8e4nv)


@triton.jit
def _store_row(
    out: tl.tensor,
    row: tl.tuple,
    scale: tl.tensor,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    lane = tl.arange(0, CHUNK)
    reciprocal = tl.div_rn(1.0, scale)
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    for i in tl.static_range(CHUNKS):
        codes = _encode(row[i], scale, reciprocal, FAST)
        if (i + 1) * CHUNK <= K:  # known when compiled: only the last chunk may need a mask
            tl.store(out + i * CHUNK + lane, codes)
        else:
            tl.store(out + i * CHUNK + lane, codes, mask=i * CHUNK + lane < K)


@triton.jit
def quantize_rows_kernel(
    src: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    counts: tl.tensor,
    stride: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    SWIGLU: tl.constexpr,
) -> None:
    """One row a program; `stride` elements between rows of `src`. With SWIGLU, a row is K values
    of gate, then K of up."""
    index = tl.program_id(0).to(tl.int64)
    src += index * stride
    lane = tl.arange(0, CHUNK)
    row = ()
    peak = tl.zeros((CHUNK,), tl.float32)
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    for i in tl.static_range(CHUNKS):
        at = i * CHUNK + lane
        if (i + 1) * CHUNK <= K:
            x = tl.load(src + at)
            if SWIGLU:
                x = swiglu(x, tl.load(src + K + at))
        else:
            x = tl.load(src + at, mask=at < K, other=0.0)
            if SWIGLU:
                x = swiglu(x, tl.load(src + K + at, mask=at < K, other=0.0))
        # A tuple, because each chunk is an array of its own: nothing is indexed when it runs.
        row = row + (x,)  # type: ignore[assignment]  # noqa: RUF005 - Triton's have none
        peak = _larger(peak, tl.abs(x.to(tl.float32)))  # a NaN stays, to be counted
    amax = tl.reduce(peak, 0, _larger)
    one_if_zero = tl.where(amax == 0, 1.0, amax)
    scale = tl.maximum(tl.div_rn(one_if_zero, 448.0), FLOOR)
    tl.store(scales + index, scale)
    out = codes + index * K
    if scale >= _FAST_LOW:
        _store_row(out, row, scale, K, CHUNK, True)
    else:
        _store_row(out, row, scale, K, CHUNK, False)
    # 0: rows that are not finite, 1: rows of zeros.
    if (amax < float("inf")) == 0:
        tl.atomic_add(counts, 1, sem="relaxed")
    if amax == 0:
        tl.atomic_add(counts + 1, 1, sem="relaxed")


@triton.jit
def swiglu_kernel(src: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, CHUNK: tl.constexpr) -> None:
    """out[s, i] = silu(src[s, i]) * src[s, WIDTH + i], FP32 inside; one row a program."""
    CHUNKS: tl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    row = tl.program_id(0).to(tl.int64)
    src += row * (2 * WIDTH)
    out += row * WIDTH
    for i in tl.static_range(CHUNKS):
        at = i * CHUNK + tl.arange(0, CHUNK)
        if (i + 1) * CHUNK <= WIDTH:
            tl.store(out + at, swiglu(tl.load(src + at), tl.load(src + WIDTH + at)))
        else:
            inside = at < WIDTH
            gate = tl.load(src + at, mask=inside, other=0.0)
            up = tl.load(src + WIDTH + at, mask=inside, other=0.0)
            tl.store(out + at, swiglu(gate, up), mask=inside)


@triton.jit
def _count(counts: tl.tensor, amax: tl.tensor) -> None:
    """0: groups that are not finite, 1: groups of zeros."""
    odd = tl.sum(((amax < float("inf")) == 0).to(tl.int32), 0)
    if odd > 0:
        tl.atomic_add(counts, odd, sem="relaxed")
    zero = tl.sum((amax == 0).to(tl.int32), 0)
    if zero > 0:
        tl.atomic_add(counts + 1, zero, sem="relaxed")


@triton.jit
def quantize_mx_kernel(
    src: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    counts: tl.tensor,
    groups: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """TILE groups of 32 values a program; rows are whole groups, so they follow one another."""
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = group < groups
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    value = tl.load(src + at, mask=inside[:, None], other=1.0).to(tl.float32)
    amax = tl.reduce(tl.abs(value), 1, _larger)  # a NaN stays, to be counted
    bits = amax.to(tl.int32, bitcast=True)
    byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    byte = tl.minimum(tl.maximum(byte, 0), 247)  # at most, of a finite amax
    reciprocal = ((254 - byte) << 23).to(tl.float32, bitcast=True)  # 2^(127 - byte), normal
    tl.store(scales + group, byte.to(tl.uint8), mask=inside)
    tl.store(codes + at, (value * reciprocal[:, None]).to(tl.float8e4nv), mask=inside[:, None])
    _count(counts, tl.where(inside, amax, 1.0))


@triton.jit
def quantize_blocks_kernel(
    src: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    counts: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """One block of 128 x 128 a program, PART rows at a time; ragged at the ends. The matrix of a
    stack is the third number of the grid. A block is read twice, the second time from a cache."""
    across: tl.constexpr = (K + 127) // 128
    column, row, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    k = column * 128 + tl.arange(0, 128)
    base = matrix * n * K
    peak = tl.zeros((PART, 128), tl.float32)
    for first in range(0, 128, PART):
        r = row * 128 + first + tl.arange(0, PART)
        inside = (r < n)[:, None] & (k < K)[None, :]
        at = base + r.to(tl.int64)[:, None] * K + k[None, :]
        peak = _larger(peak, tl.abs(tl.load(src + at, mask=inside, other=0.0).to(tl.float32)))
    amax = tl.reduce(tl.reduce(peak, 1, _larger), 0, _larger)
    scale = tl.div_rn(tl.maximum(amax, 1e-10), 448.0)
    down = (n + 127) // 128
    tl.store(scales + (matrix * down + row) * across + column, scale)
    reciprocal = tl.div_rn(1.0, scale)
    for first in range(0, 128, PART):
        r = row * 128 + first + tl.arange(0, PART)
        inside = (r < n)[:, None] & (k < K)[None, :]
        at = base + r.to(tl.int64)[:, None] * K + k[None, :]
        value = tl.load(src + at, mask=inside, other=0.0)
        tl.store(codes + at, _encode(value, scale, reciprocal, True), mask=inside)
    if (amax < float("inf")) == 0:
        tl.atomic_add(counts, 1, sem="relaxed")
    if amax == 0:
        tl.atomic_add(counts + 1, 1, sem="relaxed")
