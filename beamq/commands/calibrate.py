"""`beamq calibrate`: one call into the library, a statistics file and a table of coverage."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beamq.adapter.options import AdapterOptions
from beamq.calib.options import CalibrationOptions
from beamq.commands.options import command, place
from beamq.errors import UsageError
from beamq.options import option
from beamq.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from beamq.calib.run import CalibrationSetup, LayerDone
    from beamq.calib.statistics import CalibrationStats
    from beamq.report.console import Block, Screen


@dataclass(frozen=True, kw_only=True)
class StatisticsMerge:
    """Flags of `beamq calibrate` that the library does not have."""

    merge: bool = option(
        False,
        "Merge statistics of one model that were made on different data.",
        after="max_device_memory",
    )
    output: Path | None = option(
        None, "With --merge: the file to write.", short="-o", type=Path, after="max_device_memory"
    )


PLACES = "Folder of a BF16 Beam, and the file to write. With --merge: statistics files."


@command()
def calibrate(
    screen: Screen,
    places: Annotated[list[str], place("SOURCE STATS", PLACES)],
    options: CalibrationOptions,
    adapter: AdapterOptions,
    more: StatisticsMerge,
    verbose: bool,
) -> None:
    """Run a BF16 Beam on text and record the inputs of its linears.

    The result is for `quantize --calibration STATS`. --resume continues a run that was stopped, and
    the result has the same bytes. Under torchrun, experts are split over the processes.
    """
    begun = time.monotonic()
    if more.merge:
        from beamq.calib.calibrate import merge_statistics

        if more.output is None:
            raise UsageError("--merge needs --output FILE")
        merged = merge_statistics(places, more.output)
        _show(screen, merged, more.output, time.monotonic() - begun)
        return
    if more.output is not None:
        raise UsageError("--output goes with --merge; without it STATS is the second argument")
    if len(places) != 2:
        raise UsageError(
            f"expected SOURCE STATS, found {len(places)} arguments: {' '.join(places)[:100]}"
        )
    from beamq.calib.calibrate import calibrate as run

    with screen.progress("calibrating") as advance:

        def on_layer(done: LayerDone) -> None:
            if advance is not None:
                advance(done.done_nbytes, done.total_nbytes)
            if verbose:
                spent = show_seconds(time.monotonic() - begun)
                screen.say(f"layer {done.layer + 1} of {done.layers} done after {spent}")

        stats = run(
            places[0],
            places[1],
            **vars(options),
            **vars(adapter),
            on_start=lambda setup: screen.say(*start_blocks(setup)),
            on_layer=on_layer,
        )
    _show(screen, stats, Path(places[1]), time.monotonic() - begun)


def _show(screen: Screen, stats: CalibrationStats, target: Path, seconds: float) -> None:
    from beamq.calib.input_scales import coverage
    from beamq.report.tables import Table

    rows = [
        ("statistics", str(target)),
        ("model", stats.model_name),
        ("inputs", f"{len(stats.inputs):,} of linears and expert layers"),
        ("tokens", f"{stats.total_tokens:,}"),
        ("time", show_seconds(seconds)),
    ]
    screen.show(
        lambda: {
            "command": "calibrate",
            "stats": str(target),
            "seconds": round(seconds, 3),
            "model": stats.model_name,
            "tokens": stats.total_tokens,
            "experts": stats.experts,
            "percentile": None,  # versions before 0.2 could record one
            "data": list(stats.data),
            "dropped_tokens": stats.dropped_rows,
            "dropped": list(stats.dropped_names),
            "coverage": coverage(stats).to_dict(),
        },
        lambda: [Table(rows=rows), "", *coverage_blocks(stats)],
    )


def start_blocks(setup: CalibrationSetup) -> list[Block]:
    """What a calibration will run, where, and the memory that it needs."""
    data, plan = setup.data, setup.plan
    names = ", ".join(source.name for source in data.sources)
    blocks: list[Block] = [
        f"Calibrating on {data.samples:,} x {data.sequence_length:,} = {data.tokens:,} tokens of"
        f" {names} (digest {data.digest[:12]})."
    ]
    needs = f"{show_bytes(plan.host_nbytes)} of memory"
    if plan.device_nbytes:
        needs = f"{show_bytes(plan.device_nbytes)} of GPU memory and {needs}"
    slices = f", {plan.slice_experts} experts of a layer at a time" if plan.slice_experts else ""
    blocks.append(f"The forward pass runs on {setup.device}{slices}, and needs up to {needs}.")
    return blocks + [f"Note: {note}." for note in data.notes]


def coverage_blocks(stats: CalibrationStats) -> list[Block]:
    """The table of `Coverage.lines`, and which sequences were left out."""
    from beamq.calib.input_scales import coverage, remarks  # numpy, only where a table is shown
    from beamq.report.tables import Table

    reached = coverage(stats)
    rows = []
    for layer in reached.layers:
        low, high = f"{layer.tokens_min:,}", f"{layer.tokens_max:,}"
        rows.append((str(layer.layer), low, f"{layer.tokens_median:,.0f}", high, remarks(layer)))
    title = (
        f"{reached.calibrated:,} of {reached.experts:,} experts reached ({reached.percent:.1f}%);"
        " tokens of each layer's experts:"
    )
    head = ("layer", "fewest", "median", "most", "experts with few tokens")
    blocks: list[Block] = [Table(title=title, head=head, align="rrrrl", rows=rows)]
    if reached.domains:
        shown = [(each.name, f"{each.experts:,}") for each in reached.domains]
        least = f"experts with {reached.domains[0].rows} tokens"
        blocks += ["", Table(head=("text", least), align="lr", rows=shown)]
    return blocks + [f"Left out: {name}." for name in stats.dropped_names]
