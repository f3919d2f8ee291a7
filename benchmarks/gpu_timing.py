"""Time GPU work: medians by events, many buffers in one graph, and the ceilings of this card.

Small tensors are timed as a graph over so many different buffers that none is found in the L2
cache again, which also leaves launch gaps out. Everything else is the median over repeated calls
with the cache flushed between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton.testing import do_bench


def median_ms(call: Callable[[], Any], repeat_ms: int = 30) -> float:
    """Median time of a call."""
    found: float = do_bench(call, warmup=5, rep=repeat_ms, return_mode="median")
    return found


def graph_ms(calls: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """Time of one call, from a graph that makes all of them one after another."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return sorted(times)[repeats // 2]


def copy_tb_per_s(nbytes: int = 1 << 30) -> float:
    """Read plus written, of a device-to-device copy: the ceiling of a kernel bound by memory."""
    source = torch.randn(nbytes // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e9


def bf16_tflops() -> float:
    """Of a product of 8,192-square BF16 matrices on random data: the ceiling of a BF16 GEMM."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / median_ms(lambda: a @ b) / 1e9


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    return {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }
