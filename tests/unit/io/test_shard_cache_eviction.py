"""The order of fetches: never over the budget, never stuck, nothing dropped under a job."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beamq.errors import DiskError
from beamq.io.shard_cache import Drop, EvictionPolicy, Fetch, largest_job, traffic_nbytes

FILES = "abcdefgh"


@st.composite
def sources(draw: st.DrawFn) -> tuple[list[frozenset[str]], dict[str, int], int]:
    sizes = {name: draw(st.integers(1, 9)) for name in FILES}
    sets = st.frozensets(st.sampled_from(FILES), max_size=3)
    jobs = draw(st.lists(sets, min_size=1, max_size=25))
    least = max(largest_job(jobs, sizes)[0], 1)
    return jobs, sizes, least + draw(st.integers(0, 20))


@settings(max_examples=100, deadline=None)
@given(sources(), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_schedule_ends_within_the_budget(source, workers, fetchers, chance) -> None:  # type: ignore[no-untyped-def]
    jobs, sizes, budget = source
    order = EvictionPolicy(jobs, sizes, budget)
    flying: list[str] = []
    here: set[str] = set()
    running: list[int] = []
    taken = finished = 0
    for _ in range(10_000):
        if finished == len(jobs):
            break
        moves = []
        if len(flying) < fetchers and not order.complete:
            moves.append("step")
        if flying:
            moves.append("arrive")
        if len(running) < workers and taken < len(jobs):
            moves.append("take")
        if any(order.ready(job) for job in running):
            moves.append("finish")
        assert moves, "stuck"
        move = chance.choice(moves)
        if move == "step":
            step = order.step()
            if isinstance(step, Fetch):
                assert step.file not in here
                flying.append(step.file)
            elif isinstance(step, Drop):
                here.remove(step.file)
            else:
                idle = not flying and not any(order.ready(job) for job in running)
                waits = len(running) == workers or taken == len(jobs)
                assert order.complete or not (idle and waits), "stuck"
        elif move == "arrive":
            file = flying.pop(chance.randrange(len(flying)))
            order.arrived(file)
            here.add(file)
        elif move == "take":
            running.append(taken)
            taken += 1
        else:
            job = chance.choice([job for job in running if order.ready(job)])
            running.remove(job)
            for file in order.finished(job):
                here.remove(file)
            finished += 1
        assert sum(sizes[file] for file in here.union(flying)) == order.held_nbytes <= budget
        for job in running:
            assert not order.ready(job) or jobs[job] <= here
    assert finished == len(jobs)
    assert not here
    assert not flying


def test_each_shard_is_fetched_once_when_jobs_follow_the_shards() -> None:
    sizes = dict.fromkeys(FILES, 5)
    jobs = [{"a"}, {"a", "b"}, {"b"}, {"c"}, {"c", "d"}, {"e"}]
    assert traffic_nbytes(jobs, sizes, 10) == 25


def test_scattered_partners_cost_traffic_not_a_standstill() -> None:
    sizes = dict.fromkeys(FILES, 5)
    jobs = [{"a", name} for name in "bcdefg"] * 2
    assert traffic_nbytes(jobs, sizes, 10) == 5 * 13
    assert traffic_nbytes(jobs, sizes, 35) == 5 * 7


def test_a_budget_below_one_job_is_refused_with_the_number_needed() -> None:
    sizes = {"a": 3_000_000_000, "b": 4_000_000_000}
    with pytest.raises(DiskError, match=r"6\.00 GB is too small for the 2 shards .* 7\.00 GB$"):
        EvictionPolicy([{"a"}, {"a", "b"}], sizes, 6_000_000_000)


def test_shards_of_an_earlier_run_are_kept_as_far_as_they_fit() -> None:
    sizes = {"a": 5, "b": 5, "c": 5, "z": 1}
    order = EvictionPolicy([{"a"}, {"b"}, {"c"}], sizes, 10, ["c", "b", "z"])
    assert order.unwanted == ["z"]
    assert order.step() == Drop("c")  # the farthest makes way for the first
    assert order.step() == Fetch("a")


def test_a_shard_that_nobody_needs_any_more_when_it_arrives_is_not_kept() -> None:
    order = EvictionPolicy([{"a"}, {"b"}], {"a": 5, "b": 5}, 10)
    assert order.step() == Fetch("a")
    assert order.finished(0) == ["a"]
    assert not order.arrived("a")
    assert order.held_nbytes == 0
