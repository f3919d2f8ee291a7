"""Locks against a second process in a folder: flock, or where there is none a touched file; and
whether all ranks of a run see one and the same folder.

In: a folder. Out: its lock, or who has it.

flock ends with the process, so a kill leaves nothing to clean up. The first line of the locked file
names the process, for the message that a second run gets.

Some network and FUSE file systems have no flock (ENOLCK, ENOSYS, EOPNOTSUPP). There the lock is a
second file, `NAME.held`, which only one process can create. Its holder touches it every
`BEAT_SECONDS`. It is void if its process ended, where that can be asked, else if it was not touched
for `STALE_SECONDS`. Times of files are compared with each other, never with this machine's clock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from beamq.errors import BeamqError, EnvironmentFault, OutputBusyError
from beamq.io.files import parse_json, read_small
from beamq.io.shard_writer import disk_errors, write_file
from beamq.ranks import Ranks

LOCK_NAME = ".beamq.lock"
HELD = ".held"
NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
BEAT_SECONDS, STALE_SECONDS = 20.0, 300.0
LOCK_TRIES, LOCK_PAUSE = 3, 0.02  # seconds between them
MAX_LOCK_BYTES = 1 << 12
SEEN_SECONDS, LOOK_SECONDS = 90.0, 0.2  # NFS believes for 60 seconds that a file is not there


class Lock:
    """An exclusive lock by the file `path`, held until `release`.

    Raises `BlockingIOError` if another process has it, other `OSError`s where there can be none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._heartbeat: _Heartbeat | None = None
        self._descriptor = self._open()
        with suppress(OSError):  # for messages only: a lock without it holds just as well
            os.write(self._descriptor, _signature())

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            descriptor = os.open(self._path, flags, 0o644)
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as fault:
                    if fault.errno not in NO_LOCKS:
                        raise
                    self._heartbeat = _Heartbeat(self._path)
                    return descriptor
                if self._is_still(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _is_still(self, descriptor: int) -> bool:
        """Whether the locked file still has its name; its last holder may have removed it."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Remove and unlock."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            if self._heartbeat is not None:
                self._heartbeat.end()
            os.close(self._descriptor)
            self._descriptor = -1


class _Heartbeat:
    """The file `lock`.held, touched by a thread until `end`. Raises as `Lock` does."""

    def __init__(self, lock: Path) -> None:
        self._path = lock.with_name(lock.name + HELD)
        judged = _identity(self._path)
        if judged is not None and _is_void(lock):
            self._bury(judged)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o644)
        except FileExistsError:
            raise BlockingIOError(errno.EWOULDBLOCK, "held", str(self._path)) from None
        except OSError as fault:
            words = f"{fault.strerror}, and {_file_system(lock)} has no other locks"
            raise OSError(fault.errno, words, str(self._path)) from fault
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(_signature())
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="beamq-heartbeat", daemon=True).start()

    def _bury(self, judged: tuple[int, int]) -> None:
        """Remove the file that was found void. If several processes try, one moves it away, and
        another may move the first one's new file: that one goes back."""
        aside = self._path.with_name(f"{self._path.name}.{os.uname().nodename}.{os.getpid()}")
        with suppress(FileNotFoundError):
            os.rename(self._path, aside)
            if _identity(aside) == judged:
                aside.unlink()
            else:
                os.rename(aside, self._path)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._path)

    def end(self) -> None:
        self._ended.set()
        self._path.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from a later one of that name: inode numbers are used again."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _is_void(lock: Path) -> bool:
    """Whether the holder of `lock`.held is gone."""
    held = lock.with_name(lock.name + HELD)
    said = _read(held)
    place, _ = _process(os.getpid())
    if place is not None and said.get("place") == place and isinstance(said.get("pid"), int):
        _, start = _process(said["pid"])
        if start is not None:
            return start != said.get("start")
        try:
            os.kill(said["pid"], 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass  # another user's, which /proc may hide
    try:
        os.utime(lock)  # by the clock that the holder's heartbeat goes by
        return lock.stat().st_mtime - held.stat().st_mtime > STALE_SECONDS
    except OSError:
        return not held.exists()


def _process(pid: int) -> tuple[str | None, str | None]:
    """(machine, boot and process namespace; when a process there started), None where unknown.

    A process that ended and that its parent does not await has the start "".
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = f"{os.uname().nodename} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return None, None
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return place, "" if fields[0] in "ZX" else fields[19]
    return place, None


def _signature() -> bytes:
    moment = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    place, start = _process(os.getpid())
    said = {"pid": os.getpid(), "host": os.uname().nodename, "since": moment}
    return json.dumps({**said, "place": place, "start": start}).encode() + b"\n"


def _read(path: Path) -> dict[str, Any]:
    """What a process wrote of itself; nothing if it is gone by now, or of an older version."""
    try:
        said = parse_json(read_small(path, OutputBusyError, MAX_LOCK_BYTES).partition(b"\n")[0])
    except (BeamqError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _file_system(path: Path) -> str:
    """For messages: `the file system (nfs4 at /data)`."""
    place = os.path.realpath(path)
    with suppress(OSError, IndexError):
        lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
        mounts = [(line.split()[1].rstrip("/"), line.split()[2]) for line in lines]
        mount, kind = max(m for m in mounts if f"{place}/".startswith(f"{m[0]}/"))
        return f"the file system ({kind} at {mount or '/'})"
    return "the file system"


class OutputLock:
    """An exclusive lock on an output folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        with disk_errors(path, "taking the lock"):
            for _ in range(LOCK_TRIES):
                with suppress(BlockingIOError):
                    self._lock = Lock(path)
                    return
                time.sleep(LOCK_PAUSE)  # `holder` takes the lock for a moment to look at it
        raise _busy(folder, _signed(path))

    def release(self) -> None:
        """Remove and unlock."""
        self._lock.release()


def check_shared(folder: Path, ranks: Ranks) -> None:
    """Raise `EnvironmentFault` at all ranks if one does not see a file that the first one wrote to
    the folder: it is on another machine, where that name is another folder.

    Network file systems show a new file to other machines only after a while; so this waits.
    """
    if ranks.world == 1:
        return
    host = os.uname().nodename
    name, writer = ranks.gather((f"{LOCK_NAME}.seen-{secrets.token_hex(8)}", host))[0]
    with ranks.meeting():
        if ranks.first:
            write_file(folder / name, b"")
    end = time.monotonic() + SEEN_SECONDS
    try:
        with ranks.agreeing():
            while not (folder.is_dir() and name in os.listdir(folder)):  # asks the server anew
                if time.monotonic() > end:
                    raise EnvironmentFault(
                        f"{folder}: rank {ranks.rank} on {host} does not see what rank 0 on"
                        f" {writer} writes there; give a place that all machines share"
                    )
                time.sleep(LOOK_SECONDS)
    finally:
        if ranks.first:
            (folder / name).unlink(missing_ok=True)


def refuse_busy(folder: Path) -> None:
    """Raise `OutputBusyError` if another process holds the folder's lock. Creates nothing."""
    who = holder(folder)
    if who is not None:
        raise _busy(folder, who)


def holder(folder: Path) -> str | None:
    """Who holds the folder's lock, as ` (process 7 on box, since 12:00)`; None if nobody does.

    Empty if the lock is not signed. Creates nothing.
    """
    path = folder / LOCK_NAME
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError:  # no lock, or no access to it: `OutputLock` reports that
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _signed(path)
    except OSError as fault:
        held = fault.errno in NO_LOCKS and path.with_name(path.name + HELD).exists()
        return _signed(path) if held and not _is_void(path) else None
    finally:
        os.close(descriptor)
    return None


def _busy(folder: Path, who: str) -> OutputBusyError:
    return OutputBusyError(
        f"{folder}: another process is writing here{who}; wait for it or choose another output"
    )


def _signed(path: Path) -> str:
    held = path.with_name(path.name + HELD)
    lost = f"; if it was lost, for {STALE_SECONDS / 60:.0f} minutes at most" * held.exists()
    said = _read(held if lost else path)
    try:
        return f" (process {said['pid']} on {said['host']}, since {said['since']}{lost})"
    except KeyError:
        return ""
