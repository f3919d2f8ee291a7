"""Quantize one job on the CPU: read rows, run the kernels on cache-warm pieces, write in place.

In: a `Job` and its shard's writer. Out: the job's bytes on disk, checksums of its tensors and
what the kernels counted. A caller that has the source's bytes already (a forward pass has just
read them) hands them over; one that knows no input scale yet writes it later.

Data moves in pieces of about 1 MiB that stay in the core's cache between reading, the kernel and
writing (larger ones where many threads run, see `piece_bytes`). FP8 rows need nothing else. NVFP4
needs the largest magnitude of the whole group before the first code: a group up to `HELD_BYTES` (an
expert's gate and up) is held in a buffer from a bounded pool; a larger one (a dense MLP's) is read
twice, the second time from the page cache, because touching fresh memory costs more than a second
copy. Every call that takes time releases the interpreter lock, so plain threads fill the cores.
torch is not imported: it would take as long as converting 5 GB.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Protocol

from beamq.beam.tensors import Role
from beamq.convert.buffer_pool import HostPool, host_pool
from beamq.convert.open_shards import (
    JobResult,
    TensorSink,
    f32_bytes,
    write_input_scale,
    write_whole,
)
from beamq.errors import Interrupted, TensorError
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.safetensors_header import ITEMSIZE
from beamq.io.shard_writer import ShardWriter
from beamq.plan.plan import Job, Member

PIECE_BYTES = 1 << 20
MANY_WORKERS = 4
HELD_BYTES = 64 << 20


def piece_bytes(workers: int) -> int:
    """Bytes of a piece where so many threads convert.

    Each piece costs three to five turns at the interpreter, which where sixteen threads want it
    take as long as reading 1 MiB (ADR 12). Few threads gain more from pieces that stay in cache.
    What all threads hold stays below 512 MiB.
    """
    if workers <= MANY_WORKERS:
        return PIECE_BYTES
    return PIECE_BYTES * max(1, min(8, 128 // workers))


class CpuWorker:
    """Runs jobs for one worker thread. Not shared between threads; the pool is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        pool: HostPool,
        *,
        scales: str,
        input_scale: Callable[[str], float] | None,
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
        piece: int = PIECE_BYTES,
    ) -> None:
        """`scales` chooses NVFP4's block scales (see `Recipe`), `piece` how many bytes are worked
        on at a time.

        Without `input_scale`, those tensors are left for `write_input_scale`."""
        self._checkpoint = checkpoint
        self._pool = pool
        self._rule = scales
        self._input_scale = input_scale
        self._stopped = stopped
        self._advance = advance
        self._held: dict[int, memoryview] = {}
        self._piece_bytes = piece
        self._source = bytearray()
        self._codes = bytearray()
        self._scales = bytearray()

    def run(
        self, job: Job, writer: ShardWriter, held: Sequence[memoryview] | None = None
    ) -> JobResult:
        """Convert one job. Raises `TensorError` for non-finite values, `DiskError`, ...

        `held` has the source bytes of each member; without it they are read.
        """
        self._held = {id(m): v for m, v in zip(job.members, held or (), strict=held is not None)}
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
        size = max(self._piece_bytes // unit, 1) * unit
        total = member.source.nbytes
        return [(start, min(size, total - start)) for start in range(0, total, size)]

    def _piece(self, member: Member, start: int, nbytes: int, *, again: bool = False) -> memoryview:
        """Some of a member's source bytes; valid until the next piece."""
        held = self._held.get(id(member))
        if held is not None:
            self._check(0 if again else nbytes)
            return held[start : start + nbytes]
        self._source = _grown(self._source, nbytes)
        view = memoryview(self._source)[:nbytes]
        self._read(member, start, view, again=again)
        return view

    def _read(self, member: Member, start: int, out: memoryview, *, again: bool = False) -> None:
        self._check(0 if again else out.nbytes)
        source = member.source
        self._checkpoint.read_into(source.spec, out, source.start + start)

    def _check(self, nbytes: int) -> None:
        if self._stopped():
            raise Interrupted("stopped")
        self._advance(nbytes)

    def _copy(self, member: Member, writer: ShardWriter, result: JobResult) -> None:
        spec, output = member.source.spec, member.outputs[0]
        sink = TensorSink(writer, output)
        item, out_item = ITEMSIZE[spec.dtype], ITEMSIZE[output.dtype]
        checked = member.role.role is not Role.EXTRA and spec.dtype in FLOAT_SOURCES
        for start, nbytes in self._pieces(member, item):
            view = self._piece(member, start, nbytes)
            if checked:
                found = cpu.amax(view, spec.dtype)
                _refuse_nonfinite(member, found.nonfinite, found.first_nonfinite, start // item)
            if output.dtype != spec.dtype:
                size = nbytes // item * out_item
                self._codes = _grown(self._codes, size)
                converted = memoryview(self._codes)[:size]
                if cpu.convert(view, spec.dtype, converted, output.dtype):
                    raise TensorError(
                        f"{spec.file}: {spec.name} holds values beyond {output.dtype}'s range"
                        " (3.4e38); they would become infinite. Repair the source"
                    )
                view = converted
            sink.append(view)
        sink.finish(result)

    def _fp8(self, member: Member, writer: ShardWriter, result: JobResult) -> None:
        spec = member.source.spec
        n, k = member.source.shape
        item = ITEMSIZE[spec.dtype]
        codes, scales = member.outputs
        sink = TensorSink(writer, codes)
        self._scales = _grown(self._scales, n * 4)
        row = 0
        for start, nbytes in self._pieces(member, k * item):
            rows = nbytes // (k * item)
            view = self._piece(member, start, nbytes)
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
        write_whole(writer, scales, memoryview(self._scales)[: n * 4], result)

    def _decode(self, kind: str, member: Member, writer: ShardWriter, result: JobResult) -> None:
        """Codes back to BF16; the scales are looked up beside the codes by name."""
        n, k = member.outputs[0].shape
        module = member.role.module
        scales = memoryview(self._checkpoint.read(f"{module}.weight_scale"))
        global_scale = 1.0
        if kind == "decode-nvfp4":
            raw = self._checkpoint.read(f"{module}.weight_scale_2")
            global_scale = struct.unpack("<f", raw)[0]
            if not 2.0**-126 <= global_scale <= 2.0**117:
                raise TensorError(
                    f"{member.source.spec.file}: {module}.weight_scale_2 is {global_scale}, which"
                    " no weight can have; `beamq verify` tells what is broken"
                )
        row_codes, row_scales = member.source.nbytes // n, scales.nbytes // n
        sink = TensorSink(writer, member.outputs[0])
        row = 0
        for start, nbytes in self._pieces(member, row_codes):
            rows = nbytes // row_codes
            codes = self._piece(member, start, nbytes)
            self._codes = _grown(self._codes, rows * k * 2)
            out = memoryview(self._codes)[: rows * k * 2]
            part = scales[row * row_scales : (row + rows) * row_scales]
            if kind == "decode-nvfp4":
                cpu.nvfp4_dequantize(codes, part, k, global_scale, out, "BF16")
            else:
                cpu.fp8_dequantize_rows(codes, part, k, out, "BF16")
            found = cpu.amax(out, "BF16")  # a NaN among codes or scales, or a scale far off
            if found.nonfinite:
                place = list(divmod(row * k + found.first_nonfinite, k))
                raise TensorError(
                    f"{member.source.spec.file}: {module} decodes to NaN or infinity (first at"
                    f" {place}); `beamq verify` tells what is broken"
                )
            sink.append(out)
            row += rows
        sink.finish(result)

    def _nvfp4(self, job: Job, writer: ShardWriter, result: JobResult) -> None:
        if self._held or job.source_nbytes > HELD_BYTES:
            self._nvfp4_group(job, [None] * len(job.members), writer, result)
            return
        buffer = self._pool.acquire(job.source_nbytes, self._stopped)
        try:
            with memoryview(buffer) as whole:
                views: list[memoryview] = []
                begin = 0
                for member in job.members:
                    views.append(whole[begin : begin + member.source.nbytes])
                    begin += member.source.nbytes
                self._nvfp4_group(job, views, writer, result)
                for view in views:
                    view.release()
        finally:
            self._pool.release(buffer)

    def _nvfp4_group(
        self,
        job: Job,
        views: Sequence[memoryview | None],
        writer: ShardWriter,
        result: JobResult,
    ) -> None:
        """Quantize with one global scale. Views are filled; members without one read in pieces."""
        amax = max(self._load(m, view) for m, view in zip(job.members, views, strict=True))
        if amax == 0.0:
            result.zero_groups.append(job.group)
        scale = cpu.nvfp4_global_scale(amax)
        for member, view in zip(job.members, views, strict=True):
            self._nvfp4_member(member, view, scale, writer, result)

    def _load(self, member: Member, out: memoryview | None) -> float:
        """Fill `out`, if given; the largest magnitude, taken while pieces are in cache."""
        item = ITEMSIZE[member.source.spec.dtype]
        amax = 0.0
        for start, nbytes in self._pieces(member, item):
            if out is None:
                piece = self._piece(member, start, nbytes)
            else:
                piece = out[start : start + nbytes]
                self._read(member, start, piece)
            found = cpu.amax(piece, member.source.spec.dtype)
            _refuse_nonfinite(member, found.nonfinite, found.first_nonfinite, start // item)
            amax = max(amax, found.amax)
        return amax

    def _nvfp4_member(
        self,
        member: Member,
        data: memoryview | None,
        global_scale: float,
        writer: ShardWriter,
        result: JobResult,
    ) -> None:
        dtype = member.source.spec.dtype
        n, k = member.source.shape
        row_bytes = k * ITEMSIZE[dtype]
        rows_at_once = max(self._piece_bytes // row_bytes, 1)
        codes, scales, scale_2, _ = member.outputs
        code_sink = TensorSink(writer, codes)
        self._codes = _grown(self._codes, rows_at_once * k // 2)
        self._scales = _grown(self._scales, n * k // 16)
        scale_view = memoryview(self._scales)[: n * k // 16]
        for row in range(0, n, rows_at_once):
            self._check(0)
            rows = min(rows_at_once, n - row)
            begin, nbytes = row * row_bytes, rows * row_bytes
            if data is None:
                piece = self._piece(member, begin, nbytes, again=True)
            else:
                piece = data[begin : begin + nbytes]
            out = memoryview(self._codes)[: rows * k // 2]
            counts = cpu.nvfp4_quantize(
                piece,
                dtype,
                k,
                global_scale,
                out,
                scale_view[row * k // 16 : (row + rows) * k // 16],
                scale_rule=self._rule,
            )
            result.underflow_blocks += counts.underflow
            result.zero_blocks += counts.zero
            code_sink.append(out)
        code_sink.finish(result)
        for tensor, content in ((scales, scale_view), (scale_2, f32_bytes(global_scale))):
            write_whole(writer, tensor, content, result)
        if self._input_scale is not None:
            write_input_scale(member, self._input_scale, writer, result)


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


# What converts jobs: threads on the CPU, or threads that feed a GPU.
#
# `WorkerFactory` makes one `Worker` for each thread; `CpuWorkerFactory` is here, `GpuWorkerFactory`
# in gpu_worker.py, which imports torch. The bytes are the same (tests/gpu/test_gpu_convert.py), so
# which of them runs is a question of time alone: `device_choice.py` answers it.


class Worker(Protocol):
    """Runs jobs for one thread."""

    def run(
        self, job: Job, writer: ShardWriter, held: Sequence[memoryview] | None = None
    ) -> JobResult:
        """See `CpuWorker.run`."""


class WorkerFactory(Protocol):
    """Makes workers for the threads of one run. `device_nbytes` bounds what they take of a GPU."""

    device_nbytes: int

    def count(self, asked: int) -> int:
        """How many threads to run, at most as many as asked for."""

    def worker(
        self,
        *,
        scales: str,
        input_scale: Callable[[str], float] | None,
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
    ) -> Worker:
        """One for the calling thread; see `CpuWorker` for the options."""


class CpuWorkerFactory:
    """Workers for `workers` threads, which share `memory` bytes for scale groups."""

    device_nbytes = 0

    def __init__(self, checkpoint: Checkpoint, memory: int, workers: int) -> None:
        self._checkpoint = checkpoint
        self._piece = piece_bytes(workers)
        self._pool = host_pool(memory)

    def count(self, asked: int) -> int:
        """All of them."""
        return asked

    def worker(
        self,
        *,
        scales: str,
        input_scale: Callable[[str], float] | None,
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
    ) -> CpuWorker:
        """See `WorkerFactory`."""
        return CpuWorker(
            self._checkpoint,
            self._pool,
            scales=scales,
            input_scale=input_scale,
            stopped=stopped,
            advance=advance,
            piece=self._piece,
        )
