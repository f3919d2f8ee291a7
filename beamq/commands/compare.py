"""`beamq compare`: options in, one call into the library, tables and reports out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from beamq.commands import outcome
from beamq.commands.options import (
    AsJson,
    Data,
    Debug,
    Device,
    EvaluationDtype,
    EvaluationLength,
    EvaluationSamples,
    Quiet,
    Report,
    Seed,
    Source,
    Verbose,
)

if TYPE_CHECKING:
    from beamq.console import Screen
    from beamq.eval.comparison import Comparison


def compare(
    source: Source,
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT...", help="Folders made from SOURCE.", show_default=False
        ),
    ],
    data: Data = None,
    samples: EvaluationSamples = None,
    sequence_length: EvaluationLength = None,
    seed: Seed = None,
    report: Report = None,
    write_card: Annotated[
        bool,
        typer.Option("--write-card", help="Put each one's figures into its README.md."),
    ] = False,
    dtype: EvaluationDtype = None,
    device: Device = "auto",
    gemm: Annotated[
        str | None,
        typer.Option(
            "--gemm",
            help="How to multiply: reference, auto, ... (weights-only: activations unquantized).",
            show_default="auto; reference on a CPU",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """What quantization cost and what it saved, side by side.

    All models run on the same text, a layer of each at a time; under torchrun, experts are split
    over the processes. Exit code 1 if one of them is out of its recipe's bounds.
    """

    def body(screen: Screen) -> int:
        from beamq.eval.compare import compare as run
        from beamq.eval.report import write_cards, write_report
        from beamq.eval.report_files import check_report_folder
        from beamq.views.compare import compare_blocks, compare_data

        if report is not None:
            check_report_folder(report)
        page: Path | None = None

        def write(found: Comparison) -> None:
            nonlocal page
            page = None if report is None else write_report(found, report)
            if write_card:
                write_cards(found, checkpoints)

        with screen.progress("comparing") as advance:
            found = run(
                source,
                checkpoints,
                data=data or (),
                samples=samples,
                sequence_length=sequence_length,
                seed=seed or 0,
                dtype=None if dtype is None else dtype.value,
                device=device,
                gemm=gemm,
                on_start=lambda: screen.say(
                    f"Running {source} and {len(checkpoints)} more on the same text ..."
                ),
                progress=advance,
                on_result=write,
            )
        screen.show(
            lambda: compare_data(found, page),
            lambda: compare_blocks(found, page, verbose=verbose),
        )
        return 0 if found.safe else 1

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))
