"""Quantize one job on the CPU: read rows, run the kernels on cache-warm pieces, write in place.

In: a `Job` and its shard's writer. Out: the job's bytes on disk, checksums of its tensors and
what the kernels counted.

Data moves in pieces of about 1 MiB that stay in the core's cache between reading, the kernel and
writing. FP8 rows need nothing else. NVFP4 needs the largest magnitude of the whole group before
the first code, so the group's source bytes are held once, in a buffer from a bounded pool, and
each source byte is read only once. Every call that takes time releases the interpreter lock, so
plain threads fill the cores. torch is not imported: it would take as long as converting 5 GB.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from beamq.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.checksum import Checksum, new_checksum
from beamq.errors import Interrupted, TensorError
from beamq.formats.kernels import cpu
from beamq.header import ITEMSIZE
from beamq.plan import Job, Member
from beamq.roles import Role
from beamq.shards import OutputTensor, ShardWriter

PIECE_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class JobResult:
    """Checksums by tensor name, and counts worth telling."""

    tensors: dict[str, str] = field(default_factory=dict)
    underflow_blocks: int = 0
    zero_blocks: int = 0
    zero_groups: list[str] = field(default_factory=list)
    zero_rows: int = 0


class BufferPool:
    """Buffers for whole scale groups, reused, never more than `budget` bytes at a time.

    A request waits until enough is returned; one larger than the budget is granted alone.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = 0
        self._free: list[mmap.mmap] = []
        self._condition = threading.Condition()

    def acquire(self, nbytes: int, stopped: Callable[[], bool]) -> mmap.mmap:
        """A buffer of at least `nbytes`. Raises `Interrupted` if `stopped` turns true."""
        with self._condition:
            while True:
                fitting = [buffer for buffer in self._free if len(buffer) >= nbytes]
                if fitting:
                    best = min(fitting, key=len)
                    self._free.remove(best)
                    return best
                while self._free and self._held + nbytes > self._budget:
                    self._held -= len(self._free[0])
                    self._free.pop(0).close()
                if self._held + nbytes <= self._budget or self._held == 0:
                    return self._allocate(nbytes)
                if stopped():
                    raise Interrupted("stopped")
                self._condition.wait(0.2)

    def release(self, buffer: mmap.mmap) -> None:
        """Give a buffer back."""
        with self._condition:
            self._free.append(buffer)
            self._condition.notify_all()

    def _allocate(self, nbytes: int) -> mmap.mmap:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)  # a page fault for 2 MiB instead of 4 KiB
        self._held += size
        return buffer


class _TensorSink:
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


