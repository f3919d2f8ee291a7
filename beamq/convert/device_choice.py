"""CPU or GPU: what `--device` means for a conversion.

`cpu` and `cuda[:N]` are orders; a GPU that cannot do it is an error. `auto` is the GPU where there
is one that can and where it saves more time than its start takes: 0.15 s of one core for each GB of
source, 0.9 s where block scales are swept, against some 8 s for torch, the driver's context and the
kernels. With the sweep that is from 140 GB on for 16 cores and from 18 GB for two. A run that
calibrates has its GPU up already and converts there. Whether there is a GPU is asked of the driver,
so that a machine without one does not import torch to find out.

Under torchrun `auto` and `cuda` are one GPU for each rank of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from beamq import devices
from beamq.convert.cpu_worker import CpuWorkerFactory, WorkerFactory
from beamq.errors import DeviceError
from beamq.io.checkpoint import Checkpoint
from beamq.plan.plan import Work
from beamq.ranks import Ranks
from beamq.units import show_bytes

if TYPE_CHECKING:
    import torch

START_SECONDS = 8.0
SAVED_SECONDS = {"max": 0.15, "sweep": 0.9}  # of a core, for each GB of source
LEAST_CAPABILITY = (8, 9)  # Triton's E4M3 casts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """`device` is "cpu", or a GPU as "cuda:0", whose `name` is known then.

    `note` says why a GPU that was looked at is left alone.
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
    """Raises `DeviceError` where `asked` names a device that is not there or cannot do it."""
    if asked == "cpu":
        return DeviceChoice(device="cpu")
    if asked == "auto" and not calibrates and saved_seconds(work, workers) < START_SECONDS:
        return DeviceChoice(device="cpu")
    if asked == "auto" and not devices.driver_sees_a_gpu():
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
        return _on_gpu(device)
    if asked != "auto" and not calibrates:
        raise DeviceError(f"{device}: {refused}; use --device cpu, the bytes are the same")
    return DeviceChoice(device="cpu", note=f"{device} cannot be used for conversion: {refused}.")


def saved_seconds(work: Work, workers: int) -> float:
    """What a GPU takes off each of `workers` cores."""
    seconds = 0.0
    for job in work.jobs:
        if job.kind in ("nvfp4", "fp8"):
            rule = work.scales if job.kind == "nvfp4" else "max"
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


def _on_gpu(device: torch.device) -> DeviceChoice:
    import torch

    index = device.index or 0
    return DeviceChoice(device=f"cuda:{index}", name=torch.cuda.get_device_name(device))
