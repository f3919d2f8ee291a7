"""Rows of files and of datasets on the Hub, and the document that a row holds.

In: a .jsonl, .parquet, .json, .csv or .tsv file, or the name of a dataset. Out: `Row`s, and from
`document_of` a text, token ids, or a conversation that went through the chat template. What a row
may hold is in the head of calib/documents.py.

Errors name the row's place. A row with none of the known columns is an error; empty texts and
conversations that no template takes are skipped and counted.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from beamq.errors import BeamqError, CalibrationError, MissingDependencyError
from beamq.io.hub_call import hub_call

# `datasets` and `pyarrow` are imported where they are used: 0.2 to 1 s, and most runs need neither.

COLUMNS = ("text", "messages", "conversations", "prompt", "input_ids")
READ_COLUMNS = (*COLUMNS, "completion", "tools")
SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool"}
MAX_LINE_BYTES = 1 << 28
MAX_WHOLE_CHARACTERS = 1 << 28
PACKED_SUFFIXES = (".gz", ".zst")  # of .txt.gz and so on
SHUFFLE_BUFFER_ROWS = 1024
LOOK_UP_SECONDS = 10.0

Document = str | list[int]
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None], str | None]
Skip = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `where` names its place; it is called for messages only, since it reads the file."""

    values: Mapping[str, Any]
    where: Callable[[], str]


def document_of(row: Row, *, render: Render, skip: Skip) -> Document | None:
    """A row's document, or None where it has none, after a call of `skip` with the reason."""
    values = row.values
    if not any(column in values for column in COLUMNS):
        raise _no_column(row.where(), map(str, values))
    text, ids = values.get("text"), values.get("input_ids")
    messages = values.get("messages") or values.get("conversations")
    prompt, completion = values.get("prompt"), values.get("completion")
    if prompt and completion and isinstance(prompt, list) and isinstance(completion, list):
        messages = messages or prompt + completion
    elif prompt and text is None:
        text = prompt + (completion or "") if isinstance(prompt, str) else prompt
    if text is not None and not isinstance(text, str):
        raise CalibrationError(
            f"{row.where()}: `text` is a {type(text).__name__}, expected a string"
        )
    if text and text.strip():
        return _sound(text)
    if not messages and ids:
        if isinstance(ids, list) and all(type(each) is int for each in ids):
            return ids
        raise CalibrationError(f"{row.where()}: `input_ids` is not a list of whole numbers")
    if not messages:
        skip("empty rows", row.where())
        return None
    conversation = _conversation(messages, row)
    if not all(isinstance(each.get("content", ""), str) for each in conversation):
        skip("conversations with parts that are not text", row.where())
        return None
    rendered = render(conversation, _tools(row))
    if not rendered or not rendered.strip():
        skip("conversations that the chat template refuses", row.where())
        return None
    return _sound(rendered)


def _no_column(where: str, columns: Iterable[str]) -> CalibrationError:
    return CalibrationError(
        f"{where}: none of the columns {', '.join(COLUMNS)} (columns:"
        f" {', '.join(list(columns)[:8])[:120] or 'none'}); rename the column that holds the text"
    )


def _sound(text: str) -> str:
    """`text` with `?` for half a surrogate pair: JSON may hold one, no tokenizer accepts it."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _conversation(messages: Any, row: Row) -> list[dict[str, Any]]:
    """Check `messages`; keys whose value is null (tables fill them in) are left out. Text parts of
    a message become one string."""
    found = []
    for message in messages if isinstance(messages, list) else [None]:
        given = message if isinstance(message, dict) else {}
        kept = {key: value for key, value in given.items() if value is not None}
        if "role" not in kept and isinstance(speaker := kept.pop("from", None), str):
            kept["role"] = SPEAKERS.get(speaker, speaker)
            kept["content"] = kept.pop("value", "")
        if not isinstance(kept.get("role"), str):
            raise CalibrationError(
                f"{row.where()}: `messages` is not a list of objects with `role` and `content`"
            )
        parts = kept.get("content")
        if isinstance(parts, list) and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        ):
            kept["content"] = "".join(part["text"] for part in parts)
        found.append(kept)
    return found


def _tools(row: Row) -> list[Any] | None:
    """A row's tool definitions, a list or JSON of one."""
    tools = row.values.get("tools")
    try:
        tools = json.loads(tools) if tools and isinstance(tools, str) else tools
    except ValueError:
        tools = 0
    if tools is not None and not isinstance(tools, list):
        raise CalibrationError(f"{row.where()}: `tools` is not a list")
    return tools or None


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
        raise _no_column(str(path), names)
    return int(file.metadata.num_row_groups)


