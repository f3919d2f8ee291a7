"""What converts jobs: threads on the CPU, or threads that feed a GPU.

`Engines` makes one `Engine` for each worker thread; `CpuEngines` is here, `GpuEngines` in
gpu_engines.py, which imports torch. The bytes are the same (tests/gpu/test_gpu_convert.py), so
which of them runs is a question of time alone: `engine_choice.py` answers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from beamq.checkpoint import Checkpoint
from beamq.conversion.buffer_pool import host_pool
from beamq.conversion.cpu_engine import CpuEngine, piece_bytes
from beamq.conversion.sinks import JobResult
from beamq.plan import Job
from beamq.shards import ShardWriter


class Engine(Protocol):
    """Runs jobs for one thread."""

    def run(
        self, job: Job, writer: ShardWriter, held: Sequence[memoryview] | None = None
    ) -> JobResult:
        """See `CpuEngine.run`."""


class Engines(Protocol):
    """Makes engines for the threads of one run. `device_nbytes` bounds what they take of a GPU."""

    device_nbytes: int

    def workers(self, asked: int) -> int:
        """How many threads to run, at most as many as asked for."""

    def engine(
        self,
        *,
        scales: str,
        input_scale: Callable[[str], float] | None,
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
    ) -> Engine:
        """One for the calling thread; see `CpuEngine` for the options."""


class CpuEngines:
    """Engines for `workers` threads, which share `memory` bytes for scale groups."""

    device_nbytes = 0

    def __init__(self, checkpoint: Checkpoint, memory: int, workers: int) -> None:
        self._checkpoint = checkpoint
        self._piece = piece_bytes(workers)
        self._pool = host_pool(memory)

    def workers(self, asked: int) -> int:
        """All of them."""
        return asked

    def engine(
        self,
        *,
        scales: str,
        input_scale: Callable[[str], float] | None,
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
    ) -> CpuEngine:
        """See `Engines`."""
        return CpuEngine(
            self._checkpoint,
            self._pool,
            scales=scales,
            input_scale=input_scale,
            stopped=stopped,
            advance=advance,
            piece=self._piece,
        )
