"""The `beamq` command: options in, one call into the library, a result and an exit code out.

Results go to stdout, everything else to stderr; `outcome` turns errors into exit codes. Heavy
modules are imported inside commands, so that `beamq --help` takes a moment, not seconds.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from beamq.commands import outcome
from beamq.commands.calibrate import calibrate
from beamq.commands.compare import compare
from beamq.commands.hub import push
from beamq.commands.options import (
    AsJson,
    CacheBudget,
    Checkpoint,
    Data,
    Debug,
    Device,
    DeviceMemory,
    DtypeOption,
    Exclude,
    ExpertsOption,
    HostMemory,
    KvCacheOption,
    Level,
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
from beamq.commands.sensitivity import sensitivity
from beamq.version import __version__

if TYPE_CHECKING:
    from beamq.console import Screen

GC_THRESHOLDS = (200_000, 50, 100)


app = typer.Typer(
    name="beamq",
    help="NVFP4 and FP8 checkpoints of Reflection's Beam that vLLM and SGLang serve unchanged.",
    epilog="Exit codes: 0 done, 1 a check failed, 2 usage, 3 bad input, 4 machine, 130 stopped.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry of the console script and of `python -m beamq`."""
    # A plan is half a million small records that all stay: by default the collector walks them
    # again and again as they grow, and takes more time than planning does.
    gc.set_threshold(*GC_THRESHOLDS)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names that are not UTF-8 must not stop a message
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="beamq")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"beamq {__version__}")
        raise typer.Exit


@app.callback()
def _beamq(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    source: Source,
    recipe: Recipe = "nvfp4",
    exclude: Exclude = None,
    kv_cache: KvCacheOption = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME[:N]", help="One machine in full, as h200:8."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", min=1, help="Tokens of a sequence.", show_default="131072 or the model's"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Where it would be written.", show_default="this folder"),
    ] = None,
    max_shard_size: ShardSize = "5GB",
    max_host_memory: HostMemory = "1.5GB",
    cache_budget: CacheBudget = "100GB",
    workers: Workers = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Sizes, memory, disk and what fits where, from headers."""

    def body(screen: Screen) -> None:
        from beamq.conversion.runner import check_cache, default_workers
        from beamq.memory import parse_gpu
        from beamq.plan import make_plan
        from beamq.sizes import parse_size
        from beamq.views.plan import needs_data, needs_text, plan_blocks, plan_data
        from beamq.views.serving import ServingView

        machine, count = parse_gpu(gpu) if gpu is not None else (None, None)
        memory = parse_size(max_host_memory, "--max-host-memory")
        cache = parse_size(cache_budget, "--cache-budget")
        made = make_plan(
            source,
            recipe,
            exclude=exclude or (),
            kv_cache=kv_cache,
            max_shard_bytes=parse_size(max_shard_size, "--max-shard-size"),
        )
        check_cache(made, cache)
        needs = needs_data(
            made,
            output or Path(),
            workers=workers or default_workers(),
            memory=memory,
            cache=cache,
        )
        serving = ServingView(made, context=context, gpu=machine, count=count)
        screen.show(
            lambda: {
                "command": "plan",
                **plan_data(made, source),
                "needs": needs,
                "serving": serving.data(),
            },
            lambda: [*plan_blocks(made, verbose=verbose), needs_text(needs), *serving.blocks()],
        )

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))


app.command()(calibrate)


@app.command()
def quantize(
    source: Source,
    output: Output,
    recipe: Recipe = "nvfp4",
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="STATS", help="Statistics for NVFP4 input scales."),
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan and check, write nothing.")
    ] = False,
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
        from beamq.conversion.quantize import quantize as convert
        from beamq.conversion.runner import Progress, default_workers
        from beamq.plan import Plan
        from beamq.ranks import current_ranks
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
                on_start=lambda prepared: screen.say(*start_blocks(prepared)),
                on_progress=on_progress,
            )
        if result.stats is not None and current_ranks().first:
            screen.say(*coverage_blocks(result.stats))
        if current_ranks().first:
            screen.show(
                lambda: quantize_data(result, source, dry_run=dry_run),
                lambda: quantize_blocks(result, source, dry_run=dry_run),
            )

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))


@app.command()
def verify(
    checkpoint: Checkpoint,
    source: Annotated[
        str | None,
        typer.Option("--source", help="The BF16 Beam it was made from, to compare with."),
    ] = None,
    level: Annotated[
        Level,
        typer.Option(
            "--level",
            help="structure: headers; tensors: every byte; forward: run it beside --source.",
        ),
    ] = Level.tensors,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only checksums: every byte against beamq.json.")
    ] = False,
    workers: Workers = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check a folder: what engines will load, against the source."""

    def body(screen: Screen) -> int:
        from beamq.errors import UsageError
        from beamq.eval.verify import verify as check
        from beamq.views.verify import verify_blocks, verify_data

        if quick and level is not Level.tensors:
            raise UsageError("--quick and --level contradict each other; give one")
        with screen.progress("verifying") as advance:
            report = check(
                checkpoint,
                source=source,
                level="quick" if quick else level.value,
                workers=workers,
                progress=advance,
            )
        screen.show(lambda: verify_data(report), lambda: verify_blocks(report, verbose=verbose))
        return 0 if report.ok else 1

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))


app.command()(compare)
app.command()(sensitivity)


@app.command()
def inspect(
    checkpoint: Checkpoint,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """What a checkpoint is: format, share quantized, oddities."""

    def body(screen: Screen) -> None:
        from beamq.eval.inspect import inspect_checkpoint
        from beamq.views.inspect import inspect_blocks, inspect_data

        found = inspect_checkpoint(checkpoint)
        screen.show(lambda: inspect_data(found), lambda: inspect_blocks(found))

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))


@app.command()
def dequantize(
    checkpoint: Checkpoint,
    output: Output,
    max_shard_size: ShardSize = "5GB",
    cache_budget: CacheBudget = "100GB",
    workers: Workers = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Decode an NVFP4 or FP8 Beam back to BF16, exactly."""

    def body(screen: Screen) -> None:
        from beamq.conversion.dequantize import dequantize as decode
        from beamq.conversion.runner import Progress
        from beamq.ranks import current_ranks
        from beamq.sizes import parse_size
        from beamq.views.run import dequantize_blocks, dequantize_data

        screen.say(f"Decoding {checkpoint} to {output} ...")
        with screen.progress("decoding") as advance:

            def on_progress(progress: Progress) -> None:
                if advance is not None:
                    advance(progress.done_nbytes, progress.total_nbytes)

            result = decode(
                checkpoint,
                output,
                max_shard_bytes=parse_size(max_shard_size, "--max-shard-size"),
                cache_bytes=parse_size(cache_budget, "--cache-budget"),
                workers=workers,
                resume=resume,
                overwrite=overwrite,
                on_progress=on_progress,
            )
        if current_ranks().first:
            screen.show(
                lambda: dequantize_data(result, checkpoint), lambda: dequantize_blocks(result)
            )

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))


app.command()(push)


@app.command()
def doctor(as_json: AsJson = False, debug: Debug = False) -> None:
    """What this machine offers and what is missing."""

    def body(screen: Screen) -> None:
        from beamq.commands.doctor import doctor_blocks, doctor_data

        data = doctor_data()
        screen.show(lambda: data, lambda: doctor_blocks(data))

    raise typer.Exit(outcome.run(body, as_json=as_json, debug=debug))
