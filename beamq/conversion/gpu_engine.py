"""Quantize one job on a GPU: read into page-locked chunks, upload, kernels, download, write.

In, out and errors are those of `CpuEngine`, byte for byte; a GPU only takes the arithmetic off the
cores, which then have nothing to do but move bytes.

The one idea: no pipeline. Each worker thread is one slot: a stream, two chunks for reading into and
two for writing from, and a place on the device that its job's group fits in as a whole, so that the
source is read once and nothing on the host grows with a group. A worker reads a chunk while its
last one is on the wire, queues the kernels behind the last chunk, and writes one chunk while the
next comes down. A core's worth of such workers keep reading, both directions of the bus, kernels
and writing busy at the same time without anybody scheduling them. The global scale is computed on
the device (gpu_groups.py), so a job waits once between its last upload and its first written byte.

What workers share is the interpreter, and asking for it back is what each call that lets it go
costs most: so chunks are large, copies and marks do not let it go (cuda_driver.py), and the small
tensors of a job are written together.

Copied tensors, decoding, and groups the kernels do not take (mixed dtypes) go to a `CpuEngine`; so
does a job in which something is not finite, to be refused with its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from beamq.checkpoint import Checkpoint
from beamq.conversion.buffer_pool import BufferPool
from beamq.conversion.cpu_engine import CpuEngine
from beamq.conversion.gpu_areas import (
    area_rows,
    device_nbytes,
    fp8_sizes,
    item_size,
    nvfp4_sizes,
    part_rows,
    split,
    takes,
)
from beamq.conversion.gpu_chunks import IN_BYTES, OUT_BYTES, Chunk, Part, Ring, packed, pieces
from beamq.conversion.gpu_queue import GpuQueue, Memory
from beamq.conversion.sinks import JobResult, TensorSink, f32_bytes, write_together
from beamq.errors import DeviceError, Interrupted
from beamq.formats.kernels import cpu
from beamq.formats.kernels.group_info import INFO_BYTES, GroupInfo
from beamq.formats.layout import NVFP4_BLOCK
from beamq.header import ITEMSIZE
from beamq.plan import Job, Member
from beamq.shards import OutputTensor, ShardWriter

DevicePool = BufferPool[Memory]
Batch = list[tuple[memoryview, TensorSink]]


class GpuEngine:
    """Runs jobs for one worker thread. Not shared between threads; the pool is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        queue: GpuQueue,
        pool: DevicePool,
        fallback: CpuEngine,
        *,
        scales: str,
        input_scale: Callable[[str], float] | None,
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
    ) -> None:
        """As `CpuEngine`; `fallback` is one with the same options."""
        self._checkpoint = checkpoint
        self._queue = queue
        self._pool = pool
        self._fallback = fallback
        self._rule = scales
        self._input_scale = input_scale
        self._stopped = stopped
        self._advance = advance
        self._incoming = Ring(queue, IN_BYTES)
        self._outgoing = Ring(queue, OUT_BYTES)
        self._info = Chunk(queue, INFO_BYTES)

    def run(
        self, job: Job, writer: ShardWriter, held: Sequence[memoryview] | None = None
    ) -> JobResult:
        """See `CpuEngine.run`; also raises `DeviceError`."""
        if not takes(job):
            return self._fallback.run(job, writer, held)
        result = JobResult()
        views = [None] * len(job.members) if held is None else held
        with self._queue.using(), self._place(device_nbytes(job)) as place:
            convert = self._fp8 if job.kind == "fp8" else self._nvfp4
            sound = convert(job, writer, views, place, result)
        if not sound:
            self._fallback.run(job, writer, held)  # raises `TensorError`, with the place
            raise DeviceError(f"{job.group}: not finite on the GPU only; --device cpu may help")
        return result

    @contextmanager
    def _place(self, nbytes: int) -> Iterator[Memory]:
        """Memory on the device. What is queued is waited for before others get it."""
        place = self._pool.acquire(nbytes, self._stopped)
        try:
            yield place
        except BaseException:
            self._queue.drain()
            raise
        finally:
            self._pool.release(place)

    def _nvfp4(
        self,
        job: Job,
        writer: ShardWriter,
        views: Sequence[memoryview | None],
        place: Memory,
        result: JobResult,
    ) -> bool:
        """Whether all values are finite; if not, nothing is written."""
        item, k = item_size(job), job.members[0].source.shape[1]
        n = sum(member.source.shape[0] for member in job.members)
        areas = split(place, nvfp4_sizes(n, k, item))
        source, codes, scales, info = areas
        begin = 0
        for member, view in zip(job.members, views, strict=True):
            self._upload(source.part(begin, member.source.nbytes), member, 0, view)
            begin += member.source.nbytes
        self._queue.nvfp4(areas, job.members[0].source.spec.dtype, n, k, self._rule)
        parts: list[Part] = []
        row = 0
        for member in job.members:
            rows = slice(row, row + member.source.shape[0])
            row = rows.stop
            parts.append((area_rows(codes, rows, k // 2), TensorSink(writer, member.outputs[0])))
            parts.append(
                (area_rows(scales, rows, k // NVFP4_BLOCK), TensorSink(writer, member.outputs[1]))
            )
        found = self._download(info, parts, lambda found: found.finite_group)
        if found is None:
            return False
        if found.global_scale != cpu.nvfp4_global_scale(found.amax):
            raise DeviceError(
                f"{job.group}: the GPU makes a global scale of {found.global_scale} of amax"
                f" {found.amax}; expected {cpu.nvfp4_global_scale(found.amax)}. Use --device cpu"
            )
        if found.amax == 0.0:
            result.zero_groups.append(job.group)
        _, result.underflow_blocks, result.zero_blocks, _ = found.counts
        for _, sink in parts:
            sink.finish(result)
        write_together(writer, self._small(job, found.global_scale), result)
        return True

    def _small(self, job: Job, global_scale: float) -> Iterator[tuple[OutputTensor, memoryview]]:
        """The scales of four bytes."""
        for member in job.members:
            yield member.outputs[2], f32_bytes(global_scale)
            if self._input_scale is not None:
                yield member.outputs[-1], f32_bytes(self._input_scale(member.role.module))

    def _fp8(
        self,
        job: Job,
        writer: ShardWriter,
        views: Sequence[memoryview | None],
        place: Memory,
        result: JobResult,
    ) -> bool:
        """Whether all values are finite. Rows share nothing, so they go in parts."""
        for member, view in zip(job.members, views, strict=True):
            dtype, (n, k) = member.source.spec.dtype, member.source.shape
            item = ITEMSIZE[dtype]
            at_once = part_rows(k, item)
            code_sink, scale_sink = (TensorSink(writer, output) for output in member.outputs)
            for row in range(0, n, at_once):
                rows = min(at_once, n - row)
                areas = split(place, fp8_sizes(rows, k, item))
                self._upload(areas[0], member, row * k * item, view)
                self._queue.fp8(areas, dtype, rows, k)
                parts = [(areas[1], code_sink), (areas[2], scale_sink)]
                found = self._download(areas[3], parts, lambda found: found.finite_rows)
                if found is None:
                    return False
                result.zero_rows += found.counts[1]
            code_sink.finish(result)
            scale_sink.finish(result)
        return True

    def _upload(self, to: Memory, member: Member, start: int, view: memoryview | None) -> None:
        """Queue `to.nbytes` source bytes of a member, from `start` on."""
        held = None
        if view is not None:
            held = np.frombuffer(view, np.uint8, count=to.nbytes, offset=start)
            if self._queue.locked(held.ctypes.data):
                self._check(to.nbytes)
                self._queue.upload(to, held.ctypes.data)
                return
        for first, size in pieces(to.nbytes):
            self._check(size)
            chunk = self._incoming.next()
            if held is None:
                place = member.source.start + start + first
                self._checkpoint.read_into(member.source.spec, chunk.view[:size], place)
            else:
                np.copyto(chunk.array[:size], held[first : first + size])
            self._queue.upload(to.part(first, size), chunk.address)
            chunk.mark()

    def _download(
        self,
        info: Memory,
        parts: Sequence[Part],
        finite: Callable[[GroupInfo], bool],
    ) -> GroupInfo | None:
        """Write all parts; what the kernels found. None, and nothing written, if not `finite`."""
        found: GroupInfo | None = None
        self._queue.download(self._info.address, info)
        for batch in self._batches(parts):
            if found is None:
                found = GroupInfo.read(self._info.view)
                if not finite(found):
                    self._queue.drain()
                    return None
            for view, sink in batch:
                self._check(0)
                sink.append(view)
        return found

    def _batches(self, parts: Sequence[Part]) -> Iterator[Batch]:
        """Parts' bytes on the host, a chunk at a time, the next one on its way meanwhile."""
        waiting: tuple[Chunk, Batch] | None = None
        for some in packed(parts):
            chunk = self._outgoing.next()
            batch: Batch = []
            begin = 0
            for memory, sink in some:
                self._queue.download(chunk.address + begin, memory)
                batch.append((chunk.view[begin : begin + memory.nbytes], sink))
                begin += memory.nbytes
            chunk.mark()
            if waiting is not None:
                waiting[0].wait()
                yield waiting[1]
            waiting = chunk, batch
        if waiting is not None:
            waiting[0].wait()
            yield waiting[1]

    def _check(self, nbytes: int) -> None:
        if self._stopped():
            raise Interrupted("stopped")
        if nbytes:
            self._advance(nbytes)
