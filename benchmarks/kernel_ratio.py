"""NVFP4 codes of one weight: our CPU kernel against Model-Optimizer's, on the same threads.

Both make the same bytes from the same BF16 weight and global scale (checked here). Prints one line
of JSON: elements a second of both, medians of several rounds in turn. Outputs are fresh each time
for Model-Optimizer, which allocates them, and reused for ours, which is given them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor

from beamq.formats.kernels import cpu

N, K = 5120, 5120
ROUNDS = 5


def main() -> int:
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weight = (torch.randn(N, K) * 0.02).to(torch.bfloat16)
    amax = float(weight.abs().max())
    scale = cpu.nvfp4_global_scale(amax)
    raw = weight.view(torch.uint8).numpy().reshape(-1).data
    codes, scales = bytearray(N * K // 2), bytearray(N * K // 16)
    code_view, scale_view = memoryview(codes), memoryview(scales)
    made: list[NVFP4QTensor] = []

    def quantize_rows(begin: int, end: int) -> None:
        cpu.nvfp4_quantize(
            raw[begin * K * 2 : end * K * 2],
            "BF16",
            K,
            scale,
            code_view[begin * K // 2 : end * K // 2],
            scale_view[begin * K // 16 : end * K // 16],
        )

    def ours() -> None:
        step = 64  # rows; a piece stays in the core's cache
        list(pool.map(lambda row: quantize_rows(row, min(row + step, N)), range(0, N, step)))

    def peer() -> None:
        made[:] = [NVFP4QTensor.quantize(weight, 16, None, torch.tensor(scale))]

    times: dict[str, list[float]] = {"ours": [], "peer": []}
    with ThreadPoolExecutor(threads) as pool, torch.inference_mode():
        for _ in range(ROUNDS):
            times["ours"].append(_seconds(ours))
            times["peer"].append(_seconds(peer))
    quantized, block_scales, _ = made[0]
    same = quantized._quantized_data.numpy().tobytes() == codes
    same &= block_scales.view(torch.uint8).numpy().tobytes() == scales
    if not same:
        raise SystemExit("the two kernels made different bytes")
    rate = {who: N * K / statistics.median(seconds) for who, seconds in times.items()}
    print(json.dumps({"ours_per_s": rate["ours"], "peer_per_s": rate["peer"], "threads": threads}))
    return 0


def _seconds(body: Callable[[], None]) -> float:
    begun = time.perf_counter()
    body()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
