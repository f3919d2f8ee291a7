"""Time GPU work: medians by events, many buffers in one graph, and the limits of this card.

Small tensors are timed as a graph over so many different buffers that none is still in the L2
cache when it is used again; a graph has no launch gaps either. Everything else is the median over
repeated calls, with the cache flushed between them.

Triton is imported inside the functions that use it, so that modules which also run on a CPU can
import this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

COPIED_NBYTES = 1 << 30
SQUARE = 8192


def median_ms(call: Callable[[], Any], repeat_ms: int = 30) -> float:
    """Median time of a call."""
    from triton.testing import do_bench

    found: float = do_bench(call, warmup=5, rep=repeat_ms, return_mode="median")
    return found


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, device work included, and its result."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    found = call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, found


def graph_s(calls: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """Median seconds of a graph that makes all calls one after another."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return sorted(seconds(graph.replay)[0] for _ in range(repeats))[repeats // 2]


def copy_tb_per_s() -> float:
    """Read plus written, of a device-to-device copy: the limit of a kernel bound by memory."""
    source = torch.randn(COPIED_NBYTES // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e9


def bf16_tflops() -> float:
    """Of a product of square BF16 matrices of random values: the limit of a BF16 GEMM."""
    a, b = torch.randn(2, SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16)
    return 2 * SQUARE**3 / median_ms(lambda: a @ b) / 1e9


def machine() -> dict[str, Any]:
    """The GPU and the versions that the figures depend on."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }
