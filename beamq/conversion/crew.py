"""Worker threads over the jobs of a plan.

Jobs are taken in plan order, a few shards at a time (`Lanes`), so reading is sequential and only a
few shards are open at once. While workers convert, the kernel reads the next jobs ahead (or their
shards are fetched from the Hub) and `OpenShards` makes whole shards durable: network, disk, cores
and memory overlap without any buffer of ours in between.

The first failure stops everything: workers leave between two pieces, finished shards stay
recorded, unfinished ones keep their temporary names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from beamq.checkpoint import Checkpoint
from beamq.conversion.engines import Engines
from beamq.conversion.lanes import Lanes, lane_count
from beamq.conversion.open_shards import OpenShards, join
from beamq.errors import Interrupted
from beamq.plan import Job
from beamq.source_files import NoSupply, Supply


class Crew:
    """Converts jobs into shards. Use once: `run`, from the main thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        jobs: Sequence[Job],
        shards: OpenShards,
        engines: Engines,
        *,
        workers: int,
        remote: bool,
        scales: str,
        input_scale: Callable[[str], float],
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        """`remote` says that the source's shards have to be fetched, in the order of jobs."""
        self._checkpoint = checkpoint
        self._jobs = jobs
        self._shards = shards
        self._engines = engines
        self._workers = min(engines.workers(workers), max(len(jobs), 1))
        self._lanes = Lanes(
            jobs, workers=self._workers, lanes=lane_count(self._workers, remote=remote)
        )
        self._scales = scales
        self._input_scale = input_scale
        self._advance = advance
        self._stop = stop
        self._supply: Supply = NoSupply()

    def run(self) -> None:
        """Convert all jobs. Raises `Interrupted` if `stop` was set; failures go to `shards`."""
        workers = [
            threading.Thread(
                target=self._shards.guard, args=(lambda number=number: self._work(number),),
                daemon=True,
            )
            for number in range(self._workers)
        ]  # fmt: skip
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

    def _work(self, number: int) -> None:
        engine = self._engines.engine(
            scales=self._scales,
            input_scale=self._input_scale,
            stopped=self._stop.is_set,
            advance=self._advance,
        )
        while not self._stop.is_set():
            taken = self._lanes.take(number)
            if taken is None:
                return
            index, ahead = taken
            job = self._jobs[index]
            writer = self._shards.writer(job.shard)
            if ahead is not None:
                self._read_ahead(self._jobs[ahead])
            self._supply.wait(index, self._stop.is_set)
            self._shards.add(job, engine.run(job, writer))
            self._supply.finish(index)

    def _read_ahead(self, job: Job) -> None:
        for member in job.members:
            self._checkpoint.advise(member.source.spec, member.source.start, member.source.nbytes)
