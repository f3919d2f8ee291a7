"""One block of GPTQ on NVIDIA GPUs: Triton code that gives the bits of formats/gptq.py.

In:  the moved values of a block's 16 columns, [E, 16, N], its weights, its part of the factor.
Out: codes, scale codes, and w - rounded in place of the weights.

The one idea: a thread owns a row, so that its 16 weights, 16 moved values and their 16 successors
stay in registers while 16 candidate scales pass by; the feedback inside the block is 120 products
and sums for each candidate with factors that all rows of an expert share, loaded once. N lies last,
so neighbouring threads read neighbouring addresses. Between blocks the feedback is a GEMM of the
caller's.

The order of operations is the twin's and nothing may be fused (`enable_fp_fusion=False`): a product
rounded by itself is what plain torch can do on every device. Bound by arithmetic: some 500
instructions a weight.

Limits: as gpu.py; finite values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from beamq.formats.kernels.triton_nvfp4 import as_float
from beamq.formats.numerics import NVFP4_BLOCK
from beamq.formats.nvfp4 import candidate_offsets

_TILE = 128  # rows of a program, one a thread

_ABS = tl.constexpr(0x7FFFFFFF)
_EXPONENT = tl.constexpr(0x7F800000)
_ONE = tl.constexpr(0x3F800000)
_MAGIC_ABOVE = tl.constexpr((22 << 23) + 0x400000)  # from 2^e to 1.5 * 2^(22 + e)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _nearest(q: tl.tensor) -> tl.tensor:
    """The E2M1 value nearest to q, ties to the even code."""
    inside = tl.minimum(tl.maximum(q, -6.0), 6.0)
    exponent = inside.to(tl.int32, bitcast=True) & _EXPONENT
    magic = as_float(tl.maximum(exponent, _ONE) + _MAGIC_ABOVE)
    return (inside + magic) - magic


@triton.jit
def _code(nearest: tl.tensor, q: tl.tensor) -> tl.tensor:
    """The code of an E2M1 value; the sign is q's, which a rounded zero has lost."""
    size = as_float(nearest.to(tl.int32, bitcast=True) & _ABS)
    index = tl.minimum(tl.minimum(size * 2.0, size + 2.0), size * 0.5 + 4.0)
    return index.to(tl.int32) + tl.where(q < 0, 8, 0)


@triton.jit
def _value(code: tl.tensor) -> tl.tensor:
    """FP32 of an E4M3 code from 1 to 126."""
    normal = as_float((code << 20) + (120 << 23))
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _max_code(moved: tl.tuple, global_scale: tl.tensor) -> tl.tensor:
    """The `max` rule's scale code of a block, rounded to the nearest even by hand: so it needs no
    E4M3 cast, and the interpreter's is wrong where rounding reaches the next power of two."""
    peak = tl.abs(moved[0])
    for j in tl.static_range(1, 16):
        peak = tl.maximum(peak, tl.abs(moved[j]))
    ideal = tl.div_rn(peak, 6.0 * global_scale)
    ideal = tl.where(ideal == 0, 1.0, ideal)
    scale = tl.minimum(tl.maximum(ideal, 0.001953125), 448.0)
    bits = scale.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # In front of 2^-6 they are multiples of 2^-9, which is the last bit of a sum with 1.5 * 2^14.
    below = (scale + 24576.0).to(tl.int32, bitcast=True) & 15
    return tl.where(scale < 0.015625, below, normal)


@triton.jit
def _columns(src: tl.tensor, n: tl.tensor, row: tl.tensor, inside: tl.tensor) -> tl.tuple:
    """16 columns' values of each thread's row."""
    out = ()
    for j in tl.static_range(16):
        value = tl.load(src + j * n + row, mask=inside, other=0.0)
        out = out + (value,)  # type: ignore[assignment]  # noqa: RUF005 - no unpacking
    return out


@triton.jit
def _above(unit: tl.tensor, row: tl.tensor, column: tl.tensor) -> tl.tuple:
    """The 120 values above the diagonal, row by row; one for all threads."""
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
    """What is rounded in the columns behind J, moved by the error in J."""
    out = ()
    for k in tl.static_range(16):
        if k > J:  # noqa: SIM108 - compiled, a branch of each kind
            value = x[k] + error * unit[J * 15 - J * (J - 1) // 2 + k - J - 1]
        else:
            value = x[k]
        out = out + (value,)  # type: ignore[assignment]  # noqa: RUF005 - no unpacking
    return out


@triton.jit
def _loss(
    moved: tl.tuple, w: tl.tuple, unit: tl.tuple, pivot: tl.tuple, step: tl.tensor
) -> tl.tensor:
    """The block's share of the squared error under one scale."""
    per_step = tl.minimum(tl.div_rn(1.0, step), _LARGEST)
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

    `candidates` is 16, and not known to the compiler: of a loop of so many rounds LLVM asks whether
    it is a CRC, and in so much arithmetic looks for minutes.
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
    i = candidates - candidates
    while i < candidates:  # the sweep's order: 0, -7 .. -1, 1 .. 8
        offset = tl.where(i == 0, 0, tl.where(i < 8, i - 8, i - 7))
        code = tl.minimum(tl.maximum(middle + offset, 1), 126)
        loss = _loss(moved_16, w_16, unit_120, pivot_16, _value(code) * global_scale)
        better = loss < best
        best = tl.where(better, loss, best)
        chosen = tl.where(better, code, chosen)
        i += 1
    step = _value(chosen) * global_scale
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
    """`gptq_block.round_block` on a GPU. Raises `ValueError` for shapes or strides it can't take:
    columns must follow each other, N apart, and codes begin at a multiple of four bytes."""
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
        raise ValueError("an expert's pivots must lie in one piece")
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
            unit_E1616.stride(0),
            unit_E1616.stride(1),
            unit_E1616.stride(2),
            pivot_E16.stride(0),
            words_EN2.stride(0),
            words_EN2.stride(1),
            scale_EN.stride(0),
            scale_EN.stride(1),
            TILE=_TILE,
            num_warps=_TILE // 32,
            enable_fp_fusion=False,
        )
