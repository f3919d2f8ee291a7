"""Calibration data: documents as full rows of token ids, the same for the same seed.

In: `--data` specs (calib/documents.py), the checkpoint's tokenizer, samples, length, seed.
Out: `CalibrationData`: `input_ids` [S, T] int64, its digest, and a record of what was used.

The one idea: each source gives documents until it has its share of S x T tokens, in proportion to
its weight. All documents are then shuffled together, joined with the end-of-text token after each,
and cut every T tokens. Every row is full (no padding), a row may hold several documents, and no
token sees another row. Weights count tokens, not documents.

A source with too little text gives what it has, and the others do not make up for it, so that the
mix stays as asked; `notes` and the record say so. Less than one row is an error.

Limits: the last document of a source is cut where its share is full, and up to T-1 tokens of a
corpus that is too short are not used. All rows are in memory: 8 bytes a token.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beamq.calib.documents import (
    DataSpec,
    SourceLog,
    Split,
    documents,
    in_pieces,
    parse_spec,
    row_texts,
)
from beamq.calib.presets import LARGE, PRESETS, PublicFile, default_text, public_rows, side
from beamq.calib.rows import Document
from beamq.errors import (
    CalibrationError,
    HubError,
    HubUnreachableError,
    MissingDependencyError,
    UsageError,
    counted,
)
from beamq.io.checkpoint import Checkpoint
from beamq.io.files import read_json_object
from beamq.ranks import Ranks


class CheckpointTokenizer:
    """The checkpoint's own tokenizer: text to ids, conversations to text, and the `separator`
    between documents (`eos_token`, or `eos_token_id` of config.json).

    Text needs the `tokenizers` library alone, which loads in milliseconds and runs no code from the
    checkpoint. Only conversations need transformers, for the chat template (rendered in its
    sandbox, never with `trust_remote_code`). Special tokens are neither added nor escaped, so text
    that was rendered with a chat template before means the same here.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `CalibrationError` where `folder` has no usable tokenizer.json or separator."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CalibrationError(
                f"{path}: not found; calibration needs the checkpoint's tokenizer."
                " Copy tokenizer.json and tokenizer_config.json next to config.json"
            )
        try:
            from tokenizers import Tokenizer  # late: only runs that calibrate need it
        except ImportError as fault:
            raise MissingDependencyError(f"calibration needs `tokenizers`: {fault}") from fault
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as fault:  # the library raises plain Exception for anything unreadable
            raise CalibrationError(f"{path}: not a tokenizer: {str(fault)[:120]}") from fault
        # A saved tokenizer may truncate or pad texts to the length that it was last used with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self._chat: Any = None
        model = _optional_json(folder / "config.json")
        vocabulary = model.get("vocab_size")
        self._vocab_size = vocabulary if isinstance(vocabulary, int) else None
        self.separator = self._separator(model)
        settings = _optional_json(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        self.has_chat_template = bool(settings.get("chat_template")) or template.is_file()

    def encode(self, text: Document) -> NDArray[np.int64]:
        """Token ids [T] of a text, without special tokens around it; ids stay as they are."""
        if not isinstance(text, str):
            ids = np.asarray(text, dtype=np.int64)
            if self._vocab_size is not None and not 0 <= ids.min() <= ids.max() < self._vocab_size:
                raise CalibrationError(
                    f"`input_ids` from {ids.min()} to {ids.max()}, expected 0 to"
                    f" {self._vocab_size - 1}; use data of this model's tokenizer"
                )
            return ids
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        if self._vocab_size is not None and ids.size and int(ids.max()) >= self._vocab_size:
            raise CalibrationError(
                f"{self._folder / 'tokenizer.json'}: yields id {int(ids.max())}, but config.json"
                f" has vocab_size {self._vocab_size}; the tokenizer belongs to another model"
            )
        return ids

    def joined(self, texts: Sequence[Document]) -> NDArray[np.int64]:
        """Ids [T] of documents, the separator after each."""
        separator = np.array([self.separator], dtype=np.int64)
        return np.concatenate([part for text in texts for part in (self.encode(text), separator)])

    def plain_ids(self) -> list[int]:
        """The ids of all tokens that are not special, in order."""
        return sorted(self._tokenizer.get_vocab(with_added_tokens=False).values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> str | None:
        """A conversation and its tools in the form of the chat template; None where the template
        refuses it, as templates do on purpose (for roles that do not alternate, say).

        Raises `CalibrationError` for a tokenizer without a template: no row could be used.
        """
        if self._chat is None:
            self._chat = self._load_chat()
        try:
            return str(self._chat.apply_chat_template(list(messages), tools=tools, tokenize=False))
        except Exception:  # a template is a program: it may raise whatever it likes
            return None

    def _load_chat(self) -> Any:
        try:
            from transformers import AutoTokenizer  # late: a second, and `messages` are rare
        except ImportError as fault:
            raise MissingDependencyError(f"`messages` need transformers: {fault}") from fault
        try:
            chat = AutoTokenizer.from_pretrained(
                str(self._folder), trust_remote_code=False, local_files_only=True
            )
        except Exception as fault:  # many kinds, none of them documented
            raise CalibrationError(
                f"{self._folder}: the tokenizer's chat template cannot be loaded:"
                f" {str(fault)[:120]}. Use data with a `text` column"
            ) from fault
        if not chat.chat_template:
            raise CalibrationError(
                f"{self._folder}: data has `messages`, but the tokenizer has no chat template;"
                " use data with a `text` column, or add chat_template.jinja"
            )
        return chat

    def _separator(self, model: dict[str, Any]) -> int:
        token = _optional_json(self._folder / "tokenizer_config.json").get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found = self._tokenizer.token_to_id(token)
            if found is not None:
                return int(found)
        ids = model.get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and not isinstance(first, bool) and first >= 0:
            return first
        raise CalibrationError(
            f"{self._folder}: no end-of-text token (eos_token in tokenizer_config.json, or"
            " eos_token_id in config.json); calibration separates documents with it"
        )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, CalibrationError) if path.is_file() else {}


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

    `domain_ST` [S, T] has the place in `domains` of the text that a token is from: a part of a
    preset, or a `--data`. `notes` are sentences for the user: where this is less than was asked
    for.
    """

    input_ids: NDArray[np.int64]
    domains: tuple[str, ...]
    domain_ST: NDArray[np.uint16]
    digest: str
    samples_asked: int
    seed: int
    sources: tuple[SourceRecord, ...]
    notes: tuple[str, ...]

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
        """For JSON: everything but the ids, without paths of this machine."""
        return {
            "digest": self.digest,
            "samples": self.samples,
            "samples_asked": self.samples_asked,
            "sequence_length": self.sequence_length,
            "tokens": self.tokens,
            "seed": self.seed,
            "sources": [asdict(source) for source in self.sources],
            **({"domains": list(self.domains)} if len(self.domains) > 1 else {}),
        }


@dataclass(slots=True, kw_only=True)
class _Drawn:
    """A source's documents as token ids, each ending in the separator, and their record."""

    domain: str
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
    tokenizer = CheckpointTokenizer(tokenizer_path)
    piece = max(MIN_PIECE, PIECE_PER_TOKEN * sequence_length)
    sources = [source for spec in specs or ("stdlib",) for source in _sources(spec, tokenizer)]
    quotas = shares([source.weight for source in sources], samples * sequence_length)
    drawn = [
        _draw(source, tokenizer, quota, split=split, seed=f"{seed}:{position}", piece=piece)
        for position, (source, quota) in enumerate(zip(sources, quotas, strict=True))
    ]
    return _packed(drawn, samples=samples, sequence_length=sequence_length, seed=seed)


def load_text(
    specs: Sequence[str],
    checkpoint: Checkpoint,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    split: Split = "calibration",
    ranks: Ranks | None = None,
) -> CalibrationData:
    """`load_calibration_data`, with the default of the model's size where `specs` is empty.

    Models of more than `LARGE` parameters get the preset `general`; where it cannot be read, a note
    says why, and the text is that of small models. All `ranks` take the same one.
    """
    load = partial(
        load_calibration_data,
        tokenizer_path=checkpoint.root,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        split=split,
    )
    if specs or sum(math.prod(each.shape) for each in checkpoint.tensors.values()) <= LARGE:
        return load(specs)
    found, why = None, ""
    try:
        found = load(("general",))
    except (HubError, HubUnreachableError, CalibrationError, MissingDependencyError) as fault:
        why = str(fault)
    reasons = [why] if ranks is None else ranks.gather(why)
    if found is not None and not any(reasons):
        return found
    note = (
        "the text is Python's standard library, because the preset `general` could not be read:"
        f" {next(filter(None, reasons))} (--data general stops instead)"
    )
    plain = load(())
    return replace(plain, notes=(note, *plain.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A `--data`, or one file of a preset (`part`)."""

    spec: DataSpec
    weight: float
    part: PublicFile | None = None

    @property
    def name(self) -> str:
        return self.spec.name if self.part is None else self.part.name


def _sources(text: str, tokenizer: CheckpointTokenizer) -> list[_Source]:
    """A preset's files share its weight; conversations need a chat template."""
    spec = parse_spec(text)
    parts = PRESETS[spec.name] if spec.kind == "preset" else ()
    parts = tuple(part for part in parts if tokenizer.has_chat_template or not part.chat)
    if not parts:
        return [_Source(spec=spec, weight=spec.weight)]
    whole = math.fsum(part.weight for part in parts)
    return [
        _Source(spec=spec, weight=spec.weight * part.weight / whole, part=part) for part in parts
    ]


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` in proportion to `weights`; the largest remainders get what rounding leaves."""
    whole = math.fsum(weights)
    exact = [total * (weight / whole) for weight in weights]
    parts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def _draw(
    source: _Source,
    tokenizer: CheckpointTokenizer,
    quota: int,
    *,
    split: Split,
    seed: str,
    piece: int,
) -> _Drawn:
    log, name = SourceLog(), source.name
    kind: str = source.spec.kind
    rng = random.Random(seed)
    if source.part is not None:
        rows = row_texts(public_rows(source.part, rng), tokenizer.render, log)
        texts = in_pieces((t for t in rows if side(t) == split), piece=piece, rng=rng, log=log)
        log.files = 1
    elif kind == "preset":
        default = default_text(split)
        name, kind, log.files = default.description, "standard library", len(default.texts)
        texts = iter(default.pieces(piece, rng))
    else:
        spec = source.spec
        texts = documents(spec, seed=seed, piece=piece, render=tokenizer.render, log=log)
    taken = list(_tokens(texts, tokenizer, quota))
    notes = [
        f"{name}: skipped {count} {reason} (first: {log.examples[reason]})"
        for reason, count in log.skipped.items()
    ]
    if log.cut:
        notes.append(
            f"{name}: {counted(log.cut, 'document')} of more than {2 * piece:,} characters"
            f" were read in pieces of about {piece:,}"
        )
    if not taken and quota:
        why = f"; {'; '.join(notes)}" if notes else ""
        raise CalibrationError(f"--data {source.spec.text}: no text found in {name}{why}")
    record = _record(taken, name, kind, quota, weight=source.weight, log=log)
    domain = name if source.part is None else source.part.domain
    return _Drawn(domain=domain, documents=taken, record=record, notes=notes)


def _tokens(
    texts: Iterator[Document], tokenizer: CheckpointTokenizer, quota: int
) -> Iterator[IdsT]:
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
    domains = tuple(dict.fromkeys(source.domain for source in drawn))
    every = [(ids, source.domain) for source in drawn for ids in source.documents]
    random.Random(f"{seed}:mix").shuffle(every)
    found = sum(ids.size for ids, _ in every)
    rows = found // sequence_length
    if rows == 0:
        raise CalibrationError(
            f"calibration data: {found:,} tokens found, at least {sequence_length:,} needed for"
            " one sample; give more --data or a shorter --sequence-length"
        )
    shape, used = (rows, sequence_length), rows * sequence_length
    stream = np.concatenate([ids for ids, _ in every])[:used]
    input_ids = np.ascontiguousarray(stream.reshape(shape))
    numbers = np.array([domains.index(domain) for _, domain in every], dtype=np.uint16)
    labels = np.repeat(numbers, [ids.size for ids, _ in every])
    notes = [note for source in drawn for note in source.notes]
    if rows < samples:
        notes.append(
            f"calibration data: {rows:,} of {samples:,} samples of {sequence_length:,} tokens;"
            f" the data has {found:,} of {samples * sequence_length:,} tokens"
        )
        notes += [
            f"{source.record.name}: has {source.record.tokens:,} tokens, fewer than its"
            f" share of {source.record.tokens_asked:,}"
            for source in drawn
            if len(drawn) > 1 and source.record.tokens < source.record.tokens_asked
        ]
    return CalibrationData(
        input_ids=input_ids,
        domains=domains,
        domain_ST=labels[:used].reshape(shape),
        digest=ids_digest(list(input_ids)),
        samples_asked=samples,
        seed=seed,
        sources=tuple(source.record for source in drawn),
        notes=tuple(notes),
    )


def ids_digest(sequences: Sequence[IdsT]) -> str:
    """SHA-256 over the number of sequences, then each one's length and ids (int64, little end)."""
    digest = hashlib.sha256(b"beamq token ids 1\n")
    digest.update(len(sequences).to_bytes(8, "little"))
    for ids in sequences:
        digest.update(ids.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()
