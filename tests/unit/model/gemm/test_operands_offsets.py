"""Offsets of experts: the same numbers on a device as on the host, looked at only when asked."""

from __future__ import annotations

import pytest
import torch

from beamq.model.gemm.operands import ExpertRows, expert_rows, part_of

CHOICES = torch.tensor([1, 1, 1, 4, 4, 6])
OFFSETS = (0, 0, 3, 3, 3, 5, 5, 6, 6)


class Untold(torch.Tensor):
    """Ends that must not be looked at."""

    def tolist(self) -> list[int]:
        raise AssertionError("waited for the device")


def test_offsets_count_each_expert() -> None:
    assert expert_rows(CHOICES, 8) == OFFSETS
    assert expert_rows(CHOICES[:0], 3) == (0, 0, 0, 0)


def test_a_device_is_asked_only_for_what_lies_between() -> None:
    ends = torch.tensor(OFFSETS[1:], dtype=torch.int32)
    silent = ExpertRows(ends.as_subclass(Untold), 6)
    assert (silent[0], silent[-1], silent[8], silent[-9], len(silent)) == (0, 6, 6, 0, 9)
    assert part_of(silent, 0, 8) is silent
    with pytest.raises(AssertionError, match="waited"):
        silent[1]
    rows = ExpertRows(ends, 6)
    assert list(rows) == list(OFFSETS)
    assert rows[2:5] == OFFSETS[2:5]
    with pytest.raises(IndexError):
        rows[9]


def test_parts_start_at_zero() -> None:
    rows = ExpertRows(torch.tensor(OFFSETS[1:], dtype=torch.int32), 6)
    for first, last in ((0, 3), (2, 7), (4, 8)):
        wanted = [end - OFFSETS[first] for end in OFFSETS[first : last + 1]]
        assert part_of(rows, first, last) == part_of(OFFSETS, first, last) == wanted
