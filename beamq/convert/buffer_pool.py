"""Memory for whole scale groups, bounded and reused: on the host, or wherever it is allocated."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from beamq.errors import Interrupted

Buffer = TypeVar("Buffer")


class BufferPool(Generic[Buffer]):
    """Buffers for whole scale groups, reused, never more than `budget` bytes at a time.

    A request waits until enough is returned; one larger than the budget is granted alone.
    `allocate` makes a buffer of at least so many bytes, `size` tells its bytes, `discard` frees it.
    """

    def __init__(
        self,
        budget: int,
        *,
        allocate: Callable[[int], Buffer],
        size: Callable[[Buffer], int],
        discard: Callable[[Buffer], None],
    ) -> None:
        self._budget = budget
        self._allocate = allocate
        self._size = size
        self._discard = discard
        self._held = 0
        self._free: list[Buffer] = []
        self._condition = threading.Condition()

    def acquire(self, nbytes: int, stopped: Callable[[], bool]) -> Buffer:
        """A buffer of at least `nbytes`. Raises `Interrupted` if `stopped` turns true."""
        with self._condition:
            while True:
                place = self._smallest_fitting(nbytes)
                if place is not None:
                    return self._free.pop(place)
                while self._free and self._held + nbytes > self._budget:
                    oldest = self._free.pop(0)
                    self._held -= self._size(oldest)
                    self._discard(oldest)
                if self._held + nbytes <= self._budget or self._held == 0:
                    buffer = self._allocate(nbytes)
                    self._held += self._size(buffer)
                    return buffer
                if stopped():
                    raise Interrupted("stopped")
                self._condition.wait(0.2)

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back."""
        with self._condition:
            self._free.append(buffer)
            self._condition.notify_all()

    def _smallest_fitting(self, nbytes: int) -> int | None:
        fitting = [p for p, buffer in enumerate(self._free) if self._size(buffer) >= nbytes]
        return min(fitting, key=lambda p: self._size(self._free[p]), default=None)


HostPool = BufferPool[mmap.mmap]


def host_pool(budget: int) -> HostPool:
    """Anonymous memory of this process."""
    return BufferPool(budget, allocate=_anonymous, size=len, discard=mmap.mmap.close)


def _anonymous(nbytes: int) -> mmap.mmap:
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)  # a page fault for 2 MiB instead of 4 KiB
    return buffer
