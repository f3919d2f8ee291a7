"""Memory for whole scale groups, bounded and reused."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from beamq.errors import Interrupted


class BufferPool:
    """Buffers for whole scale groups, reused, never more than `budget` bytes at a time.

    A request waits until enough is returned; one larger than the budget is granted alone.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._held = 0
        self._free: list[mmap.mmap] = []
        self._condition = threading.Condition()

    def acquire(self, nbytes: int, stopped: Callable[[], bool]) -> mmap.mmap:
        """A buffer of at least `nbytes`. Raises `Interrupted` if `stopped` turns true."""
        with self._condition:
            while True:
                fitting = [buffer for buffer in self._free if len(buffer) >= nbytes]
                if fitting:
                    best = min(fitting, key=len)
                    self._free.remove(best)
                    return best
                while self._free and self._held + nbytes > self._budget:
                    self._held -= len(self._free[0])
                    self._free.pop(0).close()
                if self._held + nbytes <= self._budget or self._held == 0:
                    return self._allocate(nbytes)
                if stopped():
                    raise Interrupted("stopped")
                self._condition.wait(0.2)

    def release(self, buffer: mmap.mmap) -> None:
        """Give a buffer back."""
        with self._condition:
            self._free.append(buffer)
            self._condition.notify_all()

    def _allocate(self, nbytes: int) -> mmap.mmap:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)  # a page fault for 2 MiB instead of 4 KiB
        self._held += size
        return buffer
