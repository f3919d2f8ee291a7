"""A folder in which a conversion was begun and has not ended: told as such, instead of judged.

In: a folder. Out: nothing, or a `CheckpointError` that says how to go on. `beamq.json` is written
last, so a state folder without it is an output that is not whole, whatever else lies there.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from beamq.errors import BeamqError, CheckpointError
from beamq.io.checkpoint import HUB_STAMP
from beamq.io.files import parse_json, read_small
from beamq.io.journal import MAX_JOURNAL_BYTES, STATE_DIR
from beamq.io.lock import holder
from beamq.io.shard_writer import PARTIAL

MANIFEST_NAME = "beamq.json"
FIRST_JOURNAL = "journal-0.jsonl"
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")


def refuse_unfinished(root: Path) -> None:
    """Raise `CheckpointError` for the output of a conversion that was not finished."""
    if not root.is_dir() or (root / MANIFEST_NAME).exists():
        return
    if (root / STATE_DIR).is_dir():
        who = holder(root)
        if who is not None:
            raise CheckpointError(
                f"{root}: a conversion into this folder is under way{who}; wait for its end"
            )
        raise CheckpointError(
            f"{root}: the conversion into this folder was not finished{_progress(root)}; go on"
            f" with the command that began it and --resume: {_command(root)}"
        )
    partial = next((path.name for path in root.glob(f"*{PARTIAL}")), None)
    if partial is not None and not (root / "config.json").exists():
        raise CheckpointError(
            f"{root}: holds {partial} and no config.json: a download or a conversion that did not"
            " end; finish it, or begin again"
        )


def _progress(root: Path) -> str:
    """` (3 of 61 shards are)`, or nothing before the first."""
    found = [match for path in root.iterdir() if (match := _SHARD.fullmatch(path.name))]
    return f" ({len(found)} of {int(found[0][1])} shards are)" if found else ""


def _command(root: Path) -> str:
    """The command, as far as the journal knows it: not the options, nor where a folder lay."""
    identity = _identity(root / STATE_DIR / FIRST_JOURNAL)
    verb = "dequantize" if identity.get("recipe") == "dequantize" else "quantize"
    source = str(identity.get("source"))
    named = "SOURCE"
    if source.startswith(HUB_STAMP):
        named = shlex.quote(source.removeprefix(HUB_STAMP))
    return f"beamq {verb} {named} {shlex.quote(str(root))} --resume"


def _identity(journal: Path) -> dict[str, Any]:
    """The first line of a journal; nothing where the run was stopped before it was written."""
    with suppress(BeamqError, ValueError):
        text = read_small(journal, CheckpointError, MAX_JOURNAL_BYTES)
        first = parse_json(text.partition(b"\n")[0])
        if isinstance(first, dict):
            return first
    return {}