def parquet_rows(path: Path, group: int, rng: random.Random) -> Iterator[Row]:
    """Rows of one row group, in an order drawn from `rng`; only the known columns are read."""
    file = _open_parquet(path)
    columns = [column for column in READ_COLUMNS if column in file.schema_arrow.names]
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


def streamed_rows(path: Path, rng: random.Random) -> Iterator[Row]:
    """Rows of a .json, .csv or .tsv file or of a compressed one, through a buffer that shuffles."""
    buffer: list[Row] = []
    try:
        with _plain_bytes(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
            for number, values in enumerate(_objects(path, file), 1):
                where = f"{path}, row {number}"
                if not isinstance(values, dict):
                    raise CalibrationError(
                        f"{where}: a {type(values).__name__}, expected a JSON object"
                    )
                buffer.append(Row(values, lambda where=where: where))  # type: ignore[misc]
                if len(buffer) > SHUFFLE_BUFFER_ROWS:
                    place = rng.randrange(len(buffer))
                    buffer[place], buffer[-1] = buffer[-1], buffer[place]
                    yield buffer.pop()
    except (ValueError, EOFError, zlib.error, csv.Error, RecursionError) as fault:
        raise CalibrationError(f"{path}: cannot be read: {str(fault)[:120]}") from fault
    rng.shuffle(buffer)
    yield from buffer


def _objects(path: Path, file: io.TextIOWrapper) -> Iterator[Any]:
    """The rows of a file of this inner kind; a text file is one row."""
    kind = kind_of(path)
    if kind in (".csv", ".tsv"):
        csv.field_size_limit(MAX_LINE_BYTES)
        yield from csv.DictReader(file, delimiter="," if kind == ".csv" else "\t")
    elif kind == ".jsonl":
        while line := file.readline(MAX_LINE_BYTES):
            if line.strip():
                yield json.loads(line)
    else:
        text = file.read(MAX_WHOLE_CHARACTERS + 1)
        if len(text) > MAX_WHOLE_CHARACTERS:
            raise CalibrationError(
                f"{path}: more than {MAX_WHOLE_CHARACTERS:,} characters, which is read whole;"
                " convert it to .jsonl"
            )
        found = json.loads(text) if kind == ".json" else [{"text": text}]
        if isinstance(found, dict):  # {"data": [...]}, as some exports have it
            lists = [value for value in found.values() if isinstance(value, list)]
            found = lists[0] if len(lists) == 1 and len(found) == 1 else [found]
        yield from found if isinstance(found, list) else [found]


def _plain_bytes(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix != ".zst":
        opened: Any = gzip.open if suffix == ".gz" else open
        plain: IO[bytes] = opened(path, "rb")
        return plain
    try:
        import pyarrow
    except ImportError as fault:
        raise MissingDependencyError(f"{path}: .zst needs `pyarrow`: {fault}") from fault
    stream: IO[bytes] = pyarrow.input_stream(str(path), compression="zstd")
    return stream


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
            f"--data {name}: no such file or folder here, and the dataset of that name could not be"
            f" read: {type(fault).__name__}: {str(fault)[:160]}"
        ) from fault


def _look_up(name: str, revision: str | None) -> None:
    """Check quickly that the Hub has the dataset: `datasets` would retry for minutes.

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


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read, without one of compression, in small letters."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in PACKED_SUFFIXES else suffix
