"""GEMM back ends for GPUs: an ordered list for each op, and `Gemm`s that use the best that works.

In:  a name and a device. Out: an `EngineGemm`, which is a `Gemm` (linear.py).

    auto        for each op the first of `ORDER` that is not refused and passed its check
    triton, cutlass, cublaslt, quack
                that one alone; an op it cannot serve on this device raises `DeviceError`
    NAME+fast   FP8 products are added inside the tensor cores in some 14 bits: up to a third
                faster, error 2.0e-3 to 3.9e-3 instead of 1.7e-3

The one idea: a back end is a claim until it has been checked. `refusal` rules out what a device
cannot do; what is left multiplies a small problem in a process of its own (gemm_probe.py), against
the emulation, before it is used for anything. `reference` is never refused and always last.

What a call cannot serve (activations that are not BF16, widths that are no multiple of 16) goes to
the reference as well: nothing about results depends on it but speed.

Experts pass in ranges of at most `CHUNK_BYTES` of input rows, so that what lies between the GEMMs
stays small beside the layer's weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from beamq.errors import DeviceError, UsageError
from beamq.model.gemm.device import OPS, DeviceFacts, Verdict, cache_folder
from beamq.model.gemm.operands import fp4_part
from beamq.model.gemm.products import part_of
from beamq.model.gemm.quack_gemm import Quack
from beamq.model.gemm.reference import (
    DenseWeight,
    Fp8Weight,
    Gemm,
    LinearWeight,
    Nvfp4Weight,
    ReferenceGemm,
)
from beamq.model.gemm.torch_gemm import CublasLt, Cutlass
from beamq.model.gemm.triton_gemm import Triton
from beamq.version import __version__

ENGINES = ("auto", "triton", "cutlass", "cublaslt", "quack")
FAST = "+fast"
ORDER: Mapping[str, tuple[str, ...]] = {
    "bf16-grouped": ("triton", "cutlass", "reference"),
    "fp8-dense": ("cublaslt", "cutlass", "reference"),
    "fp8-grouped": ("triton", "cutlass", "cublaslt", "reference"),
    "nvfp4-dense": ("cublaslt", "cutlass", "quack", "triton", "reference"),
    "nvfp4-grouped": ("cutlass", "quack", "triton", "reference"),
}
"""Fastest first, as measured on an H200 (docs/results.md); on Blackwell, as expected."""
CHUNK_BYTES = 450 << 20

_REFERENCE = ReferenceGemm()
_FORMATS = {Fp8Weight: "fp8", Nvfp4Weight: "nvfp4"}


def backends() -> dict[str, Any]:
    """One of each class of gemm_triton.py, gemm_torch.py and gemm_quack.py, by name."""
    return {kernel.name: kernel for kernel in (Triton(), Cutlass(), CublasLt(), Quack())}


def engine(name: str) -> EngineGemm:
    """The `Gemm` of that name; what it can do is found out at its first use on a device."""
    return EngineGemm(name=name.removesuffix(FAST), fast=name.endswith(FAST))


@dataclass(slots=True, kw_only=True)
class EngineGemm:
    """A `Gemm` that sends each op to one of `kernels`, by `choices` of a device."""

    name: str
    fast: bool = False
    kernels: Mapping[str, Any] = field(default_factory=backends)
    choices: dict[tuple[str, torch.device], str] = field(default_factory=dict)

    def linear(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """See `Gemm.linear`."""
        kernel = None
        if not isinstance(weight, DenseWeight) and x_TK.shape[0] and _fits(x_TK, weight):
            kernel = self._kernel(f"{_FORMATS[type(weight)]}-dense", x_TK.device)
        if kernel is None:
            return _REFERENCE.linear(x_TK, weight)
        y: torch.Tensor = kernel.dense(x_TK, weight, fast=self.fast)
        return y

    def grouped(
        self,
        x_TK: torch.Tensor,
        rows: torch.Tensor | None,
        weight: LinearWeight,
        offsets: Sequence[int],
    ) -> torch.Tensor:
        """See `Gemm.grouped`."""
        kernel = self._grouped_kernel(x_TK, weight, offsets)
        if kernel is None:
            return _REFERENCE.grouped(x_TK, rows, weight, offsets)
        tokens = kernel.tokens(x_TK, weight)
        y: torch.Tensor = kernel.grouped(tokens, rows, weight, offsets, fast=self.fast)
        return y

    def experts(
        self,
        x_TK: torch.Tensor,
        rows: torch.Tensor | None,
        gate_up: LinearWeight,
        down: LinearWeight,
        offsets: Sequence[int],
    ) -> torch.Tensor:
        """See `Gemm.experts`."""
        kernel = self._grouped_kernel(x_TK, gate_up, offsets)
        other = self._grouped_kernel(x_TK, down, offsets)
        if kernel is None or other is None or other.name != kernel.name:
            return _REFERENCE.experts(x_TK, rows, gate_up, down, offsets)
        y_SK = x_TK.new_empty(offsets[-1], _stored(down).shape[1])
        tokens = kernel.tokens(x_TK, gate_up)
        if rows is None:
            rows = torch.arange(offsets[-1], device=x_TK.device)
        for first, last in _ranges(offsets, CHUNK_BYTES // (x_TK.shape[1] * x_TK.itemsize)):
            low, high = offsets[first], offsets[last]
            part = part_of(offsets, first, last)
            wide, narrow = (_some(kernel, w, first, last) for w in (gate_up, down))
            fused = {"swiglu": True} if kernel.fuses(gate_up, fast=self.fast) else {}
            between = kernel.grouped(tokens, rows[low:high], wide, part, fast=self.fast, **fused)
            active = kernel.tokens(between, down) if fused else kernel.gated(between, down)
            del between
            kernel.grouped(active, None, narrow, part, fast=self.fast, out=y_SK[low:high])
            del active
        return y_SK

    def _grouped_kernel(
        self, x_TK: torch.Tensor, weight: LinearWeight, offsets: Sequence[int]
    ) -> Any | None:
        if not offsets[-1] or not _fits(x_TK, weight):
            return None
        return self._kernel(f"{_FORMATS.get(type(weight), 'bf16')}-grouped", x_TK.device)

    def _kernel(self, op: str, device: torch.device) -> Any | None:
        """The class that serves `op` on `device`, None for the reference. Raises `DeviceError`."""
        chosen = self.choices.get((op, device))
        if chosen is None:
            chosen = self.choices[op, device] = self._choose(op, device)
        return self.kernels.get(chosen)

    def _choose(self, op: str, device: torch.device) -> str:

        if self.name != "auto" and self.name not in ORDER[op]:
            return next(v.backend for v in verdicts(op, device) if v.usable)
        reasons = []
        for verdict in verdicts(op, device):
            if self.name in ("auto", verdict.backend):
                if verdict.usable:
                    return verdict.backend
                reasons.append(f"{verdict.reason}")
        raise DeviceError(
            f"gemm '{self.name}' cannot do {op} on {device}: {'; '.join(reasons)}."
            " Use gemm 'auto' or 'reference'"
        )


def _fits(x_TK: torch.Tensor, weight: LinearWeight) -> bool:
    """BF16 activations, and both widths multiples of 16 (of 32 in packed codes), as kernels ask."""
    n, k = _stored(weight).shape[-2:]
    return (
        x_TK.dtype == torch.bfloat16
        and n % 16 == 0
        and k % 16 == 0
        and (not isinstance(weight, DenseWeight) or weight.w_NK.dtype == torch.bfloat16)
    )


def _stored(weight: LinearWeight) -> torch.Tensor:
    return weight.w_NK if isinstance(weight, DenseWeight) else weight.codes


def _some(kernel: Any, weight: LinearWeight, first: int, last: int) -> LinearWeight:
    """Experts first .. last - 1, as views."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(w_NK=weight.w_NK[first:last])
    if isinstance(weight, Fp8Weight):
        return Fp8Weight(codes=weight.codes[first:last], scale=weight.scale[first:last])
    if not isinstance(kernel, Triton):
        return fp4_part(weight, first, last)
    return Nvfp4Weight(
        codes=weight.codes[first:last],
        block_scale=weight.block_scale[first:last],
        global_scale=weight.global_scale[first:last],
        input_scale=weight.input_scale,
    )


