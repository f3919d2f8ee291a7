"""Quantize one job on a GPU: read into page-locked chunks, upload, kernels, download, write.

In, out and errors are those of `CpuWorker`, byte for byte. A GPU only takes the arithmetic off the
cores, which then only move bytes.

The one idea: no pipeline. Each worker thread has a stream, two chunks to read into and two to write
from, and room on the device for the whole group of its job. It reads a chunk while its last one is
being uploaded, queues the kernels after the last chunk, and writes one chunk while the next is
being downloaded. Enough such workers keep reading, both directions of the bus, kernels and writing
busy without a scheduler. The global scale is computed on the device (`formats/kernels/gpu.py`), so
a job waits once, between its last upload and its first written byte.

Workers share one interpreter, and a call that releases its lock pays to take it again. So chunks
are large, copies and marks keep the lock (`gpu_queue.CudaDriver`), and the small tensors of a job
are written together.

Copied tensors, decoding, and groups that the kernels do not take (mixed dtypes) go to a
`CpuWorker`. So does a job that holds NaN or infinity, to be refused with its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from beamq.adapter.merged import DeviceUpdate, MergedFiles
from beamq.convert.cpu_worker import BufferPool, CpuWorker, CpuWorkerFactory, JobContext
from beamq.convert.gpu_queue import (
    CudaQueue,
    DeviceLayout,
    FirstLaunches,
    GpuQueue,
    Memory,
    device_errors,
    device_memory,
)
from beamq.convert.open_shards import JobResult, JobWriter, SourceSum, TensorSink, f32_bytes
from beamq.errors import DeviceError
from beamq.formats.kernels import RESULT_NBYTES, KernelResult, cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.safetensors_header import ITEMSIZE
from beamq.io.shard_writer import ShardWriter
from beamq.plan.layout import FP8_BLOCK, NVFP4_BLOCK
from beamq.plan.plan import FP8_KINDS, Fp8Outputs, Job, JobKind, Member, Nvfp4Outputs, Work

# Device layout: what a job takes on a GPU, and where. It follows from shapes alone.

PART_BYTES = 64 << 20  # of FP8 rows on the device at a time
MAX_FP8_K = 32_768
ALIGNMENT = 256


def takes(job: Job) -> bool:
    """Whether the kernels do a job: linears with one dtype and one row length."""
    kinds = {(member.source.spec.dtype, member.source.shape[-1]) for member in job.members}
    converts = job.kind is JobKind.NVFP4 or job.kind in FP8_KINDS
    if not converts or len(kinds) != 1 or not job.source_nbytes:
        return False
    dtype, k = kinds.pop()
    return dtype in FLOAT_SOURCES and (job.kind is not JobKind.FP8 or k <= MAX_FP8_K)


def device_nbytes(job: Job) -> int:
    """Bytes a job takes on the device at a time; 0 if it is not done there."""
    return sum(aligned(size) for size in area_nbytes(job)) if takes(job) else 0


def area_nbytes(job: Job) -> tuple[int, int, int, int]:
    """Bytes of a job's areas of `DeviceLayout`; of an FP8 job, for as many rows as go at a time."""
    item, k = ITEMSIZE[job.members[0].source.spec.dtype], job.members[0].source.shape[1]
    rows = sum(member.source.shape[0] for member in job.members)
    if job.kind in FP8_KINDS:
        rows = min(rows, part_rows(k, item))
    return area_sizes(job.kind, rows, k, item)


