"""What `--data` names: a spec parsed, and its documents in a seeded order.

In: specs such as `notes.md`, `src/`, `chats.jsonl:0.3`, `owner/name,split=test:2`.
Out: `DataSpec` and, from `documents`, an iterator of texts that is read only as far as needed.

The one idea: a file is a row of *units* (a stretch of a text file, a block of lines, a row group
of a parquet file) that can be counted from its size or footer alone. Units of a whole folder are
shuffled, then read one by one until the caller has enough. So a corpus of any size costs what is
used of it, and one long file cannot crowd out the others: a text file is taken in pieces of a few
rows, cut at line ends, each a document of its own.

    DATA          file | folder | dataset            then optionally `:WEIGHT`
    dataset       owner/name[,config=C][,split=S][,revision=R]     on the Hugging Face Hub

A name that exists on disk is a path, whatever it looks like (`odd:0.5` may be a file). A folder
is read recursively: .txt .md .py as text, .jsonl .parquet as rows; hidden entries are left out.
Limits: UTF-8 only; a file above 65,536 units (1 GB of text at 2,048 tokens) is sampled evenly.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from beamq.calib import rows
from beamq.calib.rows import Render
from beamq.errors import CalibrationError

TEXT_SUFFIXES = (".txt", ".md", ".py")
ROW_SUFFIXES = (".jsonl", ".parquet")
SUFFIXES = (*TEXT_SUFFIXES, *ROW_SUFFIXES)
OTHER_SUFFIXES = (  # of files that are not read, but are no dataset either
    ".json", ".csv", ".tsv", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".arrow", ".text",
    ".rst", ".html", ".xml", ".yaml", ".yml", ".pdf", ".docx", ".log",
)  # fmt: skip
JSONL_BLOCK_BYTES = 1 << 16
MAX_UNITS_PER_FILE = 1 << 16
MAX_WAITING_CHARACTERS = 1 << 26
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?((,[a-z]+=[^,]+)*)")
_HUB_OPTIONS = ("config", "split", "revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """One `--data`. `name` is what records show: never a path, which is the user's own business."""

    text: str
    kind: Literal["file", "folder", "hub"]
    name: str
    weight: float
    path: Path | None = None
    options: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True, kw_only=True)
class SourceLog:
    """What reading a source met: files considered, and what was passed over and why."""

    files: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def skip(self, reason: str, where: str) -> None:
        """Count something passed over; the first of each reason is named."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, where)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Bytes [start, stop) of a text or .jsonl file, or row group `start` of a .parquet file.

    `length` is what a unit of this file has, even where the end of the file left this one less.
    """

    path: Path
    start: int
    stop: int
    length: int
    named: bool


def parse_spec(text: str) -> DataSpec:
    """Read one `--data`. Raises `CalibrationError` for a bad weight, or a name that is nothing."""
    if not text.strip():
        raise CalibrationError("--data is empty; give a file, a folder or a dataset's name")
    if Path(text).expanduser().exists():
        return _path_spec(text, text, 1.0)
    name, weight = _split_weight(text)
    if Path(name).expanduser().exists():
        return _path_spec(text, name, weight)
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
    """Whether a name that is not there was meant for a file or folder, not for a dataset.

    By how it begins, how it ends, or since the folder it would lie in is here.
    """
    path = Path(name)
    begins = name.startswith((".", "~", "/"))
    ends = path.suffix.lower() in (*SUFFIXES, *OTHER_SUFFIXES)
    return begins or ends or ("/" in name and path.parent.is_dir())


def _split_weight(text: str) -> tuple[str, float]:
    """Take `:0.3` off; a colon before what is no number (`C:\\data`) belongs to the name."""
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
    path = Path(name).expanduser()
    kind: Literal["file", "folder"] = "folder" if path.is_dir() else "file"
    if kind == "file" and path.suffix not in SUFFIXES:
        raise CalibrationError(
            f"--data {text}: unknown kind of file; expected one of {' '.join(SUFFIXES)}"
        )
    return DataSpec(text=text, kind=kind, name=path.resolve().name, weight=weight, path=path)


