"""Devices: what `--device` names, which one this process gets, and why a GPU cannot be used.

In: a name (`auto`, `cpu`, `cuda`, `cuda:N`) or a torch device. Out: a device, or the reason
against it. torch is imported only where there may be a GPU.

beamq's own kernels need an NVIDIA GPU of compute capability 9.0 or later, Triton, and BF16.
Everywhere else the plain torch path computes the same, so only speed and memory depend on it.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from beamq.errors import DeviceError, UsageError
from beamq.ranks import Ranks

if TYPE_CHECKING:
    import torch

LEAST_CAPABILITY = (9, 0)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")


def check_device_name(name: str, *, auto: bool = True) -> None:
    """Raise `UsageError` unless it is `cpu`, `cuda` or `cuda:N` (or `auto`, if allowed)."""
    if _DEVICE.fullmatch(name) or (auto and name == "auto"):
        return
    words = "auto, cpu, cuda or cuda:N" if auto else "cpu, cuda or cuda:N"
    raise UsageError(f"device {name[:40]!r}: expected {words}")


def usable_device(device: torch.device | str) -> torch.device:
    """The device, if the machine has it. Raises `UsageError` (its name), `DeviceError`."""
    import torch

    check_device_name(str(device), auto=False)
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device {found}: no usable NVIDIA GPU is here; use --device cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device {found}: only {torch.cuda.device_count()} GPUs are here")
    return found


def choose_device(name: str, ranks: Ranks) -> torch.device:
    """The device of this process; `auto` and `cuda` are one GPU for each rank of a machine.

    Raises `UsageError` for another name, `DeviceError` where there is no such device.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = usable_device(name)
    if device.type == "cuda" and ":" not in name:
        local = int(os.environ.get("LOCAL_RANK", 0)) if ranks.world > 1 else 0
        if local >= torch.cuda.device_count():
            raise DeviceError(
                f"rank {ranks.rank} has no GPU of its own: this machine has"
                f" {torch.cuda.device_count()}; start one process for each GPU"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)  # NCCL uses the current one
    return device


def driver_sees_a_gpu() -> bool:
    """Whether there is an NVIDIA GPU: its driver answers in milliseconds, torch's import in
    seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


@lru_cache(maxsize=16)
def refusal(device: torch.device, least: tuple[int, int] = LEAST_CAPABILITY) -> str | None:
    """Why Triton kernels that need `least` do not run on `device`; None if they do."""
    if device.type != "cuda":
        return f"device {device} is not an NVIDIA GPU"
    import torch

    if torch.version.hip is not None:
        return "torch is built for AMD GPUs"
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    capability = torch.cuda.get_device_capability(device)
    if capability < least:
        have, need = (".".join(map(str, c)) for c in (capability, least))
        return f"compute capability {have}, needs {need}"
    return None


def serves(x: torch.Tensor) -> bool:
    """True if `x` is contiguous BF16 on a device that runs the kernels."""
    import torch

    return (
        x.is_cuda and x.dtype == torch.bfloat16 and x.is_contiguous() and refusal(x.device) is None
    )
