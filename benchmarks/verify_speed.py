"""How fast `verify` reads: every byte, with and without a look at the values.

    python -m benchmarks.verify_speed              2.4 GB of source, in memory, 2 threads
    python -m benchmarks.verify_speed --experts 88   8 GB
    python -m benchmarks.verify_speed --json out.json

A real-width slice (`make_slice.py`) is converted to NVFP4 and FP8; then `quick` (checksums alone)
and `tensors` (checksums, impossible scales and codes; no second opinion, no source) read the result
in one process, several rounds in turn. A plain `preadv` of the same bytes is the floor. Figures are
the best round, in GB (1e9 bytes) of files a second, with the CPU seconds that round took: on a busy
machine wall time says little, GB for each CPU second times two is what two quiet cores would do.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from beamq.convert.quantize import quantize
from beamq.eval.verify.verify import verify
from benchmarks.make_slice import TINY, Slice, make_slice
from benchmarks.measuring import machine

PIECE_BYTES = 4 << 20


def read_plainly(folder: Path, workers: int) -> int:
    """Read every shard and do nothing with it."""
    pieces = [
        (path, start)
        for path in sorted(folder.glob("*.safetensors"))
        for start in range(0, path.stat().st_size, PIECE_BYTES)
    ]

    def read(part: list[tuple[Path, int]]) -> int:
        buffer, done = bytearray(PIECE_BYTES), 0
        for path, start in part:
            descriptor = os.open(path, os.O_RDONLY)
            done += os.preadv(descriptor, [buffer], start)
            os.close(descriptor)
        return done

    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(read, [pieces[n::workers] for n in range(workers)]))


def contenders(folder: Path, workers: int) -> dict[str, Callable[[], int]]:
    """By name: something that reads the folder and returns how many bytes."""

    def check(level: Any) -> Callable[[], int]:
        def go() -> int:
            report = verify(folder, level=level, workers=workers, sample=0)
            if not report.ok:
                raise RuntimeError(f"{folder}: {report.failures}")
            return report.bytes_read

        return go

    return {
        "plain read": lambda: read_plainly(folder, workers),
        "quick": check("quick"),
        "tensors": check("tensors"),
    }


def measure(folder: Path, workers: int, rounds: int) -> dict[str, dict[str, float]]:
    """The best of several rounds, by name."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, go in contenders(folder, workers).items():
            cpu, begun = time.process_time(), time.monotonic()
            nbytes = go()
            wall, cpu = time.monotonic() - begun, time.process_time() - cpu
            figures = {
                "gb": nbytes / 1e9,
                "gb_per_s": nbytes / wall / 1e9,
                "cpu_s": cpu,
                "gb_per_cpu_s": nbytes / cpu / 1e9,
            }
            if name not in best or figures["gb_per_s"] > best[name]["gb_per_s"]:
                best[name] = figures
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="widths of a toy, for a try")
    parser.add_argument("--work-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"machine": machine(), "workers": options.workers}
    with tempfile.TemporaryDirectory(prefix="beamq-benchmark-", dir=options.work_dir) as name:
        source = Path(name) / "source"
        make_slice(source, replace(TINY if options.tiny else Slice(), experts=options.experts))
        for recipe in ("nvfp4-max", "fp8"):
            output = Path(name) / recipe
            quantize(source, output, recipe=recipe, no_calibration=recipe != "fp8")
            results[recipe] = measure(output, options.workers, options.rounds)
    print("| format | what | GB | GB/s | CPU s | GB per CPU s |\n|---|---|---|---|---|---|")
    for recipe in ("nvfp4-max", "fp8"):
        for name, found in results[recipe].items():
            print(
                f"| {recipe} | {name} | {found['gb']:.2f} | {found['gb_per_s']:.2f} |"
                f" {found['cpu_s']:.2f} | {found['gb_per_cpu_s']:.2f} |"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
