"""Many GPUs: calibration and conversion by 1, 2, ... processes, one GPU each, from files in memory.

    python -m benchmarks.scaling_gpu FOLDER [--ranks 1 2 4] [--experts 256] [--samples 256]
                                            [--recipe nvfp4] [--device cuda] [--json FILE]

FOLDER should lie in memory and have room for 170 GB at 256 experts. A synthetic Beam of real width
is written there (`make_slice.py`: one dense layer, five sparse ones, nano's tokenizer) and goes
through `beamq calibrate` and `quantize`, alone and under torchrun. Statistics and weight files have
to have the bytes of one process.

Calibration counts from the end of one layer to the end of the next, as rank 0 tells them: "layer"
is the median of sparse layers that were read while the one before was computed, and computed while
the next was read, as nearly all of a real model are; "all sparse" has the cold start as well:
page-locked memory, meeting. Conversion counts from the first byte to the last, at any process, in
processes that have converted before (`scaling_worker.py`); the floor is what as many threads in as
many processes need to read, write and sum as much, and nothing else. Efficiency is the time of one
over N times that of N processes (goal for calibration: 0.85 with four).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.make_slice import TINY, Slice, add_tokenizer, make_slice
from benchmarks.measuring import ROOT, cores_online, weights_nbytes

DENSE, SPARSE = 1, 5
PIECE = 1 << 26
ROUNDS = 3
LAYER_DONE = re.compile(r"layer (\d+) of (\d+) done")


def make_source(folder: Path, widths: Slice) -> Path:
    """The synthetic checkpoint, with a tokenizer that fits its vocabulary."""
    source = folder / "source"
    begun = time.monotonic()
    make_slice(source, replace(widths, dense_layers=DENSE, sparse_layers=SPARSE), reuse=True)
    add_tokenizer(source)
    spent = time.monotonic() - begun
    print(f"source: {weights_nbytes(source) / 1e9:.1f} GB, written in {spent:.0f} s", flush=True)
    return source


def start(ranks: int, module: str, arguments: list[str]) -> subprocess.Popen[str]:
    """A module with these arguments, in as many processes; stdout and stderr in one."""
    launch = [sys.executable, "-m"]
    if ranks > 1:
        launch += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, cores_online() // ranks)),
    }
    return subprocess.Popen(
        [*launch, module, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def follow(process: subprocess.Popen[str]) -> list[tuple[int, float]]:
    """When each layer was done. Raises `RuntimeError` if the command failed.

    Lines are passed on with their time, so that a run that is cut off says how far it came.
    """
    lines, done = [], []
    begun = time.monotonic()
    for line in process.stdout or ():
        print(f"  {time.monotonic() - begun:6.1f} s  {line}", end="", file=sys.stderr, flush=True)
        found = LAYER_DONE.search(line)
        if found:
            done.append((int(found[1]) - 1, time.monotonic()))
        lines.append(line)
    if process.wait():
        raise RuntimeError(f"exit {process.returncode}\n{''.join(lines)[-3000:]}")
    return done


def calibrate(
    source: Path, stats: Path, ranks: int, options: argparse.Namespace
) -> dict[str, float]:
    """Seconds of a sparse layer between others, of all sparse layers, and of the whole process."""
    begun = time.monotonic()
    arguments = ["calibrate", str(source), str(stats), "--samples", str(options.samples), "-v"]
    arguments += ["--device", options.device]
    arguments += ["--sequence-length", str(options.sequence_length), "--overwrite"]
    ends = dict(follow(start(ranks, "beamq", arguments)))
    if sorted(ends) != list(range(DENSE + SPARSE)):
        raise RuntimeError(f"layers {sorted(ends)} were reported, expected {DENSE + SPARSE}")
    last = DENSE + SPARSE - 1
    layers = [ends[n] - ends[n - 1] for n in range(DENSE, last + 1)]
    return {
        "layer_s": median(layers[1:-1]),
        "sparse_s": sum(layers),
        "calibrate_process_s": time.monotonic() - begun,
    }


def convert(
    source: Path, output: Path, ranks: int, options: argparse.Namespace
) -> dict[str, float]:
    """Seconds in which bytes moved at any process: of the first round, the median of the others."""
    file = output.with_name("moments")
    arguments = [source, output, options.recipe, options.device, ROUNDS, file]
    follow(start(ranks, "benchmarks.scaling_worker", [str(each) for each in arguments]))
    ranks_found = [json.loads(Path(f"{file}.{rank}").read_text()) for rank in range(ranks)]
    seconds = [
        max(last for _, last in moments) - min(first for first, _ in moments) + 1e-9
        for moments in zip(*(each["moments"] for each in ranks_found), strict=True)
    ]
    return {
        "convert_s": median(seconds[1:]),
        "first_convert_s": seconds[0],
        "floor_s": max(each["floor_s"] for each in ranks_found) / ranks,
    }


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two files are equal, compared by several threads."""
    size = one.stat().st_size
    if size != other.stat().st_size:
        return False

    def equal(at: int) -> bool:
        with one.open("rb") as a, other.open("rb") as b:
            a.seek(at)
            b.seek(at)
            return a.read(PIECE) == b.read(PIECE)

    with ThreadPoolExecutor(8) as pool:
        return all(pool.map(equal, range(0, size, PIECE)))


