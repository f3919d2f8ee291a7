"""One worker's queue on a GPU: a stream, page-locked memory, and the kernels that run on it.

`GpuQueue` is all that `GpuWorker` needs of a device; `CudaQueue` is that of a GPU. Tests run the
same worker on a queue that computes on the CPU, as late as it may.

The one idea: every call only queues, until a mark is waited for. Waiting puts the thread to sleep
(16 threads that spin would take the cores from those that read and write) and releases the
interpreter lock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from beamq.errors import DeviceError, MemoryBudgetError
from beamq.formats.kernels import RESULT_NBYTES
from beamq.formats.numerics import TORCH_DTYPES

_BLOCKING_NO_TIMING = 1 | 2  # a waiting thread sleeps
_MEMORY_TYPE, _ON_HOST = 2, 1
_REMEDY = "finished shards are kept; run again with --resume, on another --device if needed"
_Address, _Stream = ctypes.c_uint64, ctypes.c_void_p
_Call = Callable[..., int]


class CudaDriver:
    """The few calls of CUDA's driver that a conversion makes for every piece of data.

    torch's own calls release the interpreter lock and take it again. Where sixteen threads want it,
    that costs tens of microseconds for a call that takes three (ADR 12): a GPU was fed at 9 GB/s.
    Called through `PyDLL` they keep it; only waiting releases it. Streams and memory are torch's.

    Addresses are integers. Calls need a current context in the calling thread. They raise
    `DeviceError` for a code that is not success.
    """

    def __init__(self) -> None:
        try:
            quick, waiting = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        except OSError as fault:
            raise DeviceError(f"CUDA's driver library cannot be loaded: {fault}") from fault

        def raw(name: str, *arguments: type, library: ctypes.CDLL = quick) -> _Call:
            function = library[name]
            function.argtypes, function.restype = arguments, ctypes.c_int
            return function

        describe = raw("cuGetErrorName", ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

        def call(doing: str, function: _Call) -> Callable[..., None]:
            def checked(*arguments: object) -> None:
                if code := function(*arguments):
                    name = ctypes.c_char_p()
                    describe(code, ctypes.byref(name))
                    reason = name.value.decode() if name.value else f"error {code}"
                    raise DeviceError(f"{doing} failed: {reason}; {_REMEDY}")

            return checked

        size, event, flags = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint
        upload = raw("cuMemcpyHtoDAsync_v2", _Address, _Address, size, _Stream)
        download = raw("cuMemcpyDtoHAsync_v2", _Address, _Address, size, _Stream)
        fill = raw("cuMemsetD8Async", _Address, ctypes.c_ubyte, size, _Stream)
        create = raw("cuEventCreate", ctypes.POINTER(event), flags)
        self.upload = call("copying to the GPU", upload)
        self.download = call("copying from the GPU", download)
        self.fill = call("clearing memory", fill)
        self.create_event = call("making an event", create)
        self.destroy_event = raw("cuEventDestroy_v2", event)
        self.record = call("recording an event", raw("cuEventRecord", event, _Stream))
        self.query = raw("cuEventQuery", event)
        wait = raw("cuEventSynchronize", event, library=waiting)
        self.wait = call("waiting for the GPU", wait)
        self._attribute = raw("cuPointerGetAttribute", ctypes.c_void_p, ctypes.c_int, _Address)

    def on_host(self, address: int) -> bool:
        """Whether an address is page-locked memory that CUDA knows."""
        kind = ctypes.c_uint(0)
        code: int = self._attribute(ctypes.addressof(kind), _MEMORY_TYPE, address)
        return code == 0 and kind.value == _ON_HOST


Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Memory:
    """A stretch of a device's memory, which `owner` keeps alive."""

    address: int
    nbytes: int
    owner: Any

    def part(self, start: int, nbytes: int) -> Memory:
        """Some bytes of it."""
        return Memory(self.address + start, nbytes, self.owner)


class DeviceLayout(NamedTuple):
    """The areas of device memory that the kernels work on at a time."""

    source: Memory
    codes: Memory
    scales: Memory
    info: Memory
    """A `KernelResult`."""


class Mark(Protocol):
    """A place in the queue: after all that was queued before `record`. `wait` returns when the
    queue has reached it."""

    def record(self) -> None: ...
    def wait(self) -> None: ...


