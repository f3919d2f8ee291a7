"""How beamq writes to a terminal, a pipe or a file: the only importer of rich.

Results go to stdout, all else (what is about to happen, progress) to stderr, so that
`beamq plan --json | jq` and `beamq verify > log` work. Commands hand over plain strings and
`Table`s; nothing in them is taken for markup. Tables are 80 columns wide wherever they are printed,
so that the same input gives the same text, except on terminals that are narrower; colour appears on
terminals only, never with NO_COLOR.
"""

from __future__ import annotations

import io
import json
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

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
from rich.text import Text

from beamq.errors import DiskError, printable
from beamq.io.shard_writer import disk_remedy
from beamq.ranks import rank_here
from beamq.report.tables import Table, least_width, stacked, terminal
from beamq.units import plain, show_bytes, show_seconds

WIDTH, LEAST_WIDTH = 80, 30
LINE_SECONDS = 30.0  # between lines of progress where no bar can be drawn
Advance = Callable[[int, int], None]
"""Takes bytes done and bytes in all; may be called from any thread."""


class Command(str):
    """A command line to copy: printed as it is, never broken into lines."""

    __slots__ = ()


Block = str | Table
"""Prose (broken into lines between words, so that paths stay whole), a `Command` or a `Table`."""


class Screen:
    """One command's output. `json` keeps text off stdout, `quiet` keeps messages off stderr.

    Of several ranks only the first one's is seen.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self._as_json = as_json
        self._first = rank_here() == 0
        self._quiet = quiet or not self._first

    def show(
        self, data: Callable[[], Mapping[str, Any]], blocks: Callable[[], Iterable[Block]]
    ) -> None:
        """The command's result on stdout: `data` as JSON with `--json`, else `blocks` as text."""
        if not self._first:
            return
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
        """While the block runs: on a terminal a bar with rate and time left, elsewhere a line every
        `LINE_SECONDS`. Yields what to call with bytes done and in all; None with `--quiet`."""
        if self._quiet:
            yield None
            return
        if not sys.stderr.isatty():
            yield _Lines(doing).advance
            return
        console = Console(file=sys.stderr, highlight=False)
        wide = console.width >= WIDTH
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            *([BarColumn(bar_width=20)] if wide else []),
            TaskProgressColumn(),
            *([DownloadColumn(), TransferSpeedColumn()] if wide else []),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        task = bar.add_task(doing, total=None)

        def advance(done: int, total: int) -> None:
            bar.start()  # on the first call only, so that what is said before stays readable
            bar.update(task, completed=done, total=total)

        try:
            yield advance
        finally:
            bar.stop()


class _Lines:
    """`converting: 41% (120 GB of 290 GB) after 3 min, about 4 min left`, every `LINE_SECONDS`."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._begun = self._said = time.monotonic()
        self._first: tuple[float, int] | None = None
        self._lock = threading.Lock()

    def advance(self, done: int, total: int) -> None:
        """May be called from any thread, as often as there is something to say."""
        with self._lock:
            now = time.monotonic()
            self._first = self._first or (now, done)  # a resumed run has done some already
            if now - self._said < LINE_SECONDS or not total:
                return
            self._said = now
            begun, had = self._first
            rate = (done - had) / max(now - begun, 1e-9)
            left = f", about {show_seconds((total - done) / rate)} left" if rate > 0 else ""
            line = (
                f"{self._doing}: {done / total:.0%} ({show_bytes(done)} of {show_bytes(total)})"
                f" after {show_seconds(now - self._begun)}{left}"
            )
            with suppress(DiskError):  # a log that cannot be written to must not end the run
                _print(sys.stderr, [line])


def write_json(data: Mapping[str, Any]) -> None:
    """One JSON object on stdout, keys in the order given; NaN and infinity become null."""
    _write(sys.stdout, json.dumps(plain(data), indent=2, allow_nan=False) + "\n")


def _print(stream: IO[str], blocks: Iterable[Block]) -> None:
    """Lay the blocks out for this stream, then write them at once."""
    styled = stream.isatty() and not os.environ.get("NO_COLOR")
    text = io.StringIO()
    width = _width(stream)
    console = Console(file=text, force_terminal=styled, width=width, highlight=False)
    for block in blocks:
        if isinstance(block, Table):
            if block.title and block.rows:
                for line in _fill(block.title, width):
                    console.print(Text(line, style="bold"), soft_wrap=True)
            if block.rows:
                narrow = width < WIDTH and least_width(block) > width
                for table in stacked(block) if narrow else [block]:
                    console.print(terminal(table, width))
            lines = _fill(block.note, width) if block.note else []
        else:
            lines = [block] if isinstance(block, Command) else _fill(block, width)
        for line in lines:
            console.print(Text(printable(line, len(line))), soft_wrap=True)
    _write(stream, "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def _width(stream: IO[str]) -> int:
    """Columns of a terminal that is narrower than `WIDTH`; else `WIDTH`."""
    with suppress(OSError, ValueError):
        if columns := os.get_terminal_size(stream.fileno()).columns:
            return max(LEAST_WIDTH, min(WIDTH, columns))
    return WIDTH


def _fill(prose: str, width: int) -> list[str]:
    return textwrap.wrap(prose, width, break_long_words=False, break_on_hyphens=False) or [""]


def _write(stream: IO[str], text: str) -> None:
    """Write and flush now. A reader that has gone is not our fault, nor worth a message."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _discard(stream)
    except OSError as fault:
        _discard(stream)
        remedy = disk_remedy(fault.errno, Path("."), resumable=False)
        raise DiskError(f"{stream.name}: writing failed: {fault.strerror}; {remedy}") from fault


def _discard(stream: IO[str]) -> None:
    """Point the stream at nothing, or Python would report the fault again on its way out."""
    with suppress(OSError):  # a stream without a file behind it
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
