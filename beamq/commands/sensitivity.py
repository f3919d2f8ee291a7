"""`beamq sensitivity`: options in, one call into the library, tables, a recipe and a report out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from beamq.commands import outcome
from beamq.commands.options import (
    AsJson,
    Checkpoint,
    Data,
    Debug,
    Device,
    EvaluationDtype,
    PartsLength,
    PartsSamples,
    Quiet,
    Report,
    Seed,
    Source,
    Verbose,
)
from beamq.errors import UsageError

if TYPE_CHECKING:
    from beamq.console import Screen
    from beamq.eval.parts import Choice, Sensitivity


def sensitivity(
    source: Source,
    checkpoint: Checkpoint,
    data: Data = None,
    samples: PartsSamples = None,
    sequence_length: PartsLength = None,
    seed: Seed = None,
    exclude_worst: Annotated[
        int | None,
        typer.Option("--exclude-worst", metavar="N", help="Leave the N costliest parts precise."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", metavar="X", help="As few as bring the predicted KL to X nats."),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option("--target-bits", metavar="B", help="As many as B bits a weight allow."),
    ] = None,
    write_recipe: Annotated[
        Path | None,
        typer.Option("--write-recipe", metavar="FILE", help="Write that choice as a recipe."),
    ] = None,
    report: Report = None,
    dtype: EvaluationDtype = None,
    device: Device = "auto",
    gemm: Annotated[
        str, typer.Option("--gemm", help="How to multiply (weights-only: activations unquantized).")
    ] = "reference",
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """What each quantized part costs on its own, and which to leave precise.

    CHECKPOINT is a quantized Beam made from SOURCE. Each part (a layer's experts, dense MLP or
    attention) takes the source's place alone, all in one pass over few rows of text.
    """

    def body(screen: Screen) -> None:
        from beamq.eval.parts import choose
        from beamq.eval.report_files import check_new_file, check_report_folder
        from beamq.eval.sensitivity import sensitivity as run
        from beamq.eval.sensitivity_report import write_sensitivity
        from beamq.views.sensitivity import sensitivity_blocks, sensitivity_data

        options = (exclude_worst, max_kl, target_bits)
        if sum(option is not None for option in options) > 1:
            raise UsageError("give one of --exclude-worst, --max-kl and --target-bits")
        if write_recipe is not None and all(option is None for option in options):
            raise UsageError(
                "--write-recipe needs --exclude-worst, --max-kl or --target-bits to choose by"
            )
        if write_recipe is not None and write_recipe.suffix not in (".yaml", ".yml"):
            raise UsageError(f"--write-recipe {write_recipe}: a recipe's name ends in .yaml")
        if write_recipe is not None:
            check_new_file(write_recipe, "--write-recipe")
        if report is not None:
            check_report_folder(report)
        with screen.progress("measuring") as advance:
            found = run(
                source,
                checkpoint,
                data=data or (),
                samples=samples,
                sequence_length=sequence_length,
                seed=seed or 0,
                dtype=None if dtype is None else dtype.value,
                device=device,
                gemm=gemm,
                on_start=lambda: screen.say(
                    f"Running the parts of {checkpoint} one by one in {source} ..."
                ),
                progress=advance,
            )
        choice = choose(found, exclude_worst=exclude_worst, max_kl=max_kl, target_bits=target_bits)
        written = None
        if write_recipe is not None and choice is not None:
            written = _write(found, choice, write_recipe)
        page = None if report is None else write_sensitivity(found, choice, report)
        screen.show(
            lambda: sensitivity_data(found, choice, written, page),
            lambda: sensitivity_blocks(found, choice, written, page, verbose=verbose),
        )

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))


def _write(found: Sensitivity, choice: Choice, path: Path) -> Path:
    from beamq.eval.parts import recipe_yaml, sparing_recipe
    from beamq.shards import write_file

    text = recipe_yaml(sparing_recipe(found, choice))
    write_file(path.expanduser(), text.encode(), resumable=False)
    return path