class GpuQueue(Protocol):
    """Work for a device, in order. Not shared between threads.

    `using` is entered around everything that is queued. `host` makes page-locked memory, and
    `locked` says whether an address is in such memory. `upload` (of `to.nbytes` bytes), `download`,
    `add_low_rank` (to the rows in `to`), `nvfp4` (`gpu.nvfp4_group`) and `fp8` (`gpu.fp8_rows`) are
    queued; their host addresses are those of page-locked memory. `drain` waits for all of it.
    """

    def using(self) -> AbstractContextManager[object]: ...
    def host(self, nbytes: int) -> Bytes: ...
    def locked(self, address: int) -> bool: ...
    def mark(self) -> Mark: ...
    def upload(self, to: Memory, source: int) -> None: ...
    def download(self, to: int, source: Memory) -> None: ...
    def add_low_rank(
        self, to: Memory, dtype: str, a: Floats, b: Floats, scaling: float
    ) -> None: ...
    def nvfp4(self, layout: DeviceLayout, dtype: str, n: int, k: int, rule: str) -> None: ...
    def fp8(self, layout: DeviceLayout, rounding: str, dtype: str, n: int, k: int) -> None: ...
    def drain(self) -> None: ...


class FirstLaunches:
    """Lets the first launch of each kind, which compiles the kernel, happen alone.

    Otherwise every thread that comes meanwhile would compile it too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[Hashable] = set()

    def launch(self, kind: Hashable, body: Callable[[], None]) -> None:
        """Run `body`."""
        with nullcontext() if kind in self._seen else self._lock:
            body()
            self._seen.add(kind)


class CudaQueue:
    """A stream of `device`, for the thread that makes it. Raises `DeviceError` where CUDA fails,
    `MemoryBudgetError` where memory cannot be page-locked."""

    def __init__(self, device: torch.device, first: FirstLaunches) -> None:
        from beamq.formats.kernels import gpu  # Triton, only where there is a GPU

        self._kernels = gpu
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
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as fault:
            raise MemoryBudgetError(
                f"{nbytes / 1e6:.0f} MB of pinned memory could not be allocated ({_line(fault)});"
                " use fewer --workers, or --device cpu"
            ) from fault

    def locked(self, address: int) -> bool:
        return self._driver.on_host(address)

    def mark(self) -> Mark:
        return _CudaMark(self._driver, self._stream)

    def upload(self, to: Memory, source: int) -> None:
        self._driver.upload(to.address, source, to.nbytes, self._stream)

    def download(self, to: int, source: Memory) -> None:
        self._driver.download(to, source.address, source.nbytes, self._stream)

    def add_low_rank(self, to: Memory, dtype: str, a: Floats, b: Floats, scaling: float) -> None:
        from beamq.formats.kernels.triton_lowrank import add_low_rank  # for adapters only

        k, start = a.shape[1], to.address - to.owner.data_ptr()
        w = to.owner[start : start + to.nbytes].view(TORCH_DTYPES[dtype]).view(-1, k)
        there = [torch.from_numpy(each).to(self._device, non_blocking=True) for each in (a, b)]
        body = partial(add_low_rank, w, there[0], there[1], scaling)
        self._first.launch(("low rank", dtype, k, a.shape[0]), body)

    def nvfp4(self, layout: DeviceLayout, dtype: str, n: int, k: int, rule: str) -> None:
        body = partial(self._kernels.nvfp4_group, dtype=dtype, n=n, k=k, scale_rule=rule)
        self._launch(layout, (rule, dtype, n, k), body)

    def fp8(self, layout: DeviceLayout, rounding: str, dtype: str, n: int, k: int) -> None:
        body = partial(self._kernels.fp8_rows, rounding=rounding, dtype=dtype, n=n, k=k)
        self._launch(layout, (rounding, dtype, k), body)

    def _launch(self, layout: DeviceLayout, kind: Hashable, body: Callable[..., None]) -> None:
        self._driver.fill(layout.info.address, 0, RESULT_NBYTES, self._stream)
        self._first.launch(kind, partial(body, *(area.address for area in layout)))

    def drain(self) -> None:
        self._torch_stream.synchronize()


class _CudaMark:
    def __init__(self, driver: CudaDriver, stream: int) -> None:
        self._driver = driver
        self._stream = stream
        self._event = ctypes.c_void_p()
        driver.create_event(ctypes.byref(self._event), _BLOCKING_NO_TIMING)

    def record(self) -> None:
        self._driver.record(self._event, self._stream)

    def wait(self) -> None:
        if self._driver.query(self._event):  # if it is reached: no need to release the lock
            self._driver.wait(self._event)

    def __del__(self) -> None:
        if self._event:
            self._driver.destroy_event(self._event)


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
            " other programs on it, choose another --device, or convert with --device cpu"
        ) from fault
    except RuntimeError as fault:
        if "CUDA" not in str(fault):
            raise
        raise DeviceError(f"{device} failed: {_line(fault)}; {_REMEDY}") from fault


def _line(fault: BaseException) -> str:
    return " ".join(str(fault).split("\n", 1)[0].split())[:200]
