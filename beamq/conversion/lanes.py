"""Which job a worker takes next: a few shards at a time, each from front to back.

In: jobs in plan order. Out: for each request, a job nobody has taken and one to read ahead.

Writing takes the lock of the file written to, so workers that fill one shard queue up behind each
other. Lanes give them several: shards are dealt out in turn, a worker stays in its lane, and helps
the longest one when its own is empty. With one lane the order is the plan's, which a remote source
needs (its shards are fetched in that order) and two workers are served best by (they are seldom in
each other's way, and read in sequence).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from beamq.plan import Job

WORKERS_OF_A_LANE = 2
MAX_LANES = 8  # shards that a crash may leave unfinished
READ_AHEAD_JOBS = 2  # for each worker


def lane_count(workers: int, *, remote: bool) -> int:
    """Lanes for so many workers."""
    return 1 if remote else max(1, min(MAX_LANES, workers // WORKERS_OF_A_LANE))


class Lanes:
    """Hands out the indices of `jobs`. Shared by threads."""

    def __init__(self, jobs: Sequence[Job], *, workers: int, lanes: int) -> None:
        shards = dict.fromkeys(job.shard for job in jobs)
        lane_of = {shard: place % lanes for place, shard in enumerate(shards)}
        self._lanes: list[list[int]] = [[] for _ in range(lanes)]
        for index, job in enumerate(jobs):
            self._lanes[lane_of[job.shard]].append(index)
        self._taken = [0] * lanes
        self._ahead = -(-workers // lanes) * READ_AHEAD_JOBS
        self._lock = threading.Lock()

    def take(self, worker: int) -> tuple[int, int | None] | None:
        """(a job, one to read ahead or None) for a worker, numbered from 0; None at the end."""
        with self._lock:
            lane = worker % len(self._lanes)
            if not self._left(lane):
                lane = max(range(len(self._lanes)), key=self._left)
            if not self._left(lane):
                return None
            place, jobs = self._taken[lane], self._lanes[lane]
            self._taken[lane] += 1
            ahead = place + self._ahead
            return jobs[place], jobs[ahead] if ahead < len(jobs) else None

    def _left(self, lane: int) -> int:
        return len(self._lanes[lane]) - self._taken[lane]
