"""Quantize one job on a GPU: read into page-locked chunks, upload, kernels, download, write.

In, out and errors are those of `CpuWorker`, byte for byte; a GPU only takes the arithmetic off the
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

Copied tensors, decoding, and groups the kernels do not take (mixed dtypes) go to a `CpuWorker`; so
does a job in which something is not finite, to be refused with its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from beamq.convert.buffer_pool import BufferPool
from beamq.convert.cpu_worker import CpuWorker, CpuWorkerFactory
from beamq.convert.gpu_queue import (
    CudaQueue,
    FirstLaunches,
    GpuQueue,
    Memory,
    Place,
    device_errors,
    device_memory,
)
from beamq.convert.open_shards import JobResult, TensorSink, f32_bytes, write_together
from beamq.errors import DeviceError, Interrupted
from beamq.formats.kernels import RESULT_NBYTES, KernelResult, cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.safetensors_header import ITEMSIZE
from beamq.io.shard_writer import OutputTensor, ShardWriter
from beamq.plan.layout import NVFP4_BLOCK
from beamq.plan.plan import Job, Member, Work

# What a job takes on a GPU, and where in it everything lies: source, codes, scales, info.
#
# In: a job. Out: sizes in bytes; areas of a place on the device. Known from shapes alone, so that a
# run can be refused before it begins.

PART_BYTES = 64 << 20  # of FP8 rows on the device at a time
MAX_FP8_K = 32_768
ALIGNMENT = 256


def takes(job: Job) -> bool:
    """Whether the kernels do a job: linears with one dtype and one row length."""
    kinds = {(member.source.spec.dtype, member.source.shape[-1]) for member in job.members}
    if job.kind not in ("nvfp4", "fp8") or len(kinds) != 1 or not job.source_nbytes:
        return False
    dtype, k = kinds.pop()
    return dtype in FLOAT_SOURCES and (job.kind == "nvfp4" or k <= MAX_FP8_K)


def device_nbytes(job: Job) -> int:
    """Bytes a job takes on the device at a time; 0 if it is not done there."""
    if not takes(job):
        return 0
    return sum(aligned(size) for size in area_nbytes(job))


def area_nbytes(job: Job) -> tuple[int, ...]:
    """Bytes of source, codes, scales and info of a job, or of a part of its FP8 rows."""
    item, k = item_size(job), job.members[0].source.shape[1]
    rows = sum(member.source.shape[0] for member in job.members)
    if job.kind == "fp8":
        return fp8_sizes(min(rows, part_rows(k, item)), k, item)
    return nvfp4_sizes(rows, k, item)


def item_size(job: Job) -> int:
    """Bytes of a source value."""
    return ITEMSIZE[job.members[0].source.spec.dtype]


def part_rows(k: int, item: int) -> int:
    """FP8 rows of `k` values that are on the device at a time."""
    return max(1, PART_BYTES // (k * item))


def nvfp4_sizes(n: int, k: int, item: int) -> tuple[int, ...]:
    """Bytes of source, codes, scales and info."""
    return n * k * item, n * k // 2, n * k // NVFP4_BLOCK, RESULT_NBYTES


def fp8_sizes(n: int, k: int, item: int) -> tuple[int, ...]:
    """Bytes of source, codes, scales and info."""
    return n * k * item, n * k, n * 4, RESULT_NBYTES


def aligned(nbytes: int) -> int:
    """Rounded up to what areas begin at."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def split(place: Memory, sizes: Iterable[int]) -> Place:
    """Areas of device memory, one behind the other."""
    areas, begin = [], 0
    for size in sizes:
        areas.append(place.part(begin, size))
        begin += aligned(size)
    source, codes, scales, info = areas
    return source, codes, scales, info


def area_rows(area: Memory, rows: slice, width: int) -> Memory:
    """Some rows of `width` bytes."""
    return area.part(rows.start * width, (rows.stop - rows.start) * width)


# Page-locked chunks through which a worker's bytes go to a GPU and come back.
#
# In: a queue, parts of device memory and the sinks they belong to. Out: chunks in turn, each free
# of what was copied through it before; batches of parts that fill a chunk.

IN_BYTES = 16 << 20  # of a chunk: half of an expert's projection
OUT_BYTES = 8 << 20
CHUNKS = 2  # each way
SLOT_BYTES = CHUNKS * (IN_BYTES + OUT_BYTES)

Part = tuple[Memory, TensorSink]


class Chunk:
    """Page-locked bytes that a copy may be using."""

    def __init__(self, queue: GpuQueue, nbytes: int) -> None:
        self.array = queue.host(nbytes)
        self.view = memoryview(self.array)  # type: ignore[arg-type]  # numpy arrays are buffers
        self.address: int = self.array.ctypes.data
        self._mark = queue.mark()
        self._marked = False

    def mark(self) -> None:
        """In use by what was queued so far."""
        self._mark.record()
        self._marked = True

    def wait(self) -> None:
        """Until it is not."""
        if self._marked:
            self._mark.wait()
            self._marked = False


