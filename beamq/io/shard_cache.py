"""Shards of a remote source on disk just in time: fetched ahead of the jobs, dropped behind them.

In: the files each job reads, in the order jobs are taken, and how to fetch one. Out: `wait(job)`
returns when a job's files are on disk; `finish(job)` lets go of them.

A few threads do what `EvictionPolicy` says. A whole shard lies in the folder under its own name
(the download renames it into place), so a run that was killed finds what it had and goes on. The
bytes of a fetch that was cut off are lost: huggingface_hub gives no way to keep them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from beamq.errors import DiskError, Interrupted
from beamq.io.shard_writer import disk_errors
from beamq.units import show_bytes

# Shards of a remote source on disk when they are asked for, the longest unused dropped first.
#
# For readers that do not say beforehand what they will read (calibration, verification, the forward
# pass). All of them go through the model in order, so a budget of a few shards fetches each once.
#
# The folder is private to the process (`claim_folder`) and goes when the process ends. If it is
# killed, the next one that reads the same commit takes the folder over, and one that reads another
# deletes it.

MAX_FOLDERS = 64
LOCK_NAME = ".lock"
Fetcher = Callable[[str, Path, Callable[[], bool]], Path]


class LruCache:
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


# Which shard to fetch next and which to drop, when the disk holds only some of them.
#
# In: for each job, in the order jobs are taken, the shards it reads; their sizes; a budget in
# bytes. Out: decisions, one at a time. Nothing here waits, downloads or deletes: `Prefetcher`
# does.
#
# Shards are fetched in the order jobs need them, as far ahead as the budget allows, and dropped
# when no unfinished job needs them. Where that is not enough (a source whose partners lie far
# apart), the shard whose next use is farthest is dropped and fetched again later, but only when
# no running job is about to free space.
#
# Why it cannot stop: all shards of jobs before `frontier` are here or on their way and never
# dropped while needed, so those jobs finish. Once they have, only the frontier's own shards must
# stay, and the budget holds the shards of any one job (`largest_job`).

DEFAULT_CACHE_BYTES = 100_000_000_000


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch this shard now; its space is reserved."""

    file: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete this shard now; it is fetched again when its turn comes."""

    file: str


class EvictionPolicy:
    """The state of one run. Not thread safe."""

    def __init__(
        self,
        jobs: Sequence[Collection[str]],
        sizes: Mapping[str, int],
        budget: int,
        present: Collection[str] = (),
    ) -> None:
        """`present` are shards on disk from an earlier run; `unwanted` says which to delete."""
        self._jobs = [frozenset(files) for files in jobs]
        self._sizes = sizes
        self._budget = budget
        check_budget(self._jobs, sizes, budget)
        self._uses: dict[str, list[int]] = {}
        for index, files in enumerate(self._jobs):
            for file in files:
                self._uses.setdefault(file, []).append(index)
        self._next = dict.fromkeys(self._uses, 0)  # position of the first unfinished use
        self._left = {file: len(uses) for file, uses in self._uses.items()}
        self._done = [False] * len(self._jobs)
        self._lowest = 0  # every job below is done
        self._frontier = 0  # every shard of the jobs below is here or on its way
        self._held: dict[str, int] = {}
        self._here: set[str] = set()
        self.unwanted = self._adopt(present)

    @property
    def held_nbytes(self) -> int:
        """Bytes on disk or reserved."""
        return sum(self._held.values())

    def _adopt(self, present: Collection[str]) -> list[str]:
        """Keep what is needed and fits, the soonest needed first. Returns what to delete."""
        wanted = sorted((file for file in present if file in self._uses), key=self._next_use)
        refused = [file for file in present if file not in self._uses]
        for file in wanted:
            if self.held_nbytes + self._sizes[file] > self._budget:
                refused.append(file)
                continue
            self._held[file] = self._sizes[file]
            self._here.add(file)
        return refused

    def step(self) -> Fetch | Drop | None:
        """What to do now; None: nothing until a job finishes, or at all (`complete`)."""
        while self._frontier < len(self._jobs):
            missing = sorted(self._jobs[self._frontier].difference(self._held))
            if self._done[self._frontier] or not missing:
                self._frontier += 1
                continue
            file = missing[0]
            if self.held_nbytes + self._sizes[file] <= self._budget:
                self._held[file] = self._sizes[file]
                return Fetch(file)
            return self._make_room()
        return None

    def _make_room(self) -> Drop | None:
        soon = any(self._uses[file][-1] < self._frontier for file in self._held if self._left[file])
        if soon:  # a running job frees it when it ends
            return None
        spare = [file for file in self._here if self._next_use(file) > self._frontier]
        if not spare:
            return None
        file = max(spare, key=lambda name: (self._next_use(name), name))
        self._here.remove(file)
        del self._held[file]
        return Drop(file)

    def _next_use(self, file: str) -> int:
        uses, position = self._uses[file], self._next[file]
        while position < len(uses) and self._done[uses[position]]:
            position += 1
        self._next[file] = position
        return uses[position] if position < len(uses) else len(self._jobs)

    def arrived(self, file: str) -> None:
        """A fetch has ended well."""
        self._here.add(file)

    def ready(self, job: int) -> bool:
        """Whether a job's shards are all here, and stay until it is finished."""
        return job <= self._frontier and self._jobs[job] <= self._here

    def finished(self, job: int) -> list[str]:
        """A job has ended. Returns the shards that nobody needs any more."""
        self._done[job] = True
        while self._lowest < len(self._jobs) and self._done[self._lowest]:
            self._lowest += 1
        over = []
        for file in self._jobs[job]:
            self._left[file] -= 1
            if not self._left[file]:
                over.append(file)
                self._here.discard(file)
                self._held.pop(file, None)
        return over

    @property
    def complete(self) -> bool:
        """Whether every shard has been asked for; nothing will be fetched any more."""
        return self._frontier >= len(self._jobs)

    @property
    def lowest(self) -> int:
        """The first job that is not done."""
        return self._lowest


