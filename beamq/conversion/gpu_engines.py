"""The engines of one GPU: what they share, and what they take of memory.

On the host each worker has `SLOT_BYTES` of page-locked chunks. On the device a pool has room for
what all workers have in hand, `DEVICE_BYTES` or twice the largest group, less where less is free.
Both are bounds; a run that cannot have them is refused before it begins.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from beamq.checkpoint import Checkpoint
from beamq.conversion.buffer_pool import BufferPool
from beamq.conversion.engines import CpuEngines
from beamq.conversion.gpu_areas import device_nbytes
from beamq.conversion.gpu_chunks import SLOT_BYTES
from beamq.conversion.gpu_engine import DevicePool, GpuEngine
from beamq.conversion.gpu_queue import CudaQueue, FirstLaunches, device_errors, device_memory
from beamq.errors import DeviceError
from beamq.plan import Work

DEVICE_BYTES = 2 << 30
MAX_WORKERS = 16  # 29 threads were slower than 16: they wait for the interpreter
FREE_SHARE = 0.5  # of the device's free memory, if that is less


def device_need(work: Work) -> int:
    """Bytes on a device that a run of `work` takes at most, if that many are free."""
    return max(DEVICE_BYTES, 2 * _largest(work))


class GpuEngines:
    """Engines on `device`. `memory` bounds page-locked memory and the fallback's groups, in bytes.

    Raises `DeviceError` where the device cannot be used or has too little memory.
    """

    def __init__(
        self, checkpoint: Checkpoint, work: Work, device: torch.device, memory: int, workers: int
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._memory = memory
        self._cpu = CpuEngines(checkpoint, memory, workers)
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

    def workers(self, asked: int) -> int:
        """As many as have page-locked chunks within `memory`, and not too many for one GPU."""
        return max(1, min(asked, MAX_WORKERS, self._memory // SLOT_BYTES))

    def engine(
        self,
        *,
        scales: str,
        input_scale: Callable[[str], float] | None,
        stopped: Callable[[], bool],
        advance: Callable[[int], None],
    ) -> GpuEngine:
        """See `Engines`."""
        return GpuEngine(
            self._checkpoint,
            CudaQueue(self._device, self._first),
            self._pool,
            self._cpu.engine(
                scales=scales, input_scale=input_scale, stopped=stopped, advance=advance
            ),
            scales=scales,
            input_scale=input_scale,
            stopped=stopped,
            advance=advance,
        )


def _largest(work: Work) -> int:
    return max((device_nbytes(job) for job in work.jobs), default=0)
