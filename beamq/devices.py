"""Whether beamq's own GPU kernels can take a tensor, and if not, why.

They need an NVIDIA GPU of compute capability 9.0 or later, Triton, and BF16. Everywhere else the
plain torch path computes the same; nothing but speed and memory depends on the answer.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from beamq.errors import UsageError

if TYPE_CHECKING:
    import torch

LEAST_CAPABILITY = (9, 0)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")


@lru_cache(maxsize=16)
def refusal(device: torch.device, least: tuple[int, int] = LEAST_CAPABILITY) -> str | None:
    """Why Triton kernels that need `least` don't run on `device`; None if they do."""
    if device.type != "cuda":
        return f"device {device} is no NVIDIA GPU"
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


def check_device_name(name: str, *, auto: bool = True) -> None:
    """Raise `UsageError` unless it is `cpu`, `cuda` or `cuda:N` (or `auto`, if allowed)."""
    if _DEVICE.fullmatch(name) or (auto and name == "auto"):
        return
    words = "auto, cpu, cuda or cuda:N" if auto else "cpu, cuda or cuda:N"
    raise UsageError(f"device {name[:40]!r}: expected {words}")