def documents(
    spec: DataSpec, *, seed: str, piece: int, render: Render, log: SourceLog
) -> Iterator[str]:
    """Texts of a source in an order that `seed` fixes, none much longer than 2 x `piece`.

    `render` turns a conversation into text. What is passed over is counted in `log`.
    """
    rng = random.Random(seed)
    if spec.path is None:
        found = rows.hub_rows(spec.name, dict(spec.options), seed=rng.getrandbits(31))
        return in_pieces(_row_texts(found, render, log), piece=piece, rng=rng)
    files = [spec.path] if spec.kind == "file" else _walk(spec)
    log.files = len(files)
    units = [unit for path in files for unit in _units(path, piece, spec.kind == "file")]
    rng.shuffle(units)
    return in_pieces(_unit_texts(units, render, rng, log), piece=piece, rng=rng)


def in_pieces(texts: Iterable[str], *, piece: int, rng: random.Random) -> Iterator[str]:
    """Cut texts above 2 x `piece` characters at line ends; one piece of each first, then the rest.

    A book in one row would otherwise fill every sample. What waits is bounded: past
    `MAX_WAITING_CHARACTERS` pieces come as they are met.
    """
    waiting: list[str] = []
    characters = 0
    for text in texts:
        if len(text) <= 2 * piece:
            yield text
            continue
        pieces = list(_cut(text, piece))
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
) -> Iterator[str]:
    for unit in units:
        try:
            if unit.path.suffix in TEXT_SUFFIXES:
                yield from _text_piece(unit, log)
            elif unit.path.suffix == ".jsonl":
                block = rows.jsonl_rows(unit.path, unit.start, unit.stop)
                rng.shuffle(block)
                yield from _row_texts(block, render, log)
            else:
                group = rows.parquet_rows(unit.path, unit.start, rng)
                yield from _row_texts(group, render, log)
        except OSError as fault:
            raise _unreadable(unit.path, fault) from fault


def _unreadable(path: object, fault: OSError) -> CalibrationError:
    return CalibrationError(f"{path}: cannot be read: {fault.strerror or fault}")


def _row_texts(found: Iterable[rows.Row], render: Render, log: SourceLog) -> Iterator[str]:
    for row in found:
        text = rows.text_of(row, render=render, skip=log.skip)
        if text is not None:
            yield text


def _walk(spec: DataSpec) -> list[Path]:
    """Files of a folder that hold data, sorted; neither hidden entries nor linked folders."""
    found: list[Path] = []

    def refuse(fault: OSError) -> None:
        raise _unreadable(fault.filename, fault) from fault

    for folder, inner, names in os.walk(spec.path or "", onerror=refuse):
        inner[:] = [name for name in inner if not name.startswith(".") and name != "__pycache__"]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.suffix in SUFFIXES and path.is_file()]
    if not found:
        raise CalibrationError(
            f"--data {spec.text}: the folder has no file of a known kind ({' '.join(SUFFIXES)})"
        )
    return sorted(found)


def _units(path: Path, piece: int, named: bool) -> list[_Unit]:
    """The stretches a file is read in. Where there would be too many, evenly spaced ones."""
    if path.suffix == ".parquet":
        return [_Unit(path, group, group, 0, named) for group in range(rows.parquet_groups(path))]
    length = piece if path.suffix in TEXT_SUFFIXES else JSONL_BLOCK_BYTES
    try:
        size = path.stat().st_size
    except OSError as fault:
        raise _unreadable(path, fault) from fault
    stride = max(length, math.ceil(size / MAX_UNITS_PER_FILE))
    return [
        _Unit(path, start, min(start + length, size), length, named)
        for start in range(0, size, stride)
    ]


def _text_piece(unit: _Unit, log: SourceLog) -> Iterator[str]:
    """The lines that start at bytes [start, stop), as text; nothing where there is only space.

    A file that isn't UTF-8 is an error where the user named it, and passed over in a folder.
    """
    data = _lines(unit)
    try:
        text = data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as fault:
        if unit.named:
            raise CalibrationError(
                f"{unit.path}: not UTF-8 at byte {unit.start + fault.start};"
                " convert it (iconv -t UTF-8) or leave it out"
            ) from None
        log.skip("pieces that are not UTF-8", str(unit.path))
        return
    if text.strip():
        yield text


def _lines(unit: _Unit) -> bytes:
    """Bytes from the first boundary at or after `start` to the first at or after `stop`.

    A boundary is just after a newline; in a longer line than a unit, between two characters.
    Being a function of the position alone, it makes neighbouring units meet exactly.
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
