"""Scheduler: every job once, each shard from front to back, nobody idle while there is work."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from beamq.convert.run import READ_AHEAD_JOBS, Scheduler, queue_count, spread


@dataclass
class Job:
    shard: int


def scheduler_of(sizes: list[int], *, workers: int, queues: int) -> Scheduler:
    jobs: Any = [Job(shard) for shard, size in enumerate(sizes) for _ in range(size)]
    return Scheduler(jobs, workers=workers, queues=queues)


def all_of(scheduler: Scheduler, worker: int) -> list[int]:
    taken = []
    while (found := scheduler.take(worker)) is not None:
        taken.append(found[0])
    return taken


def test_how_many() -> None:
    counts = [queue_count(workers, in_order=False) for workers in (1, 2, 3, 4, 8, 16, 32)]
    assert counts == [1, 1, 1, 2, 4, 8, 8]
    assert queue_count(32, in_order=True) == 1


def test_one_queue_is_the_order_of_the_plan() -> None:
    scheduler = scheduler_of([3, 2, 4], workers=2, queues=1)
    for expected in range(9):
        ahead = expected + 2 * READ_AHEAD_JOBS
        assert scheduler.take(expected % 2) == (expected, ahead if ahead < 9 else None)
    assert scheduler.take(0) is None


def test_workers_stay_in_their_shards_and_then_help_the_longest_queue() -> None:
    scheduler = scheduler_of([2, 6, 1, 1], workers=2, queues=2)  # shards 0, 2 and 1, 3
    assert [scheduler.take(0), scheduler.take(1)] == [(0, 8), (2, 4)]
    assert [scheduler.take(0)[0] for _ in range(4)] == [1, 8, 3, 4]
    assert scheduler.take(1) == (5, 7)


def test_what_is_read_ahead_lies_in_the_own_queue() -> None:
    scheduler = scheduler_of([4, 4, 4, 4], workers=4, queues=2)
    found = [scheduler.take(1) for _ in range(8)]
    assert found[:2] == [(4, 12), (5, 13)]
    assert [ahead for _, ahead in found[4:]] == [None] * 4


@pytest.mark.parametrize("queues", [1, 3, 8])
def test_every_job_is_taken_once_by_many_threads(queues: int) -> None:
    shared = scheduler_of([50, 1, 70, 30, 0, 49], workers=8, queues=queues)
    found: Counter[int] = Counter()
    lock = threading.Lock()

    def work(worker: int) -> None:
        taken = all_of(shared, worker)
        with lock:
            found.update(taken)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == Counter(range(200))


def test_more_queues_than_shards() -> None:
    assert sorted(all_of(scheduler_of([2, 1], workers=16, queues=8), 5)) == [0, 1, 2]


def test_jobs_of_a_layer_are_dealt_from_its_shards_in_turn() -> None:
    where = [(None, 0), *[(3, 0)] * 2, *[(3, 1)] * 4, (4, 1), (4, 2), (None, 2)]  # layer, shard
    jobs: Any = [
        SimpleNamespace(
            members=(SimpleNamespace(role=SimpleNamespace(layer=layer)),), shard=shard, place=place
        )
        for place, (layer, shard) in enumerate(where)
    ]
    dealt: Any = spread(jobs)
    assert [each.shard for each in dealt] == [0, 1, 0, 1, 1, 0, 1, 1, 2, 2]
    layers = [each.members[0].role.layer for each in dealt]
    assert layers == [None, *[3] * 6, 4, 4, None]
    for shard in range(3):  # each shard from front to back
        places = [each.place for each in dealt if each.shard == shard]
        assert places == sorted(places)
