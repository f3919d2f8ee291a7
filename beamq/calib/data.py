"""Calibration data: documents from anywhere, as full rows of token ids, the same for a seed.

In: `--data` specs (see `calib.sources`), the checkpoint's tokenizer, samples, length, seed.
Out: `CalibrationData`: `input_ids` [S, T] int64, its digest, and a record of what was used.

The one idea: each source gives documents until it has its share of S x T tokens, in proportion
to its weight; then all documents are shuffled together, joined with the end-of-text token after
each, and cut every T tokens. Every row is full (no padding, no lengths), a row may hold several
documents, and no token sees another row. Weights hold in tokens, not in documents.

A source with too little text gives what it has; the others are not stretched to make up for it,
so the mix is not quietly another one. The result then has fewer rows than asked, `notes` say so
and the record has both numbers. Less than one row is an error.

Limits: the last piece of a source is cut where its share is full, and up to T-1 tokens of a
corpus that is too short are left over. All rows are in memory: 8 bytes a token.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamq.calib.default_text import Split, default_text
from beamq.calib.sources import DataSpec, SourceLog, documents, in_pieces, parse_spec
from beamq.calib.tokens import CheckpointTokenizer
from beamq.errors import CalibrationError, UsageError

IdsT = NDArray[np.int64]

PIECE_PER_TOKEN = 8
MIN_PIECE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """What one source gave. `tokens` include one separator for each of `documents`."""

    name: str
    kind: str
    weight: float
    files: int
    documents: int
    tokens: int
    tokens_asked: int
    digest: str
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationData:
    """`input_ids` [S, T] int64, every row full; `digest` is a SHA-256 over shape and ids.

    `notes` are sentences for the user: what is less than was asked for. `document_digests` tell
    whether two data sets share a document (`shared_documents`).
    """

    input_ids: NDArray[np.int64]
    digest: str
    samples_asked: int
    seed: int
    sources: tuple[SourceRecord, ...]
    notes: tuple[str, ...]
    document_digests: frozenset[str]

    @property
    def samples(self) -> int:
        """Number of rows S."""
        return int(self.input_ids.shape[0])

    @property
    def sequence_length(self) -> int:
        """Tokens in each row, T."""
        return int(self.input_ids.shape[1])

    @property
    def tokens(self) -> int:
        """S x T."""
        return int(self.input_ids.size)

    def to_dict(self) -> dict[str, Any]:
        """The record for JSON: everything but the ids. Holds no path of this machine."""
        return {
            "digest": self.digest,
            "samples": self.samples,
            "samples_asked": self.samples_asked,
            "sequence_length": self.sequence_length,
            "tokens": self.tokens,
            "seed": self.seed,
            "sources": [asdict(source) for source in self.sources],
        }


@dataclass(slots=True, kw_only=True)
class _Drawn:
    """A source's documents as token ids, each ending in the separator, and their record."""

    documents: list[IdsT]
    record: SourceRecord
    notes: list[str]


