"""One writer to a folder: a lock that dies with its process, and says to others who holds it.

`.beamq.lock` is locked with flock, so nothing is left to clean up after a kill; its first line
names the process, for the message that another run gets. To look at a lock creates and changes
nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from beamq.errors import BeamqError, OutputBusyError
from beamq.io.files import parse_json, read_small
from beamq.io.shard_writer import disk_errors

LOCK_NAME = ".beamq.lock"
MAX_LOCK_BYTES = 1 << 12
LOCK_TRIES, LOCK_PAUSE = 3, 0.02  # seconds between them


class OutputLock:
    """An exclusive lock on an output folder, released by the kernel if the process dies.

    The file's first line says who holds it, for the message that another run gets.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        with disk_errors(self._path, "taking the lock"):
            self._descriptor = self._take()
        if self._descriptor < 0:
            raise _busy(folder, _signed(self._path))
        # A courtesy to others: a lock that could not be signed is a lock all the same.
        with suppress(OSError):
            os.write(self._descriptor, _signature())

    def _take(self) -> int:
        """A locked descriptor, or -1 if another process has the lock."""
        for _ in range(LOCK_TRIES):
            descriptor = self._try()
            if descriptor is not None:
                return descriptor
            time.sleep(LOCK_PAUSE)  # it may only be one who looks, see `refuse_busy`
        return -1

    def _try(self) -> int | None:
        """A locked descriptor, or None if another process has the lock."""
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_still(descriptor):
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _is_still(self, descriptor: int) -> bool:
        """Whether the locked file still has its name; who held it before may have removed it."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove and unlock."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def refuse_busy(folder: Path) -> None:
    """Raise `OutputBusyError` if another process holds the folder's lock. Creates nothing."""
    who = holder(folder)
    if who is not None:
        raise _busy(folder, who)


def holder(folder: Path) -> str | None:
    """Who holds the folder's lock, as ` (process 7 on box, since ...)`; None if nobody does.

    Empty where the lock does not say. Creates nothing.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(folder / LOCK_NAME, flags)
    except OSError:  # no lock, or none that can be looked at: who takes it will be told
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _signed(folder / LOCK_NAME)
    except OSError:  # a file system without locks: who takes it will be told
        return None
    finally:
        os.close(descriptor)
    return None


def _signature() -> bytes:
    moment = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    said = {"pid": os.getpid(), "host": os.uname().nodename, "since": moment}
    return json.dumps(said).encode() + b"\n"


def _busy(folder: Path, who: str) -> OutputBusyError:
    return OutputBusyError(
        f"{folder}: another process is writing here{who}; wait for it or choose another output"
    )


def _signed(path: Path) -> str:
    try:
        first = read_small(path, OutputBusyError, MAX_LOCK_BYTES).partition(b"\n")[0]
        said = parse_json(first)
        return f" (process {said['pid']} on {said['host']}, since {said['since']})"
    except (BeamqError, ValueError, TypeError, KeyError):  # gone by now, or of an older version
        return ""
