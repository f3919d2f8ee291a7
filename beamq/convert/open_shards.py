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
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from beamq.errors import Interrupted
from beamq.io.journal import Journal, ShardRecord
from beamq.io.manifest import Checksum, new_checksum
from beamq.io.shard_writer import OutputTensor, ShardWriter
from beamq.plan.plan import Job, Member, Work

# Where a job's bytes go, and what is told of it: sinks into a shard, checksums, counts.


@dataclass(slots=True, kw_only=True)
class JobResult:
    """Checksums by tensor name, and counts worth telling."""

    tensors: dict[str, str] = field(default_factory=dict)
    underflow_blocks: int = 0
    zero_blocks: int = 0
    zero_groups: list[str] = field(default_factory=list)
    zero_rows: int = 0


class TensorSink:
    """Writes one output tensor from front to back, with its checksum."""

    def __init__(self, writer: ShardWriter, tensor: OutputTensor) -> None:
        self._writer = writer
        self._tensor = tensor
        self._position = 0
        self._checksum: Checksum = new_checksum()

    def append(self, data: memoryview) -> None:
        self._writer.write(self._tensor.offset + self._position, data)
        self._checksum.update(data)
        self._position += data.nbytes

    def finish(self, result: JobResult) -> None:
        if self._position != self._tensor.nbytes:
            raise RuntimeError(f"{self._tensor.name}: wrote {self._position} bytes")
        result.tensors[self._tensor.name] = self._checksum.hexdigest()


def write_input_scale(
    member: Member, input_scale: Callable[[str], float], writer: ShardWriter, result: JobResult
) -> None:
    """The last tensor of an NVFP4 linear."""
    content = f32_bytes(input_scale(member.role.module))
    write_whole(writer, member.outputs[-1], content, result)


def write_whole(
    writer: ShardWriter, tensor: OutputTensor, content: memoryview, result: JobResult
) -> None:
    sink = TensorSink(writer, tensor)
    sink.append(content)
    sink.finish(result)


def write_together(
    writer: ShardWriter, contents: Iterable[tuple[OutputTensor, memoryview]], result: JobResult
) -> None:
    """Write small tensors, neighbours in the file at once."""
    runs: list[tuple[int, bytearray]] = []
    for tensor, content in sorted(contents, key=lambda pair: pair[0].offset):
        if content.nbytes != tensor.nbytes:
            raise RuntimeError(f"{tensor.name}: {content.nbytes} bytes")
        checksum = new_checksum()
        checksum.update(content)
        result.tensors[tensor.name] = checksum.hexdigest()
        if runs and runs[-1][0] + len(runs[-1][1]) == tensor.offset:
            runs[-1][1].extend(content)
        else:
            runs.append((tensor.offset, bytearray(content)))
    for offset, run in runs:
        writer.write(offset, memoryview(run))


def f32_bytes(value: float) -> memoryview:
    return memoryview(struct.pack("<f", value))


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
