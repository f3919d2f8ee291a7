"""Shards of a remote source on disk when they are asked for, the longest unused dropped first.

For readers that do not say beforehand what they will read (calibration, verification, the forward
pass). All of them go through the model in order, so a budget of a few shards fetches each once.

The folder is private to the process (`claim_folder`) and goes when the process ends. If it is
killed, the next one that reads the same commit takes the folder over, and one that reads another
deletes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from beamq.errors import DiskError, Interrupted
from beamq.shards import disk_errors
from beamq.sizes import show_bytes

MAX_FOLDERS = 64
LOCK_NAME = ".lock"
Fetcher = Callable[[str, Path, Callable[[], bool]], Path]


class DemandCache:
    """`hold(file)` is a context in which the file is at `folder / file`. Thread safe."""

    def __init__(
        self,
        place: Path,
        key: str,
        *,
        sizes: Mapping[str, int],
        budget: int,
        fetch: Fetcher,
        forget: Callable[[str], None],
    ) -> None:
        """`place` has one folder for each process; `key` names the source and its commit."""
        self._sizes = sizes
        self._budget = budget
        self._fetch = fetch
        self._forget = forget
        self._changed = threading.Condition()
        self._stop = False
        self._users: OrderedDict[str, int] = OrderedDict()  # the longest unused first
        self._coming: set[str] = set()
        self.folder, self._lock = claim_folder(place, key)
        for path in sorted(self.folder.iterdir()):
            if sizes.get(path.name) == path.stat().st_size:
                self._users[path.name] = 0
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK_NAME:
                path.unlink()

    @contextmanager
    def hold(self, file: str) -> Iterator[None]:
        """Fetch the file if it is not here, and keep it in the block.

        Raises `DiskError` if it alone exceeds the budget, and what fetching raises.
        """
        if self._sizes[file] > self._budget:
            raise DiskError(
                f"{file} has {show_bytes(self._sizes[file])}, more than the"
                f" {show_bytes(self._budget)} that fetched shards may take; allow at least that"
            )
        if self._take(file):
            self._bring(file)
        try:
            yield
        finally:
            with self._changed:
                self._users[file] -= 1
                self._changed.notify_all()

    def has(self, file: str) -> bool:
        """Whether the file is here now."""
        with self._changed:
            return file in self._users

    def _take(self, file: str) -> bool:
        """Count one more reader, or reserve the file's space; True: the caller must fetch it."""
        with self._changed:
            while True:
                if self._stop:
                    raise Interrupted("stopped")
                if file in self._users:
                    self._users[file] += 1
                    self._users.move_to_end(file)
                    return False
                if file not in self._coming and self._make_room(self._sizes[file]):
                    self._coming.add(file)
                    return True
                self._changed.wait(0.2)

    def _make_room(self, nbytes: int) -> bool:
        held = [*self._users, *self._coming]
        free = self._budget - sum(self._sizes[file] for file in held)
        for file in [file for file, users in self._users.items() if not users]:
            if free >= nbytes:
                break
            del self._users[file]
            self._forget(file)
            with disk_errors(self.folder / file, "dropping a shard"):
                (self.folder / file).unlink(missing_ok=True)
            free += self._sizes[file]
        return free >= nbytes

    def _bring(self, file: str) -> None:
        arrived = False
        try:
            self._fetch(file, self.folder, lambda: self._stop)
            arrived = True
        finally:
            with self._changed:
                self._coming.discard(file)
                if arrived:
                    self._users[file] = 1
                self._changed.notify_all()

    def close(self) -> None:
        """Delete everything."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def claim_folder(place: Path, key: str) -> tuple[Path, int]:
    """A folder `place/key.N` that no living process has, locked; (folder, lock's descriptor).

    Folders of other keys whose process has died are deleted.
    """
    with disk_errors(place, "preparing the shard cache"):
        place.mkdir(parents=True, exist_ok=True)
        for path in sorted(place.iterdir()):
            if path.is_dir() and path.name.rpartition(".")[0] != key:
                descriptor = _lock(path)
                if descriptor is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(descriptor)
        for number in range(MAX_FOLDERS):
            path = place / f"{key}.{number}"
            path.mkdir(exist_ok=True)
            descriptor = _lock(path)
            if descriptor is not None:
                return path, descriptor
    raise DiskError(f"{place}: {MAX_FOLDERS} processes read {key} already; wait for one to end")


def _lock(folder: Path) -> int | None:
    """Lock a folder for this process, if nobody has it."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # its owner has just deleted it
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
