"""What a run may take of a machine, checked before it takes anything: threads, memory, cache.

In: a plan's work and the user's limits. Out: nothing, or the error that would come later.
"""

from __future__ import annotations

import resource
from pathlib import Path

from beamq.beam.tensors import Role
from beamq.convert.cpu_worker import HELD_BYTES, piece_bytes
from beamq.errors import MemoryBudgetError, TensorError
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import Checkpoint
from beamq.io.shard_cache import check_budget
from beamq.plan.plan import Work
from beamq.ranks import cores_here
from beamq.units import show_bytes

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


# Checks on data that are cheap enough to make before work: norms, biases, routers, tied heads.
#
# The large weights are checked for NaN and infinity as they stream by (reading a terabyte twice
# would double the run); everything small is read here, so that a broken norm in the last layer is
# found in the first second.

SMALL_BYTES = 1 << 20
ROUTER_BYTES = 64 << 20
COMPARE_BYTES = 1 << 22


def check_small_tensors(checkpoint: Checkpoint, plan: Work) -> None:
    """Raise `TensorError` for a non-finite value in any small tensor, or untied tied heads."""
    small = []
    for job in plan.jobs:
        member = job.members[0]
        role, spec = member.role, member.source.spec
        limit = ROUTER_BYTES if role.role is Role.ROUTER else SMALL_BYTES
        if job.kind == "copy" and role.role is not Role.EXTRA and spec.nbytes <= limit:
            small.append((spec, 0, spec.nbytes))
    for (spec, _, _), data in zip(small, checkpoint.peek_many(small), strict=True):
        found = cpu.amax(memoryview(data), spec.dtype)
        if found.nonfinite:
            raise TensorError(
                f"{spec.file}: {spec.name} holds {found.nonfinite} NaN or infinite values (first"
                f" at element {found.first_nonfinite}); repair the source, such a model cannot be"
                " served"
            )
    if plan.config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors:
        _check_tied(checkpoint)


def _check_tied(checkpoint: Checkpoint) -> None:
    head = checkpoint.spec("lm_head.weight")
    embedding = checkpoint.spec("model.embed_tokens.weight")
    same = head.dtype == embedding.dtype and head.shape == embedding.shape
    for start in range(0, head.nbytes if same else 0, COMPARE_BYTES):
        size = min(COMPARE_BYTES, head.nbytes - start)
        a, b = checkpoint.peek_many([(head, start, size), (embedding, start, size)])
        if a != b:
            same = False
            break
    if not same:
        raise TensorError(
            "config.json ties the embeddings, but lm_head.weight differs from"
            " model.embed_tokens.weight; set tie_word_embeddings to false or remove the head"
        )
