"""What a run takes of the machine: CPU or GPU, threads, memory, cache. Known before it takes any.

In: a plan's work and the user's limits. Out: the workers of the run, or the error that would
otherwise come later.

The device. A GPU named by `cuda[:N]` that cannot convert is an error. `auto` is a GPU that can,
where it saves more time than its start takes. It saves 0.15 s of one core for each GB of source,
0.9 s where block scales are swept; torch, the driver's context and the kernels take some 8 s to
start. With the sweep a GPU pays from 140 GB on for 16 cores and from 18 GB on for two. A run that
calibrates has its GPU up already and converts there. The driver is asked first, so that a machine
without a GPU does not import torch. Under torchrun each rank of a machine has a GPU of its own.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass
from pathlib import Path

from beamq import devices, limits
from beamq.convert.cpu_worker import HELD_BYTES, CpuWorkerFactory, WorkerFactory, piece_bytes
from beamq.errors import DeviceError, MemoryBudgetError
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import Checkpoint
from beamq.io.shard_cache import check_budget
from beamq.plan.plan import FP8_KINDS, JobKind, Work
from beamq.ranks import Ranks, cores_here
from beamq.units import show_bytes

_LOG = logging.getLogger("beamq")
SLOW_NBYTES = 500_000_000  # of source, which take half a minute without the compiled kernels
DEFAULT_MEMORY_BYTES = 1_500_000_000
THREAD_BYTES = 1 << 23  # address space of a thread, besides its stack
START_SECONDS = 8.0
SAVED_SECONDS = {"max": 0.15, "sweep": 0.9}  # of a core, for each GB of source
LEAST_CAPABILITY = (8, 9)  # Triton's E4M3 casts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """`device` is "cpu", or a GPU as "cuda:0" with its `name`.

    `note` says why a GPU that was considered is not used.
    """

    device: str
    name: str = ""
    note: str = ""

    def text(self, workers: int, processes: int = 1) -> str:
        """For a table or a sentence; `workers` and the GPU are those of each process."""
        threads = f"{workers} thread{'' if workers == 1 else 's'}"
        place = self.device if processes == 1 else "a GPU"
        each = threads if self.device == "cpu" else f"{place} ({self.name}), {threads}"
        return each if processes == 1 else f"{processes} processes, each on {each}"


def choose_conversion_device(
    asked: str, work: Work, *, workers: int, ranks: Ranks, calibrates: bool = False
) -> DeviceChoice:
    """Raises `DeviceError` where `asked` names a device that is absent or cannot convert."""
    slower = asked == "auto" and not calibrates and saved_seconds(work, workers) < START_SECONDS
    if asked == "cpu" or (asked == "auto" and (slower or not devices.driver_sees_a_gpu())):
        return DeviceChoice(device="cpu")
    try:
        device = devices.choose_device(asked, ranks)
        refused = devices.refusal(device, LEAST_CAPABILITY)
    except DeviceError as fault:
        if asked != "auto":
            raise
        return DeviceChoice(device="cpu", note=f"No GPU: {fault}.")
    if device.type == "cpu":  # a driver, but a torch without CUDA
        return DeviceChoice(device="cpu", note="No GPU: this torch is built without CUDA.")
    if refused is None:
        import torch

        name = torch.cuda.get_device_name(device)
        return DeviceChoice(device=f"cuda:{device.index or 0}", name=name)
    if asked != "auto" and not calibrates:
        raise DeviceError(f"{device}: {refused}; use --device cpu, the bytes are the same")
    return DeviceChoice(device="cpu", note=f"{device} cannot be used for conversion: {refused}.")


def saved_seconds(work: Work, workers: int) -> float:
    """Seconds of work that a GPU saves each of `workers` cores."""
    seconds = 0.0
    for job in work.jobs:
        if job.kind is JobKind.NVFP4 or job.kind in FP8_KINDS:
            rule = work.scales if job.kind == JobKind.NVFP4 else "max"
            seconds += job.source_nbytes / 1e9 * SAVED_SECONDS[rule]
    return seconds / workers


def open_workers(
    choice: DeviceChoice, checkpoint: Checkpoint, work: Work, *, memory: int, workers: int
) -> WorkerFactory:
    """The workers chosen. Raises `DeviceError` if the GPU has too little memory."""
    if choice.device == "cpu":
        return CpuWorkerFactory(checkpoint, memory, workers)
    import torch

    from beamq.convert.gpu_worker import GpuWorkerFactory

    return GpuWorkerFactory(checkpoint, work, torch.device(choice.device), memory, workers)


def worker_sentence(
    choice: DeviceChoice, factory: WorkerFactory, workers: int, *, processes: int = 1
) -> str:
    """What converts, for the screen: where, with how many threads, in how much memory.

    The figures are those of each process.
    """
    threads = factory.count(workers)
    text = f"{'On' if processes == 1 else 'In'} {choice.text(threads, processes)}"
    if choice.device != "cpu":
        from beamq.convert.gpu_worker import SLOT_BYTES

        text += (
            f": at most {show_bytes(threads * SLOT_BYTES)} of page-locked memory and"
            f" {show_bytes(factory.device_nbytes)} of the GPU's"
        )
    return f"{text}. {choice.note}".rstrip()


def default_workers() -> int:
    """Threads: the cores that this process may use (torchrun's share them), at most 32."""
    return min(32, cores_here())


def predicted_host_nbytes(work: Work, workers: int, budget: int = DEFAULT_MEMORY_BYTES) -> int:
    """Upper bound of the buffers a run holds, in bytes, without the interpreter."""
    largest = min(work.largest_group_nbytes, HELD_BYTES)
    piece = max(piece_bytes(workers), work.largest_stripe_nbytes)
    return max(min(workers * largest, budget), largest) + workers * 4 * piece


def check_memory(work: Work, budget: int) -> None:
    """Raise `MemoryBudgetError` if one scale group does not fit the budget."""
    largest = min(work.largest_group_nbytes, HELD_BYTES)
    if largest > budget:
        raise MemoryBudgetError(
            f"--max-host-memory {show_bytes(budget)} is too small for the largest group of"
            f" linears that share a scale; allow at least {show_bytes(largest)}"
        )


def check_room(work: Work, workers: int, budget: int) -> None:
    """Raise `MemoryBudgetError` if a limit on address space (`ulimit -v`) leaves too little.

    A thread that cannot start for want of memory dies silently, and its starter waits for ever.
    A warning says when the machine or its container may have too little memory.
    """
    needed = predicted_host_nbytes(work, workers, budget)
    fewer = "use fewer --workers or a smaller --max-host-memory"
    limits.check_room(0, needed, "the conversion", fewer)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):  # not Linux
        return
    stack = THREAD_BYTES if stack == resource.RLIM_INFINITY else stack
    needed += (workers + 1) * (stack + THREAD_BYTES)
    if used + needed > limit:
        raise MemoryBudgetError(
            f"the limit on address space (ulimit -v) is {show_bytes(limit)} and"
            f" {show_bytes(used + needed)} are needed; raise it, or {fewer}"
        )


def warn_of_slow_kernels(work: Work, factory: WorkerFactory) -> None:
    """Log a warning where a long conversion on a CPU lacks the compiled kernels."""
    if cpu.LACK is None or not isinstance(factory, CpuWorkerFactory):
        return
    if sum(job.source_nbytes for job in work.jobs) >= SLOW_NBYTES:
        _LOG.warning("warning: %s", cpu.LACK)


def check_cache(work: Work, budget: int) -> None:
    """Raise `DiskError` if the remote shards that one job reads do not fit the cache together."""
    remote = work.remote_shards
    check_budget([job.files.intersection(remote) for job in work.jobs], remote, budget)
