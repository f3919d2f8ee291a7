"""CPU kernels: compiled C against numba, plain torch and ModelOpt, in one run on one machine.

    python -m benchmarks.kernels_cpu [--threads 2] [--rounds 15]     (numba is left out if missing)

Source: one expert projection of Beam, BF16 [2560, 5120] Gaussian. The C and numba kernels run over
pieces of about 1 MiB from a thread pool, as in a conversion; ModelOpt and the plain torch twin get
the whole tensor and torch's own threads. Each runs once per round, in turn. Two rates are shown:
from the median wall time, and from the least CPU time (elements per CPU second, which other
processes on a busy machine disturb less). All contenders must give the same bytes.
Start-up is the time from a fresh process to its first result on one block, less an empty
interpreter's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from beamq.formats import fp8, nvfp4
from beamq.formats.kernels import _cpu, cpu
from benchmarks.measuring import in_turns, median_s, run

HAVE_NUMBA = find_spec("numba") is not None
if HAVE_NUMBA:
    from benchmarks import numba_nvfp4

N, K = 2560, 5120
PIECE_ROWS = (1 << 20) // (2 * K)
LEVELS = ("baseline", "avx2", "avx512")

START_UP = {
    "c": "from beamq.formats.kernels import cpu\n"
    "cpu.nvfp4_quantize(bytes(32), 'BF16', 16, 1.0, bytearray(8), bytearray(1))",
    "torch twin": "from beamq.formats.kernels import torch_twin as twin\n"
    "twin.nvfp4_quantize(bytes(32), 'BF16', 16, 1.0, bytearray(8), bytearray(1))",
    "numba": "import numpy as np; from benchmarks import numba_nvfp4\n"
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
        self.a, self.b = torch.randn(32, K).numpy(), torch.randn(N, 32).mul_(1e-3).numpy()
        self.numba_codes = np.zeros_like(self.codes)
        self.numba_scales = np.zeros_like(self.block_scales)
        self.pool = ThreadPoolExecutor(threads)
        torch.set_num_threads(threads)

    def pieces(self, work: Callable[[slice], object]) -> Callable[[], object]:
        rows = [slice(start, start + PIECE_ROWS) for start in range(0, N, PIECE_ROWS)]
        return lambda: list(self.pool.map(work, rows))

    def c(self) -> dict[str, Callable[[], object]]:
        src, codes, scales = self.source, self.codes, self.block_scales
        codes8, scales8, out, g = self.fp8_codes, self.row_scales, self.decoded, self.scale
        swept, swept_scales = np.zeros_like(codes), np.zeros_like(scales)
        calls: dict[str, Callable[[slice], object]] = {
            "amax": lambda r: cpu.amax(src[r].data, "BF16"),
            "nvfp4_quantize": lambda r: cpu.nvfp4_quantize(
                src[r].data, "BF16", K, g, codes[r].data, scales[r].data
            ),
            "nvfp4_sweep": lambda r: cpu.nvfp4_quantize(
                src[r].data, "BF16", K, g, swept[r].data, swept_scales[r].data, scale_rule="sweep"
            ),
            "nvfp4_dequantize": lambda r: cpu.nvfp4_dequantize(
                codes[r].data, scales[r].data, K, g, out[r].data, "BF16"
            ),
            "nvfp4_compare": lambda r: cpu.nvfp4_compare(
                src[r].data, "BF16", codes[r].data, scales[r].data, K, g
            ),
            "fp8_quantize_rows": lambda r: cpu.fp8_quantize_rows(
                src[r].data, "BF16", K, codes8[r].data, scales8[r].data
            ),
            "fp8_dequantize_rows": lambda r: cpu.fp8_dequantize_rows(
                codes8[r].data, scales8[r].data, K, out[r].data, "BF16"
            ),
            "fp8_compare": lambda r: cpu.fp8_compare(
                src[r].data, "BF16", codes8[r].data, scales8[r].data, K
            ),
        }
        for rank in (16, 32):
            calls[f"add_low_rank {rank}"] = self.low_rank(rank)
        return {f"c {name}": self.pieces(call) for name, call in calls.items()}

    def low_rank(self, rank: int) -> Callable[[slice], object]:
        """In place, over and over, in a copy of the source."""
        a, b = self.a[:rank].data, np.ascontiguousarray(self.b[:, :rank])
        w = self.source.copy()
        return lambda r: cpu.add_low_rank(
            w[r].data, "BF16", K, a, b[r].data, 0.5, w[r].data, "BF16"
        )

    def others(self) -> dict[str, Callable[[], object]]:
        scale = torch.tensor(self.scale)
        found: dict[str, Callable[[], object]] = {
            "torch twin nvfp4_quantize": lambda: nvfp4.quantize(self.weight, scale),
            "torch twin fp8_quantize_rows": lambda: fp8.quantize_rows(self.weight),
            "modelopt nvfp4_quantize": lambda: NVFP4QTensor.quantize(self.weight, 16, None, scale),
        }
        if HAVE_NUMBA:
            bits, g = self.source.view(np.uint16), np.float32(self.scale)

            def by_numba(r: slice) -> None:
                codes, scales = self.numba_codes[r].reshape(-1), self.numba_scales[r].reshape(-1)
                numba_nvfp4.quantize(bits[r].reshape(-1), g, codes, scales)

            found["numba nvfp4_quantize"] = self.pieces(by_numba)
        return found

    def check_equal_bytes(self) -> None:
        """Raise `RuntimeError` unless all contenders wrote the bytes that ModelOpt gives."""
        scale = torch.tensor(self.scale)
        quantized, block_scale, _ = NVFP4QTensor.quantize(self.weight, 16, None, scale)
        wanted = quantized._quantized_data.numpy(), block_scale.view(torch.uint8).numpy()
        twin = nvfp4.quantize(self.weight, scale)
        found = {
            "c": (self.codes, self.block_scales),
            "torch twin": (twin.codes.numpy(), twin.block_scale.view(torch.uint8).numpy()),
        }
        if HAVE_NUMBA:
            found["numba"] = self.numba_codes, self.numba_scales
        for name, pair in found.items():
            if not all(map(np.array_equal, pair, wanted)):
                raise RuntimeError(f"{name}: the bytes differ from ModelOpt's")


def measured(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Million elements a second of wall time (median), and of CPU time (best)."""
    return {
        name: [
            round(N * K / seconds / 1e6, 1)
            for seconds in (median_s(turns), min(turn.cpu_s for turn in turns))
        ]
        for name, turns in in_turns(calls, rounds).items()
    }


def start_up(names: Iterable[str], rounds: int = 3) -> dict[str, float]:
    """Seconds from the start of a process to its first result, above an empty interpreter's."""

    def median(program: str) -> float:
        return statistics.median(run([sys.executable, "-c", program]).wall_s for _ in range(rounds))

    empty = median("pass")
    return {name: round(median(START_UP[name]) - empty, 3) for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
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
                "start_up_seconds": start_up(
                    name for name in START_UP if name != "numba" or HAVE_NUMBA
                ),
            },
            indent=2,
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
