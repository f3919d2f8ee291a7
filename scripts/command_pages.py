"""Write docs/commands/: a page for each command, with its help as the command prints it.

python scripts/command_pages.py            writes the pages
python scripts/command_pages.py --check    exit 1 if one is not current
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from unittest.mock import patch

from beamq.cli import MODULES, app

TARGET = Path(__file__).resolve().parent.parent / "docs" / "commands"
# For each command: the other commands and the pages that a reader of its help wants next.
SEE = {
    "plan": ("quantize", "hub.md"),
    "calibrate": ("quantize", "calibration.md"),
    "quantize": ("verify", "plan", "calibration.md", "adapters.md", "clusters.md"),
    "verify": ("compare", "repair", "verify.md"),
    "compare": ("sensitivity", "report-schema.md"),
    "sensitivity": ("compare", "quantize"),
    "inspect": ("verify", "adapters.md"),
    "dequantize": ("quantize", "verify"),
    "merge": ("quantize", "adapters.md"),
    "repair": ("verify", "repair.md"),
    "push": ("verify", "hub.md"),
    "doctor": ("install.md",),
}


def shown(command: str) -> str:
    """What `beamq COMMAND --help` prints in 80 columns."""
    out = io.StringIO()
    with (
        patch.dict(os.environ, COLUMNS="80"),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        app([command, "--help"], prog_name="beamq")
    return out.getvalue()


def page(command: str) -> str:
    """The page of a command."""
    links = [
        f"[{Path(to).stem}](../{to})" if to.endswith(".md") else f"[beamq {to}]({to}.md)"
        for to in SEE.get(command, ())
    ]
    return (
        "<!-- Made by scripts/command_pages.py from the command's help; do not edit. -->\n"
        f"# beamq {command}\n\n```text\n{shown(command)}```\n\n"
        f"See also: {', '.join([*links, '[errors and exit codes](../errors.md)'])}.\n"
    )


def main() -> int:
    """Write, or compare with what is there."""
    pages = {f"{command}.md": page(command) for command in MODULES}
    if "--check" in sys.argv[1:]:
        found = {path.name: path.read_text() for path in TARGET.glob("*.md")}
        return int(found != pages)
    TARGET.mkdir(exist_ok=True)
    for path in TARGET.glob("*.md"):
        path.unlink()
    for name, text in pages.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
