"""Which shard to fetch next and which to drop, when the disk holds only some of them.

In: for each job, in the order jobs are taken, the shards it reads; their sizes; a budget in bytes.
Out: decisions, one at a time. Nothing here waits, downloads or deletes: `ShardSupply` does.

Shards are fetched in the order jobs need them, as far ahead as the budget allows, and dropped when
no unfinished job needs them. Where that is not enough (a source whose partners lie far apart), the
shard whose next use is farthest is dropped and fetched again later, but only when no running job
is about to free space.

Why it cannot stop: all shards of jobs before `frontier` are here or on their way and never dropped
while needed, so those jobs finish. Once they have, only the frontier's own shards must stay, and
the budget holds the shards of any one job (`largest_job`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from beamq.errors import DiskError
from beamq.sizes import show_bytes

DEFAULT_CACHE_BYTES = 100_000_000_000


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch this shard now; its space is reserved."""

    file: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete this shard now; it is fetched again when its turn comes."""

    file: str


class FetchOrder:
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
    order = FetchOrder(jobs, sizes, budget)
    total = 0
    while not order.complete:
        step = order.step()
        if isinstance(step, Fetch):
            total += sizes[step.file]
            order.arrived(step.file)
        elif step is None and not order.complete:
            order.finished(order.lowest)
    return total
