"""What `beamq push` says, as JSON and as text."""

from __future__ import annotations

from typing import Any

from beamq.console import Block, Grid
from beamq.errors import counted
from beamq.hub.push import PushResult
from beamq.sizes import show_bytes, show_seconds


def push_data(result: PushResult) -> dict[str, Any]:
    """The JSON of `beamq push`: command, repo, revision, private, dry_run, files [{path, bytes,
    last}] in the order sent, bytes, withdrawn (old index and configs deleted first), commit, url,
    seconds."""
    return {
        "command": "push",
        "repo": result.repo,
        "revision": result.revision,
        "private": result.private,
        "dry_run": result.dry_run,
        "files": [
            {"path": file.path, "bytes": file.nbytes, "last": file.last} for file in result.files
        ],
        "bytes": result.nbytes,
        "withdrawn": list(result.withdrawn),
        "commit": result.commit,
        "url": result.url,
        "seconds": round(result.seconds, 3),
    }


def push_blocks(result: PushResult) -> list[Block]:
    """The files of a dry run; what was sent otherwise."""
    total = f"{counted(len(result.files), 'file')}, {show_bytes(result.nbytes)}"
    if result.dry_run:
        files = tuple(
            (file.path, show_bytes(file.nbytes), "last" if file.last else "")
            for file in result.files
        )
        where = f"{result.repo}, branch {result.revision}"
        return [
            Grid(columns=("file", "size>", "order"), rows=files),
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
    blocks: list[Block] = [Grid(columns=("", ""), rows=rows)]
    if result.withdrawn:
        blocks += ["", f"Replaced: {', '.join(result.withdrawn)}, deleted before the weights."]
    return blocks
