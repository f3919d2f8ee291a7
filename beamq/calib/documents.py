"""The documents that `--data` names, in an order that a seed fixes.

In: specs such as `notes.md`, `src/`, `chats.jsonl:0.3`, `owner/name,split=test:2`.
Out: `DataSpec` and, from `documents`, an iterator of texts (or token ids) that is read only as far
as needed.

The one idea: a file is a sequence of *units* (a stretch of a text file, a block of lines, a row
group of a parquet file) that are counted from the file's size or footer alone. The units of a whole
folder are shuffled, then read one by one until the caller has enough. A corpus of any size costs
what is used of it, and one long file cannot crowd out the others. A text file gives pieces of a few
rows of tokens, cut at line ends, each a document of its own.

    DATA          file | folder | dataset | preset   then optionally `:WEIGHT`
    preset        general | code | stdlib            see calib/presets.py
    dataset       owner/name[,config=C][,split=S][,revision=R]     on the Hugging Face Hub

A name that exists on disk is a path, even if it looks otherwise (`odd:0.5`). Folders are read
recursively, without hidden entries: .txt .md .py as text, .jsonl .parquet .json .csv .tsv as rows,
each also as .gz or .zst (not .parquet). A row's document is the first that it has of

    text          a string
    messages      objects with `role` and `content`, through the chat template with the row's
                  `tools`; `conversations` with `from` and `value` are the same
    prompt        with `completion`: two strings, or two lists of messages
    input_ids     token ids, taken as they are

and a row with none of them is an error.

Limits: UTF-8 only; a file of more than 65,536 units (1 GB of text at 2,048 tokens) is sampled
evenly. A .json, .csv, .tsv or compressed file is read from its beginning, through a buffer that
shuffles. Why not the `datasets` library for files: ADR 13.
"""

from __future__ import annotations

import codecs
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from beamq.calib.rows import (
    PACKED_SUFFIXES,
    Document,
    Render,
    Row,
    document_of,
    hub_rows,
    jsonl_rows,
    kind_of,
    parquet_groups,
    parquet_rows,
    streamed_rows,
)
from beamq.errors import CalibrationError
from beamq.io.files import user_path

