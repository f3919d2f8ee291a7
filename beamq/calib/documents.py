"""The documents that `--data` names, in an order that a seed fixes.

In: specs such as `notes.md`, `src/`, `chats.jsonl:0.3`, `owner/name,split=test:2`.
Out: `DataSpec` and, from `documents`, an iterator of texts that is read only as far as needed.

The one idea: a file is a sequence of *units* (a stretch of a text file, a block of lines, a row
group of a parquet file) that are counted from the file's size or footer alone. The units of a whole
folder are shuffled, then read one by one until the caller has enough. A corpus of any size costs
what is used of it, and one long file cannot crowd out the others. A text file gives pieces of a few
rows of tokens, cut at line ends, each a document of its own.

    DATA          file | folder | dataset            then optionally `:WEIGHT`
    dataset       owner/name[,config=C][,split=S][,revision=R]     on the Hugging Face Hub

A name that exists on disk is a path, even if it looks otherwise (`odd:0.5`). Folders are read
recursively, without hidden entries: .txt .md .py as text, .jsonl .parquet as rows. A row's document
is its `text`, or its `messages` (objects with `role` and `content`) through the chat template; a
row with neither is an error.

Limits: UTF-8 only; a file of more than 65,536 units (1 GB of text at 2,048 tokens) is sampled
evenly. Why not the `datasets` library for files: ADR 13.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from beamq.errors import BeamqError, CalibrationError, MissingDependencyError
from beamq.io.hub import hub_call

# `datasets` and `pyarrow` are imported where they are used: 0.2 to 1 s, and most runs need neither.

COLUMNS = ("text", "messages")
MAX_LINE_BYTES = 1 << 28
SHUFFLE_BUFFER_ROWS = 1024
LOOK_UP_SECONDS = 10.0

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
Skip = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `where` names its place; it is called for messages only, since it reads the file."""

    values: Mapping[str, Any]
    where: Callable[[], str]


def text_of(row: Row, *, render: Render, skip: Skip) -> str | None:
    """A row's document, or None where it has none, after a call of `skip` with the reason."""
    text, messages = row.values.get("text"), row.values.get("messages")
    if not any(column in row.values for column in COLUMNS):
        columns = ", ".join(list(map(str, row.values))[:8]) or "none"
        raise CalibrationError(
            f"{row.where()}: no column `text` or `messages` (columns: {columns[:120]});"
            " rename the column that holds the text"
        )
    if text is not None and not isinstance(text, str):
        raise CalibrationError(
            f"{row.where()}: `text` is a {type(text).__name__}, expected a string"
        )
    if text and text.strip():
        return _sound(text)
    if not messages:
        skip("empty rows", row.where())
        return None
    rendered = render(_conversation(messages, row))
    if not rendered or not rendered.strip():
        skip("conversations that the chat template refuses", row.where())
        return None
    return _sound(rendered)


