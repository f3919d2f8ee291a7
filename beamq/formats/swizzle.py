"""Block scales in the order in which FP4 tensor cores read them, in plain torch.

In:  E4M3 block scales [R, C] (R rows, one column for each 16 values). Out: the same bytes, flat, in
     tiles of 128 rows by 4 columns of 512 bytes each, tiles row by row. Within a tile, row r and
     column c lie at (r % 32) * 16 + (r // 32) * 4 + c. Missing rows and columns are zeros.

On disk scales are always row by row; this order is for kernels only ("SWIZZLE_32_4_4" in torch,
"128x4" elsewhere). Weights are reordered expert by expert. Activations of a grouped call are
padded to 128 rows for each group on its own, which `padded_rows` places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROWS, COLUMNS = 128, 4


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is no less than `value`."""
    return -(-value // multiple) * multiple


def swizzle(scales_RC: torch.Tensor) -> torch.Tensor:
    """[..., R, C] bytes or E4M3 -> [..., round_up(R, 128) * round_up(C, 4)]."""
    *lead, rows, columns = scales_RC.shape
    r, c = round_up(rows, ROWS), round_up(columns, COLUMNS)
    padded = torch.zeros(*lead, r, c, dtype=torch.uint8, device=scales_RC.device)
    padded[..., :rows, :columns] = scales_RC.view(torch.uint8)
    tiles = padded.view(*lead, r // ROWS, 4, 32, c // COLUMNS, COLUMNS)
    order = (*range(len(lead)), *(len(lead) + axis for axis in (0, 3, 2, 1, 4)))
    return tiles.permute(order).reshape(*lead, r * c).view(scales_RC.dtype)


def unswizzle(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `swizzle`, without the padding: [..., R * C] -> [..., rows, columns]."""
    lead = flat.shape[:-1]
    r, c = round_up(rows, ROWS), round_up(columns, COLUMNS)
    tiles = flat.view(torch.uint8).view(*lead, r // ROWS, c // COLUMNS, 32, 4, COLUMNS)
    order = (*range(len(lead)), *(len(lead) + axis for axis in (0, 3, 2, 1, 4)))
    padded = tiles.permute(order).reshape(*lead, r, c)
    return padded[..., :rows, :columns].contiguous().view(flat.dtype)


def padded_rows(offsets: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Where each row's scales go if every group starts at a multiple of 128 rows, and rows in all.

    int64 [S] on the CPU for S = offsets[-1] rows in groups offsets[e]:offsets[e+1].
    """
    ends = torch.tensor(offsets, dtype=torch.int64)
    counts = ends.diff()
    padded = (counts + ROWS - 1) // ROWS * ROWS
    starts = padded.cumsum(0) - padded
    shift = torch.repeat_interleave(starts - ends[:-1], counts)
    return torch.arange(int(ends[-1])) + shift, int(padded.sum())