def _ranges(offsets: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """Ranges of experts of at most `rows` rows each, or of one expert that has more."""
    if offsets[-1] <= rows:
        return [(0, len(offsets) - 1)]
    ranges, first = [], 0
    for expert in range(1, len(offsets)):
        if offsets[expert] - offsets[first] > rows and expert - 1 > first:
            ranges.append((first, expert - 1))
            first = expert - 1
    ranges.append((first, len(offsets) - 1))
    return [(a, b) for a, b in ranges if offsets[b] > offsets[a]]


# Which GEMM back ends work here: refused by description, or checked once in another process.
#
# In:  a device. Out: for each op the back ends in order, each with what became of it: refused and
#      why, or checked, with its error against the emulation and its time.
#
# The one idea: a kernel that is wrong for a device may not raise but trap, after which nothing
# works in that process any more. So checks run in a child process; one that dies is named as the
# reason, and the rest is checked by a new child. Results are kept in the user's cache folder, by
# device, driver-independent versions and beamq's own: nobody waits for them twice.
#
# The child is gemm_check.py.

CHILD_SECONDS = 300
NOT_RUN = (
    "beamq's NVFP4 calls have not been run on Blackwell (sm_100, sm_103, sm_120, sm_121); each is"
    " checked before it is used"
)


def facts_of(device: torch.device) -> DeviceFacts:
    """What refusals are decided from. Raises `DeviceError` if the device isn't there."""
    kind, name, capability = device.type, "CPU", (0, 0)
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(f"device {device}: no usable NVIDIA GPU is here; use --device cpu")
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
        kind = "hip" if torch.version.hip is not None else kind
    return DeviceFacts(
        kind=kind,
        name=name,
        capability=capability,
        torch=torch.__version__,
        triton=_version("triton"),
        quack=_version("quack-kernels"),
        cutlass_dsl=_version("nvidia-cutlass-dsl"),
    )


@lru_cache(maxsize=64)
def verdicts(op: str, device: torch.device) -> tuple[Verdict, ...]:
    """The back ends of `op` in order; the last, the reference, is always usable."""
    return tuple(v for v in all_verdicts(device) if v.op == op)


@lru_cache(maxsize=8)
def all_verdicts(device: torch.device) -> tuple[Verdict, ...]:
    """Verdicts of every op, from the cache or from a child process."""
    return _all_verdicts(device, facts_of(device), fresh=False)


def probe(*, fresh: bool = False) -> dict[str, Any]:
    """Plain data for `beamq doctor`: every device, its ops, choices, and refusals with reasons.

    Checks what has not been checked yet, which can take a minute a device; `fresh` checks again.
    """
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "quack": _version("quack-kernels"),
        "note": NOT_RUN,
        "devices": [_describe(device, fresh) for device in devices or [torch.device("cpu")]],
    }


