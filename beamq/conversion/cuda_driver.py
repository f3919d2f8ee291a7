"""The few calls of CUDA's driver that a conversion makes for every piece of data.

torch's own calls give up the interpreter and queue for it again, which where sixteen threads want
it costs tens of microseconds for a call that takes three (ADR 12): a GPU was fed at 9 GB/s.
Called through `PyDLL` they keep it; only waiting lets go. Streams and memory are torch's.

Addresses are integers. Every call raises `DeviceError` for a code that is not success.
"""

from __future__ import annotations

import ctypes

from beamq.errors import DeviceError

_NOT_READY = 600
_BLOCKING_NO_TIMING = 1 | 2  # a waiting thread sleeps
_MEMORY_TYPE, _ON_HOST = 2, 1

_Address, _Stream, _Event = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p


class CudaDriver:
    """The driver library. Needs a current context in the calling thread."""

    def __init__(self) -> None:
        try:
            quick, waiting = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")
        except OSError as fault:
            raise DeviceError(f"CUDA's driver library cannot be loaded: {fault}") from fault

        def call(
            name: str, *arguments: type, library: ctypes.CDLL = quick
        ) -> ctypes._NamedFuncPointer:
            function = library[name]
            function.argtypes, function.restype = arguments, ctypes.c_int
            return function

        size = ctypes.c_size_t
        self._upload = call("cuMemcpyHtoDAsync_v2", _Address, _Address, size, _Stream)
        self._download = call("cuMemcpyDtoHAsync_v2", _Address, _Address, size, _Stream)
        self._fill = call("cuMemsetD8Async", _Address, ctypes.c_ubyte, size, _Stream)
        self._create = call("cuEventCreate", ctypes.POINTER(_Event), ctypes.c_uint)
        self._destroy = call("cuEventDestroy_v2", _Event)
        self._record = call("cuEventRecord", _Event, _Stream)
        self._query = call("cuEventQuery", _Event)
        self._wait = call("cuEventSynchronize", _Event, library=waiting)
        self._attribute = call("cuPointerGetAttribute", ctypes.c_void_p, ctypes.c_int, _Address)
        self._name = call("cuGetErrorName", ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def upload(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy from page-locked memory to the device."""
        self._check(self._upload(to, source, nbytes, stream), "copying to the GPU")

    def download(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy from the device to page-locked memory."""
        self._check(self._download(to, source, nbytes, stream), "copying from the GPU")

    def zero(self, at: int, nbytes: int, stream: int) -> None:
        """Queue zeros."""
        self._check(self._fill(at, 0, nbytes, stream), "clearing memory")

    def event(self) -> int:
        """A new event, for `record` and `wait`; a thread that waits sleeps."""
        event = _Event()
        self._check(self._create(ctypes.byref(event), _BLOCKING_NO_TIMING), "making an event")
        return event.value or 0

    def destroy(self, event: int) -> None:
        """Free an event."""
        self._destroy(event)

    def record(self, event: int, stream: int) -> None:
        """Put an event behind all that is queued."""
        self._check(self._record(event, stream), "recording an event")

    def wait(self, event: int) -> None:
        """Return when the stream has come to the event."""
        code = self._query(event)
        if code == _NOT_READY:
            code = self._wait(event)
        self._check(code, "waiting for the GPU")

    def on_host(self, address: int) -> bool:
        """Whether an address is page-locked memory that CUDA knows."""
        kind = ctypes.c_uint(0)
        code: int = self._attribute(ctypes.addressof(kind), _MEMORY_TYPE, address)
        return code == 0 and kind.value == _ON_HOST

    def _check(self, code: int, doing: str) -> None:
        if code:
            name = ctypes.c_char_p()
            self._name(code, ctypes.byref(name))
            told = name.value.decode() if name.value else f"error {code}"
            raise DeviceError(
                f"{doing} failed: {told}; what is finished is kept: run again with --resume, on"
                " another --device if it fails again"
            )
