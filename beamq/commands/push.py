"""`beamq push`: options in, one call into the library, a result and an exit code out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from beamq.commands import outcome
from beamq.commands.options import AsJson, Checkpoint, Debug, Quiet
from beamq.errors import UsageError

if TYPE_CHECKING:
    from beamq.console import Screen


def push(
    checkpoint: Checkpoint,
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="org/name on the Hub.", show_default=False)
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Create it private; refuse one that is public.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch to push to.", show_default="main")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list the files, send nothing.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Publish a checkpoint on the Hub, and check what arrived.

    A folder that verify refuses, by structure or checksums, is not sent. Index and configs go last.
    A push that was stopped goes on when the same command is run again.
    """

    def body(screen: Screen) -> None:
        from beamq.hub.push import push as send
        from beamq.ranks import current_ranks
        from beamq.views.push import push_blocks, push_data

        started = current_ranks().world
        if started > 1:
            raise UsageError(
                f"push runs in one process, and torchrun started {started}; leave torchrun out"
            )
        result = send(
            checkpoint,
            repo,
            private=private,
            revision=revision,
            dry_run=dry_run,
            show_progress=not (as_json or quiet),
            checking=lambda: screen.progress("checking"),
        )
        screen.show(lambda: push_data(result), lambda: push_blocks(result))

    raise typer.Exit(outcome.run(body, as_json=as_json, quiet=quiet, debug=debug))
