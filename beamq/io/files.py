"""Untrusted files: small ones are read up to a limit, large ones by positional reads.

In: a path and a limit in bytes. Out: the bytes, or the JSON object or YAML in them, or an error
that names the file. A named pipe, a device or a folder in a file's place is refused rather than
waited for, and the size is that of the opened file, so the file cannot be exchanged in between.

JSON grows when it is parsed: an empty list is two bytes in a file and sixty in memory. A file that
is mostly brackets is refused; any other takes some twenty times its bytes at most.

`OpenFiles` reads from a bounded set of open files, shared by threads. A file must not change: the
first look notes its size and times of change, every later opening compares them, and `changed`
compares them once more at the end of a run, because offsets from one file's header must never be
used on another. (Inode numbers are not compared: mounted buckets change them now and then.)
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from beamq.errors import BeamqError, CheckpointError, DiskError, UsageError, counted

FREE_BRACKETS = 4096
LFS_BEGIN = b"version https://git-lfs"
LFS_BYTES = 1024  # of the largest pointer
MACHINE_FAULTS = {
    errno.EIO: "the device fails; check it",
    errno.ENXIO: "the device is gone; check it",
    errno.ESTALE: "the network file system lost the file; mount it again",
    errno.ETIMEDOUT: "the network file system does not answer",
    errno.EMFILE: "raise the limit (ulimit -n)",
    errno.ENFILE: "the machine has too many files open",
}
MAX_CONFIG_BYTES = 16 << 20
MAX_YAML_DEPTH = 16
MAX_YAML = 1 << 16  # the parser reads some hundred kilobytes a second
BYTES_PER_BRACKET = 8  # a tensor's entry in a header has 3 brackets in at least 50 bytes


def user_path(text: str | Path) -> Path:
    """A path as a user gave it, with `~` resolved. Raises `UsageError` where it cannot be one."""
    if not str(text):
        raise UsageError("an empty path; expected a folder or a file")
    try:
        path = Path(text).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
    except (OSError, ValueError, RuntimeError) as fault:
        words = (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
        raise UsageError(f"{text}: not a path that can be used: {words}") from None
    return path


def open_file(path: Path) -> tuple[int, os.stat_result]:
    """A descriptor for reading a regular file, and its status. Raises `OSError`."""
    # Without O_NONBLOCK, opening a named pipe waits until something writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
    raise OSError(0, f"{kind}, not a file", str(path))


def read_small(path: Path, error: type[BeamqError], limit: int) -> bytes:
    """All bytes of a file. Raises `error` if it is absent, unreadable, no file, or too large."""
    try:
        descriptor, status = open_file(path)
        with open(descriptor, "rb") as stream:
            if status.st_size > limit:
                raise error(
                    f"{path}: {status.st_size} bytes, expected at most {limit}; is it the right"
                    " file?"
                )
            return stream.read(status.st_size)  # never a buffer larger than the file
    except FileNotFoundError:
        raise error(f"{path}: not found; is this the right folder?") from None
    except (OSError, ValueError) as fault:
        raise unreadable(path, fault, error) from fault


def read_start(path: Path, limit: int) -> bytes:
    """The first bytes of a file. Raises `CheckpointError` where it cannot be read."""
    try:
        descriptor, _ = open_file(path)
        with open(descriptor, "rb") as stream:
            return stream.read(limit)
    except (OSError, ValueError) as fault:
        raise unreadable(path, fault, CheckpointError) from fault


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is the three lines that Git LFS leaves in place of its content."""
    try:
        return path.stat().st_size <= LFS_BYTES and read_start(path, 64).startswith(LFS_BEGIN)
    except (OSError, BeamqError):
        return False  # absent or unreadable, which others report


def unreadable(
    path: Path | str, fault: Exception, error: type[BeamqError], doing: str = "cannot be read"
) -> BeamqError:
    """What to raise for a failed read: `error`, or `DiskError` where the machine is at fault."""
    words = (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
    number = fault.errno if isinstance(fault, OSError) else None
    if number in MACHINE_FAULTS:
        return DiskError(f"{path}: {doing}: {words}; {MACHINE_FAULTS[number]}")
    return error(f"{path}: {doing}: {words}")


def read_json_object(
    path: Path, error: type[BeamqError], limit: int = MAX_CONFIG_BYTES
) -> dict[str, Any]:
    """The object in a JSON file. Raises `error` with the file's name."""
    raw = read_small(path, error, limit)
    try:
        parsed = parse_json(raw)
    except ValueError as fault:
        if raw.startswith(LFS_BEGIN):
            raise error(f"{path}: only a Git LFS pointer; run `git lfs pull`") from None
        raise error(f"{path}: not valid JSON: {str(fault)[:120]}") from None
    if not isinstance(parsed, dict):
        kind = "null" if parsed is None else f"a {type(parsed).__name__}"
        raise error(f"{path}: holds {kind}, expected a JSON object")
    return parsed


def parse_json(raw: bytes, *, unique: bool = False) -> Any:
    """`json.loads` with bounded growth. Raises `ValueError` for anything invalid.

    With `unique`, an object that has a key twice is refused; otherwise the last one counts, as in
    every loader.
    """
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > FREE_BRACKETS + len(raw) // BYTES_PER_BRACKET:
        raise ValueError(f"{brackets} brackets in {len(raw)} bytes")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        shown = ", ".join(name[:60] for name in twice[:3])
        raise ValueError(f"{counted(len(twice), 'name occurs', 'names occur')} twice: {shown}")
    return found


def parse_yaml(text: str) -> Any:
    """A few lines of YAML as plain data. Raises `ValueError` for anything invalid.

    Aliases are refused: with them a kilobyte can stand for gigabytes.
    """
    import yaml  # only if there is YAML to parse

    if len(text) > MAX_YAML:
        raise ValueError(f"{len(text)} characters of YAML, expected at most {MAX_YAML}")
    try:
        depth = 0
        for event in yaml.parse(text):  # lazily, so that deep nesting is never entered
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("aliases (*name) are not allowed")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH:
                raise ValueError("nested too deeply")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, OverflowError) as fault:
        raise ValueError(" ".join(str(fault).split())[:160]) from None


MAX_OPEN_FILES = 32  # two checkpoints together stay far below a limit of 128


class OpenFiles:
    """A bounded set of read-only descriptors, opened on first use, closed oldest first.

    A descriptor in use is never closed: reads hold a count on it. Files are in `root`, or where
    `locate` says.
    """

    def __init__(self, root: Path, locate: Callable[[str], Path] | None = None) -> None:
        self._locate = locate or root.joinpath
        self._lock = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: dict[str, int] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}

    def expect(self, file: str) -> None:
        """Note a file's size and times; a missing file is reported by whoever opens it."""
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
        except OSError:  # gone or no longer accessible
            return False

    def _acquire(self, file: str) -> int:
        with self._lock:
            descriptor = self._open.get(file)
            new = descriptor is None
            if descriptor is None:
                descriptor = self._open[file] = self._opened(file)
            self._open.move_to_end(file)
            self._users[file] = self._users.get(file, 0) + 1
            if new:  # only now, when its count keeps it from being closed itself
                for other in list(self._open):
                    if len(self._open) > MAX_OPEN_FILES and not self._users.get(other):
                        os.close(self._open.pop(other))
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
                f"{path}: changed after its header was read; start again, without changing it"
            )
        return descriptor

    def _release(self, file: str) -> None:
        with self._lock:
            self._users[file] -= 1

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
        """Close a file that is about to be deleted and has no reader."""
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
