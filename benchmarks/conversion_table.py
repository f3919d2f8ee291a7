"""Turn the measurements of convert.py into tables: medians, ratios, and the goal of each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Runs = Sequence[dict[str, Any]]
FORMATS = {"nvfp4": "NVFP4, max", "nvfp4-sweep": "NVFP4, sweep", "fp8": "FP8"}
PEER_GOALS = {"nvfp4-2.4": 15, "fp8-2.4": 10, "nvfp4-8": 15, "fp8-8": 15}
FLOOR_GOAL = 1.5
MEMORY_GOAL_GB = 2.0


def print_tables(record: dict[str, Any], *, markdown: bool) -> None:
    """Print every table for which there are measurements."""
    runs: Runs = list(record["runs"].values())
    about = record["machine"]
    print(
        f"\n{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python"
        f" {about['python']}, {about['date']}; medians"
    )
    for title, rows in (
        ("Against llm-compressor", list(_peer_rows(runs))),
        ("Against plain copies, files in memory", list(_floor_rows(runs, "floor"))),
        ("Against plain copies, on disk, cold, with fsync", list(_floor_rows(runs, "disk"))),
        ("Peak memory", list(_memory_rows(runs))),
    ):
        if len(rows) > 1:
            print(f"\n{title}\n")
            _print(rows, markdown)


def _peer_rows(runs: Runs) -> Iterable[list[str]]:
    yield [
        "format", "source GB", "ours s", "GB/s", "peer s", "without imports s",
        "peer/ours", "without imports/ours", "goal", "rounds", "others",
    ]  # fmt: skip
    for part, goal in PEER_GOALS.items():
        theirs = _of(runs, part, "peer")
        for form in FORMATS:
            mine = [run for run in _of(runs, part, "ours") if run["form"] == form]
            if not mine or not theirs:
                continue
            whole, peer = _median(mine, "wall_s"), _median(theirs, "wall_s")
            alone = _median(theirs, "convert_s")
            size = mine[0]["read_nbytes"] / 1e9
            yield [
                FORMATS[form], f"{size:.2f}", f"{whole:.2f}", f"{size / whole:.2f}",
                f"{peer:.1f}", f"{alone:.1f}", f"{peer / whole:.1f}", f"{alone / whole:.1f}",
                f">= {goal}", str(min(len(mine), len(theirs))), _others([*mine, *theirs]),
            ]  # fmt: skip


def _floor_rows(runs: Runs, part: str) -> Iterable[list[str]]:
    yield [
        "format", "read GB", "written GB", "ours s", "GB/s", "copy s", "ours/copy", "goal",
        "CPU s", "copy CPU s", "rounds", "others",
    ]  # fmt: skip
    cases = {(run["experts"], run["form"]): None for run in runs if run["part"] == part}
    for experts, form in cases:
        chosen = [run for run in runs if run["experts"] == experts and run["form"] == form]
        mine, floor = _of(chosen, part, "ours"), _of(chosen, part, "floor")
        if not mine or not floor:
            continue
        whole, least = _median(mine, "wall_s"), _median(floor, "wall_s")
        size = mine[0]["read_nbytes"] / 1e9
        yield [
            FORMATS[form], f"{size:.2f}", f"{mine[0]['written_nbytes'] / 1e9:.2f}",
            f"{whole:.2f}", f"{size / whole:.2f}", f"{least:.2f}", f"{whole / least:.2f}",
            f"<= {FLOOR_GOAL}", f"{_cpu_seconds(mine):.2f}", f"{_cpu_seconds(floor):.2f}",
            str(min(len(mine), len(floor))), _others([*mine, *floor]),
        ]  # fmt: skip


def _memory_rows(runs: Runs) -> Iterable[list[str]]:
    yield ["format", "experts", "source GB", "peak GB", "imports GB", "above imports GB", "goal"]
    imports = _of(runs, "memory", "imports")
    if not imports:
        return
    base = imports[0]["peak_nbytes"]
    for run in sorted(_of(runs, "memory", "ours"), key=lambda run: (run["form"], run["experts"])):
        yield [
            FORMATS[run["form"]], str(run["experts"]), f"{run['read_nbytes'] / 1e9:.2f}",
            f"{run['peak_nbytes'] / 1e9:.3f}", f"{base / 1e9:.3f}",
            f"{(run['peak_nbytes'] - base) / 1e9:.3f}", f"<= {MEMORY_GOAL_GB}",
        ]  # fmt: skip


def _of(runs: Runs, part: str, who: str) -> list[dict[str, Any]]:
    return [run for run in runs if run["part"] == part and run["who"] == who]


def _median(runs: Runs, key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def _cpu_seconds(runs: Runs) -> float:
    """Median of what all threads together used; hardly disturbed by other processes."""
    return float(statistics.median(run["user_s"] + run["system_s"] for run in runs))


def _others(runs: Runs) -> str:
    """The most that other processes used of the machine during any of the runs."""
    return f"{max(run['others'] for run in runs):.0%}"


def _print(rows: list[list[str]], markdown: bool) -> None:
    if markdown:
        print("| " + " | ".join(rows[0]) + " |")
        print("|" + "---|" * len(rows[0]))
        for row in rows[1:]:
            print("| " + " | ".join(row) + " |")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
