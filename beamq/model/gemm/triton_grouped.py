"""Grouped GEMM in Triton: one persistent kernel for BF16, FP8 and emulated NVFP4 experts.

In: rows of activations sorted by expert, a stack of weights [E, N, K], and where each expert's rows
end. Out: each row times its expert's weight, [S, N] BF16; with `swiglu`, SwiGLU of it, [S, N/2].

The one idea: formats differ only in two factors after the sum, so one kernel serves them all:
y = (a b^T) * row scale * column scale, rounded once. BF16 has no scales. FP8 has one per token and
one per output. NVFP4, whose codes times block scales are exact in BF16, has its two global scales.

Tiles of rows never span two experts. A table lists them: int32 [1 + n, 3], first their number, then
for each its expert, its first row and the end of its expert's rows. As many programs as the GPU has
multiprocessors walk through it, expert by expert, so that weights pass through the L2 cache once.
Where only the device knows the offsets (`ExpertRows`), it makes the table.

With `swiglu`, a program computes the same columns of gate and of up, rounds both to BF16 as the
unfused layer does, and writes their product.

FP8 sums: the tensor cores of Hopper keep some 14 bits while adding products. Unless `fast`, partial
sums of 128 products are added in FP32 outside the tensor cores.

Limits: compute capability 9.0 or later; rows of operands are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from beamq.formats.kernels.triton_fp8 import swiglu
from beamq.model.gemm.operands import ExpertRows

_AT_ONCE = 32  # tiles of an expert written at a time


@triton.jit
def table_kernel(
    ends: tl.tensor,
    table: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    LANES: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:
    """Write the tiles of one expert after those of all experts before it; grid (experts,).

    `ends` int32 [EXPERTS]; LANES is EXPERTS rounded up to a power of two.
    """
    # Every program counts the tiles of all experts, so that none has to wait for another.
    expert = tl.program_id(0)
    lane = tl.arange(0, LANES)
    end = tl.load(ends + lane, mask=lane < EXPERTS, other=0)
    # An expert starts where the one before it ends; the first one starts at 0, by `other`.
    start = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < EXPERTS), other=0)
    count = tl.where(lane < EXPERTS, (end - start + ROWS - 1) // ROWS, 0)
    before = tl.sum(tl.where(lane < expert, count, 0), axis=0)
    # A sum in which one lane is not zero takes that lane's value out of a vector.
    own = tl.sum(tl.where(lane == expert, count, 0), axis=0)
    first_row = tl.sum(tl.where(lane == expert, start, 0), axis=0)
    end_row = tl.sum(tl.where(lane == expert, end, 0), axis=0)
    for at in range(0, own, AT_ONCE):
        tile = at + tl.arange(0, AT_ONCE)
        place = table + 3 + (before + tile) * 3  # 3: the first row of the table holds the count
        tl.store(place, expert, mask=tile < own)
        tl.store(place + 1, first_row + tile * ROWS, mask=tile < own)
        tl.store(place + 2, end_row, mask=tile < own)
    if expert == EXPERTS - 1:  # the last one knows how many tiles there are
        tl.store(table, before + own)


def tile_table(offsets: Sequence[int], rows: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """The table on the device, and the most tiles it can have.

    It is kept with the offsets, since both projections of an expert use it.
    """
    if not isinstance(offsets, ExpertRows):
        table = _from_host(tuple(offsets), rows, device)
        return table, table.shape[0] - 1
    # Each expert that has rows may have one tile that is not full.
    most = offsets[-1] // rows + min(len(offsets) - 1, offsets[-1])
    if rows not in offsets.tables:
        experts = len(offsets) - 1
        table = torch.empty(1 + most, 3, dtype=torch.int32, device=device)
        table_kernel[(experts,)](
            offsets.ends_E,
            table,
            ROWS=rows,
            EXPERTS=experts,
            LANES=triton.next_power_of_2(experts),
            AT_ONCE=_AT_ONCE,
            num_warps=4,
        )
        offsets.tables[rows] = table
    return offsets.tables[rows], most


@lru_cache(maxsize=16)
def _from_host(offsets: tuple[int, ...], rows: int, device: torch.device) -> torch.Tensor:
    """The same table from offsets that the host knows."""
    ends = np.asarray(offsets, dtype=np.int64)
    starts, ends = ends[:-1], ends[1:]
    counts = (ends - starts + rows - 1) // rows
    expert = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(expert)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack((expert, starts[expert] + within * rows, ends[expert]), axis=1)
    table = np.concatenate(([[len(tiles), 0, 0]], tiles))
    return torch.from_numpy(table.astype(np.int32)).to(device)


FEW_ROWS = 40
"""With up to this many rows per expert, small tiles read the weights faster."""


@triton.jit
def grouped_kernel(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    row_scale: tl.tensor,
    column_scale: tl.tensor,
    tiles: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    COLUMN_SCALED: tl.constexpr,
    SWIGLU: tl.constexpr,
    IMPRECISE: tl.constexpr,
) -> None:
    """Products of all tiles; grid (PROGRAMS,) or fewer.

    `a` [S, K] and `b` [E * width, K] are tensor descriptors, blocks [ROWS, DEPTH] and [COLUMNS,
    DEPTH]. `out` [S, N]. `b` has width = N rows per expert, or 2N with SWIGLU (gate, then up).
    IMPRECISE: how many products a tensor core adds before the sum goes to FP32 registers.
    """
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    width: tl.constexpr = 2 * N if SWIGLU else N
    total = tl.load(tiles) * column_tiles
    # Column tiles of one row tile are neighbours, and row tiles of one expert follow each other:
    # programs that run at the same time read the same rows of `a` and the same expert of `b`.
    for tile in tl.range(tl.program_id(0), total, PROGRAMS):
        entry = tiles + 3 + (tile // column_tiles) * 3
        column = (tile % column_tiles) * COLUMNS
        expert = tl.load(entry)
        first = tl.load(entry + 1)
        end = tl.load(entry + 2)
        weight_row = expert * width + column
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        up_sums = sums
        # Loads are not masked. Beyond S, E * width and K a descriptor reads zeros; rows of the next
        # expert, and columns beyond N, give products that the store below leaves out.
        for depth in range(0, K, DEPTH):
            left = a.load([first, depth])
            right = b.load([weight_row, depth])
            sums = tl.dot(left, right.T, sums, max_num_imprecise_acc=IMPRECISE)
            if SWIGLU:
                up_right = b.load([weight_row + N, depth])
                up_sums = tl.dot(left, up_right.T, up_sums, max_num_imprecise_acc=IMPRECISE)
        rows = first + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        inside = rows < end
        # Scales come after the whole sum, in FP32, row before column: the reference's order.
        if ROW_SCALED:
            factor = tl.load(row_scale + rows, mask=inside, other=0.0)
            sums *= factor[:, None]
            if SWIGLU:
                up_sums *= factor[:, None]
        if COLUMN_SCALED:
            at = column_scale + expert.to(tl.int64) * width + columns
            sums *= tl.load(at, mask=columns < N, other=0.0)[None, :]
            if SWIGLU:
                sums_of_up = tl.load(at + N, mask=columns < N, other=0.0)
                up_sums *= sums_of_up[None, :]
        result = sums.to(tl.bfloat16)
        if SWIGLU:
            result = swiglu(result, up_sums.to(tl.bfloat16))
        place = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(place, result, mask=inside[:, None] & (columns < N)[None, :])


def grouped_gemm(
    a_SK: torch.Tensor,
    b_ENK: torch.Tensor,
    offsets: Sequence[int],
    *,
    row_scale: torch.Tensor | None = None,
    column_scale: torch.Tensor | None = None,
    swiglu: bool = False,
    fast: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [S, N] BF16 (SwiGLU: [S, N/2]); expert e has rows offsets[e]:offsets[e+1].

    Operands are both BF16 or both E4M3, contiguous, with K a multiple of 16 bytes. Factors after
    the sum: `row_scale` FP32 [S] or [S, 1], `column_scale` FP32 [E, N] or [E, N, 1].
    """
    experts, n, k = b_ENK.shape
    width = n // 2 if swiglu else n
    if out is None:
        out = torch.empty(a_SK.shape[0], width, dtype=torch.bfloat16, device=a_SK.device)
    if not offsets[-1]:
        return out
    rows, columns, depth, stages, warps = tile_shape(a_SK.dtype, offsets)
    tiles, most = tile_table(offsets, rows, a_SK.device)
    multiprocessors = torch.cuda.get_device_properties(a_SK.device).multi_processor_count
    imprecise = None if fast or a_SK.dtype == torch.bfloat16 else min(128, depth)
    columns = columns // 2 if swiglu else columns  # gate and up share the registers
    grouped_kernel[(min(multiprocessors, most * triton.cdiv(width, columns)),)](
        _descriptor(a_SK, [rows, depth]),
        _descriptor(b_ENK.view(experts * n, k), [columns, depth]),
        out,
        out if row_scale is None else row_scale,  # a pointer is needed even if it is not read
        out if column_scale is None else column_scale,
        tiles,
        N=width,
        K=k,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        PROGRAMS=multiprocessors,
        ROW_SCALED=row_scale is not None,
        COLUMN_SCALED=column_scale is not None,
        SWIGLU=swiglu,
        IMPRECISE=imprecise,
        num_stages=stages,
        num_warps=warps,
    )
    return out


def tile_shape(dtype: torch.dtype, offsets: Sequence[int]) -> tuple[int, int, int, int, int]:
    """Rows, columns and depth (of K) of a tile, pipeline stages and warps of a program.

    The shape that was fastest on an H200 for this many rows per expert. Where only the device knows
    the offsets, every expert is assumed to have rows.
    """
    experts = len(offsets) - 1
    if isinstance(offsets, ExpertRows):
        busy = min(experts, offsets[-1])
    else:
        busy = sum(1 for e in range(experts) if offsets[e + 1] > offsets[e])
    depth = 64 if dtype == torch.bfloat16 else 128
    if offsets[-1] <= FEW_ROWS * busy:
        return 64, 128, depth, 5, 4
    return 128, 256, depth, 3, 8


def _descriptor(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block)
