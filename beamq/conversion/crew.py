"""Worker threads over the jobs of a plan.

Jobs are taken in plan order, so reading is sequential and only a few shards are open at once.
While workers convert, the kernel reads the next jobs ahead (or their shards are fetched from the
Hub) and `OpenShards` makes whole shards durable: network, disk, cores and memory overlap without
any buffer of ours in between.

The first failure stops everything: workers leave between two pieces, finished shards stay
recorded, unfinished ones keep their temporary names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from beamq.checkpoint import Checkpoint
from beamq.conversion.buffer_pool import BufferPool
from beamq.conversion.cpu_engine import CpuEngine
from beamq.conversion.open_shards import OpenShards, join
from beamq.errors import Interrupted
from beamq.plan import Job
from beamq.source_files import NoSupply, Supply

READ_AHEAD_JOBS = 2  # for each worker


class Crew:
    """Converts jobs into shards. Use once: `run`, from the main thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        jobs: Sequence[Job],
        shards: OpenShards,
        *,
        workers: int,
        memory_budget: int,
        scales: str,
        input_scale: Callable[[str], float],
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self._checkpoint = checkpoint
        self._jobs = jobs
        self._shards = shards
        self._workers = workers
        self._scales = scales
        self._input_scale = input_scale
        self._advance = advance
        self._stop = stop
        self._pool = BufferPool(memory_budget)
        self._supply: Supply = NoSupply()
        self._next = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Convert all jobs. Raises `Interrupted` if `stop` was set; failures go to `shards`."""
        workers = [
            threading.Thread(target=self._shards.guard, args=(self._work,), daemon=True)
            for _ in range(min(self._workers, max(len(self._jobs), 1)))
        ]
        with self._checkpoint.supply([job.files for job in self._jobs]) as self._supply:
            for thread in workers:
                thread.start()
            try:
                for thread in workers:
                    join(thread)
            except BaseException:  # a second Ctrl-C; nobody may be left writing
                self._stop.set()
                for thread in workers:
                    join(thread)
                raise
        if self._stop.is_set():
            raise Interrupted("interrupted")

    def _work(self) -> None:
        engine = CpuEngine(
            self._checkpoint,
            self._pool,
            scales=self._scales,
            input_scale=self._input_scale,
            stopped=self._stop.is_set,
            advance=self._advance,
        )
        while not self._stop.is_set():
            with self._lock:
                index = self._next
                if index >= len(self._jobs):
                    return
                self._next += 1
            job = self._jobs[index]
            writer = self._shards.writer(job.shard)
            self._read_ahead(index)
            self._supply.wait(index, self._stop.is_set)
            self._shards.add(job, engine.run(job, writer))
            self._supply.finish(index)

    def _read_ahead(self, index: int) -> None:
        ahead = index + self._workers * READ_AHEAD_JOBS
        if ahead < len(self._jobs):
            for member in self._jobs[ahead].members:
                self._checkpoint.advise(
                    member.source.spec, member.source.start, member.source.nbytes
                )
