"""Convert one job on the CPU: read rows, run the kernels on pieces in cache, write in place.

In: a `Job` and the writer of its shard. Out: the job's bytes on disk, the checksums of its tensors
and the kernels' counts. A caller that already has the source's bytes (a forward pass has just read
them) passes them; a caller that does not know the input scales yet writes them later.

Data moves in pieces of about 1 MiB that stay in the core's cache between reading, the kernel and
writing (see `piece_bytes`). NVFP4 needs the largest magnitude of the whole group before the first
code: a group of up to `HELD_BYTES` (an expert's gate and up) is held in a buffer from a bounded
pool. A larger one (a dense MLP's) is read twice, the second time from the page cache, because
touching fresh memory costs more than a second copy. Every call that takes time releases the
interpreter lock, so plain threads fill the cores. torch, which takes long to import, is not used.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from beamq.beam.tensors import Role
from beamq.convert.open_shards import JobResult, JobWriter, SourceSum, f32_bytes
from beamq.errors import Interrupted, TensorError
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.safetensors_header import ITEMSIZE
from beamq.io.shard_writer import ShardWriter
from beamq.plan.layout import NVFP4_BLOCK, WeightFormat
from beamq.plan.plan import Fp8Outputs, Job, JobKind, Member, Nvfp4Outputs

PIECE_BYTES = 1 << 20
MANY_WORKERS = 4
HELD_BYTES = 64 << 20


def piece_bytes(workers: int) -> int:
    """Bytes of a piece where so many threads convert.

    Each piece takes the interpreter lock three to five times, which for sixteen threads takes as
    long as reading 1 MiB (ADR 12). What all threads hold stays below 512 MiB.
    """
    if workers <= MANY_WORKERS:
        return PIECE_BYTES
    return PIECE_BYTES * max(1, min(8, 128 // workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What all jobs of a run share.

    `scale_rule` chooses NVFP4's block scales (see `Recipe`). `input_scale` gives the scale of a
    linear; without it those tensors are left for `JobWriter.write_input_scales`. `advance` is
    called with the source bytes that were read, `stopped` asks whether to give up. `sums`: make the
    checksum of each job's source bytes as they are read.
    """

    scale_rule: str
    input_scale: Callable[[str], float] | None
    stopped: Callable[[], bool]
    advance: Callable[[int], None]
    sums: bool = False

    def step(self, nbytes: int = 0) -> None:
        """Call between two pieces, with the bytes about to be read. Raises `Interrupted`."""
        if self.stopped():
            raise Interrupted("stopped")
        if nbytes:
            self.advance(nbytes)


class Worker(Protocol):
    """Converts jobs, one at a time, for the thread that made it."""

    def run(
        self, job: Job, shard: ShardWriter, held: Sequence[memoryview] | None = None
    ) -> JobResult:
        """Convert a job. `held` has the source bytes of each member; else they are read."""


class WorkerFactory(Protocol):
    """Makes the workers of one run: `CpuWorkerFactory`, or `GpuWorkerFactory` in `gpu_worker`.

    The bytes they write are the same (tests/gpu/test_gpu_convert.py). `device_nbytes` bounds the
    GPU memory that the workers take together.
    """

    device_nbytes: int

    def count(self, asked: int) -> int:
        """How many workers to run, at most as many as asked for."""

    def worker(self, context: JobContext) -> Worker:
        """A worker for the calling thread."""


class CpuWorkerFactory:
    """Makes CPU workers, which share `memory` bytes for scale groups."""

    device_nbytes = 0

    def __init__(
        self,
        checkpoint: Checkpoint,
        memory: int,
        workers: int,
        edits: Mapping[str, Callable[[bytes], bytes]] | None = None,
    ) -> None:
        """`edits` change pieces of copied tensors; they are by the name of the output tensor."""
        self._checkpoint = checkpoint
        self._edits = edits or {}
        self._piece = piece_bytes(workers)
        self._pool = BufferPool(memory, allocate=_anonymous, size=len, discard=mmap.mmap.close)

    def count(self, asked: int) -> int:
        return asked

    def worker(self, context: JobContext) -> CpuWorker:
        return CpuWorker(self._checkpoint, self._pool, context, self._piece, self._edits)