def largest_job(jobs: Sequence[Collection[str]], sizes: Mapping[str, int]) -> tuple[int, int]:
    """(bytes, number) of the shards that one job needs at once, for the job that needs most."""
    return max(
        ((sum(sizes[file] for file in set(files)), len(set(files))) for files in jobs),
        default=(0, 0),
    )


def check_budget(jobs: Sequence[Collection[str]], sizes: Mapping[str, int], budget: int) -> None:
    """Raise `DiskError` if some job's shards do not fit the budget together."""
    nbytes, count = largest_job(jobs, sizes)
    if nbytes > budget:
        raise DiskError(
            f"--cache-budget {show_bytes(budget)} is less than the {count} shards that one group of"
            f" linears needs at once ({show_bytes(nbytes)}); allow at least that"
        )


def traffic_nbytes(jobs: Sequence[Collection[str]], sizes: Mapping[str, int], budget: int) -> int:
    """Bytes that a run fetches, shards that are fetched twice counted twice."""
    order = EvictionPolicy(jobs, sizes, budget)
    total = 0
    while not order.complete:
        step = order.step()
        if isinstance(step, Fetch):
            total += sizes[step.file]
            order.arrived(step.file)
        elif step is None and not order.complete:
            order.finished(order.lowest)
    return total


FETCHERS = 3


class Prefetcher:
    """Use as a context manager: threads run inside it. `wait` and `finish` are thread safe."""

    def __init__(
        self,
        jobs: Sequence[Collection[str]],
        *,
        sizes: Mapping[str, int],
        folder: Path,
        budget: int,
        fetch: Fetcher,
        forget: Callable[[str], None],
    ) -> None:
        """`fetch(file, folder, stopped)` brings a file; `forget(file)` is told before a deletion.

        Raises `DiskError` if the shards of one job exceed `budget` bytes.
        """
        self.folder = folder
        self._fetch = fetch
        self._forget = forget
        self._changed = threading.Condition()
        self._stop = False
        self._failure: BaseException | None = None
        with disk_errors(folder, "preparing the shard cache"):
            folder.mkdir(parents=True, exist_ok=True)
            self._order = EvictionPolicy(jobs, sizes, budget, _whole_files(folder, sizes))
            for file in self._order.unwanted:
                (folder / file).unlink()
        self._threads = [
            threading.Thread(target=self._run, name="beamq-fetch", daemon=True)
            for _ in range(FETCHERS)
        ]

    def __enter__(self) -> Prefetcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(5.0)  # a download stops at its next chunk

    def stop(self) -> None:
        """Let the threads end and waiting jobs raise."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()

    def wait(self, job: int, stopped: Callable[[], bool]) -> None:
        """Return when the job's files are all on disk; they stay until `finish`.

        Raises what a fetch raised, or `Interrupted` when `stopped` turns true.
        """
        with self._changed:
            while not self._order.ready(job):
                if self._failure is not None:
                    raise self._failure
                if self._stop or stopped():
                    raise Interrupted("stopped")
                self._changed.wait(0.2)

    def finish(self, job: int) -> None:
        """The job has read its files; those that no other needs are deleted."""
        with self._changed:
            for file in self._order.finished(job):
                self._delete(file)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (file := self._next()) is not None:
                self._fetch(file, self.folder, lambda: self._stop)
                with self._changed:
                    self._order.arrived(file)
                    self._changed.notify_all()
        except BaseException as failure:  # carried to the jobs, which raise it
            with self._changed:
                if self._failure is None and not isinstance(failure, Interrupted):
                    self._failure = failure
                self._changed.notify_all()

    def _next(self) -> str | None:
        """The next file to fetch; None when there is nothing more to do."""
        with self._changed:
            while not self._stop and self._failure is None:
                step = self._order.step()
                if isinstance(step, Fetch):
                    return step.file
                if isinstance(step, Drop):
                    self._delete(step.file)
                elif self._order.complete:
                    return None
                else:
                    self._changed.wait(0.2)
            return None

    def _delete(self, file: str) -> None:
        self._forget(file)
        with disk_errors(self.folder / file, "dropping a shard that is done"):
            (self.folder / file).unlink(missing_ok=True)


def _whole_files(folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """Shards of an earlier run that are whole; all else in the folder is deleted."""
    whole = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # the library's notes and cut-off downloads
        elif path.is_file() and sizes.get(path.name) == path.stat().st_size:
            whole.append(path.name)
        else:
            path.unlink()
    return whole
