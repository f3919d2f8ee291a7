"""A GPU for tests where there is none: the same queue, its kernels on the CPU.

What is queued happens at once, or (`late`) not before a mark behind it is waited for: then a copy
out of a buffer that was filled again too early, or bytes looked at before they came, give other
bytes than the CPU worker's.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from beamq.convert.cpu_worker import BufferPool, CpuWorkerFactory, JobContext
from beamq.convert.gpu_queue import DeviceLayout, Floats, Memory
from beamq.convert.gpu_worker import GpuWorker
from beamq.formats import numerics
from beamq.formats.kernels import RESULT_NBYTES, KernelResult, cpu
from beamq.formats.numerics import TORCH_DTYPES
from beamq.io.checkpoint import Checkpoint

GARBAGE = 0xA5


class HostQueue:
    """A `GpuQueue` in host memory. `locked` is what it says of memory it did not allocate;
    global scales are result `wrong` times too large."""

    def __init__(self, *, late: bool, locked: bool = False, wrong: float = 1.0) -> None:
        self._late = late
        self._locked = locked
        self._wrong = wrong
        self._waiting: deque[Callable[[], Any]] = deque()
        self.queued = self._done = self.merged = 0

    def using(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, GARBAGE, np.uint8)

    def locked(self, address: int) -> bool:
        return self._locked

    def mark(self) -> HostMark:
        return HostMark(self)

    def upload(self, to: Memory, source: int) -> None:
        self._queue(lambda: ctypes.memmove(to.address, source, to.nbytes))

    def download(self, to: int, source: Memory) -> None:
        self._queue(lambda: ctypes.memmove(to, source.address, source.nbytes))

    def add_low_rank(self, to: Memory, dtype: str, a: Floats, b: Floats, scaling: float) -> None:
        def work() -> None:
            w = torch.from_numpy(array_of(to)).view(TORCH_DTYPES[dtype]).view(-1, a.shape[1])
            there = torch.from_numpy(a), torch.from_numpy(b)
            w.copy_(numerics.add_low_rank(w, there[0], there[1], scaling, w.dtype))
            self.merged += 1

        self._queue(work)

    def nvfp4(self, layout: DeviceLayout, dtype: str, n: int, k: int, rule: str) -> None:
        arrays = [array_of(memory) for memory in layout]
        self._queue(lambda: nvfp4_group(*arrays, dtype, n, k, rule, self._wrong))

    def fp8(self, layout: DeviceLayout, rounding: str, dtype: str, n: int, k: int) -> None:
        arrays = [array_of(memory) for memory in layout]
        self._queue(lambda: fp8_rows(*arrays, rounding, dtype, n, k))

    def drain(self) -> None:
        self.run_to(self.queued)

    def run_to(self, place: int) -> None:
        while self._done < place:
            self._waiting.popleft()()
            self._done += 1

    def _queue(self, work: Callable[[], Any]) -> None:
        self._waiting.append(work)
        self.queued += 1
        if not self._late:
            self.drain()


def array_of(memory: Memory) -> np.ndarray:
    raw = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    return np.frombuffer(raw, np.uint8)


class HostMark:
    def __init__(self, queue: HostQueue) -> None:
        self._queue = queue
        self._place: int | None = None

    def record(self) -> None:
        self._place = self._queue.queued

    def wait(self) -> None:
        assert self._place is not None, "waited for a mark that was never recorded"
        self._queue.run_to(self._place)


def nvfp4_group(
    source: np.ndarray, codes: np.ndarray, scales: np.ndarray, info: np.ndarray,
    dtype: str, n: int, k: int, rule: str, wrong: float,
) -> None:  # fmt: skip
    """As `gpu.nvfp4_group`, a value that is not finite included."""
    assert source.nbytes == n * k * {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    found = cpu.amax(source, dtype)
    scale = cpu.nvfp4_global_scale(found.amax)
    counts = cpu.nvfp4_quantize(source, dtype, k, scale, codes, scales, scale_rule=rule)
    result = KernelResult(
        amax=float("nan") if found.nonfinite else found.amax,
        global_scale=scale * wrong,
        counts=(counts.saturated, counts.underflow, counts.zero, counts.nonfinite),
    )
    info[:] = np.frombuffer(result.pack(), np.uint8)


def fp8_rows(
    source: np.ndarray, codes: np.ndarray, scales: np.ndarray, info: np.ndarray,
    rounding: str, dtype: str, n: int, k: int,
) -> None:  # fmt: skip
    """As `gpu.fp8_rows`."""
    counts = cpu.fp8_quantize(rounding, source, dtype, k, codes, scales)
    result = KernelResult(
        amax=0.0, global_scale=0.0, counts=(counts.nonfinite, counts.zero_rows, 0, 0)
    )
    info[:] = np.frombuffer(result.pack(), np.uint8)


class HostWorkerFactory:
    """`GpuWorkerFactory` on such queues; `calls` counts the workers made and the groups granted."""

    device_nbytes = 0

    def __init__(
        self, checkpoint: Checkpoint, *, late: bool = True, locked: bool = False,
        wrong: float = 1.0, budget: int = 1 << 26,
    ) -> None:  # fmt: skip
        self._checkpoint = checkpoint
        self._options: dict[str, Any] = {"late": late, "locked": locked, "wrong": wrong}
        self._cpu = CpuWorkerFactory(checkpoint, 1 << 26, 2)
        self.allocated: list[int] = []
        self.made: list[GpuWorker] = []
        self.pool: BufferPool[Memory] = BufferPool(
            budget, allocate=self._allocate, size=lambda t: t.nbytes, discard=lambda t: None
        )

    def _allocate(self, nbytes: int) -> Memory:
        self.allocated.append(nbytes)
        array = np.full(nbytes, GARBAGE, np.uint8)
        return Memory(array.ctypes.data, nbytes, array)

    def count(self, asked: int) -> int:
        return asked

    def worker(self, context: JobContext) -> GpuWorker:
        worker = GpuWorker(
            self._checkpoint,
            HostQueue(**self._options),
            self.pool,
            self._cpu.worker(context),
            context,
        )
        self.made.append(worker)
        return worker


assert len(KernelResult(amax=1.0, global_scale=1.0, counts=(0, 0, 0, 0)).pack()) == RESULT_NBYTES