class CpuEngine:
    """Runs jobs for one worker thread. Not shared between threads; the pool is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        pool: BufferPool,
        *,
        input_scale: Callable[[str], float],
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._pool = pool
        self._input_scale = input_scale
        self._stopped = stopped
        self._advance = advance
        self._source = bytearray(PIECE_BYTES)
        self._codes = bytearray(PIECE_BYTES)
        self._scales = bytearray(PIECE_BYTES)

    def run(self, job: Job, writer: ShardWriter) -> JobResult:
        """Convert one job. Raises `TensorError` for non-finite values, `DiskError`, ..."""
        result = JobResult()
        if job.kind == "copy":
            self._copy(job.members[0], writer, result)
        elif job.kind == "fp8":
            self._fp8(job.members[0], writer, result)
        elif job.kind.startswith("decode-"):
            self._decode(job.kind, job.members[0], writer, result)
        else:
            self._nvfp4(job, writer, result)
        return result

    def _pieces(self, member: Member, unit: int) -> list[tuple[int, int]]:
        """(start, nbytes) of pieces that are whole multiples of `unit` bytes."""
        size = max(PIECE_BYTES // unit, 1) * unit
        self._source = _grown(self._source, size)
        total = member.source.nbytes
        return [(start, min(size, total - start)) for start in range(0, total, size)]

    def _read(self, member: Member, start: int, out: memoryview) -> None:
        if self._stopped():
            raise Interrupted("stopped")
        source = member.source
        self._checkpoint.read_into(source.spec, out, source.start + start)
        self._advance(out.nbytes)

    def _copy(self, member: Member, writer: ShardWriter, result: JobResult) -> None:
        spec, output = member.source.spec, member.outputs[0]
        sink = _TensorSink(writer, output)
        item, out_item = ITEMSIZE[spec.dtype], ITEMSIZE[output.dtype]
        checked = member.role.role is not Role.EXTRA and spec.dtype in FLOAT_SOURCES
        for start, nbytes in self._pieces(member, item):
            view = memoryview(self._source)[:nbytes]
            self._read(member, start, view)
            if checked:
                found = cpu.amax(view, spec.dtype)
                _refuse_nonfinite(member, found.nonfinite, found.first_nonfinite, start // item)
            if output.dtype != spec.dtype:
                size = nbytes // item * out_item
                self._codes = _grown(self._codes, size)
                converted = memoryview(self._codes)[:size]
                cpu.convert(view, spec.dtype, converted, output.dtype)
                view = converted
            sink.append(view)
        sink.finish(result)

    def _fp8(self, member: Member, writer: ShardWriter, result: JobResult) -> None:
        spec = member.source.spec
        n, k = member.source.shape
        item = ITEMSIZE[spec.dtype]
        codes, scales = member.outputs
        sink = _TensorSink(writer, codes)
        self._scales = _grown(self._scales, n * 4)
        row = 0
        for start, nbytes in self._pieces(member, k * item):
            rows = nbytes // (k * item)
            view = memoryview(self._source)[:nbytes]
            self._read(member, start, view)
            self._codes = _grown(self._codes, rows * k)
            out = memoryview(self._codes)[: rows * k]
            counts = cpu.fp8_quantize_rows(
                view, spec.dtype, k, out, memoryview(self._scales)[row * 4 : (row + rows) * 4]
            )
            _refuse_nonfinite(member, counts.nonfinite, counts.first_nonfinite, start // item)
            result.zero_rows += counts.zero_rows
            sink.append(out)
            row += rows
        sink.finish(result)
        scale_sink = _TensorSink(writer, scales)
        scale_sink.append(memoryview(self._scales)[: n * 4])
        scale_sink.finish(result)

    def _decode(self, kind: str, member: Member, writer: ShardWriter, result: JobResult) -> None:
        """Codes back to BF16; the scales are looked up beside the codes by name."""
        n, k = member.outputs[0].shape
        module = member.role.module
        scales = memoryview(self._checkpoint.read(f"{module}.weight_scale"))
        global_scale = 1.0
        if kind == "decode-nvfp4":
            raw = self._checkpoint.read(f"{module}.weight_scale_2")
            global_scale = float(np.frombuffer(raw, np.float32)[0])
        row_codes, row_scales = member.source.nbytes // n, scales.nbytes // n
        sink = _TensorSink(writer, member.outputs[0])
        row = 0
        for start, nbytes in self._pieces(member, row_codes):
            rows = nbytes // row_codes
            codes = memoryview(self._source)[:nbytes]
            self._read(member, start, codes)
            self._codes = _grown(self._codes, rows * k * 2)
            out = memoryview(self._codes)[: rows * k * 2]
            part = scales[row * row_scales : (row + rows) * row_scales]
            if kind == "decode-nvfp4":
                cpu.nvfp4_dequantize(codes, part, k, global_scale, out, "BF16")
            else:
                cpu.fp8_dequantize_rows(codes, part, k, out, "BF16")
            sink.append(out)
            row += rows
        sink.finish(result)

    def _nvfp4(self, job: Job, writer: ShardWriter, result: JobResult) -> None:
        buffer = self._pool.acquire(job.source_nbytes, self._stopped)
        try:
            with memoryview(buffer) as whole:
                views: list[memoryview] = []
                amax, begin = 0.0, 0
                for member in job.members:
                    view = whole[begin : begin + member.source.nbytes]
                    amax = max(amax, self._load(member, view))
                    views.append(view)
                    begin += member.source.nbytes
                if amax == 0.0:
                    result.zero_groups.append(job.group)
                scale = cpu.nvfp4_global_scale(amax)
                for member, view in zip(job.members, views, strict=True):
                    self._nvfp4_member(member, view, scale, writer, result)
                    view.release()
        finally:
            self._pool.release(buffer)

    def _load(self, member: Member, out: memoryview) -> float:
        """Read a member into `out`; its largest magnitude, taken while each piece is in cache."""
        item = ITEMSIZE[member.source.spec.dtype]
        amax = 0.0
        for start in range(0, out.nbytes, PIECE_BYTES):
            piece = out[start : start + PIECE_BYTES]
            self._read(member, start, piece)
            found = cpu.amax(piece, member.source.spec.dtype)
            _refuse_nonfinite(member, found.nonfinite, found.first_nonfinite, start // item)
            amax = max(amax, found.amax)
        return amax

    def _nvfp4_member(
        self,
        member: Member,
        data: memoryview,
        global_scale: float,
        writer: ShardWriter,
        result: JobResult,
    ) -> None:
        dtype = member.source.spec.dtype
        n, k = member.source.shape
        row_bytes = k * ITEMSIZE[dtype]
        rows_at_once = max(PIECE_BYTES // row_bytes, 1)
        codes, scales, scale_2, input_scale = member.outputs
        code_sink = _TensorSink(writer, codes)
        self._codes = _grown(self._codes, rows_at_once * k // 2)
        self._scales = _grown(self._scales, n * k // 16)
        scale_view = memoryview(self._scales)[: n * k // 16]
        for row in range(0, n, rows_at_once):
            if self._stopped():
                raise Interrupted("stopped")
            rows = min(rows_at_once, n - row)
            out = memoryview(self._codes)[: rows * k // 2]
            counts = cpu.nvfp4_quantize(
                data[row * row_bytes : (row + rows) * row_bytes],
                dtype,
                k,
                global_scale,
                out,
                scale_view[row * k // 16 : (row + rows) * k // 16],
            )
            result.underflow_blocks += counts.underflow
            result.zero_blocks += counts.zero
            code_sink.append(out)
        code_sink.finish(result)
        for tensor, content in (
            (scales, scale_view),
            (scale_2, _f32(global_scale)),
            (input_scale, _f32(self._input_scale(member.role.module))),
        ):
            sink = _TensorSink(writer, tensor)
            sink.append(content)
            sink.finish(result)


def _f32(value: float) -> memoryview:
    return memoryview(np.float32(value).tobytes())


def _grown(buffer: bytearray, nbytes: int) -> bytearray:
    return buffer if len(buffer) >= nbytes else bytearray(nbytes)


def _refuse_nonfinite(member: Member, count: int, first: int, base: int) -> None:
    if not count:
        return
    index, shape = base + first, member.source.shape
    place: list[int] = []
    for length in reversed(shape):
        place.insert(0, index % length)
        index //= length
    raise TensorError(
        f"{member.source.spec.file}: {member.role.name} holds NaN or infinity (at least {count},"
        f" first at {place}); repair the source, such a model cannot be served"
    )
