"""How work is divided between ranks, how many cores each has, and how they fail together."""

from __future__ import annotations

import os
import pickle
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from beamq.errors import (
    OURS,
    BeamqError,
    DiskError,
    EnvironmentFault,
    Interrupted,
    TensorError,
    UsageError,
)
from beamq.ranks import LOST, Ranks, cores_here, current_ranks, rank_here, stretch


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


SET = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def environment(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    """What torchrun would set, with some of it changed, or None: not set."""
    for name, value in (SET | changed).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": None}, "WORLD_SIZE is 2 and RANK is not set"),
        ({"RANK": ""}, "WORLD_SIZE is 2 and RANK is not set"),
        ({"RANK": "one"}, "must be whole numbers"),
        ({"WORLD_SIZE": "two"}, "must be whole numbers"),
        ({"RANK": "2"}, "RANK 2 does not fit WORLD_SIZE 2"),
        ({"RANK": "-1"}, "RANK -1 does not fit WORLD_SIZE 2"),
        ({"WORLD_SIZE": ""}, "RANK 1 does not fit WORLD_SIZE 1"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be from 1 to 65535, not 'http'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be from 1 to 65535, not '0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be from 1 to 65535, not '65536'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused_at_once(
    changed: dict[str, str | None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, **changed)
    with pytest.raises(UsageError, match=says):
        current_ranks()


def test_ranks_as_torchrun_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch)
    assert (current_ranks(), rank_here()) == (Ranks(rank=1, world=2), 1)
    environment(monkeypatch, MASTER_PORT="65535", RANK="0")
    assert current_ranks() == Ranks(world=2)
    nothing: dict[str, str | None] = dict.fromkeys(SET)
    for alone in (nothing, {"WORLD_SIZE": "", "RANK": "", "MASTER_PORT": "?"}):
        environment(monkeypatch, **alone)
        assert (current_ranks(), rank_here()) == (Ranks(), 0)
    for odd in ("7", "x"):  # nobody else would tell of it
        environment(monkeypatch, RANK=odd)
        assert rank_here() == 0


class Meeting(Ranks):
    """A rank that meets others, who bring `others`, in order of rank."""

    def __init__(self, rank: int, others: list[Any]) -> None:
        super().__init__(rank=rank, world=len(others) + 1)
        self._others = others
        self.brought: list[Any] = []

    def gather(self, item: Any) -> list[Any]:
        self.brought.append(item)
        found: list[Any] = pickle.loads(pickle.dumps(self._others))
        found.insert(self.rank, item)
        return found


def fail_with(ranks: Ranks, error: BaseException | None) -> None:
    with ranks.agreeing():
        if error is not None:
            raise error


def test_ranks_that_agree_raise_the_first_ones_error() -> None:
    bad, full = TensorError("lm_head.weight: shape"), DiskError("no space")
    fail_with(Meeting(1, [None, None]), None)
    for rank, others, own in ((0, [bad], None), (1, [bad], full), (2, [bad, full], None)):
        with pytest.raises(TensorError, match=r"^lm_head\.weight: shape$"):
            fail_with(Meeting(rank, list(others)), own)
    with pytest.raises(TensorError) as raised:
        fail_with(Meeting(0, [full]), bad)
    assert raised.value is bad


def test_a_defect_of_one_rank_is_a_fault_to_the_others_and_itself_there() -> None:
    ranks = Meeting(1, [DiskError("no space")])
    with pytest.raises(ZeroDivisionError):
        fail_with(ranks, ZeroDivisionError("by zero"))
    (told,) = ranks.brought
    assert type(told) is EnvironmentFault
    assert str(told) == "another rank failed (rank 1: ZeroDivisionError: by zero)"


def meet_with(ranks: Ranks, error: BaseException | None) -> BaseException:
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        ranks.meet(error)
    return raised.value


def told(error: BaseException) -> bool:
    return isinstance(error, OURS) and error.reported_by_rank_0


def test_words_about_another_rank() -> None:
    """Those of beamq's own errors as they are; a defect with its class."""
    for other, says in (
        ("disk full: free space", "another rank failed (rank 1: disk full: free space)"),
        ("KeyError: 'x'", "another rank failed (rank 1: KeyError: 'x')"),
    ):
        assert str(meet_with(Meeting(0, [other]), None)) == says
    for error, brought in (
        (DiskError("disk full"), "disk full"),
        (KeyError("x"), "KeyError: 'x'"),
        (KeyboardInterrupt(), "interrupted"),
    ):
        ranks = Meeting(1, [None])
        assert meet_with(ranks, error) is error
        assert ranks.brought == [brought]


def test_what_the_first_rank_tells_as_well_is_marked() -> None:
    full, stopped = DiskError("disk full"), Interrupted("interrupted; 1 shard is finished")
    assert told(meet_with(Meeting(1, ["disk full"]), None))
    assert told(meet_with(Meeting(2, [None, "disk full"]), None))
    assert not told(meet_with(Meeting(1, [None]), full))
    assert not told(meet_with(Meeting(1, ["disk full as well"]), full))
    assert not told(meet_with(Meeting(1, ["disk full"]), stopped))
    assert told(meet_with(Meeting(1, ["interrupted; 2 shards are finished"]), stopped))
    assert told(meet_with(Meeting(1, ["disk full"]), full))
    for rank, others, own in ((1, [None], full), (1, [TensorError("bad")], None)):
        with pytest.raises(BeamqError) as raised:
            fail_with(Meeting(rank, list(others)), own)
        assert told(raised.value)


class Lost(Ranks):
    """A rank whose first rank is gone."""

    def gather(self, item: Any) -> list[Any]:
        raise EnvironmentFault(LOST) from RuntimeError("[pair.cc:5]")


def test_nothing_is_left_to_a_first_rank_that_is_gone() -> None:
    lost = meet_with(Lost(rank=1, world=2), None)
    assert (str(lost), str(lost.__cause__)) == (LOST, "[pair.cc:5]")
    full = DiskError("disk full")
    assert meet_with(Lost(rank=1, world=2), full) is full
    with pytest.raises(DiskError):
        fail_with(Lost(rank=1, world=2), full)
    assert not told(full)
    assert not told(lost)


def test_one_process_agrees_with_itself_and_a_broken_run_asks_nobody() -> None:
    broken = Meeting(0, [DiskError("no space")])
    broken.broken = True
    for ranks in (Ranks(), broken):
        fail_with(ranks, None)
        with pytest.raises(ZeroDivisionError):
            fail_with(ranks, ZeroDivisionError())
    assert broken.brought == []


class Group:
    """A process group whose part on GPUs is aborted, or is not there."""

    def __init__(self, *, gpu: bool) -> None:
        self.gpu = gpu
        self.calls: list[str] = []

    def _get_backend(self, device: torch.device) -> Group:
        if not self.gpu:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def abort(self) -> None:
        self.calls.append("abort")

    def destroy(self) -> None:
        self.calls.append("destroy")


@pytest.mark.parametrize("gpu", [True, False])
def test_a_failure_leaves_the_group_without_waiting_for_gpus(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(gpu=gpu)
    monkeypatch.setattr(type(dist.group), "WORLD", group)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", group.destroy)
    ranks = Ranks(rank=1, world=2)
    with pytest.raises(ZeroDivisionError), ranks.talking():
        raise ZeroDivisionError
    assert group.calls == ["abort", "destroy"][not gpu :]
    assert ranks.broken
    gloo = RuntimeError("[/src/gloo/tcp/pair.cc:5] Connection closed by peer [::1]:1. This is typ")
    with pytest.raises(EnvironmentFault) as lost, ranks.talking():
        raise gloo
    assert (str(lost.value), lost.value.__cause__) == (LOST, gloo)
    for own in (RuntimeError("CUDA out of memory"), RuntimeError("shapes differ")):
        with pytest.raises(RuntimeError, match=str(own)), ranks.talking():
            raise own