def load_calibration_data(
    specs: Sequence[str],
    tokenizer_path: Path,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    split: Split = "calibration",
) -> CalibrationData:
    """Rows of token ids from `specs`, or from the default text (its `split` half) without any.

    `tokenizer_path` is the checkpoint's folder. Raises `CalibrationError` for data that cannot be
    read or is shorter than one row, `UsageError` for counts below 1.
    """
    if samples < 1 or sequence_length < 1:
        raise UsageError(
            f"samples ({samples}) and sequence length ({sequence_length}) must be at least 1"
        )
    parsed = [parse_spec(spec) for spec in specs]
    tokenizer = CheckpointTokenizer(tokenizer_path)
    piece = max(MIN_PIECE, PIECE_PER_TOKEN * sequence_length)
    quotas = shares([spec.weight for spec in parsed] or [1.0], samples * sequence_length)
    if parsed:
        drawn = [
            _draw(spec, tokenizer, quota, seed=f"{seed}:{position}", piece=piece)
            for position, (spec, quota) in enumerate(zip(parsed, quotas, strict=True))
        ]
    else:
        drawn = [_draw_default(split, tokenizer, quotas[0], seed=f"{seed}:0", piece=piece)]
    return _packed(drawn, samples=samples, sequence_length=sequence_length, seed=seed)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` in proportion to `weights`, exactly; what rounding leaves goes to the largest
    remainders."""
    whole = math.fsum(weights)
    exact = [total * (weight / whole) for weight in weights]
    parts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def shared_documents(first: CalibrationData, second: CalibrationData) -> int:
    """How many distinct documents two data sets have in common; 0 between the default's halves."""
    return len(first.document_digests & second.document_digests)


def _draw(
    spec: DataSpec, tokenizer: CheckpointTokenizer, quota: int, *, seed: str, piece: int
) -> _Drawn:
    log = SourceLog()
    texts = documents(spec, seed=seed, piece=piece, render=tokenizer.render, log=log)
    taken = list(_tokens(texts, tokenizer, quota))
    notes = [
        f"{spec.name}: passed over {count} {reason} (first: {log.examples[reason]})"
        for reason, count in log.skipped.items()
    ]
    if not taken and quota:
        why = f"; {'; '.join(notes)}" if notes else ""
        raise CalibrationError(f"--data {spec.text}: no text found{why}")
    record = _record(taken, spec.name, spec.kind, quota, weight=spec.weight, log=log)
    return _Drawn(documents=taken, record=record, notes=notes)


def _draw_default(
    split: Split, tokenizer: CheckpointTokenizer, quota: int, *, seed: str, piece: int
) -> _Drawn:
    default = default_text(split)
    rng = random.Random(seed)
    texts = [
        part for text in default.texts.values() for part in in_pieces([text], piece=piece, rng=rng)
    ]
    rng.shuffle(texts)
    taken = list(_tokens(iter(texts), tokenizer, quota))
    log = SourceLog(files=len(default.texts))
    record = _record(taken, default.description, "standard library", quota, weight=1.0, log=log)
    return _Drawn(documents=taken, record=record, notes=[])


def _tokens(texts: Iterator[str], tokenizer: CheckpointTokenizer, quota: int) -> Iterator[IdsT]:
    """Documents as ids with the separator after each, until they are exactly `quota` tokens."""
    left = quota
    while left > 0 and (text := next(texts, None)) is not None:
        ids = np.append(tokenizer.encode(text)[: left - 1], np.int64(tokenizer.separator))
        left -= ids.size
        yield ids


def _record(
    taken: list[IdsT], name: str, kind: str, quota: int, *, weight: float, log: SourceLog
) -> SourceRecord:
    return SourceRecord(
        name=name,
        kind=kind,
        weight=weight,
        files=log.files,
        documents=len(taken),
        tokens=sum(ids.size for ids in taken),
        tokens_asked=quota,
        digest=ids_digest(taken),
        skipped=dict(log.skipped),
    )


def _packed(
    drawn: list[_Drawn], *, samples: int, sequence_length: int, seed: int
) -> CalibrationData:
    every = [ids for source in drawn for ids in source.documents]
    random.Random(f"{seed}:mix").shuffle(every)
    found = sum(ids.size for ids in every)
    rows = found // sequence_length
    if rows == 0:
        raise CalibrationError(
            f"calibration data: {found:,} tokens found, at least {sequence_length:,} needed for"
            " one sample; give more --data or a shorter --sequence-length"
        )
    stream = np.concatenate(every)[: rows * sequence_length]
    input_ids = np.ascontiguousarray(stream.reshape(rows, sequence_length))
    notes = [note for source in drawn for note in source.notes]
    if rows < samples:
        notes.append(
            f"calibration data: {rows:,} of {samples:,} samples of {sequence_length:,} tokens;"
            f" the data has {found:,} of {samples * sequence_length:,} tokens"
        )
        notes += [
            f"{source.record.name}: gave {source.record.tokens:,} of its share of"
            f" {source.record.tokens_asked:,} tokens"
            for source in drawn
            if len(drawn) > 1 and source.record.tokens < source.record.tokens_asked
        ]
    return CalibrationData(
        input_ids=input_ids,
        digest=ids_digest(list(input_ids)),
        samples_asked=samples,
        seed=seed,
        sources=tuple(source.record for source in drawn),
        notes=tuple(notes),
        document_digests=frozenset(ids_digest([ids]) for ids in every),
    )


def ids_digest(sequences: Sequence[IdsT]) -> str:
    """SHA-256 over the number of sequences, then each one's length and ids (int64, little end)."""
    digest = hashlib.sha256(b"beamq token ids 1\n")
    digest.update(len(sequences).to_bytes(8, "little"))
    for ids in sequences:
        digest.update(ids.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()
