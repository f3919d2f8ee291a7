"""CPU kernels: compiled C against numba, the torch twin and ModelOpt, in one run on one machine.

    python benchmarks/kernels_cpu.py [--threads 2] [--rounds 15]        (numba has to be installed)

Source: one expert projection of Beam, BF16 [2560, 5120] Gaussian. The C and numba kernels run over
pieces of about 1 MiB from a thread pool, as conversion does; ModelOpt and the twin get the whole
tensor and torch's own threads. Each runs once per round, in turn. Two rates are shown: from the
median wall time, and from the least CPU time (elements per CPU second, which other processes on a
busy machine disturb less). The bytes of all four are checked to be equal.
Start-up is a fresh process to its first result on one block, less an empty interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba_nvfp4
import numpy as np
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from beamq.formats import fp8, nvfp4
from beamq.formats.kernels import _cpu, cpu

N, K = 2560, 5120
PIECE_ROWS = (1 << 20) // (2 * K)
LEVELS = ("baseline", "avx2", "avx512")

START_UP = {
    "c": "from beamq.formats.kernels import cpu\n"
    "cpu.nvfp4_quantize(bytes(32), 'BF16', 16, 1.0, bytearray(8), bytearray(1))",
    "torch twin": "from beamq.formats.kernels import torch_twin as twin\n"
    "twin.nvfp4_quantize(bytes(32), 'BF16', 16, 1.0, bytearray(8), bytearray(1))",
    "numba": f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    "import numba_nvfp4, numpy as np\n"
    "numba_nvfp4.quantize(np.zeros(16, np.uint16), np.float32(1), np.zeros(8, np.uint8), "
    "np.zeros(1, np.uint8))",
    "modelopt": "import torch\n"
    "from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor as Q\n"
    "Q.quantize(torch.ones(1, 16).bfloat16(), 16, None, torch.tensor(1.0))",
}


class Bench:
    """The source, output buffers of each side, and one callable per measured function."""

    def __init__(self, threads: int) -> None:
        torch.manual_seed(0)
        self.weight = (torch.randn(N, K) * 0.02).bfloat16()
        self.source = self.weight.view(torch.uint8).numpy().reshape(N, 2 * K)
        self.scale = cpu.nvfp4_global_scale(float(self.weight.abs().amax()))
        self.codes = np.zeros((N, K // 2), np.uint8)
        self.block_scales = np.zeros((N, K // 16), np.uint8)
        self.fp8_codes = np.zeros((N, K), np.uint8)
        self.row_scales = np.zeros((N, 1), np.float32)
        self.decoded = np.zeros((N, K), np.uint16)
        self.pool = ThreadPoolExecutor(threads)
        torch.set_num_threads(threads)

    def pieces(self, work: Callable[[slice], object]) -> Callable[[], None]:
        rows = [slice(start, start + PIECE_ROWS) for start in range(0, N, PIECE_ROWS)]
        return lambda: [*self.pool.map(work, rows)] and None

    def c(self) -> dict[str, Callable[[], object]]:
        src, codes, scales = self.source, self.codes, self.block_scales
        codes8, scales8, out, g = self.fp8_codes, self.row_scales, self.decoded, self.scale
        swept, swept_scales = np.zeros_like(codes), np.zeros_like(scales)
        calls: dict[str, Callable[[slice], object]] = {
            "amax": lambda r: cpu.amax(src[r], "BF16"),
            "nvfp4_quantize": lambda r: cpu.nvfp4_quantize(
                src[r], "BF16", K, g, codes[r], scales[r]
            ),
            "nvfp4_sweep": lambda r: cpu.nvfp4_quantize(
                src[r], "BF16", K, g, swept[r], swept_scales[r], scale_rule="sweep"
            ),
            "nvfp4_dequantize": lambda r: cpu.nvfp4_dequantize(
                codes[r], scales[r], K, g, out[r], "BF16"
            ),
            "nvfp4_compare": lambda r: cpu.nvfp4_compare(src[r], "BF16", codes[r], scales[r], K, g),
            "fp8_quantize_rows": lambda r: cpu.fp8_quantize_rows(
                src[r], "BF16", K, codes8[r], scales8[r]
            ),
            "fp8_dequantize_rows": lambda r: cpu.fp8_dequantize_rows(
                codes8[r], scales8[r], K, out[r], "BF16"
            ),
            "fp8_compare": lambda r: cpu.fp8_compare(src[r], "BF16", codes8[r], scales8[r], K),
        }
        return {f"c {name}": self.pieces(call) for name, call in calls.items()}

    def others(self) -> dict[str, Callable[[], object]]:
        bits = self.source.view(np.uint16)
        codes, scales = np.zeros_like(self.codes), np.zeros_like(self.block_scales)
        self.numba_codes, self.numba_scales = codes, scales
        g = np.float32(self.scale)

        def by_numba(r: slice) -> None:
            numba_nvfp4.quantize(
                bits[r].reshape(-1), g, codes[r].reshape(-1), scales[r].reshape(-1)
            )

        scale = torch.tensor(self.scale)
        return {
            "numba nvfp4_quantize": self.pieces(by_numba),
            "torch twin nvfp4_quantize": lambda: nvfp4.quantize(self.weight, scale),
            "torch twin fp8_quantize_rows": lambda: fp8.quantize_rows(self.weight),
            "modelopt nvfp4_quantize": lambda: NVFP4QTensor.quantize(self.weight, 16, None, scale),
        }

    def check_equal_bytes(self) -> None:
        scale = torch.tensor(self.scale)
        quantized, block_scale, _ = NVFP4QTensor.quantize(self.weight, 16, None, scale)
        ours = nvfp4.quantize(self.weight, scale)
        for codes in (self.codes, self.numba_codes, ours.codes.numpy()):
            assert np.array_equal(codes, quantized._quantized_data.numpy())
        for scales in (
            self.block_scales,
            self.numba_scales,
            ours.block_scale.view(torch.uint8).numpy(),
        ):
            assert np.array_equal(scales, block_scale.view(torch.uint8).numpy())


def measured(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Million elements a second of wall time (median), and of CPU time (best)."""
    for call in calls.values():
        call()
    wall: dict[str, list[float]] = {name: [] for name in calls}
    busy: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            call()
            wall[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - start_cpu)
    return {
        name: [round(N * K / t / 1e6, 1) for t in (statistics.median(wall[name]), min(busy[name]))]
        for name in calls
    }


def start_up(rounds: int = 3) -> dict[str, float]:
    def run(program: str) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    empty = run("pass")
    return {name: round(run(program) - empty, 3) for name, program in START_UP.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    bench = Bench(options.threads)
    speeds = measured(bench.c() | bench.others(), options.rounds)
    bench.check_equal_bytes()
    by_level = {}
    for level in range(_cpu.use_level(-1) + 1):
        _cpu.use_level(level)
        by_level[LEVELS[level]] = measured(bench.c(), options.rounds)
    _cpu.use_level(-1)
    ours, modelopt = speeds["c nvfp4_quantize"], speeds["modelopt nvfp4_quantize"]
    print(
        json.dumps(
            {
                "threads": options.threads,
                "load_before": load,
                "million_elements_per_second": speeds,
                "c_over_modelopt": [round(a / b, 1) for a, b in zip(ours, modelopt, strict=True)],
                "c_by_level": by_level,
                "start_up_seconds": start_up(),
            },
            indent=2,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
