"""Shards of a remote source on disk while they are needed, within a budget of bytes.

In: the shards' sizes, a budget, and how to fetch one. Out: shards in a folder, each under its own
name (a download renames it into place, so what a killed run leaves is whole and is used again).
The bytes of a fetch that was cut off are lost: huggingface_hub gives no way to keep them.

    Prefetcher   for a loop that names its shards beforehand: fetches ahead of the jobs, in their
                 order, and deletes a shard after the last job that needs it (`EvictionPolicy`)
    LruCache     for readers that do not: fetches on demand and deletes the least recently used
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from beamq.errors import DiskError, Interrupted
from beamq.io.lock import LOCK_NAME, Lock
from beamq.io.shard_writer import disk_errors
from beamq.io.source import Prefetch
from beamq.units import show_bytes

DEFAULT_CACHE_BYTES = 100_000_000_000
FETCHERS = 3
MAX_FOLDERS = 64


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch this shard now; its space is reserved."""

    file: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete this shard now; it is fetched again when its turn comes."""

    file: str


class EvictionPolicy:
    """Which shard to fetch next and which to delete: decisions only, one at a time. Not thread
    safe.

    Shards are fetched in the order jobs need them, as far ahead as the budget allows, and deleted
    when no unfinished job needs them. Where that is not enough (a source in which linears of one
    job are far apart), the shard whose next use is farthest is deleted and fetched again later,
    but only when no running job is about to free space.

    Why it cannot hang: all shards of jobs before `_frontier` are here or on their way and are never
    deleted while needed, so those jobs finish. Once they have, only the frontier's own shards must
    stay, and the budget holds the shards of any one job (`largest_job`).
    """

    def __init__(
        self,
        jobs: Sequence[Collection[str]],
        sizes: Mapping[str, int],
        budget: int,
        present: Collection[str] = (),
    ) -> None:
        """`present` are shards of an earlier run; `unwanted` says which of them to delete.

        Raises `DiskError` if the shards of one job exceed `budget` bytes.
        """
        self._jobs = [frozenset(files) for files in jobs]
        self._sizes = sizes
        self._budget = budget
        check_budget(self._jobs, sizes, budget)
        self._uses: dict[str, list[int]] = {}
        for index, files in enumerate(self._jobs):
            for file in files:
                self._uses.setdefault(file, []).append(index)
        self._next = dict.fromkeys(self._uses, 0)  # position of the first unfinished use
        self._left = Counter({file: len(uses) for file, uses in self._uses.items()})
        self._done = [False] * len(self._jobs)
        self._frontier = 0  # every shard of the jobs below is here or on its way
        self._here: set[str] = set()
        self._coming: set[str] = set()
        self.unwanted = [file for file in present if file not in self._uses]
        for file in sorted((name for name in present if name in self._uses), key=self._next_use):
            if self._fits(file):
                self._here.add(file)
            else:
                self.unwanted.append(file)

    @property
    def held_nbytes(self) -> int:
        """Bytes on disk or reserved."""
        return sum(self._sizes[file] for file in self._here | self._coming)

    def _fits(self, file: str) -> bool:
        return self.held_nbytes + self._sizes[file] <= self._budget

    def step(self) -> Fetch | Drop | None:
        """What to do now; None: nothing until a job finishes, or at all (`complete`)."""
        while self._frontier < len(self._jobs):
            missing = self._jobs[self._frontier] - self._here - self._coming
            if self._done[self._frontier] or not missing:
                self._frontier += 1
                continue
            file = min(missing)
            if self._fits(file):
                self._coming.add(file)
                return Fetch(file)
            return self._make_room()
        return None

    def _make_room(self) -> Drop | None:
        held = self._here | self._coming
        if any(self._uses[file][-1] < self._frontier for file in held):
            return None  # a running job frees it when it ends
        spare = [file for file in self._here if self._next_use(file) > self._frontier]
        if not spare:
            return None
        file = max(spare, key=lambda name: (self._next_use(name), name))
        self._here.remove(file)
        return Drop(file)

    def _next_use(self, file: str) -> int:
        uses, position = self._uses[file], self._next[file]
        while position < len(uses) and self._done[uses[position]]:
            position += 1
        self._next[file] = position
        return uses[position] if position < len(uses) else len(self._jobs)

    def arrived(self, file: str) -> bool:
        """A fetch has ended well. False if meanwhile no job needs the shard any more."""
        needed = file in self._coming
        if needed:
            self._coming.remove(file)
            self._here.add(file)
        return needed

    def ready(self, job: int) -> bool:
        """Whether a job's shards are all here, and stay until it is finished."""
        return job <= self._frontier and self._jobs[job] <= self._here

    def finished(self, job: int) -> list[str]:
        """A job has ended. Returns the shards that no other job needs."""
        self._done[job] = True
        self._left.subtract(self._jobs[job])
        over = [file for file in self._jobs[job] if not self._left[file]]
        self._here.difference_update(over)
        self._coming.difference_update(over)
        return over

    @property
    def complete(self) -> bool:
        """Whether every shard has been asked for; nothing will be fetched any more."""
        return self._frontier >= len(self._jobs)


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
            f"--cache-budget {show_bytes(budget)} is too small for the {count} shards that one"
            f" group of linears needs at once; allow at least {show_bytes(nbytes)}"
        )


