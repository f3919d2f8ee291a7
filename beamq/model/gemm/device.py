"""What GEMM back ends are asked to do, and what they are told about a device.

    triton     gemm_triton.py: beamq's own grouped kernel; NVFP4 by exact emulation in BF16
    cutlass    gemm_torch.py: torch's CUTLASS kernels: FP8 on sm_90, NVFP4 on sm_100 and sm_103
    cublaslt   gemm_torch.py: torch's cuBLASLt: dense linears; FP8 experts one by one
    quack      gemm_quack.py: an optional package: NVFP4 on sm_120 and sm_121; experts one by one
    reference  linear.py's emulation, anywhere

Every class of those has `refusal`, `dense`, and for experts `tokens` (what can be done once for
each token), `grouped` (products of sorted rows of those) and, unless it `fuses` SwiGLU into its
first product, `gated`.

`refusal` says from `DeviceFacts` alone why an op cannot be served: a kernel for another
architecture can trap and take the process's CUDA context with it, so nothing is tried to find out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

OPS = ("bf16-grouped", "fp8-dense", "fp8-grouped", "nvfp4-dense", "nvfp4-grouped")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What `refusal` decides from. Packages by version, None if not installed."""

    kind: str
    name: str
    capability: tuple[int, int]
    torch: str
    triton: str | None
    quack: str | None
    cutlass_dsl: str | None


def needs(facts: DeviceFacts, least: tuple[int, int]) -> str | None:
    if facts.kind != "cuda":
        return f"needs an NVIDIA GPU; this is {facts.kind}"
    if facts.capability < least:
        return f"needs sm_{least[0]}{least[1]} or later; this is {sm(facts)}"
    return None


def sm(facts: DeviceFacts) -> str:
    return f"sm_{facts.capability[0]}{facts.capability[1]}"


def cache_folder() -> Path:
    """The user's, for what was found out or compiled once. It may not be there yet."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "beamq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one back end for one op. `error` is relative, `ms` of the probe's problem."""

    op: str
    backend: str
    usable: bool
    reason: str | None = None
    error: float | None = None
    ms: float | None = None
