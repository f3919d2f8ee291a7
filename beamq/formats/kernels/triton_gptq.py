"""One block of GPTQ on NVIDIA GPUs: a Triton kernel that gives the bits of formats/gptq.py.

In:  the moved values of a block's 16 columns, [E, 16, N], its weights, its part of the factor.
Out: codes, scale codes, and w - rounded in place of the weights.

The one idea: a thread owns a row, so that its 16 weights, 16 moved values and their 16 updates stay
in registers while 16 candidate scales are tried. The feedback inside the block is 120 products and
sums for each candidate, with factors that all rows of an expert share and that are loaded once. N
is the last dimension, so neighbouring threads read neighbouring addresses. Feedback between blocks
is a GEMM in formats/gptq.py.

The order of operations is that of the plain torch twin, and nothing may be fused
(`enable_fp_fusion=False`): plain torch can round each product by itself on every device. Bound by
arithmetic: some 500 instructions for each weight.

Limits: finite values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from beamq.formats.kernels.triton_nvfp4 import as_float, e4m3_value
from beamq.formats.numerics import NVFP4_BLOCK
from beamq.formats.nvfp4 import candidate_offsets

_TILE = 128  # rows of a program, one a thread

_ABS = tl.constexpr(0x7FFFFFFF)
_EXPONENT = tl.constexpr(0x7F800000)
_ONE = tl.constexpr(0x3F800000)
_TO_MAGIC = tl.constexpr((22 << 23) + 0x400000)  # added to the bits of 2^e: 1.5 * 2^(22 + e)
_LARGEST = tl.constexpr(3.4028234663852886e38)  # of FP32


@triton.jit
def _nearest(q: tl.tensor) -> tl.tensor:
    """The E2M1 value nearest to q, ties to the even code."""
    inside = tl.minimum(tl.maximum(q, -6.0), 6.0)
    # 2^e, where e is the exponent of q but at least 0, since values below 2 are all 1/2 apart.
    exponent = tl.maximum(inside.to(tl.int32, bitcast=True) & _EXPONENT, _ONE)
    # A sum with 1.5 * 2^(22 + e) has the unit 2^(e - 1), which is the grid's spacing there.
    magic = as_float(exponent + _TO_MAGIC)
    return (inside + magic) - magic


@triton.jit
def _code(nearest: tl.tensor, q: tl.tensor) -> tl.tensor:
    """The code of an E2M1 value. The sign is that of q, because a rounded zero has lost it."""
    size = as_float(nearest.to(tl.int32, bitcast=True) & _ABS)
    # The line through codes 0..4, that through 4..6, that through 6 and 7: the least one is right.
    index = tl.minimum(tl.minimum(size * 2.0, size + 2.0), size * 0.5 + 4.0)
    return index.to(tl.int32) + tl.where(q < 0, 8, 0)


@triton.jit
def _max_code(moved: tl.tuple, global_scale: tl.tensor) -> tl.tensor:
    """The `max` rule's scale code of a block, rounded to nearest even by hand. An E4M3 cast would
    do, but that of Triton's interpreter is wrong where rounding reaches the next power of two."""
    peak = tl.abs(moved[0])
    for j in tl.static_range(1, 16):
        peak = tl.maximum(peak, tl.abs(moved[j]))
    ideal = tl.div_rn(peak, 6.0 * global_scale)
    ideal = tl.where(ideal == 0, 1.0, ideal)
    scale = tl.minimum(tl.maximum(ideal, 0.001953125), 448.0)
    bits = scale.to(tl.int32, bitcast=True)
    # Drop 20 of 23 mantissa bits, ties to even; then the exponent's bias goes from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is the last bit of a sum with 1.5 * 2^14.
    below = (scale + 24576.0).to(tl.int32, bitcast=True) & 15
    return tl.where(scale < 0.015625, below, normal)


