"""How beamq writes to a terminal, a pipe or a file: the only importer of rich.

Results go to stdout, all else (what is about to happen, progress) to stderr, so that
`beamq plan --json | jq` and `beamq verify > log` work. Views hand over plain strings and `Grid`s;
nothing in them is taken for markup. Tables are 80 columns wide wherever they are printed, so that
the same input gives the same text; colour appears on terminals only, and never with NO_COLOR.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from beamq.errors import DiskError, printable

WIDTH = 80
# A rule of hyphens under the header and nothing else: the same in every encoding.
_RULED = box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
Advance = Callable[[int, int], None]
"""Takes bytes done and bytes in all; may be called from any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table. A column whose name ends in `>` holds figures: right-aligned and never folded;
    others are left-aligned and folded where they do not fit. No rows: nothing is printed."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


class Command(str):
    """A command line to copy: printed as it is, never broken into lines."""

    __slots__ = ()


Block = str | Grid
"""Prose (broken into lines between words, so that paths stay whole), a `Command` or a `Grid`."""


class Screen:
    """One command's output. `json` keeps text off stdout, `quiet` keeps messages off stderr."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self._as_json = as_json
        self._quiet = quiet

    def show(
        self, data: Callable[[], Mapping[str, Any]], blocks: Callable[[], Iterable[Block]]
    ) -> None:
        """The command's result on stdout: `data` as JSON with `--json`, else `blocks` as text.

        Only the one that is shown is made.
        """
        if self._as_json:
            write_json(data())
        else:
            _print(sys.stdout, blocks())

    def say(self, *blocks: Block) -> None:
        """Something to know while waiting, on stderr; nothing with `--quiet`."""
        if not self._quiet:
            _print(sys.stderr, blocks)

    @contextmanager
    def progress(self, doing: str) -> Iterator[Advance | None]:
        """A bar with rate and time left while the block runs, if stderr is a terminal.

        Yields what to call with bytes done and in all, or None where nobody would see it.
        """
        if self._quiet or not sys.stderr.isatty():
            yield None
            return
        bar = _bar(Console(file=sys.stderr, highlight=False))
        task = bar.add_task(doing, total=None)

        def advance(done: int, total: int) -> None:
            bar.start()  # on the first call only, so that what is said before stays readable
            bar.update(task, completed=done, total=total)

        try:
            yield advance
        finally:
            bar.stop()


def write_json(data: Mapping[str, Any]) -> None:
    """One JSON object on stdout, keys in the order given; NaN and infinity become null."""
    _write(sys.stdout, json.dumps(_finite(data), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _print(stream: IO[str], blocks: Iterable[Block]) -> None:
    """Lay the blocks out for this stream, then write them at once."""
    styled = stream.isatty() and not os.environ.get("NO_COLOR")
    text = io.StringIO()
    console = Console(file=text, force_terminal=styled, width=WIDTH, highlight=False)
    for block in blocks:
        if isinstance(block, Grid):
            if block.title and block.rows:
                console.print(Text(block.title, style="bold"), soft_wrap=True)
            if block.rows:
                console.print(_table(block))
            continue
        for line in [block] if isinstance(block, Command) else _fill(block):
            console.print(_text(line), soft_wrap=True)
    _write(stream, "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def _fill(prose: str) -> list[str]:
    return textwrap.wrap(prose, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]


def _table(grid: Grid) -> Table:
    table = Table(
        box=_RULED,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="",
        show_header=any(name.strip(">") for name in grid.columns),
    )
    for name in grid.columns:
        figures = name.endswith(">")
        table.add_column(
            Text(name.rstrip(">")),
            justify="right" if figures else "left",
            no_wrap=figures,
            overflow="fold",
        )
    for row in grid.rows:
        table.add_row(*map(_text, row))
    return table


def _text(words: str) -> Text:
    """Words as they are; what would steer a terminal is shown, not sent."""
    return Text(printable(words, len(words)))


def _write(stream: IO[str], text: str) -> None:
    """Write and flush now. A reader that has gone is not our fault, nor worth a message."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
    except OSError as fault:
        _discard(stream)
        raise DiskError(f"{stream.name}: writing failed: {fault.strerror}; free space") from fault


def _discard(stream: IO[str]) -> None:
    """Point the stream at nothing, or Python would report the fault again on its way out."""
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    except OSError:  # a stream without a file behind it
        return
