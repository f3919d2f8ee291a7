"""Output shards under way, shared by all who fill them, and the thread that makes them durable.

In: results of jobs, from any thread in any order. When a shard's last job is in, the finisher
thread flushes it, records it in the journal and gives it its name, while the others go on. Any
number of shards may be under way; only the few that were used last keep their files open.

The first failure, whoever's it is, sets `stop`; `run` in a thread through `guard` to have it
remembered. Leaving the `with` block waits for the finisher, closes what is unfinished (it keeps
its temporary name) and raises the first failure.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from beamq.conversion.journal import Journal, ShardRecord
from beamq.conversion.sinks import JobResult
from beamq.errors import Interrupted
from beamq.plan import Job, Work
from beamq.shards import ShardWriter

MAX_OPEN_SHARDS = 16


class OpenShards:
    """Writers of the shards of `jobs`. Use in a `with` block, from the main thread."""

    def __init__(
        self,
        work: Work,
        output: Path,
        journal: Journal,
        jobs: Sequence[Job],
        stop: threading.Event,
    ) -> None:
        self._work = work
        self._output = output
        self._journal = journal
        self._stop = stop
        self._left = Counter(job.shard for job in jobs)
        self._lock = threading.Lock()
        self._open: dict[int, ShardWriter] = {}
        self._awake: OrderedDict[int, None] = OrderedDict()
        self._results: dict[int, list[JobResult]] = {}
        self._finished: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._finisher = threading.Thread(target=self.guard, args=(self._finish,), daemon=True)

    def __enter__(self) -> OpenShards:
        self._finisher.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._finished.put(None)
        join(self._finisher)
        for writer in self._open.values():
            writer.rest()
        ours = self._failure
        # An interruption elsewhere is the echo of a failure here, whose message says more.
        if ours is not None and (error is None or isinstance(error, Interrupted)):
            raise ours from None

    def guard(self, body: Callable[[], None]) -> None:
        """Run `body`; remember its failure, and stop everything."""
        try:
            body()
        except BaseException as failure:  # carried to the main thread, which raises it
            with self._lock:
                if self._failure is None and not isinstance(failure, Interrupted):
                    self._failure = failure
            self._stop.set()

    def writer(self, shard: int) -> ShardWriter:
        """The writer of a shard, created when first asked for."""
        with self._lock:
            writer = self._open.get(shard)
            if writer is None:
                writer = ShardWriter(self._output, self._work.shards[shard])
                self._open[shard] = writer
            self._awake[shard] = None
            self._awake.move_to_end(shard)
            while len(self._awake) > MAX_OPEN_SHARDS:
                oldest, _ = self._awake.popitem(last=False)
                if oldest in self._open:
                    self._open[oldest].rest()
            return writer

    def add(self, job: Job, result: JobResult) -> None:
        """A job's bytes are written."""
        with self._lock:
            self._results.setdefault(job.shard, []).append(result)
            self._left[job.shard] -= 1
            done = self._left[job.shard] == 0
        if done:
            self._finished.put(job.shard)

    def _finish(self) -> None:
        while (index := self._finished.get()) is not None:
            with self._lock:
                writer = self._open.pop(index)
                results = self._results.pop(index)
            writer.sync()
            self._journal.append(_record(writer, results))
            writer.publish()


def join(thread: threading.Thread) -> None:
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