@triton.jit
def _columns(src: tl.tensor, n: tl.tensor, row: tl.tensor, inside: tl.tensor) -> tl.tuple:
    """The values of 16 columns in each thread's row."""
    out = ()  # tuples throughout: their elements are registers, whose names the compiler knows
    for j in tl.static_range(16):
        value = tl.load(src + j * n + row, mask=inside, other=0.0)
        out = out + (value,)  # type: ignore[assignment]  # noqa: RUF005 - no unpacking
    return out


@triton.jit
def _above(unit: tl.tensor, row: tl.tensor, column: tl.tensor) -> tl.tuple:
    """The 120 values of U above the diagonal, row by row; each is the same for all threads."""
    out = ()
    for j in tl.static_range(15):
        for k in tl.static_range(j + 1, 16):
            value = tl.load(unit + j * row + k * column)
            out = out + (value,)  # type: ignore[assignment]  # noqa: RUF005 - no unpacking
    return out


@triton.jit
def _pivots(pivot: tl.tensor) -> tl.tuple:
    out = ()
    for j in tl.static_range(16):
        out = out + (tl.load(pivot + j),)  # type: ignore[assignment]  # noqa: RUF005
    return out


@triton.jit
def _push(x: tl.tuple, error: tl.tensor, unit: tl.tuple, J: tl.constexpr) -> tl.tuple:
    """The values x with the columns after J moved by the error in column J."""
    out = ()
    for k in tl.static_range(16):
        if k > J:  # noqa: SIM108 - a constexpr if: only one branch is compiled
            # Row J of `unit` begins after 15 + 14 + ... values, at J * 15 - J * (J - 1) / 2.
            value = x[k] + error * unit[J * 15 - J * (J - 1) // 2 + k - J - 1]
        else:
            value = x[k]
        out = out + (value,)  # type: ignore[assignment]  # noqa: RUF005 - no unpacking
    return out


@triton.jit
def _loss(
    moved: tl.tuple, w: tl.tuple, unit: tl.tuple, pivot: tl.tuple, step: tl.tensor
) -> tl.tensor:
    """The block's share of the squared error with one scale."""
    per_step = tl.minimum(tl.div_rn(1.0, step), _LARGEST)  # a step near 2^-127 has no reciprocal
    x = moved
    loss = tl.zeros_like(step)
    for j in tl.static_range(16):
        rounded = _nearest(x[j] * per_step) * step
        missed = x[j] - rounded
        loss += missed * missed * pivot[j]
        x = _push(x, w[j] - rounded, unit, j)
    return loss


@triton.jit(
    do_not_specialize=[
        "candidates", "n", "moved_stride", "w_stride", "unit_stride", "unit_row", "unit_column",
        "pivot_stride", "codes_stride", "codes_row", "scales_stride", "scales_row",
    ],
    do_not_specialize_on_alignment=[
        "moved", "w", "unit", "pivot", "global_scales", "codes", "scales"
    ],
)  # fmt: skip
def round_block_kernel(
    moved: tl.tensor,
    w: tl.tensor,
    unit: tl.tensor,
    pivot: tl.tensor,
    global_scales: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    candidates: tl.tensor,
    n: tl.tensor,
    moved_stride: tl.tensor,
    w_stride: tl.tensor,
    unit_stride: tl.tensor,
    unit_row: tl.tensor,
    unit_column: tl.tensor,
    pivot_stride: tl.tensor,
    codes_stride: tl.tensor,
    codes_row: tl.tensor,
    scales_stride: tl.tensor,
    scales_row: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Rows of one expert; grid (tiles of rows, experts). Codes are addressed in words of eight.

    `candidates` is 16, but the compiler must not know it: LLVM tests a loop with a known number of
    rounds for being a CRC, which takes minutes with so much arithmetic in it.
    """
    expert = tl.program_id(1).to(tl.int64)
    moved += expert * moved_stride
    w += expert * w_stride
    unit += expert * unit_stride
    pivot += expert * pivot_stride
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < n
    global_scale = tl.load(global_scales + expert)
    moved_16 = _columns(moved, n, row, inside)
    w_16 = _columns(w, n, row, inside)
    unit_120 = _above(unit, unit_row, unit_column)
    pivot_16 = _pivots(pivot)
    middle = _max_code(moved_16, global_scale)
    chosen = middle
    best = tl.full((TILE,), float("inf"), tl.float32)
    i = candidates - candidates  # a zero that is a tensor: `i` must not be a constant
    while i < candidates:  # the sweep's order: 0, -7 .. -1, 1 .. 8
        offset = tl.where(i == 0, 0, tl.where(i < 8, i - 8, i - 7))
        code = tl.minimum(tl.maximum(middle + offset, 1), 126)
        loss = _loss(moved_16, w_16, unit_120, pivot_16, e4m3_value(code) * global_scale)
        better = loss < best
        best = tl.where(better, loss, best)
        chosen = tl.where(better, code, chosen)
        i += 1
    # Once more with the best scale, this time for the codes and the errors.
    step = e4m3_value(chosen) * global_scale
    per_step = tl.minimum(tl.div_rn(1.0, step), _LARGEST)
    x = moved_16
    low, high = tl.zeros_like(chosen), tl.zeros_like(chosen)
    for j in tl.static_range(16):
        q = x[j] * per_step
        nearest = _nearest(q)
        if j < 8:
            low += _code(nearest, q) << (4 * j)
        else:
            high += _code(nearest, q) << (4 * (j - 8))
        error = w_16[j] - nearest * step
        tl.store(w + j * n + row, error, mask=inside)
        x = _push(x, error, unit_120, j)
    place = codes + (expert * codes_stride + row[:, None] * codes_row + tl.arange(0, 2)[None, :])
    tl.store(place, tl.join(low, high), mask=inside[:, None])
    tl.store(scales + (expert * scales_stride + row * scales_row), chosen.to(tl.int8), mask=inside)


def round_block(
    moved_E16N: torch.Tensor,
    w_E16N: torch.Tensor,
    unit_E1616: torch.Tensor,
    pivot_E16: torch.Tensor,
    global_scale_E: torch.Tensor,
    codes_EN8: torch.Tensor,
    scale_EN: torch.Tensor,
) -> None:
    """`gptq.round_block` on a GPU. Raises `ValueError` for other shapes or strides than these:
    columns follow each other, N apart, and codes begin at a multiple of four bytes."""
    experts, columns, n = w_E16N.shape
    if columns != NVFP4_BLOCK or moved_E16N.shape != w_E16N.shape:
        raise ValueError(
            f"moved {list(moved_E16N.shape)}, weights {list(w_E16N.shape)};"
            f" expected [E, {NVFP4_BLOCK}, N] of both"
        )
    for block in (moved_E16N, w_E16N):
        if block.dtype != torch.float32 or block.stride()[1:] != (n, 1):
            raise ValueError(f"{block.dtype}, strides {block.stride()}; expected FP32, N and 1")
    if pivot_E16.stride(1) != 1:
        raise ValueError("expected the pivots of an expert to be contiguous")
    words_EN2 = codes_EN8.view(torch.int32)
    if w_E16N.numel():
        round_block_kernel[(triton.cdiv(n, _TILE), experts)](
            moved_E16N,
            w_E16N,
            unit_E1616,
            pivot_E16,
            global_scale_E,
            words_EN2,
            scale_EN.view(torch.int8),
            len(candidate_offsets()),
            n,
            moved_E16N.stride(0),
            w_E16N.stride(0),
            *unit_E1616.stride(),
            pivot_E16.stride(0),
            *words_EN2.stride()[:2],
            *scale_EN.stride(),
            TILE=_TILE,
            num_warps=_TILE // 32,
            enable_fp_fusion=False,
        )
