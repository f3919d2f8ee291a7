"""Shards on disk ahead of jobs, and on demand: bounded, shared by threads, gone at the end."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from beamq.errors import DiskError, HubError, Interrupted
from beamq.io.shard_cache import LruCache, Prefetcher, Remote, claim_folder

SIZES = {name: 1000 for name in "abcdef"}


class Source:
    """Writes files of the right size, counts, and fails where told to."""

    def __init__(self, fails: str = "") -> None:
        self.fetched: Counter[str] = Counter()
        self.forgotten: list[str] = []
        self.most = 0
        self._fails = fails
        self._lock = threading.Lock()

    def fetch(self, file: str, folder: Path, stopped: Callable[[], bool]) -> Path:
        if file == self._fails:
            raise HubError("gone")
        (folder / file).write_bytes(file.encode() * SIZES[file])
        with self._lock:
            self.fetched[file] += 1
            here = [path for path in folder.iterdir() if path.name in SIZES]
            self.most = max(self.most, sum(SIZES[path.name] for path in here))
        return folder / file


def never() -> bool:
    return False


def prefetcher(source: Source, folder: Path, jobs: list[str], budget: int) -> Prefetcher:
    return Prefetcher(
        jobs,
        Remote(sizes=SIZES, fetch=source.fetch, forget=source.forgotten.append),
        folder=folder,
        budget=budget,
    )


def test_jobs_find_their_shards_and_nothing_stays(tmp_path: Path) -> None:
    source = Source()
    jobs = ["a", "ab", "b", "bc", "cd", "d", "ef", ""]
    with prefetcher(source, tmp_path, jobs, 3000) as feed:

        def work(job: int) -> None:
            feed.wait(job, never)
            assert all((tmp_path / file).stat().st_size == 1000 for file in jobs[job])
            feed.finish(job)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(len(jobs))))
    assert source.fetched == dict.fromkeys("abcdef", 1)
    assert source.most <= 3000
    assert not list(tmp_path.iterdir())
    assert sorted(source.forgotten) == list("abcdef")


def test_whole_shards_of_an_earlier_run_are_used_and_rubbish_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 1000)
    (tmp_path / "b").write_bytes(b"b" * 7)
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.incomplete").write_bytes(b"x")
    source = Source()
    with prefetcher(source, tmp_path, ["a", "b"], 2000) as feed:
        for job in (0, 1):
            feed.wait(job, never)
            feed.finish(job)
    assert source.fetched == {"b": 1}
    assert not list(tmp_path.iterdir())


def test_a_failed_fetch_reaches_the_job_that_waits(tmp_path: Path) -> None:
    def wait_for_both() -> None:
        with prefetcher(Source(fails="b"), tmp_path, ["a", "b"], 2000) as feed:
            feed.wait(0, never)  # may hear of it already: fetching is ahead of the jobs
            feed.wait(1, never)

    with pytest.raises(HubError, match="gone"):
        wait_for_both()


def test_waiting_ends_when_the_run_is_stopped(tmp_path: Path) -> None:
    with prefetcher(Source(), tmp_path, ["ab", "cd"], 2000) as feed:
        with pytest.raises(Interrupted):
            feed.wait(1, lambda: True)
        feed.stop()
        with pytest.raises(Interrupted):
            feed.wait(1, never)


def demand(source: Source, place: Path, budget: int = 2000, key: str = "k") -> LruCache:
    remote = Remote(sizes=SIZES, fetch=source.fetch, forget=source.forgotten.append)
    return LruCache(place, key, remote, budget=budget)


def test_on_demand_the_longest_unused_goes_first(tmp_path: Path) -> None:
    source = Source()
    cache = demand(source, tmp_path)
    for file in "aabacab":
        with cache.hold(file):
            assert (cache.folder / file).exists()
    assert source.fetched == {"a": 1, "b": 2, "c": 1}
    assert source.most == 2000
    cache.close()
    assert not list(tmp_path.iterdir())


def test_readers_of_many_threads_share_a_fetch(tmp_path: Path) -> None:
    source = Source()
    cache = demand(source, tmp_path, 3000)

    def read(file: str) -> None:
        with cache.hold(file):
            assert (cache.folder / file).read_bytes() == file.encode() * 1000

    with ThreadPoolExecutor(8) as pool:
        for file in "abcdef":  # one at a time: a reader left behind may rightly fetch again
            list(pool.map(read, [file] * 20))
        assert source.fetched == dict.fromkeys("abcdef", 1)
        list(pool.map(read, "abcdef" * 20))
    assert source.most <= 3000
    cache.close()


def test_a_fetch_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    cache = demand(Source(fails="a"), tmp_path)
    for _ in range(2):
        with pytest.raises(HubError), cache.hold("a"):
            pass
    with cache.hold("b"):
        pass
    with (
        pytest.raises(DiskError, match="too small for a; allow"),
        demand(Source(), tmp_path, 999).hold("a"),
    ):
        pass


def test_folders_of_the_dead_are_taken_over_or_deleted(tmp_path: Path) -> None:
    first = demand(Source(), tmp_path)
    second = demand(Source(), tmp_path)
    assert (first.folder.name, second.folder.name) == ("k.0", "k.1")
    with first.hold("a"):
        pass
    os.close(first._lock._descriptor)  # as if its process had been killed
    other, lock = claim_folder(tmp_path, "j")
    assert not first.folder.exists()
    assert second.folder.exists()
    os.close(lock._descriptor)
    (other / "a").write_bytes(b"a" * 1000)
    source = Source()
    again = demand(source, tmp_path, key="j")
    assert again.folder == other
    with again.hold("a"):
        pass
    assert not source.fetched
