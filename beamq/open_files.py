"""Positional reads from a bounded set of open files, shared by threads."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from beamq.errors import CheckpointError

MAX_OPEN_FILES = 64


class OpenFiles:
    """A bounded set of read-only descriptors, opened on first use, closed oldest first.

    A descriptor in use is never closed under its reader: reads hold a count on it. Files lie in
    `root`, or where `locate` says.
    """

    def __init__(self, root: Path, locate: Callable[[str], Path] | None = None) -> None:
        self._locate = locate or root.joinpath
        self._lock = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: dict[str, int] = {}

    def _acquire(self, file: str) -> int:
        with self._lock:
            descriptor = self._open.get(file)
            if descriptor is None:
                try:
                    descriptor = os.open(self._locate(file), os.O_RDONLY | os.O_CLOEXEC)
                except OSError as fault:
                    raise CheckpointError(
                        f"{self._locate(file)}: cannot be opened: {fault.strerror}"
                    ) from fault
                self._open[file] = descriptor
                self._evict()
            self._open.move_to_end(file)
            self._users[file] = self._users.get(file, 0) + 1
            return descriptor

    def _release(self, file: str) -> None:
        with self._lock:
            self._users[file] -= 1

    def _evict(self) -> None:
        for file in list(self._open):
            if len(self._open) <= MAX_OPEN_FILES:
                return
            if not self._users.get(file):
                os.close(self._open.pop(file))

    def read(self, file: str, offset: int, out: memoryview, name: str) -> None:
        descriptor = self._acquire(file)
        try:
            done, view = 0, out.cast("B") if out.format != "B" or out.ndim != 1 else out
            while done < view.nbytes:
                got = os.preadv(descriptor, [view[done:]], offset + done)
                if got == 0:
                    raise CheckpointError(
                        f"{self._locate(file)}: ended while reading {name}; the file changed"
                        " after its header was read"
                    )
                done += got
        except OSError as fault:
            raise CheckpointError(
                f"{self._locate(file)}: reading {name} failed: {fault.strerror or fault}"
            ) from fault
        finally:
            self._release(file)

    def advise(self, file: str, offset: int, nbytes: int) -> None:
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        descriptor = self._acquire(file)
        try:
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
        except OSError:
            return
        finally:
            self._release(file)

    def forget(self, file: str) -> None:
        """Close a file that is about to be deleted and that nobody reads."""
        with self._lock:
            descriptor = self._open.pop(file, None)
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()
