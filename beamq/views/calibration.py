"""What `beamq calibrate` and a calibrating `quantize` say: the data beforehand, coverage after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.console import Block, Grid
from beamq.sizes import show_bytes, show_seconds

if TYPE_CHECKING:
    from beamq.calib.prepared import Prepared
    from beamq.calib.stats import CalibrationStats


def start_blocks(prepared: Prepared) -> list[Block]:
    """What will be run through the model, where, and what that needs."""
    data, plan = prepared.data, prepared.plan
    names = ", ".join(source.name for source in data.sources)
    blocks: list[Block] = [
        f"Calibrating on {data.samples:,} x {data.sequence_length:,} = {data.tokens:,} tokens of"
        f" {names} (digest {data.digest[:12]})."
    ]
    needs = f"{show_bytes(plan.host_nbytes)} of memory"
    if plan.device_nbytes:
        needs = f"{show_bytes(plan.device_nbytes)} of GPU memory and {needs}"
    slices = f", {plan.slice_experts} experts of a layer at a time" if plan.slice_experts else ""
    blocks.append(f"The forward pass runs on {prepared.device}{slices}, and needs up to {needs}.")
    return blocks + [f"Note: {note}." for note in data.notes]


def calibrate_data(stats: CalibrationStats, target: Path, seconds: float) -> dict[str, Any]:
    """The JSON of `beamq calibrate`: command, stats (the file), seconds, model, tokens, experts,
    percentile, data (one record a data set), dropped_tokens, dropped, coverage."""
    from beamq.calib.coverage import coverage

    return {
        "command": "calibrate",
        "stats": str(target),
        "seconds": round(seconds, 3),
        "model": stats.model_name,
        "tokens": stats.total_tokens,
        "experts": stats.experts,
        "percentile": stats.percentile,
        "data": list(stats.data),
        "dropped_tokens": stats.dropped_rows,
        "dropped": list(stats.dropped_names),
        "coverage": coverage(stats).to_dict(),
    }


def calibrate_blocks(stats: CalibrationStats, target: Path, seconds: float) -> list[Block]:
    """The result and the coverage table."""
    rows = [
        ("statistics", str(target)),
        ("model", stats.model_name),
        ("inputs", f"{len(stats.inputs):,} of linears and expert layers"),
        ("tokens", f"{stats.total_tokens:,}"),
        ("time", show_seconds(seconds)),
    ]
    return [Grid(columns=("", ""), rows=tuple(rows)), "", *coverage_blocks(stats)]


def coverage_blocks(stats: CalibrationStats) -> list[Block]:
    """The table of `Coverage.lines`, and which sequences were left out."""
    from beamq.calib.coverage import coverage, remarks  # NumPy, only where a table is shown

    reached = coverage(stats)
    rows = tuple(
        (
            str(layer.layer),
            f"{layer.tokens_min:,}",
            f"{layer.tokens_median:,.0f}",
            f"{layer.tokens_max:,}",
            remarks(layer),
        )
        for layer in reached.layers
    )
    title = (
        f"{reached.calibrated:,} of {reached.experts:,} experts reached ({reached.percent:.1f}%);"
        " tokens of each layer's experts:"
    )
    columns = ("layer>", "fewest>", "median>", "most>", "experts to look at")
    blocks: list[Block] = [Grid(columns=columns, rows=rows, title=title)]
    return blocks + [f"Left out: {name}." for name in stats.dropped_names]
