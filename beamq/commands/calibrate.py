"""`beamq calibrate`: options in, one call into the library, a statistics file and a table out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from beamq.commands import outcome
from beamq.commands.options import (
    AsJson,
    Data,
    Debug,
    Device,
    DeviceMemory,
    DtypeOption,
    ExpertsOption,
    Overwrite,
    Quiet,
    Resume,
    Samples,
    Seed,
    SequenceLength,
    Verbose,
)
from beamq.errors import UsageError

if TYPE_CHECKING:
    from beamq.calib.forward import LayerDone
    from beamq.calib.stats import CalibrationStats
    from beamq.console import Screen


def calibrate(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE STATS",
            help="Folder of a BF16 Beam, and the file to write. With --merge: statistics files.",
            show_default=False,
        ),
    ],
    data: Data = None,
    samples: Samples = None,
    sequence_length: SequenceLength = None,
    seed: Seed = None,
    experts: ExpertsOption = None,
    percentile: Annotated[
        float | None,
        typer.Option("--percentile", help="Record this percentile of inputs too, as 99.9."),
    ] = None,
    second_moments: Annotated[
        bool, typer.Option("--second-moments", help="Record mean squares of each input too.")
    ] = False,
    dtype: DtypeOption = None,
    device: Device = "auto",
    max_device_memory: DeviceMemory = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge statistics of one model on different data.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --merge: the file to write.")
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a BF16 Beam on text and record what its linears see.

    For `quantize --calibration STATS`. A run that was stopped goes on with --resume, and ends with
    the same bytes. Under torchrun, experts are split over the processes.
    """

    def body(screen: Screen) -> None:
        if merge:
            _merge(screen, places, output)
            return
        if output is not None:
            raise UsageError("--output goes with --merge; without it STATS is the second argument")
        if len(places) != 2:
            raise UsageError(
                f"expected SOURCE STATS, found {len(places)} arguments: {' '.join(places)[:100]}"
            )
        from beamq.calib.layerwise import calibrate as run
        from beamq.sizes import parse_size, show_seconds
        from beamq.views.calibration import start_blocks

        begun = time.monotonic()
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
                data=data or (),
                samples=samples,
                sequence_length=sequence_length,
                seed=seed or 0,
                experts="all" if experts is not None and experts.value == "all" else "routed",
                percentile=percentile,
                second_moments=second_moments,
                dtype="bfloat16" if dtype is None else dtype.value,
                device=device,
                max_device_memory=None
                if max_device_memory is None
                else parse_size(max_device_memory, "--max-device-memory"),
                resume=resume,
                overwrite=overwrite,
                on_start=lambda prepared: screen.say(*start_blocks(prepared)),
                on_layer=on_layer,
            )
        _show(screen, stats, Path(places[1]), time.monotonic() - begun)

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))


def _merge(screen: Screen, places: list[str], output: Path | None) -> None:
    if output is None:
        raise UsageError("--merge needs --output FILE")
    from beamq.calib.layerwise import merge_statistics

    begun = time.monotonic()
    stats = merge_statistics(places, output)
    _show(screen, stats, output, time.monotonic() - begun)


def _show(screen: Screen, stats: CalibrationStats, target: Path, seconds: float) -> None:
    from beamq.views.calibration import calibrate_blocks, calibrate_data

    screen.show(
        lambda: calibrate_data(stats, target, seconds),
        lambda: calibrate_blocks(stats, target, seconds),
    )
