"""Low-rank sums on NVIDIA GPUs: a Triton kernel that merges LoRA adapters into weights in place.

In:  weights [N, K], or a stack [E, N, K], in BF16, F16 or FP32; FP32 factors a [E, r, K] and
     b [E, N, r].
Out: the weights, with the bytes of `numerics.add_low_rank` and of the C kernel.

The one idea: a program keeps a tile of sums in registers while j runs over the rank, and a thread
has eight columns of eight rows, so that each number it loads serves eight sums. What limits it are
registers, of which two such programs need all that a multiprocessor has. Hence the weights are read
after the sums, and no more than two j are in flight.

Only what is written as fused is fused (`enable_fp_fusion=False`). Matrix units are not used: they
round to TF32 or add in another order.

Limits: bound by arithmetic and the loads of factors from about r = 8 on. A rank is compiled in, so
each has its own kernel. Each b of a stack holds fewer than 2^31 numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from beamq.formats.numerics import FP32_END

_ROWS, _COLUMNS, _WARPS = 128, 128, 8
_STEP = tl.constexpr(2)


@triton.jit
def _zeros(weight: tl.tensor) -> tl.tensor:
    """FP32 zeros that are spread over threads as `weight` is: eight columns of a row together.

    Triton gives a constant a layout of its own, and sums would keep it: 64 rows of one column in a
    thread, and a load for each. So the zeros are computed; LLVM finds that they are constant.
    """
    bits = weight.to(tl.int32 if weight.dtype == tl.float32 else tl.int16, bitcast=True)
    return ((bits.to(tl.int32) << 8) & 0xFF).to(tl.float32)


@triton.jit
def _along(a: tl.tensor, column: tl.tensor, K: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    if K % COLUMNS == 0:  # known when compiled: no mask
        return tl.load(a + column)
    return tl.load(a + column, mask=column < K, other=0.0)


@triton.jit
def _add_product(sums: tl.tensor, down: tl.tensor, along: tl.tensor) -> tl.tensor:
    down = tl.broadcast_to(down[:, None], sums.shape)
    return tl.fma(down, tl.broadcast_to(along[None, :], sums.shape), sums)


@triton.jit
def _rounded(merged: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Nearest even; a NaN becomes the positive quiet one."""
    if dtype == tl.float32:
        bits = tl.where(merged == merged, merged.to(tl.int32, bitcast=True), 0x7FC00000)
    else:
        # The cast makes 0x7FFF of every NaN: as an integer the largest, above infinity.
        bits = merged.to(dtype).to(tl.int16, bitcast=True)
        nan: tl.constexpr = 0x7FC0 if dtype == tl.bfloat16 else 0x7E00
        bits = tl.minimum(bits, tl.full(bits.shape, nan, tl.int16))
    return bits.to(dtype, bitcast=True)


@triton.jit(do_not_specialize=["n"])
def add_low_rank_kernel(
    w: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    scaling: tl.tensor,
    n: tl.tensor,
    K: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile a program; grid (tiles along K, tiles along N, tensors of a stack)."""
    tensor = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = w + (tensor * n + row[:, None]) * K + column[None, :]
    inside = row[:, None] < n
    if K % COLUMNS != 0:
        inside = inside & (column[None, :] < K)
    sums = _zeros(tl.load(place, mask=inside & (n < 0), other=0.0))  # reads nothing
    a += tensor * RANK * K
    b += tensor * n * RANK
    down = tl.minimum(row, n - 1) * RANK
    WHOLE: tl.constexpr = RANK // _STEP * _STEP
    for first in range(0, WHOLE, _STEP):
        for step in tl.static_range(_STEP):
            j = first + step
            along = _along(a + j * K, column, K, COLUMNS)
            sums = _add_product(sums, tl.load(b + (down + j)), along)
    for j in tl.static_range(WHOLE, RANK):
        along = _along(a + j * K, column, K, COLUMNS)
        sums = _add_product(sums, tl.load(b + (down + j)), along)
    weight = tl.load(place, mask=inside, other=0.0)
    merged = weight.to(tl.float32) + sums * scaling
    tl.store(place, _rounded(merged, weight.dtype), mask=inside)


def add_low_rank(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
    """`numerics.add_low_rank` in place of `w` [N, K] or [E, N, K]; `a` [.., r, K], `b` [.., N, r].

    Raises `ValueError` for other shapes or dtypes, a rank of zero, or what is not contiguous.
    """
    fits = w.dim() in (2, 3) and a.dim() == w.dim() and a.shape[-2] > 0
    if fits:
        *lead, n, k = w.shape
        r = a.shape[-2]
        fits = a.shape == (*lead, r, k) and b.shape == (*lead, n, r)
    if not fits:
        raise ValueError(
            f"weights {list(w.shape)}, a {list(a.shape)}, b {list(b.shape)};"
            " expected [N, K], [r, K], [N, r] or stacks of them, r at least 1"
        )
    if w.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"weights in {w.dtype}; expected BF16, F16 or FP32")
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        raise ValueError(f"factors in {a.dtype} and {b.dtype}; expected FP32")
    if not (w.is_contiguous() and a.is_contiguous() and b.is_contiguous()):
        raise ValueError("expected contiguous tensors")
    if not abs(scaling) < FP32_END:
        raise ValueError(f"scaling is {scaling}; it must be finite in FP32")
    if w.numel():
        grid = (triton.cdiv(k, _COLUMNS), triton.cdiv(n, _ROWS), *(lead or [1]))
        add_low_rank_kernel[grid](
            w, a, b, float(scaling), n, K=k, RANK=r, ROWS=_ROWS, COLUMNS=_COLUMNS,
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
