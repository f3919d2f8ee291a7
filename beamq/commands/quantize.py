"""`beamq quantize`: options in, one call into the library, a folder and what became of it out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from beamq.commands import outcome
from beamq.commands.options import (
    AsJson,
    CacheBudget,
    Data,
    Debug,
    Device,
    DeviceMemory,
    DryRun,
    DtypeOption,
    Exclude,
    ExpertsOption,
    HostMemory,
    KvCacheOption,
    Output,
    Overwrite,
    Quiet,
    Recipe,
    Resume,
    Samples,
    Seed,
    SequenceLength,
    ShardSize,
    Source,
    Verbose,
    Workers,
)

if TYPE_CHECKING:
    from beamq.console import Screen


def quantize(
    source: Source,
    output: Output,
    recipe: Recipe = "nvfp4",
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="STATS",
            help="Statistics for NVFP4 input scales; nvfp4-gptq takes none.",
        ),
    ] = None,
    no_calibration: Annotated[
        bool, typer.Option("--no-calibration", help="NVFP4 input scales all 1.0 instead.")
    ] = False,
    data: Data = None,
    samples: Samples = None,
    sequence_length: SequenceLength = None,
    seed: Seed = None,
    experts: ExpertsOption = None,
    dtype: DtypeOption = None,
    device: Device = "auto",
    max_device_memory: DeviceMemory = None,
    statistics: Annotated[
        Path | None,
        typer.Option("--statistics", metavar="STATS", help="Keep what calibration saw, here."),
    ] = None,
    exclude: Exclude = None,
    kv_cache: KvCacheOption = None,
    base_model: Annotated[
        str | None,
        typer.Option("--base-model", metavar="ORG/NAME", help="The source's id, for the card."),
    ] = None,
    max_shard_size: ShardSize = "5GB",
    max_host_memory: HostMemory = "1.5GB",
    cache_budget: CacheBudget = "100GB",
    workers: Workers = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Convert a BF16 Beam into an NVFP4 or FP8 one.

    NVFP4 needs input scales. The run calibrates on the way, on --data or a default text; or takes
    them from --calibration STATS; or leaves them constant with --no-calibration. A run that was
    stopped goes on with --resume, and ends with the same bytes.
    """

    def body(screen: Screen) -> None:
        from beamq.conversion.input_scales import CONSTANT_NOTE
        from beamq.conversion.limits import default_workers
        from beamq.conversion.quantize import quantize as convert
        from beamq.conversion.runner import Progress
        from beamq.plan import Plan
        from beamq.sizes import parse_size, show_bytes
        from beamq.views.calibration import coverage_blocks, start_blocks
        from beamq.views.plan import needs_data, needs_text, plan_blocks
        from beamq.views.run import quantize_blocks, quantize_data

        memory = parse_size(max_host_memory, "--max-host-memory")
        cache = parse_size(cache_budget, "--cache-budget")
        threads = workers or default_workers()

        def announce(made: Plan) -> None:
            needs = needs_data(made, output, workers=threads, memory=memory, cache=cache)
            screen.say(*plan_blocks(made, verbose=verbose), needs_text(needs))
            if made.recipe.format == "nvfp4" and no_calibration:
                screen.say(f"Note: {CONSTANT_NOTE}.")
            if not dry_run:
                screen.say(f"Converting {show_bytes(made.source_nbytes)} to {output} ...")

        with screen.progress("converting") as advance:

            def on_progress(progress: Progress) -> None:
                if advance is not None:
                    advance(progress.done_nbytes, progress.total_nbytes)

            result = convert(
                source,
                output,
                recipe=recipe,
                calibration=calibration,
                no_calibration=no_calibration,
                data=data or (),
                samples=samples,
                sequence_length=sequence_length,
                seed=seed,
                experts=None if experts is None else experts.value,
                dtype=None if dtype is None else dtype.value,
                device=device,
                max_device_memory=None
                if max_device_memory is None
                else parse_size(max_device_memory, "--max-device-memory"),
                statistics=statistics,
                exclude=exclude or (),
                kv_cache=kv_cache,
                max_shard_bytes=parse_size(max_shard_size, "--max-shard-size"),
                max_host_memory=memory,
                cache_bytes=cache,
                base_model=base_model,
                workers=threads,
                resume=resume,
                overwrite=overwrite,
                dry_run=dry_run,
                on_plan=announce,
                on_engine=screen.say,
                on_start=lambda prepared: screen.say(*start_blocks(prepared)),
                on_progress=on_progress,
            )
        if result.stats is not None:
            screen.say(*coverage_blocks(result.stats))
        screen.show(
            lambda: quantize_data(result, source, dry_run=dry_run),
            lambda: quantize_blocks(result, source, dry_run=dry_run),
        )

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))
