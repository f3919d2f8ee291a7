"""Which GEMM back ends work here: refused by description, or checked once in another process.

In:  a device. Out: for each op the back ends in order, each with what became of it: refused and
     why, or checked, with its error against the emulation and its time.

The one idea: a kernel that is wrong for a device may not raise but trap, after which nothing works
in that process any more. So checks run in a child process; one that dies is named as the reason,
and the rest is checked by a new child. Results are kept in the user's cache folder, by device,
driver-independent versions and beamq's own: nobody waits for them twice.

The child is gemm_check.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from beamq.errors import DeviceError
from beamq.model.gemm import ORDER, backends
from beamq.model.gemm_check import Verdict
from beamq.model.gemm_device import OPS, DeviceFacts, cache_folder
from beamq.version import __version__

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
    command = [sys.executable, "-m", "beamq.model.gemm_check", str(device), *names]
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