def _describe(device: torch.device, fresh: bool) -> dict[str, Any]:
    facts = facts_of(device)
    found = _all_verdicts(device, facts, fresh=fresh)
    memory = None
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    ops = []
    for op in OPS:
        tried = [v for v in found if v.op == op]
        ops.append(
            {
                "op": op,
                "choice": next(v.backend for v in tried if v.usable),
                "backends": [
                    {k: v for k, v in dataclasses.asdict(verdict).items() if k != "op"}
                    for verdict in tried
                ],
            }
        )
    capability = ".".join(map(str, facts.capability)) if device.type == "cuda" else None
    return {
        "device": str(device),
        "name": facts.name,
        "capability": capability,
        "memory_bytes": memory,
        "ops": ops,
    }


def _all_verdicts(device: torch.device, facts: DeviceFacts, *, fresh: bool) -> tuple[Verdict, ...]:
    kernels = backends()
    refused: dict[tuple[str, str], str] = {}
    for op in OPS:
        for name in ORDER[op]:
            reason = kernels[name].refusal(op, facts) if name in kernels else None
            if reason is not None:
                refused[op, name] = reason
    wanted = [
        (op, name)
        for op in OPS
        for name in ORDER[op]
        if name in kernels and (op, name) not in refused
    ]
    path = _cache_path(facts)
    known = {} if fresh else _read_cache(path)
    missing = [pair for pair in wanted if pair not in known]
    if missing:
        known |= _check(device, missing)
        _write_cache(path, facts, known)
    out = []
    for op in OPS:
        for name in ORDER[op]:
            if (op, name) in refused:
                out.append(Verdict(op=op, backend=name, usable=False, reason=refused[op, name]))
            elif name in kernels:
                out.append(known[op, name])
            else:
                out.append(Verdict(op=op, backend=name, usable=True))
    return tuple(out)


