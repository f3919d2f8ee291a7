"""The text of a comparison: rows of token ids, and whether a candidate was calibrated on them.

In: `--data` specs and the source's tokenizer, or the caller's token ids; a candidate's manifest.
Out: a `Text`, and notes on text that calibration and comparison share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamq.calib.data import default_text, ids_digest, load_calibration_data
from beamq.errors import UsageError
from beamq.io.checkpoint import Checkpoint
from beamq.io.manifest import Manifest

DEFAULT_KIND = "standard library"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Rows of token ids [S, T], their record for the report, and notes on how they were read."""

    ids_BT: NDArray[np.int64]
    record: dict[str, Any]
    notes: tuple[str, ...] = ()


def read_text(
    checkpoint: Checkpoint, data: Sequence[str], size: tuple[int, int], seed: int
) -> Text:
    """`size` (rows, tokens of each) of `data`, or of the half of the default text that calibration
    does not use. Raises `UsageError` for rows of one token, `CalibrationError` for data."""
    samples, length = size
    if length < 2:
        raise UsageError(f"sequence length is {length}, expected at least 2 to predict a token")
    read = load_calibration_data(
        data,
        checkpoint.root,
        samples=samples,
        sequence_length=length,
        seed=seed,
        split="evaluation",
    )
    description = ", ".join(source.name for source in read.sources)
    record = {"description": description, **read.to_dict()}
    return Text(ids_BT=read.input_ids, record=record, notes=read.notes)


def given_text(input_ids: NDArray[np.int64]) -> Text:
    """Rows of token ids [S, T] as they are. Raises `UsageError` for another shape."""
    ids_BT = np.ascontiguousarray(input_ids, dtype=np.int64)
    if ids_BT.ndim != 2 or min(ids_BT.shape) < 1 or ids_BT.shape[1] < 2:
        raise UsageError(f"input_ids has shape {list(ids_BT.shape)}, expected [S, T] with T > 1")
    record = {
        "description": "token ids given by the caller",
        "digest": ids_digest(list(ids_BT)),
        "samples": ids_BT.shape[0],
        "sequence_length": ids_BT.shape[1],
        "tokens": ids_BT.size,
        "sources": [],
    }
    return Text(ids_BT=ids_BT, record=record)


def overlap_notes(manifest: Manifest | None, record: Mapping[str, Any]) -> list[str]:
    """Whether digests show that a candidate was calibrated on the text it is judged by."""
    entries = _objects(None if manifest is None else manifest.input_scales.get("data"))
    if not entries:
        return []
    theirs = [source for entry in entries for source in _objects(entry.get("sources"))]
    ours = record["sources"]
    if _digests([record, *ours]) & _digests([*entries, *theirs]):
        return ["it was calibrated on this very text, which improves its figures; use other data"]
    default = all(source.get("kind") == DEFAULT_KIND for source in [*ours, *theirs])
    if default and ours and theirs:
        halves = [default_text(split).digests() for split in ("calibration", "evaluation")]
        if not halves[0] & halves[1]:
            return ["calibrated on the other half of the default text; the digests share no file"]
    return ["calibrated on other data; whether that shares documents with this text is not known"]


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; none for anything else, as a stranger's beamq.json may hold."""
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, Mapping)]


def _digests(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    return {str(entry["digest"]) for entry in entries if entry.get("digest")}
