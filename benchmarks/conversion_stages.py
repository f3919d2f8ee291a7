"""Each stage of a conversion on a GPU alone: its time when nothing else runs.

In: a plan, a number of threads, a folder for files. Out: seconds that the whole source takes in
each stage. Memory, chunks and threads are those of the worker (`convert/gpu_worker.py`):

    read      threads read the source into two page-locked chunks each
    upload    as many bytes as the source has, from chunks to the device, a stream for each thread
    kernels   the jobs of one expert, eight copies in a graph, all on the device
    download  as many bytes as the output has, back into chunks
    write     threads write as many from chunks, into as many files as a conversion has open
    checksum  threads compute checksums of as many bytes
    by hand   the cores' work alone: each thread reads a chunk, writes and sums its share of output

`by hand` is the floor of a conversion on these cores, whatever does the arithmetic.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from beamq.beam.tensors import Role
from beamq.convert import gpu_worker
from beamq.convert.gpu_queue import Memory
from beamq.convert.gpu_worker import IN_BYTES as CHUNK_BYTES
from beamq.convert.run import Progress, queue_count
from beamq.io.checkpoint import Checkpoint
from beamq.io.manifest import new_checksum
from beamq.plan.plan import Job, JobKind, Member, Plan
from benchmarks.gpu_timing import graph_s

COPIES = 8  # of an expert: ten times the L2 cache


class Stages:
    """Measures stages one by one. `folder` gets files, which are removed again."""

    def __init__(
        self, checkpoint: Checkpoint, plan: Plan, folder: Path, *, threads: int, cuda: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._folder = folder
        self._threads = threads
        self._cuda = cuda
        self.read_nbytes = sum(job.source_nbytes for job in plan.jobs)
        self.written_nbytes = plan.tensor_nbytes

    def measure(self) -> dict[str, float]:
        """Seconds by stage; those of the GPU are missing where there is none."""
        found = {"read": self._run(self._reader)}
        if self._cuda:
            found["upload"] = self._run(lambda number: self._copier(self.read_nbytes, up=True))
            found["kernels"] = self._kernels()
            found["download"] = self._run(
                lambda number: self._copier(self.written_nbytes, up=False)
            )
        found["write"] = self._run(lambda number: self._writer(number))
        found["checksum"] = self._run(lambda number: self._summer())
        found["by hand"] = self.floor()
        return found

    def floor(self) -> float:
        """Seconds of `by hand`."""
        return self._run(self._by_hand)

    def _run(self, work_of: Callable[[int], Iterator[None]]) -> float:
        """Seconds until every thread's work is done; what comes before the first yield is free."""
        ready = threading.Barrier(self._threads + 1)
        failures: list[BaseException] = []

        def thread(number: int) -> None:
            try:
                work = work_of(number)
                next(work)
                ready.wait()
                for _ in work:
                    pass
            except BaseException as failure:
                failures.append(failure)
                ready.abort()

        threads = [threading.Thread(target=thread, args=(n,)) for n in range(self._threads)]
        for each in threads:
            each.start()
        try:
            ready.wait()
        except threading.BrokenBarrierError:
            raise failures[0] from None
        begun = time.monotonic()
        for each in threads:
            each.join()
        seconds = time.monotonic() - begun
        if failures:
            raise failures[0]
        for path in self._folder.glob("stage-*.bin"):
            path.unlink()
        return seconds

    def _chunk(self) -> torch.Tensor:
        return torch.full((CHUNK_BYTES,), 7, dtype=torch.uint8, pin_memory=self._cuda)

    def _bytes(self) -> memoryview:
        """A chunk as bytes."""
        return self._chunk().numpy().data

    def _pieces(self, number: int) -> Iterator[tuple[Member, int, int]]:
        """(member, start, bytes) of this thread's share of the source."""
        for job in self._plan.jobs[number :: self._threads]:
            for member in job.members:
                total = member.source.nbytes
                for start in range(0, total, CHUNK_BYTES):
                    yield member, start, min(CHUNK_BYTES, total - start)

    def _reader(self, number: int) -> Iterator[None]:
        chunks = [self._bytes() for _ in range(2)]
        yield
        for turn, (member, start, nbytes) in enumerate(self._pieces(number)):
            place = member.source.start + start
            self._checkpoint.read_into(member.source.spec, chunks[turn % 2][:nbytes], place)
            yield

    def _copier(self, total: int, *, up: bool) -> Iterator[None]:
        pairs = [
            (self._chunk(), torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cuda"))
            for _ in range(2)
        ]
        marks = [torch.cuda.Event(blocking=True) for _ in range(2)]
        stream = torch.cuda.Stream()
        yield
        with torch.cuda.stream(stream):
            for turn in range(-(-total // (self._threads * CHUNK_BYTES))):
                (here, device), mark = pairs[turn % 2], marks[turn % 2]
                mark.synchronize()
                (device if up else here).copy_(here if up else device, non_blocking=True)
                mark.record()
                yield
        stream.synchronize()

    def _open(self, number: int) -> int:
        files = queue_count(self._threads, in_order=False)
        path = self._folder / f"stage-{number % files}.bin"
        return os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def _writer(self, number: int) -> Iterator[None]:
        chunk = self._bytes()
        descriptor = self._open(number)
        share = -(-self.written_nbytes // self._threads)
        yield
        for done in range(0, share, CHUNK_BYTES):
            size = min(CHUNK_BYTES, share - done)
            os.pwrite(descriptor, chunk[:size], number * share + done)
            yield
        os.close(descriptor)

    def _summer(self) -> Iterator[None]:
        chunk = self._bytes()
        checksum = new_checksum()
        yield
        for _ in range(-(-self.written_nbytes // (self._threads * CHUNK_BYTES))):
            checksum.update(chunk)
            yield

    def _by_hand(self, number: int) -> Iterator[None]:
        chunk = self._bytes()
        descriptor, checksum = self._open(number), new_checksum()
        ratio = self.written_nbytes / self.read_nbytes
        read = written = 0
        base = number * -(-self.read_nbytes // self._threads)  # a sparse file: no overlap
        yield
        for member, start, nbytes in self._pieces(number):
            place = member.source.start + start
            self._checkpoint.read_into(member.source.spec, chunk[:nbytes], place)
            read += nbytes
            due = round(read * ratio) - written
            os.pwrite(descriptor, chunk[:due], base + written)
            checksum.update(chunk[:due])
            written += due
            yield
        os.close(descriptor)

    def _kernels(self) -> float:
        """The jobs of one expert (or all jobs of a small layer), scaled to the source's bytes."""
        jobs = [
            job
            for job in self._plan.jobs
            if job.kind is not JobKind.COPY and job.members[0].role.role is Role.EXPERT
        ]
        first = jobs[0].members[0].role
        jobs = COPIES * [
            job
            for job in jobs
            if (job.members[0].role.layer, job.members[0].role.expert)
            == (first.layer, first.expert)
        ]
        seconds = graph_s([partial(_launch, job, self._plan, _device_memory(job)) for job in jobs])
        return seconds * self.read_nbytes / sum(job.source_nbytes for job in jobs)


def _device_memory(job: Job) -> Memory:
    """What a job takes on the device, its source filled with random values."""
    place = torch.zeros(gpu_worker.device_nbytes(job), dtype=torch.uint8, device="cuda")
    place[: gpu_worker.area_nbytes(job)[0]].view(torch.bfloat16).normal_(0, 0.02)
    return Memory(place.data_ptr(), place.nbytes, place)


def _launch(job: Job, plan: Plan, memory: Memory) -> None:
    """Launch a job's kernels."""
    from beamq.formats.kernels import gpu  # Triton is installed only next to a GPU

    dtype, k = job.members[0].source.spec.dtype, job.members[0].source.shape[1]
    n = sum(member.source.shape[0] for member in job.members)
    areas = gpu_worker.split(memory, gpu_worker.area_nbytes(job))
    source, codes, scales, info = (area.address for area in areas)
    if job.kind is not JobKind.NVFP4:
        gpu.fp8_rows(source, codes, scales, info, rounding=job.kind, dtype=dtype, n=n, k=k)
    else:
        rule = plan.scales
        gpu.nvfp4_group(source, codes, scales, info, dtype=dtype, n=n, k=k, scale_rule=rule)


class Clock:
    """The first and the last moment at which a conversion reported progress.

    Many threads call `look`, in any order. Moments are of the monotonic clock, which all processes
    of a machine share.
    """

    def __init__(self) -> None:
        self.first = float("inf")
        self.last = 0.0

    def look(self, progress: Progress) -> None:
        """For `on_progress`."""
        now = time.monotonic()
        self.first, self.last = min(self.first, now), max(self.last, now)

    @property
    def moving(self) -> float:
        """Seconds in which bytes moved."""
        return max(self.last - self.first, 1e-9)
