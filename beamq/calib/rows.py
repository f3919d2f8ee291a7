"""Rows of .jsonl and .parquet files and of Hub datasets, and the text in a row.

In: a file's stretch, or a dataset's name. Out: `Row`s (a mapping, and a way to say where it
stood); `text_of` turns one into a document.

A row's `text` is used as it is; without one, its `messages` (a list of objects with `role` and
`content`) go through the tokenizer's chat template. A row with neither column is an error that
lists its columns, since guessing a column calibrates on something nobody chose. A row whose text
is empty, or whose conversation the template refuses, is passed over.

Lines are read by byte offset, never as a whole file: a line belongs to the stretch it starts in.
`datasets` and `pyarrow` are imported where first used (0.2 to 1 s, and most runs need neither).
A Hub dataset is streamed through a shuffle buffer, so only what is used is downloaded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamq.errors import BeamqError, CalibrationError, MissingDependencyError
from beamq.hub.calls import hub_call

COLUMNS = ("text", "messages")
MAX_LINE_BYTES = 1 << 28
SHUFFLE_BUFFER_ROWS = 1024
LOOK_UP_SECONDS = 10.0

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
Skip = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it is from (called only for a message: finding a line number reads)."""

    values: Mapping[str, Any]
    where: Callable[[], str]


def text_of(row: Row, *, render: Render, skip: Skip) -> str | None:
    """A row's document, or None (and `skip` told why) where it has nothing to give."""
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
    """JSON may hold half a surrogate pair, which no tokenizer takes; it becomes `?`."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _conversation(messages: Any, row: Row) -> list[dict[str, Any]]:
    """Check `messages`; columns that a table filled with nulls are left out of each message."""
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
            # The byte before tells whether a line starts at `start`; one that starts earlier
            # and reaches past `stop` leaves nothing for this stretch.
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
    """The split to use where none was named: `train`, or the only one."""
    if "train" in splits:
        return splits["train"]
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise CalibrationError(
        f"--data {name}: has no split `train`; choose one of {', '.join(splits)[:120]}"
        f" (--data {name},split=...)"
    )