def check_same(one: Path, other: Path) -> None:
    """Raise `RuntimeError` unless all weight files and the index of two folders are equal."""
    names = sorted(path.name for path in one.glob("*.safetensors*"))
    if not names or names != sorted(path.name for path in other.glob("*.safetensors*")):
        raise RuntimeError(f"{other}: other files than {one}")
    odd = [name for name in names if not same_bytes(one / name, other / name)]
    if odd:
        raise RuntimeError(f"{other}: {', '.join(odd)} differ from {one}")


def measure(
    folder: Path, source: Path, ranks: int, options: argparse.Namespace
) -> dict[str, float]:
    """Both commands with so many processes, checked against those of the first."""
    first, own = options.ranks[0], {"ranks": float(ranks)}
    stats, output = folder / f"stats-{ranks}.safetensors", folder / f"output-{ranks}"
    own |= calibrate(source, stats, ranks, options)
    own |= convert(source, output, ranks, options)
    if ranks != first:
        if not same_bytes(folder / f"stats-{first}.safetensors", stats):
            raise RuntimeError(f"the statistics of {ranks} processes differ from those of {first}")
        check_same(folder / f"output-{first}", output)
        shutil.rmtree(output)
    return own


def table(found: list[dict[str, float]], nbytes: int) -> str:
    """Markdown, efficiency against the first row."""

    def cell(row: dict[str, float], key: str) -> str:
        work = found[0]["ranks"] * found[0][key]
        return f"{row[key]:.2f} ({work / (row['ranks'] * row[key]):.2f})"

    lines = [
        "| GPUs | layer, s | all sparse, s | convert, s | floor, s | GB/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = [cell(row, key) for key in ("layer_s", "sparse_s", "convert_s", "floor_s")]
        rate = nbytes / row["convert_s"] / 1e9
        lines.append(f"| {row['ranks']:.0f} | {' | '.join(cells)} | {rate:.1f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 1, 2, 4 as far as GPUs go")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=256, help="rows of tokens")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--device", default="cuda", help="of both commands")
    parser.add_argument("--tiny", action="store_true", help="widths of a toy, for a try")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    options.ranks = options.ranks or [n for n in (1, 2, 4) if n <= max(gpus, 1)]
    options.folder.mkdir(parents=True, exist_ok=True)
    widths = TINY if options.tiny else Slice()
    source = make_source(options.folder, replace(widths, experts=options.experts))
    nbytes, found = weights_nbytes(source), []
    for ranks in options.ranks:
        found.append(measure(options.folder, source, ranks, options))
        print({key: round(value, 3) for key, value in found[-1].items()}, flush=True)
    name = torch.cuda.get_device_name() if gpus else "no GPU"
    print(f"{name}, torch {torch.__version__}, {options.samples} x"
          f" {options.sequence_length:,} tokens, efficiency in ()")  # fmt: skip
    print(table(found, nbytes), flush=True)
    print("statistics and weight files: the same bytes with every number of processes")
    if options.json:
        options.json.write_text(json.dumps({"source_nbytes": nbytes, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
