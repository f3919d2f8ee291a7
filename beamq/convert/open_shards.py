"""Output shards in progress: where converted bytes go, and the thread that makes shards durable.

In: the outputs of jobs, from any thread in any order (`JobWriter`). Out: finished shards. When the
last job of a shard is added to `OpenShards`, its finisher thread flushes the shard, records it in
the journal and renames it, while the other threads continue. Any number of shards may be in
progress; only the most recently used ones keep their files open.

The first failure in any thread sets `stop`; a thread that runs through `guard` has its failure
remembered. Leaving the `with` block waits for the finisher, closes the unfinished shards (they
keep their temporary names) and raises the first failure.
"""

from __future__ import annotations

import json
import math
import queue
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from beamq.errors import Interrupted, TensorError
from beamq.io.journal import Journal, ShardRecord
from beamq.io.manifest import Checksum, new_checksum
from beamq.io.shard_writer import OutputTensor, ShardWriter
from beamq.plan.layout import NVFP4_BLOCK
from beamq.plan.plan import Job, Nvfp4Outputs, Work


@dataclass(slots=True, kw_only=True)
class JobResult:
    """The checksums of a job's output tensors by name, and what its kernels counted.

    `source` is the checksum of its source bytes (see `SourceSum`), "" where none was made.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    source: str = ""
    underflow_blocks: int = 0
    zero_blocks: int = 0
    zero_groups: list[str] = field(default_factory=list)
    zero_rows: int = 0
    swept_groups: int = 0


class SourceSum:
    """The checksum of what a job is made from: names, dtypes and shapes of its source tensors, then
    their bytes in order, in pieces of any size. `--only-changed` compares it (`only_changed`)."""

    def __init__(self, job: Job) -> None:
        self._checksum = new_checksum()
        members = [
            [m.role.name, m.source.spec.dtype, *map(str, m.source.shape)] for m in job.members
        ]
        self._checksum.update(json.dumps([str(job.kind), members]).encode())
        self.update = self._checksum.update
        self.hexdigest = self._checksum.hexdigest


class TensorSink:
    """Writes one output tensor from front to back and adds its checksum to `result`."""

    def __init__(self, shard: ShardWriter, tensor: OutputTensor, result: JobResult) -> None:
        self._shard = shard
        self._tensor = tensor
        self._result = result
        self._position = 0
        self._checksum: Checksum = new_checksum()

    def append(self, data: memoryview) -> None:
        self._shard.write(self._tensor.offset + self._position, data)
        self._checksum.update(data)
        self._position += data.nbytes

    def finish(self) -> None:
        if self._position != self._tensor.nbytes:
            raise RuntimeError(f"{self._tensor.name}: wrote {self._position} bytes")
        self._result.tensors[self._tensor.name] = self._checksum.hexdigest()


class JobWriter:
    """Writes the outputs of one job into its shard. `result` is complete when all are written."""

    def __init__(self, shard: ShardWriter, result: JobResult | None = None) -> None:
        self.result = JobResult() if result is None else result
        self._shard = shard

    def sink(self, tensor: OutputTensor) -> TensorSink:
        """For a tensor that is written in pieces."""
        return TensorSink(self._shard, tensor, self.result)

    def write(self, tensor: OutputTensor, content: memoryview) -> None:
        """Write a whole tensor."""
        sink = self.sink(tensor)
        sink.append(content)
        sink.finish()

    def write_input_scales(self, job: Job, input_scale: Callable[[str], float]) -> None:
        """Write the FP32 input scales of an NVFP4 job."""
        for member in job.members:
            scale = input_scale(member.role.module)
            self.write(Nvfp4Outputs(*member.outputs).input_scale, f32_bytes(scale))

    def write_together(self, contents: Iterable[tuple[OutputTensor, memoryview]]) -> None:
        """Write small tensors, with one call for those that are neighbours in the file."""
        runs: list[tuple[int, bytearray]] = []
        for tensor, content in sorted(contents, key=lambda pair: pair[0].offset):
            if content.nbytes != tensor.nbytes:
                raise RuntimeError(f"{tensor.name}: {content.nbytes} bytes")
            checksum = new_checksum()
            checksum.update(content)
            self.result.tensors[tensor.name] = checksum.hexdigest()
            if runs and runs[-1][0] + len(runs[-1][1]) == tensor.offset:
                runs[-1][1].extend(content)
            else:
                runs.append((tensor.offset, bytearray(content)))
        for offset, run in runs:
            self._shard.write(offset, memoryview(run))


def f32_bytes(value: float) -> memoryview:
    return memoryview(struct.pack("<f", value))


MAX_OPEN_SHARDS = 16
MAX_UNDERFLOW_SHARE = 0.9  # of a group's blocks; `verify --source` names the linears below that


class OpenShards:
    """Writers of the shards of `jobs`. Use in a `with` block, from the main thread."""

    def __init__(
        self, work: Work, output: Path, journal: Journal, jobs: Sequence[Job], stop: threading.Event
    ) -> None:
        self._work = work
        self._output = output
        self._journal = journal
        self._stop = stop
        self._jobs_left = Counter(job.shard for job in jobs)
        self._lock = threading.Lock()
        self._open: dict[int, ShardWriter] = {}
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._results: dict[int, list[tuple[str, JobResult]]] = {}
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
        # A failure here interrupts the other threads; its message says more than `Interrupted`.
        if self._failure is not None and (error is None or isinstance(error, Interrupted)):
            raise self._failure from None

    def guard(self, body: Callable[[], None]) -> None:
        """Run `body` in the calling thread; remember its failure and set `stop`."""
        try:
            body()
        except BaseException as failure:  # carried to the main thread, which raises it
            with self._lock:
                if self._failure is None and not isinstance(failure, Interrupted):
                    self._failure = failure
            self._stop.set()

    def writer(self, shard: int) -> ShardWriter:
        """The writer of a shard, created by the first call."""
        with self._lock:
            writer = self._open.get(shard)
            if writer is None:
                writer = self._open[shard] = ShardWriter(self._output, self._work.shards[shard])
            self._recent[shard] = None
            self._recent.move_to_end(shard)
            while len(self._recent) > MAX_OPEN_SHARDS:
                oldest, _ = self._recent.popitem(last=False)
                if oldest in self._open:
                    self._open[oldest].rest()
            return writer

    def add(self, job: Job, result: JobResult) -> None:
        """All bytes of a job are written; the last job of a shard hands it to the finisher.

        Raises `TensorError` where nearly all of an NVFP4 group became zero.
        """
        blocks = sum(math.prod(member.source.shape) for member in job.members) / NVFP4_BLOCK
        if result.underflow_blocks > MAX_UNDERFLOW_SHARE * blocks:
            raise TensorError(
                f"{job.members[0].source.spec.file}: {job.group}: {result.underflow_blocks:,} of"
                f" {blocks:,.0f} blocks would become zero, because its largest value is far above"
                " the others; repair the source, or keep it in high precision with --exclude"
            )
        with self._lock:
            self._results.setdefault(job.shard, []).append((job.group, result))
            self._jobs_left[job.shard] -= 1
            done = self._jobs_left[job.shard] == 0
        if done:
            self._finished.put(job.shard)

    def _finish(self) -> None:
        while (index := self._finished.get()) is not None:
            with self._lock:
                writer, results = self._open.pop(index), self._results.pop(index)
            writer.sync()
            self._journal.append(_record(writer, results))
            writer.publish()


def join(thread: threading.Thread) -> None:
    """Join in short waits, so that signal handlers run in between."""
    while thread.is_alive():
        thread.join(0.1)


COUNTED = ("underflow_blocks", "zero_blocks", "zero_rows")


def _record(writer: ShardWriter, results: Sequence[tuple[str, JobResult]]) -> ShardRecord:
    shard, digests = writer.shard, dict[str, str]()
    for _, result in results:
        digests |= result.tensors
    summed = list(COUNTED)
    if any(result.swept_groups for _, result in results):
        summed.append("swept_groups")
    found = sorted((group, result) for group, result in results if result.source)
    counts = {
        group: {key: count for key in COUNTED if (count := getattr(result, key))}
        for group, result in found
    }
    return ShardRecord(
        name=shard.name,
        nbytes=shard.nbytes,
        tensors={tensor.name: digests[tensor.name] for tensor in shard.tensors},
        counts={
            **{key: sum(getattr(result, key) for _, result in results) for key in summed},
            "zero_groups": sorted(group for _, result in results for group in result.zero_groups),
        },
        sources={group: result.source for group, result in found},
        source_counts={group: each for group, each in counts.items() if each},
    )
