"""What a run keeps in its output folder: a journal to resume from.

In: an output folder. Out: what is durable in it, and whether a run ended.

`.beamq/journal-<rank>.jsonl` is append-only. Its first line is the run's identity; each further
line records a shard whose bytes are on disk, written after the shard's fsync and before its rename.
So a recorded shard is whole under its temporary or its final name, and resuming only has to finish
the rename. A last line that a crash cut off is ignored: its shard is made again.

A resumed run must have the same `Identity`; the message names every difference.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from beamq.errors import BeamqError, CheckpointError, ResumeError
from beamq.io.checkpoint import ADAPTER_STAMP, HUB_STAMP
from beamq.io.files import parse_json, read_small
from beamq.io.lock import holder
from beamq.io.manifest import MANIFEST_NAME, is_digest
from beamq.io.shard_writer import PARTIAL, disk_errors, make_folder, sync_folder, write_file

STATE_DIR = ".beamq"
CALIBRATION = "calibration"
"""Folder in the state folder for the state of a calibration that is part of the run."""
MAX_JOURNAL_BYTES = 1 << 30
FIRST_JOURNAL = "journal-0.jsonl"
_SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What must be equal for a run to continue another."""

    version: str
    source: str
    recipe: str
    input_scales: str
    plan: str
    checksum: str


