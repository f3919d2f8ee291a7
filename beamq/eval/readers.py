"""Who reads a checkpoint for `verify`: the threads of this process, and torchrun's other processes.

In: units of work in file order, their bytes, and what to do with one. Out: what was found in each,
in that order, on every rank; so a report is the same however many have read for it.

A rank takes a stretch of neighbours, since files are read fastest from front to back. What is found
must be small enough to be pickled and sent to all ranks. With one process nothing of torch is
imported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from beamq.errors import EnvironmentFault
from beamq.ranks import Ranks, stretch

Unit = TypeVar("Unit")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """`progress` is called in the calling thread with bytes done and bytes in all, of this rank."""

    ranks: Ranks
    threads: int
    progress: Callable[[int, int], None] | None

    def agree(self, readable: bool, places: Iterable[tuple[str, int, int]]) -> None:
        """Go on only if all ranks are about to read the same (file, offset, bytes), or nothing.

        Raises `EnvironmentFault` on all of them if not: their folders are not one.
        """
        if self.ranks.world == 1:
            return
        digest = hashlib.sha256(str(readable).encode())
        for place in places:
            digest.update(repr(place).encode())
        if len(set(self.ranks.gather(digest.hexdigest()))) > 1:
            raise EnvironmentFault(
                "the ranks do not see the same files; all need the same folders, complete"
            )

    def read(
        self, units: Sequence[Unit], sizes: Sequence[int], work: Callable[[Unit], Found]
    ) -> list[Found]:
        """What `work` returns for each unit. Raises what it raises on any rank, when all have
        stopped reading."""
        mine = stretch(sizes, self.ranks)
        with self.ranks.agreeing():
            found = self._read(units[mine.start : mine.stop], sizes[mine.start : mine.stop], work)
        return [each for share in self.ranks.gather(found) for each in share]

    def _read(
        self, units: Sequence[Unit], sizes: Sequence[int], work: Callable[[Unit], Found]
    ) -> list[Found]:
        """In threads, at most a few units in flight for each."""
        done, total = 0, sum(sizes)
        found: dict[int, Found] = {}
        left = iter(range(len(units)))
        pending: dict[Future[Found], int] = {}
        with ThreadPoolExecutor(self.threads, thread_name_prefix="beamq-verify") as pool:
            try:
                while True:
                    for index in islice(left, 4 * self.threads - len(pending)):
                        pending[pool.submit(work, units[index])] = index
                    if not pending:
                        return [found[index] for index in range(len(units))]
                    finished, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in finished:
                        index = pending.pop(future)
                        found[index] = future.result()
                        done += sizes[index]
                        if self.progress is not None:
                            self.progress(done, total)
            finally:
                pool.shutdown(cancel_futures=True)