class Ring:
    """Chunks in turn, made when first needed; each is waited for before it is given out again."""

    def __init__(self, queue: GpuQueue, nbytes: int) -> None:
        self._queue = queue
        self._nbytes = nbytes
        self._chunks: list[Chunk] = []
        self._turn = 0

    def next(self) -> Chunk:
        """One that nothing uses."""
        if len(self._chunks) < CHUNKS:
            self._chunks.append(Chunk(self._queue, self._nbytes))
        chunk = self._chunks[self._turn % CHUNKS]
        self._turn += 1
        chunk.wait()
        return chunk


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """(start, size) of as few equal pieces as chunks allow."""
    count = -(-nbytes // IN_BYTES)
    size = min(IN_BYTES, aligned(-(-nbytes // count)))
    for start in range(0, nbytes, size):
        yield start, min(size, nbytes - start)


def packed(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Batches of parts that fit a chunk, large ones divided."""
    batch: list[Part] = []
    room = OUT_BYTES
    for memory, sink in parts:
        done = 0
        while done < memory.nbytes:
            size = min(room, memory.nbytes - done)
            batch.append((memory.part(done, size), sink))
            done += size
            room -= size
            if not room:
                yield batch
                batch, room = [], OUT_BYTES
    if batch:
        yield batch


DevicePool = BufferPool[Memory]
Batch = list[tuple[memoryview, TensorSink]]


class GpuWorker:
    """Runs jobs for one worker thread. Not shared between threads; the pool is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        queue: GpuQueue,
        pool: DevicePool,
        fallback: CpuWorker,
        *,
        scales: str,
        input_scale: Callable[[str], float] | None,
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
    ) -> None:
        """As `CpuWorker`; `fallback` is one with the same options."""
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
        self._info = Chunk(queue, RESULT_NBYTES)

    def run(
        self, job: Job, writer: ShardWriter, held: Sequence[memoryview] | None = None
    ) -> JobResult:
        """See `CpuWorker.run`; also raises `DeviceError`."""
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
        finite: Callable[[KernelResult], bool],
    ) -> KernelResult | None:
        """Write all parts; what the kernels found. None, and nothing written, if not `finite`."""
        found: KernelResult | None = None
        self._queue.download(self._info.address, info)
        for batch in self._batches(parts):
            if found is None:
                found = KernelResult.read(self._info.view)
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


# The workers of one GPU: what they share, and what they take of memory.
#
# On the host each worker has `SLOT_BYTES` of page-locked chunks. On the device a pool has room for
# what all workers have in hand, `DEVICE_BYTES` or twice the largest group, less where less is free.
# Both are bounds; a run that cannot have them is refused before it begins.

DEVICE_BYTES = 2 << 30
MAX_WORKERS = 16  # 29 threads were slower than 16: they wait for the interpreter
FREE_SHARE = 0.5  # of the device's free memory, if that is less


def device_need(work: Work) -> int:
    """Bytes on a device that a run of `work` takes at most, if that many are free."""
    return max(DEVICE_BYTES, 2 * _largest(work))


class GpuWorkerFactory:
    """Workers on `device`. `memory` bounds page-locked memory and the fallback's groups, in bytes.

    Raises `DeviceError` where the device cannot be used or has too little memory.
    """

    def __init__(
        self, checkpoint: Checkpoint, work: Work, device: torch.device, memory: int, workers: int
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._memory = memory
        self._cpu = CpuWorkerFactory(checkpoint, memory, workers)
        self._first = FirstLaunches()
        with device_errors(device):
            free, _ = torch.cuda.mem_get_info(device)
        least = _largest(work)
        if least > free:
            raise DeviceError(
                f"{device}: {free / 1e9:.2f} GB are free, and one group of linears that share a"
                f" scale takes {least / 1e9:.2f} GB; end what else runs there, or use --device cpu"
            )
        budget = min(device_need(work), max(least, int(FREE_SHARE * free)))
        self._pool: DevicePool = BufferPool(
            budget,
            allocate=lambda nbytes: device_memory(device, nbytes),
            size=lambda memory: memory.nbytes,
            discard=lambda memory: None,
        )
        self.device_nbytes = budget

    def count(self, asked: int) -> int:
        """As many as have page-locked chunks within `memory`, and not too many for one GPU."""
        return max(1, min(asked, MAX_WORKERS, self._memory // SLOT_BYTES))

    def worker(
        self,
        *,
        scales: str,
        input_scale: Callable[[str], float] | None,
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
    ) -> GpuWorker:
        """See `WorkerFactory`."""
        return GpuWorker(
            self._checkpoint,
            CudaQueue(self._device, self._first),
            self._pool,
            self._cpu.worker(
                scales=scales, input_scale=input_scale, stopped=stopped, advance=advance
            ),
            scales=scales,
            input_scale=input_scale,
            stopped=stopped,
            advance=advance,
        )


def _largest(work: Work) -> int:
    return max((device_nbytes(job) for job in work.jobs), default=0)
