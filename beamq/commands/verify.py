"""`beamq verify`: options in, one call into the library, a table of checks and exit code 0 or 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from beamq.commands import outcome
from beamq.commands.options import AsJson, Checkpoint, Debug, Level, Quiet, Verbose, Workers
from beamq.errors import UsageError

if TYPE_CHECKING:
    from beamq.console import Screen


def verify(
    checkpoint: Checkpoint,
    source: Annotated[
        str | None,
        typer.Option("--source", help="What it was made from, to compare every value with."),
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
