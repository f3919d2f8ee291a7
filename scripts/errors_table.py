"""Write docs/errors.md from beamq/errors.py: every error class, its cause, exit code and remedy.

python scripts/errors_table.py            writes the file
python scripts/errors_table.py --check    exit 1 if it is not current
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from beamq import errors
from beamq.errors import BeamqError, Interrupted

TARGET = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
HEAD = """# Errors

Made by `scripts/errors_table.py` from `beamq/errors.py`; do not edit.

A command that fails prints one line on stderr, `error: ...`: what is wrong, where (file, tensor),
what was expected, and what to do. On a terminal the line is wrapped. With `--json` the error is an
object on stdout, `{"error", "kind", "exit_code"}`, where `kind` is a class of the table below; the
same holds for options that cannot be read. A traceback is shown only with `--debug`. Under torchrun
rank 0 prints shared errors; other ranks print only their own, as `rank 1: error: ...`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a check of `verify` or `compare` failed; or a defect of beamq (`internal error`) |
| 2 | usage: an unknown option, a value it cannot have (`--device tpu`), a contradiction |
| 3 | bad input: a checkpoint, recipe (or its name), pattern, data or folder that does not fit |
| 4 | the machine: disk, memory, a missing GPU, network, packages, another run in progress |
| 130 | interrupted; `--resume` continues |

`--dry-run` exits with the code of the run, as far as that can be known beforehand.

| error | exit code | cause | what to do |
|---|---|---|---|
"""
TAIL = """
In Python all of them are in `beamq` (`beamq.DiskError`), and `except beamq.BeamqError` catches them
all but `Interrupted`, which is a `KeyboardInterrupt`, so that a loop over models that goes on after
an error still ends at Ctrl-C. `InputError` is about what the user gave, `EnvironmentFault` about
the machine. After an `EnvironmentFault` or an interruption, finished shards are kept and the same
call with `resume=True` continues. A run that is refused before it begins (too little disk, an
output in use) leaves nothing.
"""


def classes(
    base: type[BeamqError] = BeamqError, depth: int = 0
) -> Iterator[tuple[int, type[BeamqError] | type[Interrupted]]]:
    """The tree below `base`, in the order of the file; at its end `Interrupted`."""
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            yield depth, child
            yield from classes(child, depth + 1)
    if base is BeamqError:
        yield 0, Interrupted


def table() -> str:
    """The whole document."""
    rows = []
    for depth, kind in classes():
        cause = " ".join((inspect.getdoc(kind) or "").split())
        name = "&nbsp;" * 4 * depth + f"`{kind.__name__}`"
        rows.append(f"| {name} | {kind.exit_code} | {cause} | {kind.remedy} |")
    return HEAD + "\n".join(rows) + "\n" + TAIL


def main() -> int:
    """Write, or compare with what is there."""
    if "--check" in sys.argv[1:]:
        return int(not TARGET.exists() or TARGET.read_text() != table())
    TARGET.write_text(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