def _sound(text: str) -> str:
    """`text` with `?` for half a surrogate pair: JSON may hold one, no tokenizer accepts it."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _conversation(messages: Any, row: Row) -> list[dict[str, Any]]:
    """Check `messages`; keys whose value is null (tables fill them in) are left out."""
    good = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not good:
        raise CalibrationError(
            f"{row.where()}: `messages` is not a list of objects with `role` and `content`"
        )
    return [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]


def jsonl_rows(path: Path, start: int, stop: int) -> list[Row]:
    """The rows of the lines that start at bytes [start, stop) of a .jsonl file."""
    found: list[Row] = []
    with path.open("rb") as file:
        if start:
            # Skip the line that starts before `start`; it may reach past `stop`.
            file.seek(start - 1)
            if not file.readline(stop - start + 1).endswith(b"\n"):
                return found
        while (offset := file.tell()) < stop:
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                break
            if line.strip():
                found.append(_parse_line(path, offset, line))
    return found


def _parse_line(path: Path, offset: int, line: bytes) -> Row:
    def where() -> str:
        return f"{path}, line {_line_number(path, offset)}"

    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise CalibrationError(f"{where()}: not JSON: {str(fault)[:120]}") from None
    if not isinstance(values, dict):
        raise CalibrationError(f"{where()}: a {type(values).__name__}, expected a JSON object")
    return Row(values, where)


def _line_number(path: Path, offset: int) -> int:
    count, left = 1, offset
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def parquet_groups(path: Path) -> int:
    """Number of row groups; `CalibrationError` where the file is broken or has no known column."""
    file = _open_parquet(path)
    names = file.schema_arrow.names
    if not any(column in names for column in COLUMNS):
        raise CalibrationError(
            f"{path}: no column `text` or `messages` (columns: {', '.join(names)[:120]});"
            " rename the column that holds the text"
        )
    return int(file.metadata.num_row_groups)


def parquet_rows(path: Path, group: int, rng: random.Random) -> Iterator[Row]:
    """Rows of one row group, in an order drawn from `rng`; only the known columns are read."""
    file = _open_parquet(path)
    columns = [column for column in COLUMNS if column in file.schema_arrow.names]
    try:
        table = file.read_row_group(group, columns=columns)
    except (OSError, ValueError) as fault:  # pyarrow's own errors derive from these
        raise CalibrationError(f"{path}, row group {group}: {str(fault)[:120]}") from fault
    order = list(range(table.num_rows))
    rng.shuffle(order)
    for index in order:
        values = {column: table.column(column)[index].as_py() for column in columns}
        yield Row(values, lambda index=index: f"{path}, row {index} of row group {group}")  # type: ignore[misc]


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as fault:
        raise MissingDependencyError(f"{path}: parquet needs `pyarrow`: {fault}") from fault
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as fault:
        raise CalibrationError(f"{path}: not a parquet file: {str(fault)[:120]}") from fault


def hub_rows(name: str, options: Mapping[str, str], *, seed: int) -> Iterator[Row]:
    """Rows of a Hub dataset, streamed, shuffled with `seed`; `options`: config, split, revision."""
    try:
        import datasets
    except ImportError as fault:
        raise MissingDependencyError(f"--data {name} needs `datasets`: {fault}") from fault
    try:
        _look_up(name, options.get("revision"))
        found = datasets.load_dataset(
            name,
            options.get("config"),
            split=options.get("split"),
            revision=options.get("revision"),
            streaming=True,
        )
        if "split" not in options:
            found = _only_split(name, found)
        shuffled = found.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER_ROWS)
        for index, values in enumerate(shuffled):
            yield Row(values, lambda index=index: f"dataset {name}, row {index} as shuffled")  # type: ignore[misc]
    except BeamqError:
        raise
    except Exception as fault:  # network, Hub, config and format errors share no base class
        raise CalibrationError(
            f"--data {name}: neither a file or folder here nor a dataset that could be read from"
            f" the Hub: {type(fault).__name__}: {str(fault)[:160]}"
        ) from fault


def _look_up(name: str, revision: str | None) -> None:
    """Ask the Hub whether there is such a dataset: `datasets` would ask for minutes.

    Raises `HubError` (there is none, or it is gated), `HubUnreachableError`.
    """
    from huggingface_hub import HfApi

    hub_call(
        f"datasets/{name}",
        "looking for a dataset of that name (no file or folder here has it)",
        lambda: HfApi().dataset_info(name, revision=revision, timeout=LOOK_UP_SECONDS),
        attempts=2,
    )


def _only_split(name: str, splits: Mapping[str, Any]) -> Any:
    """The split to use if none was named: `train`, or the only one."""
    if "train" in splits:
        return splits["train"]
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise CalibrationError(
        f"--data {name}: has no split `train`; choose one of {', '.join(splits)[:120]}"
        f" (--data {name},split=...)"
    )


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
    """One `--data`. Records show `name`, which is never a path: paths are private to the user."""

    text: str
    kind: Literal["file", "folder", "hub"]
    name: str
    weight: float
    path: Path | None = None
    options: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True, kw_only=True)
class SourceLog:
    """What was read of a source: number of files, and what was skipped and why."""

    files: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def skip(self, reason: str, where: str) -> None:
        """Count something skipped; the first example of each reason is kept."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, where)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Bytes [start, stop) of a text or .jsonl file, or row group `start` of a .parquet file.

    `length` is the length of this file's units; the last one may be shorter.
    """

    path: Path
    start: int
    stop: int
    length: int
    named: bool


def parse_spec(text: str) -> DataSpec:
    """Read one `--data`. Raises `CalibrationError` for a bad weight or a name of nothing known."""
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
    """Texts of a source in an order that `seed` fixes, of at most about 2 x `piece` characters.

    `render` turns a conversation into text. What is skipped is counted in `log`.
    """
    rng = random.Random(seed)
    if spec.path is None:
        found = hub_rows(spec.name, dict(spec.options), seed=rng.getrandbits(31))
        return in_pieces(_row_texts(found, render, log), piece=piece, rng=rng)
    files = [spec.path] if spec.kind == "file" else _walk(spec)
    log.files = len(files)
    units = [unit for path in files for unit in _units(path, piece, spec.kind == "file")]
    rng.shuffle(units)
    return in_pieces(_unit_texts(units, render, rng, log), piece=piece, rng=rng)


def in_pieces(texts: Iterable[str], *, piece: int, rng: random.Random) -> Iterator[str]:
    """Cut texts above 2 x `piece` characters at line ends. Yield one piece of each such text in its
    place and the others at the end, so that a book in one row does not fill every sample.

    What waits is bounded: past `MAX_WAITING_CHARACTERS`, pieces are yielded at once.
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
                block = jsonl_rows(unit.path, unit.start, unit.stop)
                rng.shuffle(block)
                yield from _row_texts(block, render, log)
            else:
                group = parquet_rows(unit.path, unit.start, rng)
                yield from _row_texts(group, render, log)
        except OSError as fault:
            raise _unreadable(unit.path, fault) from fault


def _unreadable(path: object, fault: OSError) -> CalibrationError:
    return CalibrationError(f"{path}: cannot be read: {fault.strerror or fault}")


def _row_texts(found: Iterable[Row], render: Render, log: SourceLog) -> Iterator[str]:
    for row in found:
        text = text_of(row, render=render, skip=log.skip)
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
        found += [path for path in paths if path.suffix in SUFFIXES and path.is_file()]
    if not found:
        raise CalibrationError(
            f"--data {spec.text}: the folder has no file of a known kind ({' '.join(SUFFIXES)})"
        )
    return sorted(found)


def _units(path: Path, piece: int, named: bool) -> list[_Unit]:
    """The units of a file; evenly spaced ones where there would be too many."""
    if path.suffix == ".parquet":
        return [_Unit(path, group, group, 0, named) for group in range(parquet_groups(path))]
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
    """The lines that start at bytes [start, stop), as text, if there is more than white space.

    A file that is not UTF-8 is an error if the user named it, and skipped in a folder.
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
