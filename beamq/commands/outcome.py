"""How a command ends: run its body, report what it raises, return the exit code.

    0 done   1 a check failed, or a defect of beamq   2 usage   3 bad input or recipe
    4 the machine: disk, memory, packages   130 interrupted

Only this module catches `BeamqError`s. An error is a line or two on stderr, `error: TEXT`. With
`--json` it is also one object on stdout, {"error", "kind" (the class in beamq.errors),
"exit_code"}. A traceback appears only with `--debug`. Rank 0 prints shared errors; other ranks
print only their own, as `rank 1: error: TEXT`.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from beamq.errors import (
    OURS,
    DiskError,
    Interrupted,
    MemoryBudgetError,
    MissingDependencyError,
    UsageError,
    printable,
)
from beamq.ranks import rank_here
from beamq.signals import interrupted

if TYPE_CHECKING:
    from beamq.report.console import Screen

TERMINAL_WIDTH = 80
Body = Callable[["Screen"], int | None]


def run(body: Body, *, as_json: bool = False, quiet: bool = False, debug: bool = False) -> int:
    """Run a command's body, which may return an exit code of its own (0 or 1)."""
    try:
        _check_surroundings()
        from beamq.report.console import Screen  # rich

        return body(Screen(as_json=as_json, quiet=quiet)) or 0
    except (Exception, KeyboardInterrupt) as raised:
        if debug:
            traceback.print_exc()
        return report_error(_named(raised), as_json=as_json, debug=debug)


def _check_surroundings() -> None:
    """Refuse to run in a folder that is gone: relative paths fail there, and so does torch (MKL
    ends the process with exit code 2). Refuse settings with which libraries cannot be imported."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise DiskError(
            "the current folder was removed; change to another one and run this again"
        ) from None
    if any(name.startswith("HF_") for name in os.environ):
        from beamq.io.hub_call import check_settings

        check_settings()


def _named(raised: BaseException) -> BaseException:
    """The `BeamqError` for what Python or a library raised; other defects as they are."""
    if interrupted(raised) and not isinstance(raised, OURS):
        return Interrupted("interrupted")
    if (
        isinstance(raised, MemoryError)
        or (isinstance(raised, OSError) and raised.errno == errno.ENOMEM)
        or (isinstance(raised, RuntimeError) and "can't start new thread" in str(raised))
    ):
        return MemoryBudgetError(
            "out of memory; use fewer --workers or a smaller --max-host-memory"
        )
    if isinstance(raised, OSError):
        from beamq.io.shard_writer import disk_remedy

        place = os.fsdecode(raised.filename or "")
        remedy = "check the path and the disk"
        if raised.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE):
            remedy = disk_remedy(raised.errno, Path(place), resumable=False)
        return DiskError(f"{place and f'{place}: '}{raised.strerror or raised}; {remedy}")
    if isinstance(raised, ModuleNotFoundError):
        package = (raised.name or "").partition(".")[0]
        if package and package != "beamq":
            return MissingDependencyError(
                f"the package {package} is not installed and this command needs it; see"
                " `beamq doctor`"
            )
    return raised


def report_error(error: BaseException, *, as_json: bool = False, debug: bool = False) -> int:
    """Write an error to stderr, with `as_json` to stdout as well. Returns its exit code."""
    if isinstance(error, OURS):
        kind, text, code = type(error).__name__, str(error), error.exit_code
    else:
        kind, code = "InternalError", 1
        remedy = "please report it" if debug else "run with --debug and report it"
        text = f"internal error: {type(error).__name__}: {printable(str(error))}; {remedy}"
    rank = rank_here()
    if rank and _reported_by_rank_0(error):
        return code
    _write(sys.stderr, _lines(f"rank {rank}: error: {text}" if rank else f"error: {text}"))
    if as_json and not rank:
        found = {"error": text, "kind": kind, "exit_code": code}
        _write(sys.stdout, json.dumps(found, indent=2) + "\n")
    return code


def _reported_by_rank_0(error: BaseException) -> bool:
    """Whether rank 0 prints it: all ranks have one command line and torchrun's signals, and `Ranks`
    marks other errors that it raised at every rank."""
    if isinstance(error, Interrupted) and "LOCAL_RANK" in os.environ:
        return True
    return isinstance(error, UsageError) or (isinstance(error, OURS) and error.reported_by_rank_0)


def _lines(text: str) -> str:
    """One line for a log or a pipe; on a terminal it is broken between words."""
    try:
        terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no such stream, or it is closed
        terminal = False
    if not terminal:
        return f"{text}\n"
    wrapped = textwrap.wrap(text, TERMINAL_WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapped) + "\n"


def _write(stream: IO[str], text: str) -> None:
    """Write if the stream still works; if not, only the exit code reports the result."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        return
