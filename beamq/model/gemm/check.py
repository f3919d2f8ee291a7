"""Check GEMM back ends against the emulation; run as a process that may die of it.

`python -m beamq.model.gemm.check DEVICE OP:BACKEND ...` prints one JSON line a check, at once, and
ends early if a check has broken the device's context. gemm_probe.py starts it and goes on with
what is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from beamq.formats import fp8, nvfp4
from beamq.model.gemm.device import Verdict
from beamq.model.gemm.reference import (
    DenseWeight,
    Fp8Weight,
    LinearWeight,
    Nvfp4Weight,
    ReferenceGemm,
)
from beamq.model.gemm.select import EngineGemm, backends

TOLERANCE = 5e-3
ROWS, FP4_ROWS = (300,), (300, 5, 3072)
"""Of the problems; of 5, experts have one each. FP4 kernels for sm_120 were reported that are right
for some numbers of rows and return zeros for others (flashinfer issue 3398)."""


def check_one(op: str, name: str, device: torch.device, *, kernels: Any = None) -> Verdict:
    """Multiply random problems with back end `name` and compare with the emulation."""
    gemm = EngineGemm(name=name, kernels=kernels or backends(), choices={(op, device): name})
    torch.manual_seed(0)
    largest = 0.0
    for rows in FP4_ROWS if op.startswith("nvfp4") else ROWS:
        x_TK, weight, offsets = _problem(op, device, experts=5, rows=rows, n=256, k=512)
        got = _run(gemm, op, x_TK, weight, offsets)
        wanted = _run(ReferenceGemm(), op, x_TK, weight, offsets)
        error = float((got.double() - wanted.double()).norm() / wanted.double().norm())
        if not error < TOLERANCE:
            reason = f"differs from the emulation by {error:.1e}, more than {TOLERANCE:.0e}"
            return Verdict(op=op, backend=name, usable=False, error=error, reason=reason)
        largest = max(largest, error)
    return Verdict(op=op, backend=name, usable=True, error=largest, ms=_time(gemm, op, device))


def _run(
    gemm: Any, op: str, x_TK: torch.Tensor, weight: LinearWeight, offsets: list[int]
) -> torch.Tensor:
    if op.endswith("dense"):
        y: torch.Tensor = gemm.linear(x_TK, weight)
        return y
    y = gemm.grouped(x_TK, None, weight, offsets)
    return y


def _problem(
    op: str, device: torch.device, *, experts: int, rows: int, n: int, k: int
) -> tuple[torch.Tensor, LinearWeight, list[int]]:
    """Random BF16 tokens and a weight of the op's format; one expert in five has no rows."""
    fmt, kind = op.split("-")
    x_TK = torch.randn(rows, k, device=device).bfloat16()
    counts = [0 if e % 5 == 1 else 1 for e in range(experts)]
    each = rows // sum(counts)
    offsets = [0]
    for present in counts:
        offsets.append(offsets[-1] + each * present)
    offsets[-1] = rows
    lead = () if kind == "dense" else (experts,)
    w = torch.randn(*lead, n, k, device=device).bfloat16()
    weight: LinearWeight
    if fmt == "bf16":
        weight = DenseWeight(w_NK=w)
    elif fmt == "fp8":
        codes, scale = fp8.quantize_rows(w)
        weight = Fp8Weight(codes=codes, scale=scale)
    else:
        amax = w.float().abs().amax((-2, -1))
        scales = nvfp4.global_scale_from_amax(amax)
        matrices = [w] if kind == "dense" else list(w)
        quantized = [
            nvfp4.quantize(m, s) for m, s in zip(matrices, scales.reshape(-1), strict=True)
        ]
        weight = Nvfp4Weight(
            codes=torch.stack([q.codes for q in quantized]).view(*lead, n, k // 2),
            block_scale=torch.stack([q.block_scale.view(torch.uint8) for q in quantized])
            .view(*lead, n, k // 16)
            .view(torch.float8_e4m3fn),
            global_scale=scales[..., None, None].expand(*lead, n, 1).contiguous(),
            input_scale=nvfp4.global_scale_from_amax(x_TK.float().abs().max()),
        )
    return x_TK, weight, offsets


def _time(gemm: EngineGemm, op: str, device: torch.device) -> float | None:
    """Median ms of [2048, 4096] tokens times [4096, 4096], or the same rows over 16 experts."""
    if device.type != "cuda":
        return None
    x_TK, weight, offsets = _problem(op, device, experts=16, rows=2048, n=4096, k=4096)
    times = []
    for _ in range(8):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        _run(gemm, op, x_TK, weight, offsets)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(sorted(times[2:])[3])


def main(arguments: Sequence[str]) -> None:
    """Check each OP:BACKEND, in order, and print a line for each at once."""
    device = torch.device(arguments[0])
    for pair in arguments[1:]:
        op, name = pair.split(":")
        try:
            verdict = check_one(op, name, device)
        except Exception as error:  # whatever it is, it is the reason
            lines = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {lines[0][:200]}"
            verdict = Verdict(op=op, backend=name, usable=False, reason=reason)
            print(json.dumps(dataclasses.asdict(verdict)), flush=True)
            with contextlib.suppress(Exception):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                continue
            return  # the context is gone: the rest is for another process
        print(json.dumps(dataclasses.asdict(verdict)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