def traffic_nbytes(jobs: Sequence[Collection[str]], sizes: Mapping[str, int], budget: int) -> int:
    """Bytes that a run fetches; shards that are fetched twice count twice."""
    policy = EvictionPolicy(jobs, sizes, budget)
    unfinished = iter(range(len(jobs)))
    total = 0
    while not policy.complete:
        step = policy.step()
        if isinstance(step, Fetch):
            total += sizes[step.file]
            policy.arrived(step.file)
        elif step is None and not policy.complete:
            policy.finished(next(unfinished))
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Shards elsewhere: `fetch(file, folder, stopped)` brings one, `forget(file)` is called before
    its deletion."""

    sizes: Mapping[str, int]
    fetch: Callable[[str, Path, Callable[[], bool]], Path]
    forget: Callable[[str], None]


class _ShardFolder:
    """A folder with nothing in it but whole shards of `remote`; `_changed` guards all state."""

    def __init__(self, folder: Path, remote: Remote) -> None:
        self.folder = folder
        self._remote = remote
        self._changed = threading.Condition()
        self._stop = False
        with disk_errors(folder, "preparing the shard cache"):
            folder.mkdir(parents=True, exist_ok=True)
            self._adopted = [path.name for path in sorted(folder.iterdir()) if self._adopt(path)]

    def _adopt(self, path: Path) -> bool:
        """Whether this is a whole shard of an earlier run; anything else is deleted."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # the library's notes and cut-off downloads
        elif path.is_file() and self._remote.sizes.get(path.name) == path.stat().st_size:
            return True
        elif not path.name.startswith(LOCK_NAME):
            path.unlink()
        return False

    def _fetch(self, file: str) -> None:
        self._remote.fetch(file, self.folder, lambda: self._stop)

    def _delete(self, file: str) -> None:
        self._remote.forget(file)
        with disk_errors(self.folder / file, "deleting a fetched shard"):
            (self.folder / file).unlink(missing_ok=True)

    def stop(self) -> None:
        """Let fetches end and waiting readers raise `Interrupted`."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()


class Prefetcher(_ShardFolder, Prefetch):
    """Use as a context manager: threads run inside it. `wait` and `finish` are thread safe."""

    def __init__(
        self, jobs: Sequence[Collection[str]], remote: Remote, *, folder: Path, budget: int
    ) -> None:
        """Raises `DiskError` if the shards of one job exceed `budget` bytes."""
        super().__init__(folder, remote)
        self._failure: BaseException | None = None
        self._policy = EvictionPolicy(jobs, remote.sizes, budget, self._adopted)
        for file in self._policy.unwanted:
            self._delete(file)
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

    def wait(self, job: int, stopped: Callable[[], bool]) -> None:
        """Return when the job's files are all on disk; they stay until `finish`.

        Raises what a fetch raised, or `Interrupted` when `stopped` turns true.
        """
        with self._changed:
            while not self._policy.ready(job):
                if self._failure is not None:
                    raise self._failure
                if self._stop or stopped():
                    raise Interrupted("stopped")
                self._changed.wait(0.2)

    def finish(self, job: int) -> None:
        """The job has read its files; those that no other job needs are deleted."""
        with self._changed:
            for file in self._policy.finished(job):
                self._delete(file)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (file := self._next()) is not None:
                self._fetch(file)
                with self._changed:
                    if not self._policy.arrived(file):
                        self._delete(file)
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
                step = self._policy.step()
                if isinstance(step, Fetch):
                    return step.file
                if isinstance(step, Drop):
                    self._delete(step.file)
                elif self._policy.complete:
                    return None
                else:
                    self._changed.wait(0.2)
            return None


class LruCache(_ShardFolder):
    """`hold(file)` is a context in which the file is at `folder / file`. Thread safe.

    All readers go through a model in order, so a budget of a few shards fetches each once. The
    folder is private to the process and is deleted when it ends (see `claim_folder`).
    """

    def __init__(self, place: Path, key: str, remote: Remote, *, budget: int) -> None:
        """`place` has one folder for each process; `key` names the source and its commit."""
        folder, lock = claim_folder(place, key)
        self._lock: Lock | None = lock
        super().__init__(folder, remote)
        self._budget = budget
        self._users = dict.fromkeys(self._adopted, 0)  # the least recently used file first
        self._coming: set[str] = set()

    @contextmanager
    def hold(self, file: str) -> Iterator[None]:
        """Fetch the file if it is not here, and keep it in the block.

        Raises `DiskError` if it alone exceeds the budget, and what fetching raises.
        """
        size = self._remote.sizes[file]
        if size > self._budget:
            raise DiskError(
                f"the limit for fetched shards, {show_bytes(self._budget)}, is too small for"
                f" {file}; allow at least {show_bytes(size)}"
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
            while not self._stop:
                if file in self._users:
                    self._users[file] = self._users.pop(file) + 1
                    return False
                if file not in self._coming and self._make_room(self._remote.sizes[file]):
                    self._coming.add(file)
                    return True
                self._changed.wait(0.2)
            raise Interrupted("stopped")

    def _make_room(self, nbytes: int) -> bool:
        sizes = self._remote.sizes
        free = self._budget - sum(sizes[file] for file in (*self._users, *self._coming))
        for file in [file for file, users in self._users.items() if not users]:
            if free >= nbytes:
                break
            del self._users[file]
            self._delete(file)
            free += sizes[file]
        return free >= nbytes

    def _bring(self, file: str) -> None:
        arrived = False
        try:
            self._fetch(file)
            arrived = True
        finally:
            with self._changed:
                self._coming.discard(file)
                if arrived:
                    self._users[file] = 1
                self._changed.notify_all()

    def close(self) -> None:
        """Delete everything."""
        self.stop()
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.release()
            self._lock = None


def claim_folder(place: Path, key: str) -> tuple[Path, Lock]:
    """A folder `place/key.N` that no living process has, and its lock.

    Of processes that were killed, folders of this key are taken over, those of others deleted.
    """
    with disk_errors(place, "preparing the shard cache"):
        place.mkdir(parents=True, exist_ok=True)
        for path in sorted(place.iterdir()):
            if path.is_dir() and path.name.rpartition(".")[0] != key:
                lock = _lock(path)
                if lock is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    lock.release()
        for number in range(MAX_FOLDERS):
            path = place / f"{key}.{number}"
            path.mkdir(exist_ok=True)
            lock = _lock(path)
            if lock is not None:
                return path, lock
    raise DiskError(f"{place}: {MAX_FOLDERS} processes read {key} already; wait for one to end")


def _lock(folder: Path) -> Lock | None:
    """Lock a folder for this process, if no other has it."""
    try:
        return Lock(folder / LOCK_NAME)
    except (BlockingIOError, FileNotFoundError):  # or its owner has just deleted it
        return None
