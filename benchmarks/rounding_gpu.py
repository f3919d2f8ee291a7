"""What better weights cost on one GPU: the sweep kernel against `max`, GPTQ by stage.

    python -m benchmarks.rounding_gpu [--json FILE] [--experts 24] [--rows-per-input 16]

Sweep: one expert projection of Beam, BF16 [16, 2560, 5120], time of `gpu_sweep.nvfp4_sweep` over
that of `gpu.nvfp4_quantize` (goal: at most 8).

GPTQ: experts of real width with synthetic inputs, so many rows as `--rows-per-input` times the
inputs (16 x 5,120 for gate and up). As many experts as one call of the product takes are measured
and scaled to 256; stages are the second moments (served inputs and their products), the factor, and
the rounding with its feedback. The projection is for 49 layers, without reading and forward pass
(goal: at most 30 minutes beside them).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from beamq.calib.gptq import factorize, round_experts
from beamq.formats.kernels import gpu, gpu_sweep
from beamq.formats.nvfp4 import global_scale_from_amax
from beamq.model.linear import nvfp4_operand
from benchmarks.gpu_timing import machine, median_ms

EXPERTS, LAYERS = 256, 49
BATCH_ROWS = 16_384
GROUPS = {"gate_up": (5120, 5120), "down": (5120, 2560)}  # N, K


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time of one call, the device included, and what it gave."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    found = call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, found


def sweep() -> dict[str, float]:
    """Milliseconds of both kernels on the same weights."""
    w = torch.randn(16, 2560, 5120, device="cuda", dtype=torch.bfloat16) * 0.02
    scale = global_scale_from_amax(w.abs().amax())
    by_max = median_ms(lambda: gpu.nvfp4_quantize(w, scale))
    swept = median_ms(lambda: gpu_sweep.nvfp4_sweep(w, scale))
    return {"max_ms": by_max, "sweep_ms": swept, "ratio": swept / by_max}


def moments(experts: int, k: int, rows: int) -> torch.Tensor:
    """As `expert_rounding` sums them, of fresh synthetic batches."""
    total = torch.zeros(experts, k, k, device="cuda")
    scale = torch.tensor(0.002, device="cuda")
    for expert in range(experts):
        for start in range(0, rows, BATCH_ROWS):
            count = min(BATCH_ROWS, rows - start)
            x = torch.randn(count, k, device="cuda", dtype=torch.bfloat16)
            served = nvfp4_operand(x, scale).to(torch.bfloat16)
            total[expert] += torch.mm(served.t(), served, out_dtype=torch.float32)
    return total


def gptq(experts: int, per_input: int) -> dict[str, Any]:
    """Seconds by group and stage for `experts` experts, and what a whole model would take."""
    stages: dict[str, Any] = {}
    for name, (n, k) in GROUPS.items():
        w = torch.randn(experts, n, k, device="cuda") * 0.02
        scale = global_scale_from_amax(w.abs().amax((1, 2)))
        summed, total = seconds(lambda k=k: moments(experts, k, per_input * k))
        factored, feedback = seconds(lambda total=total: factorize(total))
        del total
        rounded, _ = seconds(lambda w=w, f=feedback, s=scale: round_experts(w, f, s))
        stages[name] = {"moments_s": summed, "factor_s": factored, "rounding_s": rounded}
        del w, feedback
        torch.cuda.empty_cache()
    layer = sum(sum(group.values()) for group in stages.values()) * EXPERTS / experts
    return {
        "experts": experts,
        "rows_per_input": per_input,
        "stages": stages,
        "layer_s": layer,
        "model_minutes": layer * LAYERS / 60,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--experts", type=int, default=24)
    parser.add_argument("--rows-per-input", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {**machine(), "sweep": sweep()}
    print(found["sweep"], flush=True)
    with torch.inference_mode():
        round_experts(
            torch.randn(2, 64, 64, device="cuda"),
            factorize(torch.eye(64, device="cuda").repeat(2, 1, 1)),
            torch.ones(2, device="cuda"),
        )  # libraries are loaded now
        found["gptq"] = gptq(options.experts, options.rows_per_input)
    print(json.dumps(found["gptq"], indent=1), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