PRESET_NAMES = ("general", "code", "stdlib")
TEXT_SUFFIXES = (".txt", ".md", ".py")
STREAMED_SUFFIXES = (".json", ".csv", ".tsv")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet", *STREAMED_SUFFIXES)
OTHER_SUFFIXES = (  # of files that are not read, but are no dataset either
    *PACKED_SUFFIXES, ".xz", ".bz2", ".zip", ".tar", ".arrow", ".text", ".rst", ".html", ".xml",
    ".yaml", ".yml", ".pdf", ".docx", ".log",
)  # fmt: skip
JSONL_BLOCK_BYTES = 1 << 16
MAX_UNITS_PER_FILE = 1 << 16
CHECKED_BYTES = 256 << 20  # of a text file, before its pieces are drawn
MAX_WAITING_CHARACTERS = 1 << 26
Split = Literal["calibration", "evaluation"]

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?((,[a-z]+=[^,]+)*)")
_HUB_OPTIONS = ("config", "split", "revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """One `--data`. Records show `name`, which is never a path: paths are private to the user."""

    text: str
    kind: Literal["file", "folder", "hub", "preset"]
    name: str
    weight: float
    path: Path | None = None
    options: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True, kw_only=True)
class SourceLog:
    """What was read of a source: number of files, of documents cut into pieces, and what was
    skipped and why."""

    files: int = 0
    cut: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def skip(self, reason: str, where: str) -> None:
        """Count something skipped; the first example of each reason is kept."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, where)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Bytes [start, stop) of a text or .jsonl file, row group `start` of a .parquet file, or the
    whole of a file that is streamed (`stop` is -1).

    `length` is the length of this file's units; the last one may be shorter.
    """

    path: Path
    start: int
    stop: int
    length: int
    named: bool


def parse_spec(text: str) -> DataSpec:
    """Read one `--data`. Raises `CalibrationError` for a bad weight or an unknown name."""
    if not text.strip():
        raise CalibrationError("--data is empty; give a file, a folder or a dataset's name")
    if user_path(text).exists():
        return _path_spec(text, text, 1.0)
    name, weight = _split_weight(text)
    if user_path(name).exists():
        return _path_spec(text, name, weight)
    if name in PRESET_NAMES:
        return DataSpec(text=text, kind="preset", name=name, weight=weight)
    found = _HUB.fullmatch(name)
    if found is None or _looks_like_path(name):
        raise CalibrationError(
            f"--data {text}: no such file or folder (and not a dataset's name: owner/name)"
        )
    options = [option.split("=", 1) for option in found[2].split(",") if option]
    keys = [key for key, _ in options]
    for key in keys:
        if key not in _HUB_OPTIONS or keys.count(key) > 1:
            raise CalibrationError(
                f"--data {text}: option {key!r} is unknown or given twice;"
                f" a dataset takes {', '.join(_HUB_OPTIONS)}"
            )
    return DataSpec(
        text=text,
        kind="hub",
        name=name.partition(",")[0],
        weight=weight,
        options=tuple((key, value) for key, value in options),
    )


def _looks_like_path(name: str) -> bool:
    """Whether a name that does not exist was meant as a path rather than as a dataset: by its
    beginning, its suffix, or because its parent folder exists."""
    path = Path(name)
    begins = name.startswith((".", "~", "/"))
    ends = path.suffix.lower() in (*SUFFIXES, *OTHER_SUFFIXES)
    return begins or ends or ("/" in name and path.parent.is_dir())


def _split_weight(text: str) -> tuple[str, float]:
    """Split off `:0.3`. A colon that no number follows (`C:\\data`) belongs to the name."""
    name, colon, tail = text.rpartition(":")
    try:
        weight = float(tail)
    except ValueError:
        return text, 1.0
    if not colon or not name:
        return text, 1.0
    if not (math.isfinite(weight) and weight > 0):
        raise CalibrationError(f"--data {text}: weight {tail} is not above 0; leave the data out")
    return name, weight


def _path_spec(text: str, name: str, weight: float) -> DataSpec:
    path = user_path(name)
    kind: Literal["file", "folder"] = "folder" if path.is_dir() else "file"
    if kind == "file" and not _is_known(path):
        raise CalibrationError(
            f"--data {text}: unknown kind of file; expected one of {' '.join(SUFFIXES)}, or one of"
            f" them with {' or '.join(PACKED_SUFFIXES)} after it"
        )
    return DataSpec(text=text, kind=kind, name=path.resolve().name, weight=weight, path=path)


def _is_known(path: Path) -> bool:
    packed = path.suffix.lower() in PACKED_SUFFIXES
    return kind_of(path) in SUFFIXES and not (packed and kind_of(path) == ".parquet")


def documents(
    spec: DataSpec, *, seed: str, piece: int, render: Render, log: SourceLog
) -> Iterator[Document]:
    """Texts of a source in an order that `seed` fixes, of at most about 2 x `piece` characters.

    `render` turns a conversation, and its tools, into text. What is skipped or cut is counted in
    `log`.
    """
    rng = random.Random(seed)
    if spec.path is None:
        found = hub_rows(spec.name, dict(spec.options), seed=rng.getrandbits(31))
        return in_pieces(row_texts(found, render, log), piece=piece, rng=rng, log=log)
    files = [spec.path] if spec.kind == "file" else _walk(spec)
    log.files = len(files)
    units = [unit for path in files for unit in _units(path, piece, spec.kind == "file")]
    rng.shuffle(units)
    return in_pieces(_unit_texts(units, render, rng, log), piece=piece, rng=rng, log=log)


def in_pieces(
    texts: Iterable[Document], *, piece: int, rng: random.Random, log: SourceLog | None = None
) -> Iterator[Document]:
    """Cut texts above 2 x `piece` characters at line ends, and token ids above as many. Yield one
    piece of each in its place and the others at the end, so that a book in one row does not fill
    every sample.

    What waits is bounded: past `MAX_WAITING_CHARACTERS`, pieces are yielded at once.
    """
    waiting: list[Document] = []
    characters = 0
    for text in texts:
        if len(text) <= 2 * piece:
            yield text
            continue
        if log is not None:
            log.cut += 1
        pieces: list[Document]
        if isinstance(text, str):
            pieces = list(_cut(text, piece))
        else:
            pieces = [text[start : start + piece] for start in range(0, len(text), piece)]
        yield pieces.pop(rng.randrange(len(pieces)))
        if characters > MAX_WAITING_CHARACTERS:
            yield from pieces
            continue
        waiting += pieces
        characters += len(text)
    rng.shuffle(waiting)
    yield from waiting


def _cut(text: str, piece: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        newline = text.find("\n", start + piece - 1, start + 2 * piece)
        stop = newline + 1 if newline >= 0 else start + piece
        if text[start:stop].strip():
            yield text[start:stop]
        start = stop


def _unit_texts(
    units: Iterable[_Unit], render: Render, rng: random.Random, log: SourceLog
) -> Iterator[Document]:
    for unit in units:
        try:
            if unit.stop < 0:
                yield from row_texts(streamed_rows(unit.path, rng), render, log)
            elif kind_of(unit.path) in TEXT_SUFFIXES:
                yield from _text_piece(unit, log)
            elif kind_of(unit.path) == ".jsonl":
                block = jsonl_rows(unit.path, unit.start, unit.stop)
                rng.shuffle(block)
                yield from row_texts(block, render, log)
            else:
                group = parquet_rows(unit.path, unit.start, rng)
                yield from row_texts(group, render, log)
        except OSError as fault:
            raise _unreadable(unit.path, fault) from fault


def _unreadable(path: object, fault: OSError) -> CalibrationError:
    return CalibrationError(f"{path}: cannot be read: {fault.strerror or fault}")


def row_texts(found: Iterable[Row], render: Render, log: SourceLog) -> Iterator[Document]:
    """The rows' documents."""
    for row in found:
        text = document_of(row, render=render, skip=log.skip)
        if text is not None:
            yield text


def _walk(spec: DataSpec) -> list[Path]:
    """Data files of a folder, sorted; without hidden entries and linked folders."""
    found: list[Path] = []

    def refuse(fault: OSError) -> None:
        raise _unreadable(fault.filename, fault) from fault

    for folder, inner, names in os.walk(spec.path or "", onerror=refuse):
        inner[:] = [name for name in inner if not name.startswith(".") and name != "__pycache__"]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if _is_known(path) and path.is_file()]
    if not found:
        raise CalibrationError(
            f"--data {spec.text}: the folder has no file of a known kind ({' '.join(SUFFIXES)})"
        )
    return sorted(found)