_MEANING = {
    "version": "another version of beamq",
    "source": "a source that has changed since",
    "recipe": "another recipe, --exclude, --kv-cache or --activation-headroom",
    "input_scales": "another calibration (--data, --samples, --sequence-length, --seed, --experts,"
    " --dtype, --calibration or --no-calibration)",
    "plan": "another --max-shard-size or plan",
    "checksum": "another checksum algorithm (is xxhash installed?)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """A finished shard: tensor checksums in file order, and what the kernels counted.

    `sources` are checksums of what each group was made from, `source_counts` what the kernels
    counted in it, where that is not 0; both empty where no `--only-changed` can use them.
    """

    name: str
    nbytes: int
    tensors: Mapping[str, str]
    counts: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    source_counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class Journal:
    """The records of one rank, appended to; `done` has those of every rank of the run."""

    def __init__(self, folder: Path, identity: Identity, rank: int = 0) -> None:
        self.state = folder / STATE_DIR
        self._identity = identity
        self._path = self.state / f"journal-{rank}.jsonl"
        self._stream: BinaryIO | None = None
        self.done: dict[str, ShardRecord] = {}

    def load(self) -> None:
        """Read every rank's records of an earlier run. Raises `ResumeError` if not the same run."""
        self.done = {}
        if self.state.is_symlink():
            raise ResumeError(f"{self.state}: is a link, not a folder; choose another output")
        for path in sorted(self.state.glob("journal-*.jsonl")):
            self._load_file(path)

    def _load_file(self, path: Path) -> None:
        lines = read_small(path, ResumeError, MAX_JOURNAL_BYTES).split(b"\n")
        # What follows the last newline was cut off by a crash, or is empty.
        entries = [_parse(path, number, line) for number, line in enumerate(lines[:-1], 1)]
        if not entries:
            return
        check_identity(self._identity, entries[0], path.parent.parent)
        for number, entry in enumerate(entries[1:], 2):
            record = _record(entry)
            if record is None:
                raise ResumeError(f"{path}: line {number} is not a shard's record; use --overwrite")
            self.done[record.name] = record

    def open(self) -> None:
        """Create or continue this rank's file, dropping a cut last line."""
        with disk_errors(self._path, "opening the journal"):
            make_folder(self.state)
            whole = b""
            if self._path.exists():
                whole = read_small(self._path, ResumeError, MAX_JOURNAL_BYTES)
            whole = whole[: whole.rfind(b"\n") + 1]
            if not whole:
                whole = _line(asdict(self._identity))
            write_file(self._path, whole)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._stream = os.fdopen(os.open(self._path, flags), "ab")
            sync_folder(self.state)

    def append(self, record: ShardRecord) -> None:
        """Record a shard; durable on return."""
        if self._stream is None:
            raise ValueError("the journal is not open")
        with disk_errors(self._path, "writing the journal"):
            self._stream.write(_line(asdict(record)))
            self._stream.flush()
            os.fsync(self._stream.fileno())
        self.done[record.name] = record

    def close(self) -> None:
        """Close this rank's file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def remove(self) -> None:
        """Delete the state folder: the run is complete."""
        self.close()
        with disk_errors(self.state, "removing"):
            shutil.rmtree(self.state, ignore_errors=True)


def check_identity(identity: Identity, recorded: Mapping[str, Any], folder: Path) -> None:
    """Raise `ResumeError` naming every way in which a recorded run differs."""
    differences = [
        meaning for key, meaning in _MEANING.items() if recorded.get(key) != getattr(identity, key)
    ]
    if recorded.get("source") != identity.source:
        differences[differences.index(_MEANING["source"])] = _changed_source(
            str(recorded.get("source")), identity.source
        )
    # A changed source or recipe changes the plan as well; name the cause only.
    if len(differences) > 1 and _MEANING["plan"] in differences:
        differences.remove(_MEANING["plan"])
    if differences:
        raise ResumeError(
            f"{folder} was started with {', '.join(differences)}; use the same options, or start"
            " again with --overwrite"
        )


def _changed_source(recorded: str, current: str) -> str:
    """Names both commits where the source was on the Hub."""
    (recorded, _, merged), (current, _, now) = (
        text.partition(ADAPTER_STAMP) for text in (recorded, current)
    )
    if recorded == current and merged != now:
        return "another --adapter, or another reading of its packed experts (--expert-lora options)"
    if not recorded.startswith(HUB_STAMP):
        return _MEANING["source"]
    was, now = recorded.removeprefix(HUB_STAMP), current.removeprefix(HUB_STAMP)
    return f"the source {was}" + (f" (given now: {now})" if now != current else "")


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = parse_json(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise ResumeError(f"{path}: line {number} is damaged; start again with --overwrite")
    return entry


def _record(entry: Mapping[str, Any]) -> ShardRecord | None:
    """A line as a record, or None if it is not in the form that `append` writes."""
    if set(entry) != {"name", "nbytes", "tensors", "counts", "sources", "source_counts"}:
        return None
    tensors = entry["tensors"]
    sound = (
        isinstance(entry["name"], str)
        and isinstance(entry["nbytes"], int)
        and isinstance(tensors, dict)
        and all(is_digest(digest) for digest in tensors.values())
        and sound_counts(entry["counts"])
        and sound_sources(entry["sources"], entry["source_counts"])
    )
    return ShardRecord(**entry) if sound else None


def sound_counts(counts: Any) -> bool:
    """Whether these are counts as kernels give them: numbers, and names for `zero_groups`."""
    return isinstance(counts, dict) and all(
        isinstance(value, list) and all(isinstance(name, str) for name in value)
        if key == "zero_groups"
        else isinstance(value, int)
        for key, value in counts.items()
    )


def sound_sources(sources: Any, counts: Any) -> bool:
    """Whether these are a record's `sources` and `source_counts`."""
    return (
        isinstance(sources, dict)
        and isinstance(counts, dict)
        and all(is_digest(digest) for digest in sources.values())
        and all(sound_counts(each) and "zero_groups" not in each for each in counts.values())
    )


def refuse_unfinished(root: Path) -> None:
    """Raise `CheckpointError`, with how to resume, for an output whose conversion has not ended.

    `beamq.json` is written last, so a state folder without it means an incomplete output.
    """
    if not root.is_dir() or (root / MANIFEST_NAME).exists():
        return
    if (root / STATE_DIR).is_dir():
        who = holder(root)
        if who is not None:
            raise CheckpointError(
                f"{root}: a conversion is writing to this folder{who}; wait until it ends"
            )
        raise CheckpointError(
            f"{root}: the conversion into this folder was not finished{_progress(root)}; run the"
            f" command that started it again, with --resume: {_command(root)}"
        )
    partial = next((path.name for path in root.glob(f"*{PARTIAL}")), None)
    if partial is not None and not (root / "config.json").exists():
        raise CheckpointError(
            f"{root}: holds {partial} and no config.json, so a download or a conversion did not"
            " end; finish it, or start it again"
        )


def _progress(root: Path) -> str:
    """` (3 of 61 shards are)`, or nothing before the first."""
    found = [match for path in root.iterdir() if (match := _SHARD.fullmatch(path.name))]
    return f" ({len(found)} of {int(found[0][1])} shards are)" if found else ""


def _command(root: Path) -> str:
    """The command as far as the journal knows it: without options and local source folders."""
    identity: Any = None
    with suppress(BeamqError, ValueError):  # the run may have been stopped before the first line
        journal = read_small(root / STATE_DIR / FIRST_JOURNAL, CheckpointError, MAX_JOURNAL_BYTES)
        identity = parse_json(journal.partition(b"\n")[0])
    identity = identity if isinstance(identity, dict) else {}
    recipe = identity.get("recipe")
    verb = str(recipe) if recipe in ("dequantize", "merge") else "quantize"
    source, adapter, _ = str(identity.get("source")).partition(ADAPTER_STAMP)
    named = "SOURCE"
    if source.startswith(HUB_STAMP):
        named = shlex.quote(source.removeprefix(HUB_STAMP))
    before = " ADAPTER" if verb == "merge" else ""
    after = " --adapter ADAPTER" if adapter and not before else ""
    return f"beamq {verb} {named}{before} {shlex.quote(str(root))}{after} --resume"
