"""One worker's line to a GPU: a stream, page-locked memory, and the kernels that run on it.

`GpuQueue` is all that `GpuEngine` asks of a device. Everything is queued and nothing waits until a
mark is waited for, which puts the thread to sleep (16 threads that spin would take the cores from
those that read and write) and leaves the interpreter to others. `CudaQueue` is the GPU; tests run
the same engine on one that computes on the CPU, as late as it may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from beamq.conversion.cuda_driver import CudaDriver
from beamq.errors import DeviceError, MemoryBudgetError
from beamq.formats.kernels.group_info import INFO_BYTES

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Memory:
    """A stretch of a device's memory, which `owner` keeps alive."""

    address: int
    nbytes: int
    owner: Any

    def part(self, start: int, nbytes: int) -> Memory:
        """Some bytes of it."""
        return Memory(self.address + start, nbytes, self.owner)


Place = tuple[Memory, Memory, Memory, Memory]
"""Source, codes, scales, info of what the kernels do at a time."""


class Mark(Protocol):
    """A place in the queue."""

    def record(self) -> None:
        """Here: behind all that was queued so far."""

    def wait(self) -> None:
        """Return when the queue has come so far."""


class GpuQueue(Protocol):
    """Not shared between threads. Addresses are those of page-locked memory."""

    def using(self) -> AbstractContextManager[object]:
        """Around everything that is queued."""

    def host(self, nbytes: int) -> Bytes:
        """New page-locked memory."""

    def locked(self, address: int) -> bool:
        """Whether memory is page-locked."""

    def mark(self) -> Mark:
        """A new mark, not recorded yet."""

    def upload(self, to: Memory, source: int) -> None:
        """Queue a copy of `to.nbytes` bytes from `source`, an address on the host."""

    def download(self, to: int, source: Memory) -> None:
        """Queue a copy to an address on the host."""

    def nvfp4(self, place: Place, dtype: str, n: int, k: int, rule: str) -> None:
        """Queue `gpu_groups.nvfp4_group`."""

    def fp8(self, place: Place, dtype: str, n: int, k: int) -> None:
        """Queue `gpu_groups.fp8_rows`."""

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
    """A stream of `device`, for the thread that makes it. Raises `DeviceError` where CUDA fails,
    `MemoryBudgetError` where memory cannot be page-locked."""

    def __init__(self, device: torch.device, first: FirstLaunches) -> None:
        from beamq.formats.kernels import gpu_groups  # Triton, only where there is a GPU

        self._kernels = gpu_groups
        self._device = device
        self._first = first
        self._driver = CudaDriver()
        with device_errors(device):
            torch.cuda.set_device(device)
            torch.cuda.synchronize()  # this thread has a context now
            self._torch_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream: int = self._torch_stream.cuda_stream

    @contextmanager
    def using(self) -> Iterator[None]:
        """This thread's current stream and device meanwhile; CUDA's failures become ours."""
        with device_errors(self._device), torch.cuda.stream(self._torch_stream):
            yield

    def host(self, nbytes: int) -> Bytes:
        """See `GpuQueue`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as fault:
            raise MemoryBudgetError(
                f"{nbytes / 1e6:.0f} MB of page-locked memory could not be had ({_line(fault)});"
                " use fewer --workers, or --device cpu"
            ) from fault

    def locked(self, address: int) -> bool:
        """See `GpuQueue`."""
        return self._driver.on_host(address)

    def mark(self) -> Mark:
        """See `GpuQueue`."""
        return _CudaMark(self._driver, self._stream)

    def upload(self, to: Memory, source: int) -> None:
        """See `GpuQueue`."""
        self._driver.upload(to.address, source, to.nbytes, self._stream)

    def download(self, to: int, source: Memory) -> None:
        """See `GpuQueue`."""
        self._driver.download(to, source.address, source.nbytes, self._stream)

    def nvfp4(self, place: Place, dtype: str, n: int, k: int, rule: str) -> None:
        """See `GpuQueue`."""
        addresses = [area.address for area in place]
        self._driver.zero(addresses[3], INFO_BYTES, self._stream)
        self._first.launch(
            (rule, dtype, n, k),
            lambda: self._kernels.nvfp4_group(*addresses, dtype=dtype, n=n, k=k, rule=rule),
        )

    def fp8(self, place: Place, dtype: str, n: int, k: int) -> None:
        """See `GpuQueue`."""
        addresses = [area.address for area in place]
        self._driver.zero(addresses[3], INFO_BYTES, self._stream)
        self._first.launch(
            ("fp8", dtype, k), lambda: self._kernels.fp8_rows(*addresses, dtype=dtype, n=n, k=k)
        )

    def drain(self) -> None:
        """See `GpuQueue`."""
        self._torch_stream.synchronize()


class _CudaMark:
    def __init__(self, driver: CudaDriver, stream: int) -> None:
        self._driver = driver
        self._stream = stream
        self._event = driver.event()

    def record(self) -> None:
        self._driver.record(self._event, self._stream)

    def wait(self) -> None:
        self._driver.wait(self._event)

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            self._driver.destroy(self._event)


def device_memory(device: torch.device, nbytes: int) -> Memory:
    """Memory of a GPU. Raises `DeviceError` with what is free if there is too little."""
    with device_errors(device):
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return Memory(tensor.data_ptr(), nbytes, tensor)


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
