"""Which GEMM back ends work on a device: refused by its description, or checked once.

In: a device. Out: for each operation the back ends in order of speed, each with its `BackendCheck`:
refused and why, or checked, with its error against the emulation and its time.

The one idea: a kernel that is wrong for a device may not raise but trap, after which nothing works
in that process any more. So a child process runs the checks,

    python -m beamq.model.gemm.check DEVICE OP:BACKEND ...

prints one JSON line after each, and exits when one has broken the device's context. If the child
dies, the check it died at is marked unusable and a new child runs the rest. Results are kept in the
user's cache folder, by the device and the versions of torch, CUDA, the kernel packages and beamq.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from beamq.devices import usable_device
from beamq.formats import fp8, nvfp4
from beamq.model.gemm.backend import (
    OPS,
    BackendCheck,
    DenseWeight,
    DeviceFacts,
    Fp8Weight,
    GemmBackend,
    Groups,
    LinearWeight,
    Nvfp4Weight,
)
from beamq.model.gemm.library_gemm import CublasLt, Cutlass, Quack, cache_folder
from beamq.model.gemm.reference import ReferenceGemm
from beamq.model.gemm.triton_gemm import Triton
from beamq.version import __version__

ORDER: Mapping[str, tuple[str, ...]] = {
    "bf16-grouped": ("triton", "cutlass", "reference"),
    "fp8-dense": ("cublaslt", "cutlass", "reference"),
    "fp8-grouped": ("triton", "cutlass", "cublaslt", "reference"),
    "nvfp4-dense": ("cublaslt", "cutlass", "quack", "triton", "reference"),
    "nvfp4-grouped": ("cutlass", "quack", "triton", "reference"),
}
"""Fastest first, as measured on an H200 (docs/results.md); on Blackwell, as expected."""

TOLERANCE = 5e-3
ROWS, FP4_ROWS = (300,), (300, 5, 3072)
"""Rows of the problems. With 5, each expert has at most one or two. FP4 kernels for sm_120 were
reported that are right for some numbers of rows and return zeros for others (flashinfer 3398)."""

CHILD_SECONDS = 300
NOT_RUN = (
    "beamq's NVFP4 calls have not been run on Blackwell (sm_100, sm_103, sm_120, sm_121); each is"
    " checked before it is used"
)

Pair = tuple[str, str]
"""An operation and a back end's name."""


def backends(*, fast: bool = False) -> dict[str, GemmBackend]:
    """One instance of every back end, by name.

    With `fast`, FP8 products are added in the reduced precision of the tensor cores.
    """
    kinds = (Triton(fast=fast), Cutlass(fast=fast), CublasLt(fast=fast), Quack())
    return {backend.name: backend for backend in kinds}


def facts_of(device: torch.device) -> DeviceFacts:
    """The device's description. Raises `DeviceError` if the device is not there."""
    kind, name, capability = device.type, "CPU", (0, 0)
    if kind == "cuda":
        usable_device(device)
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@lru_cache(maxsize=8)
def known_checks(device: torch.device) -> tuple[BackendCheck, ...]:
    """Checks of every operation on a device, in the order of `ORDER`.

    The last one of each operation, the reference, is always usable.
    """
    return all_checks(device, facts_of(device), fresh=False)


def probe(*, fresh: bool = False) -> dict[str, Any]:
    """Plain data for `beamq doctor`: every device, its operations, choices and refusals.

    Runs the checks that are not cached, which can take a minute for each device; with `fresh`,
    runs all of them.
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
    by_op: dict[str, list[dict[str, Any]]] = {op: [] for op in OPS}
    for check in all_checks(device, facts, fresh=fresh):
        entry = dataclasses.asdict(check)
        by_op[entry.pop("op")].append(entry)
    cuda = device.type == "cuda"
    return {
        "device": str(device),
        "name": facts.name,
        "capability": ".".join(map(str, facts.capability)) if cuda else None,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "ops": [
            {
                "op": op,
                "choice": next(entry["backend"] for entry in tried if entry["usable"]),
                "backends": tried,
            }
            for op, tried in by_op.items()
        ],
    }


def all_checks(
    device: torch.device, facts: DeviceFacts, *, fresh: bool
) -> tuple[BackendCheck, ...]:
    """Checks of every operation, in the order of `ORDER`: from the cache or from a child."""
    known_backends = backends()
    found: dict[Pair, BackendCheck] = {}
    wanted: list[Pair] = []
    pairs = [(op, name) for op in OPS for name in ORDER[op]]
    for op, name in pairs:
        if name not in known_backends:  # the reference
            found[op, name] = BackendCheck(op=op, backend=name, usable=True)
        elif (reason := known_backends[name].refusal(op, facts)) is not None:
            found[op, name] = BackendCheck(op=op, backend=name, usable=False, reason=reason)
        else:
            wanted.append((op, name))
    path = _cache_path(facts)
    known = {} if fresh else _read_cache(path)
    missing = [pair for pair in wanted if pair not in known]
    if missing:
        known |= _run_checks(device, missing)
        _write_cache(path, facts, known)
    return tuple(found.get(pair) or known[pair] for pair in pairs)


def _cache_path(facts: DeviceFacts) -> Path:
    key = json.dumps([dataclasses.asdict(facts), __version__, torch.version.cuda])
    return cache_folder() / f"gemm-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _read_cache(path: Path) -> dict[Pair, BackendCheck]:
    """What an earlier run found; nothing if the file is missing or not ours."""
    try:
        found = [BackendCheck(**entry) for entry in json.loads(path.read_text())["verdicts"]]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return {(check.op, check.backend): check for check in found}


def _write_cache(path: Path, facts: DeviceFacts, found: Mapping[Pair, BackendCheck]) -> None:
    """Write the whole file or nothing. An unwritable folder only costs the next run its time."""
    data = {
        "device": dataclasses.asdict(facts),
        "verdicts": [dataclasses.asdict(check) for check in found.values()],
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(data, indent=1))
        partial.replace(path)


def _run_checks(device: torch.device, pairs: Sequence[Pair]) -> dict[Pair, BackendCheck]:
    """Start child processes until every pair has a result."""
    done: dict[Pair, BackendCheck] = {}
    left = list(pairs)
    while left:
        lines, death = _child(device, left)
        for line in lines:
            check = BackendCheck(**json.loads(line))
            done[check.op, check.backend] = check
        left = [pair for pair in left if pair not in done]
        if left and (death is not None or not lines):
            op, name = left.pop(0)  # the check that the child died at
            reason = death or "its check printed nothing"
            done[op, name] = BackendCheck(op=op, backend=name, usable=False, reason=reason)
    return done


def _child(device: torch.device, pairs: Sequence[Pair]) -> tuple[list[str], str | None]:
    """The child's JSON lines, and how it died; None if it exited by itself."""
    root = str(Path(__file__).resolve().parents[3])
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
        out, death = ended.stdout, None
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            death = f"its check ended with exit code {ended.returncode}: {last[:200]}"
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        out = text.decode() if isinstance(text, bytes) else text
        death = f"its check took more than {CHILD_SECONDS} s"
    return [line for line in out.splitlines() if line.startswith("{")], death


