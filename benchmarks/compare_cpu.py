"""Comparison on a CPU: known figures, and time against the forward passes alone.

The source is converted to NVFP4 experts (scales of the largest value, calibrated on odd modules)
and to FP8 (experts, and every linear), then compared on 16 x 512 tokens of the standard library's
top modules, sorted, even positions. Against the comparison of source, NVFP4 and FP8 stands
`beamq.logits` of the three, one after the other. CPU time is shown as well as wall time, because
other users of a shared machine stretch the latter.

    python -m benchmarks.compare_cpu CHECKPOINT [--threads 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from beamq.convert.quantize import quantize
from beamq.eval.compare.compare import compare
from beamq.model.logits import logits
from beamq.report.files import write_report
from benchmarks.measuring import in_turns, median_s

ROWS, LENGTH = 16, 512
RECIPES = ("nvfp4-max", "fp8", "fp8-experts", "nvfp4")


def library_files(first: int) -> list[Path]:
    """Top modules of the standard library, sorted: even positions (0) or odd ones (1)."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[first::2]


def evaluation_ids(folder: Path) -> NDArray[np.int64]:
    """Rows [16, 512] of the modules at even positions, one after the other."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    for path in library_files(0):
        ids += tokenizer.encode(path.read_text("utf-8"), add_special_tokens=False).ids
        if len(ids) >= ROWS * LENGTH:
            break
    return np.array(ids[: ROWS * LENGTH]).reshape(ROWS, LENGTH)


def convert(source: Path, work: Path) -> dict[str, Path]:
    """One folder for each recipe; NVFP4 calibrated on modules at odd positions."""
    made = {}
    text = work / "calibration"
    text.mkdir()
    for path in library_files(1):
        (text / f"{path.stem}.txt").write_text(path.read_text("utf-8"))
    for recipe in RECIPES:
        made[recipe] = work / recipe
        if recipe.startswith("fp8"):
            quantize(source, made[recipe], recipe=recipe)
        else:
            quantize(
                source,
                made[recipe],
                recipe=recipe,
                data=[str(text)],
                samples=32,
                sequence_length=LENGTH,
                dtype="float32",
            )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures, then the times."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    source: Path = options.checkpoint
    ids = evaluation_ids(source)
    with tempfile.TemporaryDirectory(prefix="beamq-compare-") as folder:
        made = convert(source, Path(folder))
        print(f"{source.name}, {ROWS} x {LENGTH} tokens, FP32, {options.threads} threads")
        show_figures(source, made, ids)
        pair = [made["nvfp4-max"], made["fp8"]]
        ids_BT = torch.from_numpy(ids)
        both = compare(source, pair, input_ids=ids)
        found = in_turns(
            {
                "three forwards": lambda: [
                    logits(path, ids_BT, dtype=torch.float32) for path in (source, *pair)
                ],
                "compare": lambda: compare(source, pair, input_ids=ids),
                "write reports": lambda: write_report(both, Path(folder) / "report"),
            },
            options.rounds,
        )
    least = {name: min(turn.cpu_s for turn in turns) for name, turns in found.items()}
    for name, turns in found.items():
        walls = [turn.wall_s for turn in turns]
        print(
            f"{name:<15} {median_s(turns):7.2f} s wall, {least[name]:7.2f} s of CPU"
            f" ({least[name] / least['three forwards']:.2f}x);"
            f" wall from {min(walls):.2f} to {max(walls):.2f}"
        )


def show_figures(source: Path, made: dict[str, Path], ids: NDArray[np.int64]) -> None:
    """Mean KLD and same top token of each recipe, and of NVFP4 weights with exact activations."""
    rows = [("", compare(source, list(made.values()), input_ids=ids).candidates)]
    only = compare(source, [made["nvfp4-max"]], input_ids=ids, gemm="weights-only")
    rows.append((", weights only", only.candidates))
    for suffix, candidates in rows:
        for candidate in candidates:
            seen = candidate.divergence
            print(
                f"{candidate.model.name + suffix:<24} mean KLD {seen.mean_kld.value:.5f} ±"
                f" {seen.mean_kld.standard_error or 0:.5f}, same top {seen.same_top.value:.4f}"
            )


if __name__ == "__main__":
    main()
