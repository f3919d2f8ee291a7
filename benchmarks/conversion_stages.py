"""Each stage of a conversion on a GPU alone: what it could do if nothing else ran.

In: a plan, a number of threads, a folder for files. Out: seconds that the whole source takes in
each stage. Memory, chunks and threads are those of the worker (`convert/gpu_worker.py`):

    read      threads read the source into two page-locked chunks each
    upload    as many bytes as the source has, from chunks to the device, a stream for each thread
    kernels   the jobs of one expert, eight copies in a graph, all on the device
    download  as many bytes as the output has, back into chunks
    write     threads write as many from chunks, into as many files as there are queues
    checksum  threads take checksums of as many
    by hand   what cores do, and nothing else: each thread reads a chunk, writes and sums its share

`by hand` is the floor of a conversion on these cores, whatever does the arithmetic.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from beamq.beam.tensors import Role
from beamq.convert.gpu_queue import Memory
from beamq.convert.gpu_worker import IN_BYTES as CHUNK_BYTES
from beamq.convert.run import queue_count
from beamq.io.checkpoint import Checkpoint
from beamq.io.manifest import new_checksum
from beamq.plan.plan import Job, JobKind, Plan

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

        threads = [
            threading.Thread(target=thread, args=(number,)) for number in range(self._threads)
        ]
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

    def _pieces(self, number: int) -> Iterator[tuple[Any, int, int]]:
        """(member, start, bytes) of this thread's share of the source."""
        for job in self._plan.jobs[number :: self._threads]:
            for member in job.members:
                total = member.source.nbytes
                for start in range(0, total, CHUNK_BYTES):
                    yield member, start, min(CHUNK_BYTES, total - start)

    def _reader(self, number: int) -> Iterator[None]:
        chunks = [memoryview(self._chunk().numpy()) for _ in range(2)]  # type: ignore[arg-type]
        yield
        for turn, (member, start, nbytes) in enumerate(self._pieces(number)):
            place = member.source.start + start
            self._checkpoint.read_into(member.source.spec, chunks[turn % 2][:nbytes], place)
            yield

    def _copier(self, total: int, *, up: bool) -> Iterator[None]:
        chunks = [self._chunk() for _ in range(2)]
        there = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
        marks = [torch.cuda.Event(blocking=True) for _ in range(2)]
        stream = torch.cuda.Stream()
        yield
        with torch.cuda.stream(stream):
            for turn in range(-(-total // (self._threads * CHUNK_BYTES))):
                here, device, mark = (each[turn % 2] for each in (chunks, there, marks))
                mark.synchronize()
                (device if up else here).copy_(here if up else device, non_blocking=True)
                mark.record()
                yield
        stream.synchronize()

    def _open(self, number: int) -> int:
        queues = queue_count(self._threads, remote=False)
        path = self._folder / f"stage-{number % queues}.bin"
        return os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)

    def _writer(self, number: int) -> Iterator[None]:
        chunk = memoryview(self._chunk().numpy())  # type: ignore[arg-type]
        descriptor = self._open(number)
        share = -(-self.written_nbytes // self._threads)
        yield
        for done in range(0, share, CHUNK_BYTES):
            size = min(CHUNK_BYTES, share - done)
            os.pwrite(descriptor, chunk[:size], number * share + done)
            yield
        os.close(descriptor)

    def _summer(self) -> Iterator[None]:
        chunk = self._chunk().numpy()
        checksum = new_checksum()
        yield
        for _ in range(-(-self.written_nbytes // (self._threads * CHUNK_BYTES))):
            checksum.update(chunk)
            yield

    def _by_hand(self, number: int) -> Iterator[None]:
        chunk = memoryview(self._chunk().numpy())  # type: ignore[arg-type]
        descriptor, checksum = self._open(number), new_checksum()
        ratio = self.written_nbytes / self.read_nbytes
        read = written = 0
        base = number * -(-self.read_nbytes // self._threads)  # sparse: nobody meets
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
        jobs = [
            job
            for job in jobs
            if (job.members[0].role.layer, job.members[0].role.expert)
            == (first.layer, first.expert)
        ]
        graph = _captured([job for _ in range(COPIES) for job in jobs], self._plan.scales)
        seconds = _seconds(graph.replay)
        return seconds * self.read_nbytes / (COPIES * sum(job.source_nbytes for job in jobs))


def _captured(jobs: Sequence[Job], rule: str) -> torch.cuda.CUDAGraph:
    """A graph of jobs, each on random values in device memory of its own."""
    from beamq.convert import gpu_worker
    from beamq.formats.kernels import gpu

    places: list[torch.Tensor] = []
    calls: list[Callable[[], None]] = []
    for job in jobs:
        dtype, k = job.members[0].source.spec.dtype, job.members[0].source.shape[1]
        n = sum(member.source.shape[0] for member in job.members)
        sizes = gpu_worker.area_nbytes(job)
        place = torch.zeros(gpu_worker.device_nbytes(job), dtype=torch.uint8, device="cuda")
        place[: sizes[0]].view(torch.bfloat16).normal_(0, 0.02)
        memory = Memory(place.data_ptr(), place.nbytes, place)
        areas = [area.address for area in gpu_worker.split(memory, sizes)]
        shape: dict[str, Any] = {"dtype": dtype, "n": n, "k": k}
        call = gpu.fp8_rows
        if job.kind is not JobKind.FP8:
            call, shape["scale_rule"] = gpu.nvfp4_group, rule
        places.append(place)
        calls.append(partial(call, *areas, **shape))
    for each in calls:
        each()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in calls:
            each()
    graph.places = places  # they live as long as it does
    return graph


def _seconds(call: Callable[[], Any], repeats: int = 9) -> float:
    """Median, by events."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]
