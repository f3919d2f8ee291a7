"""Positional reads from a bounded set of open files, shared by threads.

A file must stay the one it was when it was first seen: `expect` notes its size and times of
change, every later opening compares them, and `changed` compares them once more at the end of a
run. Offsets from one file's header must never be read out of another. (Inode numbers would say it
as well, but mounted buckets give a file a new one now and then.)
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from beamq.errors import CheckpointError
from beamq.small_files import open_file, unreadable

MAX_OPEN_FILES = 32  # two checkpoints beside each other stay far below a limit of 128


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
        self._seen: dict[str, tuple[int, int, int]] = {}

    def expect(self, file: str) -> None:
        """Remember what a file is now; that of one that is not there is for others to say."""
        with suppress(OSError, ValueError):
            self._seen[file] = _identity(os.stat(self._locate(file)))

    def size_and_time(self, file: str) -> tuple[int, int]:
        """Bytes and time of change (ns) of a file, as `expect` saw it."""
        return self._seen[file][:2]

    def changed(self) -> str | None:
        """A file that is not what it was when `expect` was called, or None."""
        return next((file for file in self._seen if not self._is_same(file)), None)

    def _is_same(self, file: str) -> bool:
        try:
            return _identity(os.stat(self._locate(file))) == self._seen[file]
        except OSError:  # gone, or no longer to be looked at: not what it was
            return False

    def _acquire(self, file: str) -> int:
        with self._lock:
            descriptor = self._open.get(file)
            new = descriptor is None
            if descriptor is None:
                descriptor = self._open[file] = self._opened(file)
            self._open.move_to_end(file)
            self._users[file] = self._users.get(file, 0) + 1
            if new:  # and in use by now, or it might be the one that has to go
                self._evict()
            return descriptor

    def _opened(self, file: str) -> int:
        path = self._locate(file)
        try:
            descriptor, status = open_file(path)
        except (OSError, ValueError) as fault:
            raise unreadable(path, fault, CheckpointError, "cannot be opened") from fault
        seen = self._seen.get(file)
        if seen is not None and _identity(status) != seen:
            os.close(descriptor)
            raise CheckpointError(
                f"{path}: changed after its header was read; leave the source alone, start again"
            )
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
            raise unreadable(
                self._locate(file), fault, CheckpointError, f"reading {name[:120]} failed"
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
            self._seen.pop(file, None)
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        with self._lock:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
