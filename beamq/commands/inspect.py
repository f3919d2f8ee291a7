"""`beamq inspect`: a folder in, what it is out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from beamq.commands import outcome
from beamq.commands.options import AsJson, Checkpoint, Debug, Quiet

if TYPE_CHECKING:
    from beamq.console import Screen


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
