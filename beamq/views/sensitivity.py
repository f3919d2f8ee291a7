"""What `beamq sensitivity` says: what each part costs alone, and what leaving some precise buys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from beamq.console import Block, Command, Grid
from beamq.eval.parts import Choice, Sensitivity
from beamq.eval.sensitivity_report import (
    NOTE,
    choice_line,
    curve_table,
    headline,
    parts_table,
    text_line,
)
from beamq.eval.tables import Table

SHOWN_PARTS = 12


def sensitivity_data(
    found: Sensitivity, choice: Choice | None, recipe: Path | None, report: Path | None
) -> dict[str, Any]:
    """The JSON of `beamq sensitivity`: command, written files (or null), the choice (or null), and
    all that was measured."""
    return {
        "command": "sensitivity",
        "report": None if report is None else str(report),
        "recipe_file": None if recipe is None else str(recipe),
        "choice": None if choice is None else choice.to_dict(),
        **found.to_dict(),
    }


def sensitivity_blocks(
    found: Sensitivity,
    choice: Choice | None,
    recipe: Path | None,
    report: Path | None,
    *,
    verbose: bool,
) -> list[Block]:
    """The same as text."""
    blocks: list[Block] = [headline(found), text_line(found)]
    blocks += [f"Note: {note}." for note in found.data["notes"]]
    blocks += ["", _grid(parts_table(found, None if verbose else SHOWN_PARTS))]
    hidden = len(found.parts) - SHOWN_PARTS
    if hidden > 0 and not verbose:
        blocks.append(f"and {hidden} more; -v shows all")
    blocks += [NOTE, "", _grid(curve_table(found)), ""]
    if choice is not None:
        blocks.append(choice_line(choice))
    if recipe is not None:
        blocks += [f"Recipe: {recipe}", Command(f"beamq quantize SOURCE OUTPUT --recipe {recipe}")]
    if report is not None:
        blocks.append(f"Report: {report}")
    return blocks


def _grid(table: Table) -> Grid:
    return Grid(title=table.title, columns=table.columns, rows=table.rows)
