"""What a run may take of a machine, checked before it takes anything: threads, memory, cache.

In: a plan's work and the user's limits. Out: nothing, or the error that would come later.
"""

from __future__ import annotations

import resource
from pathlib import Path

from beamq.conversion.cpu_engine import HELD_BYTES, piece_bytes
from beamq.errors import MemoryBudgetError
from beamq.hub.fetch_order import check_budget
from beamq.plan import Work
from beamq.ranks import cores_here
from beamq.sizes import show_bytes

DEFAULT_MEMORY_BYTES = 1_500_000_000
THREAD_BYTES = 1 << 23  # address space of a thread, besides its stack


def default_workers() -> int:
    """Threads: this process's share of the cores it may use, at most 32.

    The processes that torchrun starts on one machine divide its cores.
    """
    return min(32, cores_here())


def predicted_host_nbytes(work: Work, workers: int, budget: int = DEFAULT_MEMORY_BYTES) -> int:
    """Upper bound of the buffers a run holds, in bytes, without the interpreter."""
    largest = min(work.largest_group_nbytes, HELD_BYTES)
    return max(min(workers * largest, budget), largest) + workers * 4 * piece_bytes(workers)


def check_memory(work: Work, budget: int) -> None:
    """Raise `MemoryBudgetError` if one scale group does not fit the budget."""
    largest = min(work.largest_group_nbytes, HELD_BYTES)
    if largest > budget:
        raise MemoryBudgetError(
            f"--max-host-memory {show_bytes(budget)} is less than the largest group of linears"
            f" that share a scale ({show_bytes(largest)}); allow at least that"
        )


def check_address_space(work: Work, workers: int, budget: int) -> None:
    """Raise `MemoryBudgetError` if a limit on address space (`ulimit -v`) leaves too little.

    Buffers could fail one by one, but a thread that starts without memory dies unheard, and who
    started it waits for ever.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):  # not Linux
        return
    stack = THREAD_BYTES if stack == resource.RLIM_INFINITY else stack
    needed = predicted_host_nbytes(work, workers, budget)
    needed += (workers + 1) * (stack + THREAD_BYTES)
    if used + needed > limit:
        raise MemoryBudgetError(
            f"the limit on address space (ulimit -v) is {show_bytes(limit)} and"
            f" {show_bytes(used + needed)} are needed; raise it, or use fewer --workers or a"
            " smaller --max-host-memory"
        )


def check_cache(work: Work, budget: int) -> None:
    """Raise `DiskError` if the remote shards that one job reads do not fit the cache together."""
    remote = work.remote_shards
    check_budget([job.files.intersection(remote) for job in work.jobs], remote, budget)
