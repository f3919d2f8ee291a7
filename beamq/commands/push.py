"""`beamq push`: one call into the library, and what was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from beamq.commands.options import Checkpoint, command, place
from beamq.errors import UsageError, counted
from beamq.options import option
from beamq.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from beamq.publish import PushResult
    from beamq.report.console import Block, Screen


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Where to push, and whether to."""

    private: bool = option(False, "Create a private repository; refuse a public one.")
    revision: str | None = option(None, "Branch to push to.", shown="main")
    dry_run: bool = option(False, "Check and list the files, but send nothing.")


@command()
def push(
    screen: Screen,
    checkpoint: Checkpoint,
    repo: Annotated[str, place("REPO", "org/name on the Hub.")],
    options: PushOptions,
    as_json: bool,
    quiet: bool,
) -> None:
    """Publish a checkpoint on the Hub, and check what arrived.

    A folder whose structure or checksums fail in verify is not sent. Index and configs are sent
    last. Run the same command again to continue a push that was stopped.
    """
    from beamq.publish import push as send
    from beamq.ranks import current_ranks

    started = current_ranks().world
    if started > 1:
        raise UsageError(
            f"push runs in one process, and torchrun started {started}; leave torchrun out"
        )
    result = send(
        checkpoint,
        repo,
        **vars(options),
        show_progress=not (as_json or quiet),
        checking=lambda: screen.progress("checking"),
    )
    screen.show(
        lambda: {
            "command": "push",
            "repo": result.repo,
            "revision": result.revision,
            "private": result.private,
            "dry_run": result.dry_run,
            # In the order sent; `last` are the index and the configs.
            "files": [{"path": f.path, "bytes": f.nbytes, "last": f.last} for f in result.files],
            "bytes": result.nbytes,
            "withdrawn": list(result.withdrawn),  # old index and configs, deleted first
            "commit": result.commit,
            "url": result.url,
            "seconds": round(result.seconds, 3),
        },
        lambda: push_blocks(result),
    )


def push_blocks(result: PushResult) -> list[Block]:
    """The files of a dry run; what was sent otherwise."""
    from beamq.report.tables import Table

    total = f"{counted(len(result.files), 'file')}, {show_bytes(result.nbytes)}"
    if result.dry_run:
        where = f"{result.repo}, branch {result.revision}"
        files = [(f.path, show_bytes(f.nbytes), "last" if f.last else "") for f in result.files]
        return [
            Table(head=("file", "size", "order"), align="lrl", rows=files),
            "",
            f"Dry run: {total} would go to {where}; nothing was sent.",
        ]
    rows = (
        ("repository", f"{result.repo}{' (private)' if result.private else ''}"),
        ("branch", result.revision),
        ("commit", str(result.commit)),
        ("sent and checked", total),
        ("time", show_seconds(result.seconds)),
        ("address", str(result.url)),
    )
    blocks: list[Block] = [Table(rows=rows)]
    if result.withdrawn:
        blocks += ["", f"Replaced (old ones deleted first): {', '.join(result.withdrawn)}."]
    return blocks