def part_rows(k: int, item: int) -> int:
    """FP8 rows of `k` values of `item` bytes that are on the device at a time: whole blocks."""
    return max(1, PART_BYTES // (k * item * FP8_BLOCK)) * FP8_BLOCK


def area_sizes(kind: JobKind, n: int, k: int, item: int) -> tuple[int, int, int, int]:
    """Bytes of each area of `DeviceLayout` for [n, k] values of `item` bytes."""
    codes = n * k // 2 if kind is JobKind.NVFP4 else n * k
    return n * k * item, codes, kind.weights.scale_nbytes(n, k), RESULT_NBYTES


def aligned(nbytes: int) -> int:
    """Rounded up to a multiple of `ALIGNMENT`, at which areas begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def split(memory: Memory, sizes: Iterable[int]) -> DeviceLayout:
    """Areas of device memory, one after the other."""
    areas, begin = [], 0
    for size in sizes:
        areas.append(memory.part(begin, size))
        begin += aligned(size)
    return DeviceLayout(*areas)


# Pinned staging: page-locked chunks through which a worker's bytes go to the GPU and come back.

IN_BYTES = 16 << 20  # of a chunk: half of an expert's projection
OUT_BYTES = 8 << 20
CHUNKS = 2  # each way: one is filled or emptied while the other is copied
SLOT_BYTES = CHUNKS * (IN_BYTES + OUT_BYTES)

Part = tuple[Memory, TensorSink]
"""Some bytes on the device, and the tensor they are the next bytes of."""


class Chunk:
    """Page-locked bytes that a queued copy may be using."""

    def __init__(self, queue: GpuQueue, nbytes: int) -> None:
        self.array = queue.host(nbytes)
        self.view = memoryview(self.array)  # type: ignore[arg-type]  # numpy arrays are buffers
        self.address: int = self.array.ctypes.data
        self._mark = queue.mark()
        self._marked = False

    def mark(self) -> None:
        """In use until the queue is done with what it holds now."""
        self._mark.record()
        self._marked = True

    def wait(self) -> None:
        """Return when no copy uses it."""
        if self._marked:
            self._mark.wait()
            self._marked = False


class Ring:
    """`CHUNKS` chunks in turn, made when first needed.

    A chunk is waited for before it is given out again: a copy may still read from it.
    """

    def __init__(self, queue: GpuQueue, nbytes: int) -> None:
        self._queue = queue
        self._nbytes = nbytes
        self._chunks: list[Chunk] = []
        self._turn = 0

    def next(self) -> Chunk:
        """A chunk that nothing uses."""
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
    """Batches of parts that fit a chunk, large parts divided."""
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


Views = Sequence[memoryview | None]
"""The source bytes of each member of a job, where the caller has them."""
Staged = list[tuple[memoryview, TensorSink]]
"""Bytes in one chunk, and the tensors they are the next bytes of."""


class GpuWorker:
    """Converts jobs for one thread; the pool is shared by threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        queue: GpuQueue,
        pool: BufferPool[Memory],
        fallback: CpuWorker,
        context: JobContext,
    ) -> None:
        self._checkpoint = checkpoint
        self._queue = queue
        self._pool = pool
        self._fallback = fallback
        self._context = context
        self._sum: SourceSum | None = None
        self._incoming = Ring(queue, IN_BYTES)
        self._outgoing = Ring(queue, OUT_BYTES)
        self._info = Chunk(queue, RESULT_NBYTES)

    def run(
        self, job: Job, shard: ShardWriter, held: Sequence[memoryview] | None = None
    ) -> JobResult:
        """See `Worker.run`; also raises `DeviceError`."""
        if not takes(job):
            return self._fallback.run(job, shard, held)
        out = JobWriter(shard)
        self._sum = SourceSum(job) if self._context.sums else None
        views: Views = held or [None] * len(job.members)
        with self._queue.using(), self._memory(device_nbytes(job)) as memory:
            convert = self._fp8 if job.kind in FP8_KINDS else self._nvfp4
            finite = convert(job, views, memory, out)
        if not finite:
            self._fallback.run(job, shard, held)  # raises `TensorError`, with the place
            raise DeviceError(f"{job.group}: NaN or infinity on the GPU only; use --device cpu")
        if self._sum is not None:
            out.result.source = self._sum.hexdigest()
        return out.result

    @contextmanager
    def _memory(self, nbytes: int) -> Iterator[Memory]:
        memory = self._pool.acquire(nbytes, self._context.stopped)
        try:
            yield memory
        except BaseException:
            # What is queued may still write to this memory: no other worker may get it before.
            self._queue.drain()
            raise
        finally:
            self._pool.release(memory)

    def _nvfp4(self, job: Job, views: Views, memory: Memory, out: JobWriter) -> bool:
        """Whether all values are finite; if not, nothing is written."""
        dtype, k = job.members[0].source.spec.dtype, job.members[0].source.shape[1]
        n = sum(member.source.shape[0] for member in job.members)
        layout = split(memory, area_nbytes(job))
        begin = 0
        for member, view in zip(job.members, views, strict=True):
            self._upload(layout.source.part(begin, member.source.nbytes), member, 0, view)
            begin += member.source.nbytes
        self._queue.nvfp4(layout, dtype, n, k, self._context.scale_rule)
        parts: list[Part] = []
        row = 0
        for member in job.members:
            outputs, rows = Nvfp4Outputs(*member.outputs), member.source.shape[0]
            codes = layout.codes.part(row * k // 2, rows * k // 2)
            width = k // NVFP4_BLOCK
            scales = layout.scales.part(row * width, rows * width)
            parts += [(codes, out.sink(outputs.codes)), (scales, out.sink(outputs.block_scale))]
            row += rows
        found = self._download(layout.info, parts, lambda found: math.isfinite(found.amax))
        if found is None:
            return False
        if found.global_scale != cpu.nvfp4_global_scale(found.amax):
            raise DeviceError(
                f"{job.group}: the GPU computed the global scale {found.global_scale} from amax"
                f" {found.amax}; expected {cpu.nvfp4_global_scale(found.amax)}. Use --device cpu"
            )
        if found.amax == 0.0:
            out.result.zero_groups.append(job.group)
        _, out.result.underflow_blocks, out.result.zero_blocks, _ = found.counts
        for _, sink in parts:
            sink.finish()
        small = []
        for member in job.members:
            outputs = Nvfp4Outputs(*member.outputs)
            small.append((outputs.global_scale, f32_bytes(found.global_scale)))
            if self._context.input_scale is not None:
                scale = self._context.input_scale(member.role.module)
                small.append((outputs.input_scale, f32_bytes(scale)))
        out.write_together(small)
        return True

    def _fp8(self, job: Job, views: Views, memory: Memory, out: JobWriter) -> bool:
        """Whether all values are finite. Parts of whole blocks of rows share nothing."""
        for member, view in zip(job.members, views, strict=True):
            dtype, (n, k) = member.source.spec.dtype, member.source.shape
            item, outputs = ITEMSIZE[dtype], Fp8Outputs(*member.outputs)
            at_once = part_rows(k, item)
            code_sink, scale_sink = out.sink(outputs.codes), out.sink(outputs.scale)
            for row in range(0, n, at_once):
                rows = min(at_once, n - row)
                layout = split(memory, area_sizes(job.kind, rows, k, item))
                self._upload(layout.source, member, row * k * item, view)
                self._queue.fp8(layout, job.kind, dtype, rows, k)
                parts = [(layout.codes, code_sink), (layout.scales, scale_sink)]
                found = self._download(layout.info, parts, lambda found: not found.counts[0])
                if found is None:
                    return False
                if job.kind is JobKind.FP8:
                    out.result.zero_rows += found.counts[1]
                else:
                    out.result.zero_blocks += found.counts[1]
            code_sink.finish()
            scale_sink.finish()
        return True

    def _upload(self, to: Memory, member: Member, start: int, view: memoryview | None) -> None:
        """Queue `to.nbytes` source bytes of a member, from `start` on, and the adapter's update."""
        held, source = None, self._checkpoint
        update = None if view is not None else self._update(member)
        if update is not None:
            source = update.base
        if view is not None:
            held = np.frombuffer(view, np.uint8, count=to.nbytes, offset=start)
            if self._sum is not None:
                self._sum.update(view[start : start + to.nbytes])
            if self._queue.locked(held.ctypes.data):  # a forward pass staged it: no copy needed
                self._context.step(to.nbytes)
                self._queue.upload(to, held.ctypes.data)
                return
        for first, size in pieces(to.nbytes):
            self._context.step(size)
            chunk = self._incoming.next()
            if held is None:
                place = member.source.start + start + first
                source.read_into(member.source.spec, chunk.view[:size], place)
                if self._sum is not None:
                    self._sum.update(chunk.view[:size])
            else:
                np.copyto(chunk.array[:size], held[first : first + size])
            self._queue.upload(to.part(first, size), chunk.address)
            chunk.mark()
        if update is not None:
            dtype, k = member.source.spec.dtype, member.source.shape[1]
            row, rows = (nbytes // (k * ITEMSIZE[dtype]) for nbytes in (start, to.nbytes))
            a, b = update.a, update.b[row : row + rows]
            if a.nbytes + b.nbytes > IN_BYTES:  # pageable memory: the copies wait for the queue
                self._queue.add_low_rank(to, dtype, a, b, update.scaling)
                return
            chunk = self._incoming.next()
            staged = chunk.array[: a.nbytes + b.nbytes].view(np.float32)
            staged_a, staged_b = (
                staged[: a.size].reshape(a.shape),
                staged[a.size :].reshape(b.shape),
            )
            np.copyto(staged_a, a)
            np.copyto(staged_b, b)
            self._queue.add_low_rank(to, dtype, staged_a, staged_b, update.scaling)
            chunk.mark()

    def _update(self, member: Member) -> DeviceUpdate | None:
        files = self._checkpoint.source
        return files.device_update(member.role.name) if isinstance(files, MergedFiles) else None

    def _download(
        self, info: Memory, parts: Sequence[Part], finite: Callable[[KernelResult], bool]
    ) -> KernelResult | None:
        """Write all parts; what the kernels found. None, and nothing written, if not `finite`."""
        found: KernelResult | None = None
        self._queue.download(self._info.address, info)
        for staged in self._stage(parts):
            if found is None:  # queued before the first chunk, so it has arrived with it
                found = KernelResult.read(self._info.view)
                if not finite(found):
                    self._queue.drain()
                    return None
            for view, sink in staged:
                self._context.step()
                sink.append(view)
        return found

    def _stage(self, parts: Sequence[Part]) -> Iterator[Staged]:
        """Parts' bytes on the host, a chunk at a time, while the next chunk is downloaded."""
        waiting: tuple[Chunk, Staged] | None = None
        for batch in packed(parts):
            chunk = self._outgoing.next()
            staged: Staged = []
            begin = 0
            for memory, sink in batch:
                self._queue.download(chunk.address + begin, memory)
                staged.append((chunk.view[begin : begin + memory.nbytes], sink))
                begin += memory.nbytes
            chunk.mark()
            if waiting is not None:
                waiting[0].wait()
                yield waiting[1]
            waiting = chunk, staged
        if waiting is not None:
            waiting[0].wait()
            yield waiting[1]


# What the workers of one GPU take of memory: `SLOT_BYTES` of page-locked chunks each, and a common
# pool on the device of `DEVICE_BYTES` or twice the largest group, less where less is free.

DEVICE_BYTES = 2 << 30
MAX_WORKERS = 16  # 29 threads were slower than 16: they wait for the interpreter
FREE_SHARE = 0.5  # of the device's free memory, if that is less


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
        least = max((device_nbytes(job) for job in work.jobs), default=0)
        if least > free:
            raise DeviceError(
                f"{device}: {free / 1e9:.2f} GB are free, and one group of linears that share a"
                f" scale takes {least / 1e9:.2f} GB; stop other programs on it, or use --device cpu"
            )
        budget = min(max(DEVICE_BYTES, 2 * least), max(least, int(FREE_SHARE * free)))
        self.device_nbytes = budget
        self._pool: BufferPool[Memory] = BufferPool(
            budget,
            allocate=partial(device_memory, device),
            size=lambda memory: memory.nbytes,
            discard=lambda memory: None,
        )

    def count(self, asked: int) -> int:
        """As many as have page-locked chunks within `memory`, and not too many for one GPU."""
        return max(1, min(asked, MAX_WORKERS, self._memory // SLOT_BYTES))

    def worker(self, context: JobContext) -> GpuWorker:
        queue, fallback = CudaQueue(self._device, self._first), self._cpu.worker(context)
        return GpuWorker(self._checkpoint, queue, self._pool, fallback, context)
