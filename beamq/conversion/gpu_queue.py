"""One worker's line to a GPU: a stream, page-locked memory, and the kernels that run on it.

`GpuQueue` is all that `GpuEngine` asks of a device. Everything is queued and nothing waits until a
`Mark` is waited for, which puts the thread to sleep (16 threads that spin would take the cores from
those that read and write) and leaves the interpreter to others. `CudaQueue` is the GPU; tests run
the same engine on one that computes on the CPU, as late as it may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from beamq.errors import DeviceError, MemoryBudgetError


class Mark(Protocol):
    """A place in the queue."""

    def record(self) -> None:
        """Here: behind all that was queued so far."""

    def synchronize(self) -> None:
        """Return when the queue has come so far."""


class GpuQueue(Protocol):
    """Flat uint8 tensors everywhere. Not shared between threads."""

    def using(self) -> AbstractContextManager[object]:
        """Around everything that is queued."""

    def host(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory."""

    def mark(self) -> Mark:
        """A new mark, not recorded yet."""

    def locked(self, tensor: torch.Tensor) -> bool:
        """Whether memory on the host can be copied from without a stop."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between host and device."""

    def nvfp4(self, place: tuple[torch.Tensor, ...], dtype: str, n: int, k: int, rule: str) -> None:
        """Queue `gpu_groups.nvfp4_group` on (source, codes, scales, info)."""

    def fp8(self, place: tuple[torch.Tensor, ...], dtype: str, n: int, k: int) -> None:
        """Queue `gpu_groups.fp8_rows`, likewise."""

    def drain(self) -> None:
        """Wait for all that is queued."""


class FirstLaunches:
    """Lets each kind of launch happen once alone: Triton compiles on the first, in every thread
    that comes meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[Hashable] = set()

    def launch(self, kind: Hashable, body: Callable[[], None]) -> None:
        """Run `body`."""
        if kind in self._seen:
            body()
            return
        with self._lock:
            body()
            self._seen.add(kind)


class CudaQueue:
    """A stream of `device`. Raises `DeviceError` and `MemoryBudgetError` where CUDA fails."""

    def __init__(self, device: torch.device, first: FirstLaunches) -> None:
        from beamq.formats.kernels import gpu_groups  # Triton, only where there is a GPU

        self._kernels = gpu_groups
        self._device = device
        self._first = first
        with device_errors(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def using(self) -> Iterator[None]:
        """This thread's current stream and device meanwhile; CUDA's failures become ours."""
        with device_errors(self._device), torch.cuda.stream(self._stream):
            yield

    def host(self, nbytes: int) -> torch.Tensor:
        """See `GpuQueue`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as fault:
            raise MemoryBudgetError(
                f"{nbytes / 1e6:.0f} MB of page-locked memory could not be had ({_line(fault)});"
                " use fewer --workers, or --device cpu"
            ) from fault

    def mark(self) -> Mark:
        """See `GpuQueue`."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def locked(self, tensor: torch.Tensor) -> bool:
        """See `GpuQueue`."""
        return tensor.is_pinned()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """See `GpuQueue`."""
        to.copy_(source, non_blocking=True)

    def nvfp4(self, place: tuple[torch.Tensor, ...], dtype: str, n: int, k: int, rule: str) -> None:
        """See `GpuQueue`."""
        self._first.launch(
            (rule, dtype, n, k),
            lambda: self._kernels.nvfp4_group(*place, dtype=dtype, n=n, k=k, rule=rule),
        )

    def fp8(self, place: tuple[torch.Tensor, ...], dtype: str, n: int, k: int) -> None:
        """See `GpuQueue`."""
        self._first.launch(
            ("fp8", dtype, k), lambda: self._kernels.fp8_rows(*place, dtype=dtype, n=n, k=k)
        )

    def drain(self) -> None:
        """See `GpuQueue`."""
        self._stream.synchronize()


def device_memory(device: torch.device, nbytes: int) -> torch.Tensor:
    """Flat uint8 memory of a GPU. Raises `DeviceError` with what is free if there is too little."""
    with device_errors(device):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


@contextmanager
def device_errors(device: torch.device) -> Iterator[None]:
    """Turn what CUDA raises into `DeviceError`."""
    try:
        yield
    except torch.OutOfMemoryError as fault:
        free, total = torch.cuda.mem_get_info(device)
        raise DeviceError(
            f"{device} is out of memory: {free / 1e9:.2f} of {total / 1e9:.2f} GB are free; end"
            " what else runs there, choose another --device, or convert with --device cpu"
        ) from fault
    except RuntimeError as fault:
        if "CUDA" not in str(fault):
            raise
        raise DeviceError(
            f"{device} failed: {_line(fault)}; what is finished is kept: run again with --resume,"
            " on another --device if it fails again"
        ) from fault


def _line(fault: BaseException) -> str:
    return " ".join(str(fault).split("\n", 1)[0].split())[:200]
