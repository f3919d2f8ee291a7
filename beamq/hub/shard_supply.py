"""Shards of a remote source on disk just in time: fetched ahead of the jobs, dropped behind them.

In: the files each job reads, in the order jobs are taken, and how to fetch one. Out: `wait(job)`
returns when a job's files are on disk; `finish(job)` lets go of them.

A few threads do what `FetchOrder` says. A whole shard lies in the folder under its own name (the
download renames it into place), so a run that was killed finds what it had and goes on. The bytes
of a fetch that was cut off are lost: huggingface_hub gives no way to keep them.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from beamq.errors import Interrupted
from beamq.hub.fetch_order import Drop, Fetch, FetchOrder
from beamq.shards import disk_errors

FETCHERS = 3
Fetcher = Callable[[str, Path, Callable[[], bool]], Path]


class ShardSupply:
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
            self._order = FetchOrder(jobs, sizes, budget, _whole_files(folder, sizes))
            for file in self._order.unwanted:
                (folder / file).unlink()
        self._threads = [
            threading.Thread(target=self._run, name="beamq-fetch", daemon=True)
            for _ in range(FETCHERS)
        ]

    def __enter__(self) -> ShardSupply:
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
