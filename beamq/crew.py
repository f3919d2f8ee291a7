"""Worker threads over the jobs of a plan, and one finisher that makes shards durable.

Jobs are taken in plan order, so reading is sequential and only a few shards are open at once.
While workers convert, the kernel reads the next jobs ahead and the finisher flushes, records and
renames whole shards: disk, cores and memory overlap without any buffer of ours in between.

The first failure stops everything: workers leave between two pieces, finished shards stay
recorded, unfinished ones keep their temporary names.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from beamq.checkpoint import Checkpoint
from beamq.cpu_engine import BufferPool, CpuEngine, JobResult
from beamq.errors import Interrupted
from beamq.journal import Journal, ShardRecord
from beamq.plan import Job, Work
from beamq.shards import ShardWriter

READ_AHEAD_JOBS = 2  # for each worker


class Crew:
    """Converts a set of shards. Use once: `run`, from the main thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        work: Work,
        output: Path,
        journal: Journal,
        *,
        shards: Sequence[int],
        workers: int,
        memory_budget: int,
        input_scale: Callable[[str], float],
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = work
        self._output = output
        self._journal = journal
        self._workers = workers
        self._input_scale = input_scale
        self._advance = advance
        self._stop = stop
        self._pool = BufferPool(memory_budget)
        wanted = frozenset(shards)
        self._jobs: list[Job] = [job for job in work.jobs if job.shard in wanted]
        self._left = Counter(job.shard for job in self._jobs)
        self._next = 0
        self._lock = threading.Lock()
        self._open: dict[int, ShardWriter] = {}
        self._results: dict[int, list[JobResult]] = {}
        self._finished: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Convert all jobs. Raises the first failure, or `Interrupted` if `stop` was set."""
        finisher = threading.Thread(target=self._guard, args=(self._finish,), daemon=True)
        workers = [
            threading.Thread(target=self._guard, args=(self._work,), daemon=True)
            for _ in range(min(self._workers, max(len(self._jobs), 1)))
        ]
        for thread in (finisher, *workers):
            thread.start()
        for thread in workers:
            _join(thread)
        self._finished.put(None)
        _join(finisher)
        for writer in self._open.values():
            writer.abandon()
        if self._failure is not None and not isinstance(self._failure, Interrupted):
            raise self._failure
        if self._stop.is_set():
            raise Interrupted("interrupted")

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as failure:  # carried to the main thread, which raises it
            with self._lock:
                if self._failure is None:
                    self._failure = failure
            self._stop.set()

    def _work(self) -> None:
        engine = CpuEngine(
            self._checkpoint,
            self._pool,
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
                writer = self._writer(job.shard)
            self._read_ahead(index)
            result = engine.run(job, writer)
            with self._lock:
                self._results.setdefault(job.shard, []).append(result)
                self._left[job.shard] -= 1
                done = self._left[job.shard] == 0
            if done:
                self._finished.put(job.shard)

    def _writer(self, shard: int) -> ShardWriter:
        writer = self._open.get(shard)
        if writer is None:
            writer = self._open[shard] = ShardWriter(self._output, self._plan.shards[shard])
        return writer

    def _read_ahead(self, index: int) -> None:
        ahead = index + self._workers * READ_AHEAD_JOBS
        if ahead < len(self._jobs):
            for member in self._jobs[ahead].members:
                self._checkpoint.advise(
                    member.source.spec, member.source.start, member.source.nbytes
                )

    def _finish(self) -> None:
        while (index := self._finished.get()) is not None:
            with self._lock:
                writer = self._open.pop(index)
                results = self._results.pop(index)
            writer.sync()
            self._journal.append(_record(writer, results))
            writer.publish()


def _join(thread: threading.Thread) -> None:
    """Join in short waits, so that signal handlers run in between."""
    while thread.is_alive():
        thread.join(0.1)


def _record(writer: ShardWriter, results: Sequence[JobResult]) -> ShardRecord:
    digests = {name: digest for result in results for name, digest in result.tensors.items()}
    counts = {
        "underflow_blocks": sum(result.underflow_blocks for result in results),
        "zero_blocks": sum(result.zero_blocks for result in results),
        "zero_rows": sum(result.zero_rows for result in results),
        "zero_groups": sorted(group for result in results for group in result.zero_groups),
    }
    return ShardRecord(
        name=writer.shard.name,
        nbytes=writer.shard.nbytes,
        tensors={tensor.name: digests[tensor.name] for tensor in writer.shard.tensors},
        counts=counts,
    )