def main(arguments: Sequence[str]) -> None:
    """Check each OP:BACKEND on a device, in order, and print each result at once."""
    device = torch.device(arguments[0])
    for pair in arguments[1:]:
        op, name = pair.split(":")
        failed = False
        try:
            check = check_backend(op, backends()[name], device)
        except Exception as error:  # whatever it is, it is the reason
            failed = True
            lines = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {lines[0][:200]}"
            check = BackendCheck(op=op, backend=name, usable=False, reason=reason)
        print(json.dumps(dataclasses.asdict(check)), flush=True)
        if failed and device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except Exception:  # the context is gone: the rest is for another process
                return


def check_backend(op: str, backend: GemmBackend, device: torch.device) -> BackendCheck:
    """Multiply random problems with a back end and compare the products with the emulation's."""
    torch.manual_seed(0)
    largest = 0.0
    for rows in FP4_ROWS if op.startswith("nvfp4") else ROWS:
        x_TK, weight, offsets = random_problem(op, device, experts=5, rows=rows, n=256, k=512)
        got = _product(backend, op, x_TK, weight, offsets)
        if op.endswith("dense"):
            wanted = ReferenceGemm().linear(x_TK, weight)
        else:
            wanted = ReferenceGemm().grouped(x_TK, weight, Groups(offsets))
        error = float((got.double() - wanted.double()).norm() / wanted.double().norm())
        if not error < TOLERANCE:
            reason = f"differs from the emulation by {error:.1e}, more than {TOLERANCE:.0e}"
            return BackendCheck(
                op=op, backend=backend.name, usable=False, error=error, reason=reason
            )
        largest = max(largest, error)
    ms = _time(backend, op, device) if device.type == "cuda" else None
    return BackendCheck(op=op, backend=backend.name, usable=True, error=largest, ms=ms)


def _product(
    backend: GemmBackend, op: str, x_TK: torch.Tensor, weight: LinearWeight, offsets: list[int]
) -> torch.Tensor:
    if op.endswith("dense"):
        return backend.dense(x_TK, weight)
    return backend.grouped(backend.tokens(x_TK, weight), weight, Groups(offsets))


def random_problem(
    op: str, device: torch.device, *, experts: int, rows: int, n: int, k: int
) -> tuple[torch.Tensor, LinearWeight, list[int]]:
    """Random BF16 tokens [rows, k], a weight of the operation's format, and the experts' offsets.

    One expert in five has no rows.
    """
    fmt, kind = op.split("-")
    x_TK = torch.randn(rows, k, dtype=torch.float32, device=device).bfloat16()
    busy = [e % 5 != 1 for e in range(experts)]
    offsets = [0, *(rows // sum(busy) * count for count in itertools.accumulate(busy))]
    offsets[-1] = rows
    shape = (1 if kind == "dense" else experts, n, k)
    w = torch.randn(shape, dtype=torch.float32, device=device).bfloat16()
    weight: LinearWeight = DenseWeight(w_NK=w)
    if fmt == "fp8":
        codes, scale = fp8.quantize_rows(w)
        weight = Fp8Weight(codes=codes, scale=scale)
    elif fmt == "nvfp4":
        scale_E = nvfp4.global_scale_from_amax(w.float().abs().amax((-2, -1)))
        parts = [nvfp4.quantize(*each) for each in zip(w, scale_E, strict=True)]
        block_scale = torch.stack([part.block_scale.view(torch.uint8) for part in parts])
        weight = Nvfp4Weight(
            codes=torch.stack([part.codes for part in parts]),
            block_scale=block_scale.view(torch.float8_e4m3fn),
            global_scale=scale_E[:, None, None].repeat(1, n, 1),
            input_scale=nvfp4.global_scale_from_amax(x_TK.float().abs().max()),
        )
    return x_TK, weight.expert(0) if kind == "dense" else weight, offsets


def _time(backend: GemmBackend, op: str, device: torch.device) -> float:
    """Median ms of [2048, 4096] tokens times [4096, 4096], or the same rows over 16 experts."""
    x_TK, weight, offsets = random_problem(op, device, experts=16, rows=2048, n=4096, k=4096)
    times = []
    for _ in range(8):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        _product(backend, op, x_TK, weight, offsets)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(sorted(times[2:])[3])


if __name__ == "__main__":
    main(sys.argv[1:])
