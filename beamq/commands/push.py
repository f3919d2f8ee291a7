"""`beamq push`: one call into the library, and what was sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from beamq.commands.options import Checkpoint, command, place
from beamq.errors import UsageError, counted
from beamq.io.safetensors_header import few
from beamq.options import option
from beamq.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from beamq.publish import PushFile, PushResult
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
    last. What the card lacks is said first. Run the same command again to continue a push that was
    stopped.
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
        on_plan=lambda plan: screen.say(*_notes(plan)),
    )
    screen.show(
        lambda: {
            "command": "push",
            "repo": result.repo,
            "revision": result.revision,
            "private": result.private,
            "dry_run": result.dry_run,
            # In the order sent; `last` are the index and the configs, `there` was there before.
            "files": [
                {"path": f.path, "bytes": f.nbytes, "last": f.last, "there": f.there}
                for f in result.files
            ],
            "bytes": result.nbytes,
            "not_sent": [{"path": path, "reason": why} for path, why in result.kept_back],
            "card_lacks": list(result.gaps),
            "withdrawn": list(result.withdrawn),  # old index and configs, deleted first
            "others": list(result.others),  # only the repository has them
            "commit": result.commit,
            "url": result.url,
            "seconds": round(result.seconds, 3),
        },
        lambda: push_blocks(result),
    )


def push_blocks(result: PushResult) -> list[Block]:
    """The files of a dry run; what was sent otherwise."""
    from beamq.report.tables import Table

    total = _total(result.files)
    if result.dry_run:
        where = f"{result.repo}, branch {result.revision}"
        files = [(f.path, show_bytes(f.nbytes), "last" if f.last else "") for f in result.files]
        return [
            Table(head=("file", "size", "order"), align="lrl", rows=files),
            "",
            *_notes(result),
            f"Dry run: {total} would go to {where}; nothing was sent.",
        ]
    new = [file for file in result.files if not file.there]
    old = [file for file in result.files if file.there]
    rows = (
        ("repository", f"{result.repo}{' (private)' if result.private else ''}"),
        ("branch", result.revision),
        ("commit", str(result.commit)),
        ("sent", _total(new)),
        ("already there", _total(old)),
        ("checked", total),
        ("time", show_seconds(result.seconds)),
        ("address", str(result.url)),
    )
    blocks: list[Block] = [Table(rows=rows)]
    if result.withdrawn:
        blocks += ["", f"Withdrawn first: {', '.join(result.withdrawn)}."]
    if result.others:
        stay = counted(len(result.others), "file that is", "files that are")
        blocks += ["", f"The repository also has {stay} not in the folder: {few(result.others)}."]
    return blocks


def _total(files: Sequence[PushFile]) -> str:
    nbytes = sum(file.nbytes for file in files)
    return f"{counted(len(files), 'file')}, {show_bytes(nbytes)}" if files else "nothing"


def _notes(result: PushResult) -> list[Block]:
    """What to know before anything is sent."""
    notes: list[Block] = []
    if result.gaps:
        notes.append(f"Note: the card lacks {', '.join(result.gaps)}.")
    if result.kept_back:
        names = few([f"{path} ({why})" for path, why in result.kept_back])
        notes.append(f"Note: not sent: {names}.")
    return notes
