"""How work is divided between ranks, and how many cores each has."""

from __future__ import annotations

import os
import random

import pytest

from beamq.errors import UsageError
from beamq.ranks import Ranks, cores_here, stretch


def stretches(sizes: list[int], world: int) -> list[range]:
    return [stretch(sizes, Ranks(rank=rank, world=world)) for rank in range(world)]


def test_stretches_are_neighbours_of_about_equal_bytes() -> None:
    chance = random.Random(5)
    for _ in range(200):
        world = chance.randrange(1, 9)
        sizes = [chance.choice([0, 4, 900, chance.randrange(10_000)]) for _ in range(60)]
        sizes = sizes[: chance.randrange(60)]
        found = stretches(sizes, world)
        assert [index for part in found for index in part] == list(range(len(sizes)))
        for part in found:
            nbytes = sum(sizes[index] for index in part)
            assert nbytes <= sum(sizes) / world + max(sizes, default=0)


def test_stretches_by_hand() -> None:
    assert stretches([4, 4, 4, 4], 2) == [range(0, 2), range(2, 4)]
    assert stretches([10, 1, 1, 1, 1], 2) == [range(0, 1), range(1, 5)]
    assert stretches([1, 1, 10], 3) == [range(0, 2), range(2, 3), range(3, 3)]
    assert stretches([0, 0], 2) == [range(0, 2), range(2, 2)]
    assert stretches([3, 0], 2) == [range(0), range(0, 2)]
    assert stretches([], 3) == [range(0)] * 3


def test_processes_on_one_machine_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    for processes, cores in ((None, 12), ("1", 12), ("5", 2), ("12", 1), ("64", 1)):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if processes is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        assert cores_here() == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE"):
        cores_here()
