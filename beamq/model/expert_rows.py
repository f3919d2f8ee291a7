"""Where each expert's rows lie, of choices sorted by expert: told to a GPU without asking it.

In: choices in ascending order of expert. Out: E + 1 offsets; expert e has rows
`offsets[e]:offsets[e + 1]`.

The one idea: the host does not have to know. On a GPU the ends stay a tensor, from which kernels
find their way, and the work behind the router is queued while the work in front of it still runs.
`ExpertRows` is a sequence like the tuple of a CPU: its first and last entry are known without
asking, any other is fetched when somebody looks, all at once, which waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch


class ExpertRows(Sequence[int]):
    """Offsets on a device: `ends_E` int32 [E], the last of which is `total`."""

    def __init__(self, ends_E: torch.Tensor, total: int) -> None:
        self.ends_E = ends_E
        self.tables: dict[int, torch.Tensor] = {}
        """What kernels made of the ends, by rows of a tile: both projections ask for it."""
        self._total = total
        self._host: tuple[int, ...] | None = None

    @property
    def host(self) -> tuple[int, ...]:
        """All offsets; waits for the device the first time."""
        if self._host is None:
            self._host = (0, *self.ends_E.tolist())
        return self._host

    def __len__(self) -> int:
        return self.ends_E.numel() + 1

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, int):
            if index in (0, -len(self)):
                return 0
            if index in (-1, len(self) - 1):
                return self._total
        return self.host[index]


def expert_rows(sorted_S: torch.Tensor, num_experts: int) -> Sequence[int]:
    """Offsets of the experts in `sorted_S`, int64 [S] in ascending order; a tuple on a CPU."""
    experts = torch.arange(num_experts, device=sorted_S.device)
    ends_E = torch.searchsorted(sorted_S, experts, right=True, out_int32=True)
    if sorted_S.is_cuda:
        return ExpertRows(ends_E, sorted_S.numel())
    return (0, *ends_E.tolist())


def part_of(offsets: Sequence[int], first: int, last: int) -> Sequence[int]:
    """Offsets of experts first .. last - 1, from 0; for all of them the sequence itself."""
    if first == 0 and last == len(offsets) - 1:
        return offsets
    low = offsets[first]
    return [end - low for end in offsets[first : last + 1]]