def _units(path: Path, piece: int, named: bool) -> list[_Unit]:
    """The units of a file; evenly spaced ones where there would be too many."""
    if path.suffix.lower() in PACKED_SUFFIXES or kind_of(path) in STREAMED_SUFFIXES:
        return [_Unit(path, 0, -1, 0, named)]
    if kind_of(path) == ".parquet":
        return [_Unit(path, group, group, 0, named) for group in range(parquet_groups(path))]
    length = piece if kind_of(path) in TEXT_SUFFIXES else JSONL_BLOCK_BYTES
    try:
        size = path.stat().st_size
        if named and kind_of(path) in TEXT_SUFFIXES:
            _refuse_other_encodings(path)
    except OSError as fault:
        raise _unreadable(path, fault) from fault
    stride = max(length, math.ceil(size / MAX_UNITS_PER_FILE))
    return [
        _Unit(path, start, min(start + length, size), length, named)
        for start in range(0, size, stride)
    ]


def _refuse_other_encodings(path: Path) -> None:
    """Raise `CalibrationError` for what is not UTF-8: which pieces are read depends on the seed."""
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while at < CHECKED_BYTES:
            data = file.read(1 << 20)
            begun = len(decoder.getstate()[0])  # bytes of a character that the last read cut
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as fault:
                raise _other_encoding(path, at - begun + fault.start) from None
            if not data:
                return
            at += len(data)


def _other_encoding(path: Path, place: int) -> CalibrationError:
    return CalibrationError(
        f"{path}: not UTF-8 at byte {place}; convert it (iconv -t UTF-8) or leave it out"
    )


def _text_piece(unit: _Unit, log: SourceLog) -> Iterator[str]:
    """The lines that start at bytes [start, stop), as text, if there is more than white space.

    A file that is not UTF-8 is an error if the user named it, and skipped in a folder.
    """
    data = _lines(unit)
    try:
        text = data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as fault:
        if unit.named:
            raise _other_encoding(unit.path, unit.start + fault.start) from None
        log.skip("pieces that are not UTF-8", str(unit.path))
        return
    if text.strip():
        yield text


def _lines(unit: _Unit) -> bytes:
    """Bytes from the first boundary at or after `start` to the first at or after `stop`.

    A boundary follows a newline or, in a line longer than a unit, lies between two characters. It
    depends on the position alone, so neighbouring units meet exactly.
    """
    before = max(unit.start - 1, 0)
    with unit.path.open("rb") as file:
        file.seek(before)
        data = file.read(unit.stop + unit.length - before)
    first = 0 if unit.start == 0 else _boundary(data, unit.start - before, unit.length)
    return data[first : _boundary(data, unit.stop - before, unit.length)]


def _boundary(data: bytes, position: int, length: int) -> int:
    newline = data.find(b"\n", position - 1, position - 1 + length)
    if newline >= 0:
        return newline + 1
    while position < len(data) and data[position] & 0xC0 == 0x80:
        position += 1
    return position
