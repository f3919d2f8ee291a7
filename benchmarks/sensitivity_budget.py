"""Which parts in which format at a number of bytes: an integer programme and "worst first".

    python -m benchmarks.sensitivity_budget examples/beam-nano

In: a BF16 model. Out: for each budget (a share of the bytes between NVFP4 and BF16) the share of
the parts' summed KL that is left, when parts are kept in BF16 worst first, by KL per byte (what
`--target-bits` does) and by an integer programme; and when the programme may also choose FP8 for a
part. Of "worst first" and of the programme with two formats the KL is measured as well.

Limits: needs scipy. What three formats leave is predicted only: no recipe can give parts of one
role different formats. Input scales are 1.0, and the text is that of `sensitivity`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from beamq import quantize, sensitivity
from beamq.eval.compare.sensitivity import PATTERNS, Sensitivity

BUDGETS = (0.1, 0.3, 0.5, 0.7)
Vector = np.ndarray[Any, np.dtype[np.float64]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args(arguments)
    text = {"samples": given.rows, "sequence_length": given.length}
    with tempfile.TemporaryDirectory() as place:
        found = {}
        for recipe in ("nvfp4-all", "fp8"):
            options: dict[str, Any] = {"no_calibration": True} if recipe == "nvfp4-all" else {}
            quantize(given.source, Path(place, recipe), recipe=recipe, **options)
            found[recipe] = sensitivity(given.source, Path(place, recipe), **text)
        nvfp4, fp8 = found["nvfp4-all"], found["fp8"]
        loss = np.array([max(part.mean_kld.value, 0.0) for part in nvfp4.parts])
        extra = np.array([float(part.extra_bytes) for part in nvfp4.parts])
        print(
            "budget  left: worst first  per byte  programme  with FP8 | KL: worst first  programme"
        )
        for share in BUDGETS:
            budget = share * extra.sum()
            worst, worth = (_fill(order, extra, budget) for order in (-loss, -loss / extra))
            picked = _programme([loss, 0 * loss], [0 * extra, extra], budget)
            chosen: list[int] = np.flatnonzero(picked[1]).tolist()
            kept_parts = (worst, worth, chosen)
            left = [1 - loss[kept].sum() / loss.sum() for kept in kept_parts]
            measured = []
            for number, kept in enumerate((worst, chosen)):
                output = Path(place, f"{share}-{number}")
                spared = [nvfp4.parts[index] for index in kept]
                patterns = [PATTERNS[part.part].format(part.layer) for part in spared]
                quantize(
                    given.source, output, recipe="nvfp4-all", no_calibration=True, exclude=patterns
                )
                measured.append(sensitivity(given.source, output, **text).mean_kld.value)
            print(
                f"{share:6.0%}  {left[0]:17.3f}  {left[1]:8.3f}  {left[2]:9.3f}"
                f"  {_with_fp8(nvfp4, fp8, budget):8.3f} | {measured[0]:15.5f}  {measured[1]:9.5f}",
                flush=True,
            )


def _fill(order: Vector, extra: Vector, budget: float) -> list[int]:
    """Parts by rising `order`, each that the budget still has room for."""
    kept: list[int] = []
    for index in np.argsort(order, kind="stable"):
        if extra[[*kept, index]].sum() <= budget:
            kept.append(int(index))
    return kept


def _with_fp8(nvfp4: Sensitivity, fp8: Sensitivity, budget: float) -> float:
    """The share of the summed KL that the best choice of three formats for each part leaves."""
    pairs = list(zip(nvfp4.parts, fp8.parts, strict=True))
    loss = [np.array([max(pair[i].mean_kld.value, 0.0) for pair in pairs]) for i in (0, 1)]
    stored = [np.array([float(pair[i].stored_bytes) for pair in pairs]) for i in (0, 1)]
    precise = np.array([float(part.precise_bytes) for part, _ in pairs])
    sizes = [0 * precise, stored[1] - stored[0], precise - stored[0]]
    losses = [*loss, 0 * precise]
    picked = _programme(losses, sizes, budget)
    return float(sum((a * b).sum() for a, b in zip(picked, losses, strict=True)) / loss[0].sum())


def _programme(losses: Sequence[Vector], sizes: Sequence[Vector], budget: float) -> Vector:
    """0 or 1 [formats, parts]: one format for each part, the least loss within the budget."""
    optimize, parts = import_module("scipy.optimize"), len(losses[0])
    found = optimize.milp(
        np.concatenate(losses),
        constraints=[
            optimize.LinearConstraint(np.concatenate(sizes)[None], -np.inf, budget),
            optimize.LinearConstraint(np.hstack([np.eye(parts)] * len(losses)), 1, 1),
        ],
        integrality=np.ones(parts * len(losses)),
        bounds=optimize.Bounds(0, 1),
    )
    return np.asarray(found.x.round().reshape(len(losses), parts), dtype=np.float64)


if __name__ == "__main__":
    main()
