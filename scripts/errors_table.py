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
from beamq.errors import BeamqError

TARGET = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
HEAD = """# Errors

Made by `scripts/errors_table.py` from `beamq/errors.py`; do not edit.

A command that fails says so in one line on stderr, `error: ...`: what is wrong, where (file,
tensor), what was expected, what to do; on a terminal it is broken into lines. With `--json` the
same is an object on stdout, `{"error", "kind", "exit_code"}`, and `kind` is a class below; this
goes for options that cannot be read, too. A traceback is shown with `--debug` only.
Of torchrun's processes the first one tells an error, the others only what it cannot know:
`rank 1: error: ...`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a check of `verify` or `compare` failed; or a defect of beamq (`internal error`) |
| 2 | usage: an option there is not, a value it cannot have (`--device tpu`), a contradiction |
| 3 | bad input: a checkpoint, recipe (or its name), pattern, data or folder that does not fit |
| 4 | the machine: disk, memory, a GPU that is not here, network, packages, another run at work |
| 130 | interrupted; `--resume` continues |

`--dry-run` ends with the code that the run would end with as far as it can be told beforehand.

| error | exit code | cause | what to do |
|---|---|---|---|
"""
TAIL = """
In Python every one is in `beamq` (`beamq.DiskError`), and `except beamq.BeamqError` catches them
all. `InputError` and `EnvironmentFault` are the two families: what the user gave, and the machine.
After an error of the second family, or an interruption, what is finished is kept and the same call
with `resume=True` goes on. A run that is refused before it has begun (too little disk, an output in
use) leaves nothing.
"""


def classes(base: type[BeamqError] = BeamqError, depth: int = 0) -> Iterator[tuple[int, type]]:
    """The tree below `base`, in the order of the file."""
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            yield depth, child
            yield from classes(child, depth + 1)


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
