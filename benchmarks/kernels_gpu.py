"""Quantization kernels on a GPU, as a share of the copy bandwidth measured in the same run.

    python -m benchmarks.kernels_gpu [--json FILE]

For each shape: one tensor per launch (a graph over tensors in different memory), and a stack of
tensors in one launch, as a conversion has them. Bytes are those read plus those written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from beamq.formats.kernels import gpu, triton_lowrank
from beamq.formats.nvfp4 import QuantizedTensor
from benchmarks.gpu_timing import copy_tb_per_s, graph_s, machine

SHAPES = ((2560, 5120), (5120, 2560), (20480, 5120), (81920, 5120))
TOTAL_BYTES = 3 << 30  # of sources in a graph: fifty times the L2 cache


def measure(stack: int, n: int, k: int) -> dict[str, tuple[float, int]]:
    """(ms, bytes moved) of each kernel on [stack, n, k] BF16."""
    count = max(2, min(24, TOTAL_BYTES // (stack * n * k * 2)))
    sources = [
        torch.randn(stack, n, k, device="cuda", dtype=torch.bfloat16).mul_(0.02)
        for _ in range(count)
    ]
    values = stack * n * k
    scale = gpu.amax(sources[0]) / 2688
    counts = torch.zeros(stack, 4, dtype=torch.int32, device="cuda")
    fours = [gpu.nvfp4_quantize(w, scale) for w in sources]
    eights = [gpu.fp8_quantize_rows(w) for w in sources]
    copies = [torch.empty_like(w) for w in sources]

    def four(w: torch.Tensor, out: QuantizedTensor) -> Callable[[], Any]:
        return lambda: gpu.nvfp4_quantize(w, scale, out=out, counts=counts)

    def eight(w: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], Any]:
        return lambda: gpu.fp8_quantize_rows(w, codes=out[0], scale=out[1], counts=counts)

    def each(call: Callable[[Any], Any], items: list[Any]) -> list[Callable[[], Any]]:
        return [partial(call, item) for item in items]

    four_bytes = values * 2 + values // 2 + values // 16
    eight_bytes = values * 3 + stack * n * 4
    work: dict[str, tuple[list[Callable[[], Any]], int]] = {
        "nvfp4": ([four(w, q) for w, q in zip(sources, fours, strict=True)], four_bytes),
        "fp8 rows": ([eight(w, q) for w, q in zip(sources, eights, strict=True)], eight_bytes),
        "amax": (each(gpu.amax, sources), values * 2),
        "nvfp4 decode": (each(gpu.nvfp4_dequantize, fours), four_bytes),
        "low rank 16": (each(low_rank(stack, n, k, 16), sources), values * 4),
        "low rank 32": (each(low_rank(stack, n, k, 32), sources), values * 4),
        "copy": (
            [partial(out.copy_, w) for w, out in zip(sources, copies, strict=True)],
            values * 4,
        ),
    }
    return {
        name: (1e3 * graph_s(calls) / len(calls), nbytes) for name, (calls, nbytes) in work.items()
    }


def low_rank(stack: int, n: int, k: int, rank: int) -> Callable[[torch.Tensor], None]:
    """Merges one adapter into the stack that it is given, in place."""
    a = torch.randn(stack, rank, k, device="cuda").mul_(1e-3)
    b = torch.randn(stack, n, rank, device="cuda")
    return lambda w: triton_lowrank.add_low_rank(w, a, b, 0.5)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    ceiling = copy_tb_per_s()
    result: dict[str, Any] = {**machine(), "copy_tb_per_s": ceiling, "kernels": []}
    print(f"copy {ceiling:.2f} TB/s")
    for n, k in SHAPES:
        for stack in (1, 16) if n * k < 1 << 24 else (1,):
            for name, (ms, nbytes) in measure(stack, n, k).items():
                rate = nbytes / ms / 1e9
                entry = {"kernel": name, "shape": [stack, n, k], "us": ms * 1e3}
                result["kernels"].append({**entry, "tb_per_s": rate, "ratio": rate / ceiling})
                shape = f"{stack:2} x [{n}, {k}]"
                figures = f"{ms * 1e3:8.1f} us {rate:5.2f} TB/s {rate / ceiling:.2f}"
                print(f"{name:13} {shape:20} {figures}", flush=True)
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