class CpuWorker:
    """Converts jobs for one thread; the pool is shared by threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        pool: BufferPool[mmap.mmap],
        context: JobContext,
        piece: int,
        edits: Mapping[str, Callable[[bytes], bytes]],
    ) -> None:
        """`piece` is how many bytes are worked on at a time."""
        self._edits = edits
        self._checkpoint = checkpoint
        self._pool = pool
        self._context = context
        self._piece_bytes = piece
        self._held: dict[str, memoryview] = {}
        self._sum: SourceSum | None = None
        self._source, self._codes, self._scales = _Scratch(), _Scratch(), _Scratch()

    def run(
        self, job: Job, shard: ShardWriter, held: Sequence[memoryview] | None = None
    ) -> JobResult:
        """See `Worker.run`. Raises `TensorError` for non-finite values, `DiskError`, ..."""
        views = zip(job.members, held or (), strict=held is not None)
        self._held = {member.role.name: view for member, view in views}
        out = JobWriter(shard)
        self._sum = SourceSum(job) if self._context.sums else None
        match job.kind:
            case JobKind.COPY:
                self._copy(job.members[0], out)
            case JobKind.FP8 | JobKind.FP8_BLOCK | JobKind.MXFP8:
                self._fp8(job.kind.weights, job.members[0], out)
            case JobKind.NVFP4:
                self._nvfp4(job, out)
            case _:
                self._decode(job.kind.weights, job.members[0], out)
        if self._sum is not None:
            out.result.source = self._sum.hexdigest()
        return out.result

    def _pieces(self, member: Member, unit: int) -> list[tuple[int, int]]:
        """(start, nbytes) of pieces that are whole multiples of `unit` bytes."""
        size = max(self._piece_bytes // unit, 1) * unit
        total = member.source.nbytes
        return [(start, min(size, total - start)) for start in range(0, total, size)]

    def _piece(self, member: Member, start: int, nbytes: int, *, again: bool = False) -> memoryview:
        """Some of a member's source bytes; valid until the next piece."""
        held = self._held.get(member.role.name)
        if held is not None:
            self._context.step(0 if again else nbytes)
            view = held[start : start + nbytes]
            self._add_to_sum(view, again=again)
            return view
        view = self._source.view(nbytes)
        self._read(member, start, view, again=again)
        return view

    def _read(self, member: Member, start: int, out: memoryview, *, again: bool = False) -> None:
        self._context.step(0 if again else out.nbytes)
        source = member.source
        self._checkpoint.read_into(source.spec, out, source.start + start)
        self._add_to_sum(out, again=again)

    def _add_to_sum(self, view: memoryview, *, again: bool) -> None:
        """Pieces come in order when they are read first, so their checksum is the members'."""
        if self._sum is not None and not again:
            self._sum.update(view)

    def _copy(self, member: Member, out: JobWriter) -> None:
        spec, (output,) = member.source.spec, member.outputs
        sink, edit = out.sink(output), self._edits.get(output.name)
        item, out_item = ITEMSIZE[spec.dtype], ITEMSIZE[output.dtype]
        checked = member.role.role is not Role.EXTRA and spec.dtype in FLOAT_SOURCES
        for start, nbytes in self._pieces(member, item):
            view = self._piece(member, start, nbytes)
            if checked:
                _refuse_nonfinite(member, cpu.amax(view, spec.dtype), start // item)
            if output.dtype != spec.dtype:
                converted = self._codes.view(nbytes // item * out_item)
                if cpu.convert(view, spec.dtype, converted, output.dtype):
                    raise TensorError(
                        f"{spec.file}: {spec.name} holds values beyond {output.dtype}'s range"
                        " (3.4e38); they would become infinite. Repair the source"
                    )
                view = converted
            sink.append(view if edit is None else memoryview(edit(bytes(view))))
        sink.finish()

    def _fp8(self, fmt: WeightFormat, member: Member, out: JobWriter) -> None:
        dtype, (n, k) = member.source.spec.dtype, member.source.shape
        row_bytes = k * ITEMSIZE[dtype]
        outputs = Fp8Outputs(*member.outputs)
        sink = out.sink(outputs.codes)
        scales = self._scales.view(fmt.scale_nbytes(n, k))
        row = 0
        for start, nbytes in self._pieces(member, row_bytes * fmt.block[0]):
            rows = nbytes // row_bytes
            source = self._piece(member, start, nbytes)
            codes = self._codes.view(rows * k)
            part = scales[fmt.scale_nbytes(row, k) : fmt.scale_nbytes(row + rows, k)]
            counts = cpu.fp8_quantize(fmt.rounding, source, dtype, k, codes, part)
            _refuse_nonfinite(member, counts, row * k)
            if fmt.rounding == "fp8":
                out.result.zero_rows += counts.zero_rows
            else:
                out.result.zero_blocks += counts.zero_rows
            sink.append(codes)
            row += rows
        sink.finish()
        out.write(outputs.scale, scales)

    def _decode(self, fmt: WeightFormat, member: Member, out: JobWriter) -> None:
        """Codes back to BF16; the scales are found by name, in tensors next to the codes."""
        (output,), module = member.outputs, member.role.module
        n, k = output.shape
        scales = memoryview(self._checkpoint.read(f"{module}.{fmt.scale}"))
        global_scale = self._global_scale(member) if fmt.scalars else 1.0
        row_codes = member.source.nbytes // n
        sink = out.sink(output)
        row = 0
        for start, nbytes in self._pieces(member, row_codes * fmt.block[0]):
            rows = nbytes // row_codes
            codes = self._piece(member, start, nbytes)
            values = self._codes.view(rows * k * 2)
            part = scales[fmt.scale_nbytes(row, k) : fmt.scale_nbytes(row + rows, k)]
            if fmt.scalars:
                cpu.nvfp4_dequantize(codes, part, k, global_scale, values, "BF16")
            else:
                cpu.fp8_dequantize(fmt.rounding, codes, part, k, values, "BF16")
            found = cpu.amax(values, "BF16")  # finds a NaN among codes or scales, or a wild scale
            if found.nonfinite:
                place = list(divmod(row * k + found.first_nonfinite, k))
                raise TensorError(
                    f"{member.source.spec.file}: {module} decodes to NaN or infinity (first at"
                    f" {place}); `beamq verify` shows what is damaged"
                )
            sink.append(values)
            row += rows
        sink.finish()

    def _global_scale(self, member: Member) -> float:
        name = f"{member.role.module}.weight_scale_2"
        scale: float = struct.unpack("<f", self._checkpoint.read(name))[0]
        if not 2.0**-126 <= scale <= 2.0**117:
            raise TensorError(
                f"{member.source.spec.file}: {name} is {scale}, not a valid scale;"
                " `beamq verify` shows what is damaged"
            )
        return scale

    def _nvfp4(self, job: Job, out: JobWriter) -> None:
        if self._held or job.source_nbytes > HELD_BYTES:
            self._nvfp4_group(job, [None] * len(job.members), out)
            return
        buffer = self._pool.acquire(job.source_nbytes, self._context.stopped)
        try:
            with memoryview(buffer) as whole:
                ends = list(accumulate(member.source.nbytes for member in job.members))
                views = [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
                self._nvfp4_group(job, views, out)
                for view in views:  # the pool can close a buffer only when no view is left
                    view.release()
        finally:
            self._pool.release(buffer)

    def _nvfp4_group(self, job: Job, views: Sequence[memoryview | None], out: JobWriter) -> None:
        """Quantize with one global scale. Views are filled; members without one read in pieces."""
        amax = max(self._load(m, view) for m, view in zip(job.members, views, strict=True))
        if amax == 0.0:
            out.result.zero_groups.append(job.group)
        scale = cpu.nvfp4_global_scale(amax)
        for member, view in zip(job.members, views, strict=True):
            self._nvfp4_member(member, view, scale, out)
        if self._context.input_scale is not None:
            out.write_input_scales(job, self._context.input_scale)

    def _load(self, member: Member, view: memoryview | None) -> float:
        """Fill `view`, if given; the largest magnitude, found while pieces are in cache."""
        item = ITEMSIZE[member.source.spec.dtype]
        amax = 0.0
        for start, nbytes in self._pieces(member, item):
            if view is None:
                piece = self._piece(member, start, nbytes)
            else:
                piece = view[start : start + nbytes]
                self._read(member, start, piece)
            found = cpu.amax(piece, member.source.spec.dtype)
            _refuse_nonfinite(member, found, start // item)
            amax = max(amax, found.amax)
        return amax

    def _nvfp4_member(
        self, member: Member, data: memoryview | None, global_scale: float, out: JobWriter
    ) -> None:
        dtype, (n, k) = member.source.spec.dtype, member.source.shape
        row_bytes = k * ITEMSIZE[dtype]
        outputs = Nvfp4Outputs(*member.outputs)
        sink = out.sink(outputs.codes)
        scales = self._scales.view(n * k // NVFP4_BLOCK)
        row_scales = k // NVFP4_BLOCK
        row = 0
        for begin, nbytes in self._pieces(member, row_bytes):
            rows = nbytes // row_bytes
            if data is None:
                piece = self._piece(member, begin, nbytes, again=True)
            else:
                self._context.step()
                piece = data[begin : begin + nbytes]
            codes = self._codes.view(rows * k // 2)
            part = scales[row * row_scales : (row + rows) * row_scales]
            counts = cpu.nvfp4_quantize(
                piece, dtype, k, global_scale, codes, part, scale_rule=self._context.scale_rule
            )
            out.result.underflow_blocks += counts.underflow
            out.result.zero_blocks += counts.zero
            sink.append(codes)
            row += rows
        sink.finish()
        out.write(outputs.block_scale, scales)
        out.write(outputs.global_scale, f32_bytes(global_scale))


class _Scratch:
    """A buffer that is used again for each piece and grows when it must."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def view(self, nbytes: int) -> memoryview:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]


def _refuse_nonfinite(member: Member, found: cpu.AmaxResult | cpu.Fp8Counts, base: int) -> None:
    """Raise `TensorError` if the kernel met a NaN or infinity; its piece begins at value `base`."""
    if not found.nonfinite:
        return
    index, place = base + found.first_nonfinite, list[int]()
    for length in reversed(member.source.shape):
        place.insert(0, index % length)
        index //= length
    raise TensorError(
        f"{member.source.spec.file}: {member.role.name} holds NaN or infinity (at least"
        f" {found.nonfinite}, first at {place}); repair the source, such a model cannot be served"
    )


Buffer = TypeVar("Buffer")


class BufferPool(Generic[Buffer]):
    """Buffers for whole scale groups, used again, never more than `budget` bytes at a time.

    A request waits until enough is returned. One that is larger than the budget is granted when
    nothing else is out, so that a single large group cannot block a run. `allocate` makes a buffer
    of at least so many bytes, `size` gives its bytes, `discard` frees it.
    """

    def __init__(
        self,
        budget: int,
        *,
        allocate: Callable[[int], Buffer],
        size: Callable[[Buffer], int],
        discard: Callable[[Buffer], None],
    ) -> None:
        self._budget = budget
        self._allocate = allocate
        self._size = size
        self._discard = discard
        self._held = 0  # bytes of all buffers, free or in use
        self._free: list[Buffer] = []  # the longest unused first
        self._condition = threading.Condition()

    def acquire(self, nbytes: int, stopped: Callable[[], bool]) -> Buffer:
        """A buffer of at least `nbytes`. Raises `Interrupted` if `stopped` turns true."""
        with self._condition:
            while True:
                fitting = [p for p, b in enumerate(self._free) if self._size(b) >= nbytes]
                if fitting:  # the smallest that fits leaves the large ones for large groups
                    return self._free.pop(min(fitting, key=lambda p: self._size(self._free[p])))
                while self._free and self._held + nbytes > self._budget:
                    oldest = self._free.pop(0)
                    self._held -= self._size(oldest)
                    self._discard(oldest)
                if self._held + nbytes <= self._budget or self._held == 0:
                    buffer = self._allocate(nbytes)
                    self._held += self._size(buffer)
                    return buffer
                if stopped():
                    raise Interrupted("stopped")
                self._condition.wait(0.2)  # wakes to look at `stopped`, which notifies nobody

    def release(self, buffer: Buffer) -> None:
        """Return a buffer."""
        with self._condition:
            self._free.append(buffer)
            self._condition.notify_all()


def _anonymous(nbytes: int) -> mmap.mmap:
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # advice: a kernel without huge pages refuses it
            buffer.madvise(mmap.MADV_HUGEPAGE)  # a page fault for 2 MiB instead of 4 KiB
    return buffer
