"""Which tile of rows belongs to which expert: the table that grouped_kernel walks through.

In: where experts' rows end, and the rows of a tile. Out: int32 [1 + n, 3] on the device: the number
of tiles in the first row, then for each tile its expert, its first row, the end of its expert.

The one idea: a tile never spans two experts. The table of offsets that only the device knows is
made there, by one program for each expert, with room for as many tiles as there can be; the plain
twin makes it on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from beamq.model.expert_rows import ExpertRows

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
    """The tiles of one expert, behind those of all before it."""
    expert = tl.program_id(0)
    lane = tl.arange(0, LANES)
    end = tl.load(ends + lane, mask=lane < EXPERTS, other=0)
    start = tl.load(ends + lane - 1, mask=(lane > 0) & (lane < EXPERTS), other=0)
    count = tl.where(lane < EXPERTS, (end - start + ROWS - 1) // ROWS, 0)
    before = tl.sum(tl.where(lane < expert, count, 0), axis=0)
    own = tl.sum(tl.where(lane == expert, count, 0), axis=0)
    first_row = tl.sum(tl.where(lane == expert, start, 0), axis=0)
    end_row = tl.sum(tl.where(lane == expert, end, 0), axis=0)
    for at in range(0, own, AT_ONCE):
        tile = at + tl.arange(0, AT_ONCE)
        place = table + 3 + (before + tile) * 3
        tl.store(place, expert, mask=tile < own)
        tl.store(place + 1, first_row + tile * ROWS, mask=tile < own)
        tl.store(place + 2, end_row, mask=tile < own)
    if expert == EXPERTS - 1:
        tl.store(table, before + own)


def tile_table(offsets: Sequence[int], rows: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """The table, and the most tiles it can have; remembered for the other projection."""
    if not isinstance(offsets, ExpertRows):
        table = _from_host(tuple(offsets), rows, device)
        return table, table.shape[0] - 1
    most = most_tiles(offsets, rows)
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


def most_tiles(offsets: Sequence[int], rows: int) -> int:
    """Tiles there can be at most: each expert that has rows may have one that is not full."""
    total = offsets[-1]
    return total // rows + min(len(offsets) - 1, total)


@lru_cache(maxsize=16)
def _from_host(offsets: tuple[int, ...], rows: int, device: torch.device) -> torch.Tensor:
    ends = np.asarray(offsets, dtype=np.int64)
    starts, ends = ends[:-1], ends[1:]
    counts = (ends - starts + rows - 1) // rows
    expert = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(expert)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack((expert, starts[expert] + within * rows, ends[expert]), axis=1)
    table = np.concatenate(([[len(tiles), 0, 0]], tiles))
    return torch.from_numpy(table.astype(np.int32)).to(device)