def _check(
    device: torch.device, pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Verdict]:
    """Check in child processes until every pair has a verdict."""
    done: dict[tuple[str, str], Verdict] = {}
    left = list(pairs)
    while left:
        lines, death = _child(device, left)
        for line in lines:
            verdict = Verdict(**json.loads(line))
            done[verdict.op, verdict.backend] = verdict
        left = [pair for pair in left if pair not in done]
        if left and (death is not None or not lines):
            op, name = left.pop(0)  # at which the child died
            reason = death or "its check said nothing"
            done[op, name] = Verdict(op=op, backend=name, usable=False, reason=reason)
    return done


def _child(device: torch.device, pairs: Sequence[tuple[str, str]]) -> tuple[list[str], str | None]:
    """(JSON lines, how it died; None if it ended by itself)."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    names = [f"{op}:{name}" for op, name in pairs]
    command = [sys.executable, "-m", "beamq.model.gemm.check", str(device), *names]
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        out = text.decode() if isinstance(text, bytes) else text
        return _json_lines(out), f"its check took more than {CHILD_SECONDS} s"
    if not ended.returncode:
        return _json_lines(ended.stdout), None
    last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    death = f"its check ended with exit code {ended.returncode}: {last[:200]}"
    return _json_lines(ended.stdout), death


def _json_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("{")]


def _cache_path(facts: DeviceFacts) -> Path:
    key = json.dumps([dataclasses.asdict(facts), __version__, torch.version.cuda])
    return cache_folder() / f"gemm-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read_cache(path: Path) -> dict[tuple[str, str], Verdict]:
    """What an earlier run found; nothing if the file is missing or not ours."""
    try:
        found = [Verdict(**entry) for entry in json.loads(path.read_text())["verdicts"]]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return {(v.op, v.backend): v for v in found}


def _write_cache(path: Path, facts: DeviceFacts, found: dict[tuple[str, str], Verdict]) -> None:
    """Whole or not at all; a folder that cannot be written only costs the next run its time."""
    data = {
        "device": dataclasses.asdict(facts),
        "verdicts": [dataclasses.asdict(verdict) for verdict in found.values()],
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(data, indent=1))
        partial.replace(path)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


_BACKENDS: dict[str, Gemm] = {
    "reference": ReferenceGemm(),
    "weights-only": ReferenceGemm(quantize_activations=False),
}


def gemm_backend(name: str) -> Gemm:
    """The back end called `name`. Raises `UsageError` for a name that is none."""
    if name in _BACKENDS:
        return _BACKENDS[name]
    if name.removesuffix(FAST) in ENGINES:
        return engine(name)
    names = ", ".join(sorted([*_BACKENDS, *ENGINES]))
    raise UsageError(f"gemm {name!r} is unknown, expected one of: {names}")
