"""What `beamq compare` says: verdicts, figures side by side, layers that hurt, memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from beamq.console import Block, Grid
from beamq.eval import tables
from beamq.eval.comparison import Comparison
from beamq.eval.tables import Table
from beamq.eval.verdict import CAVEAT

ABREAST = 2  # candidates that fit 80 columns side by side
LAYERS, LINEARS = 5, 5
ALL_LINEARS = 20
NAME_WIDTH = 17


def compare_data(comparison: Comparison, report: Path | None) -> dict[str, Any]:
    """The JSON of `beamq compare`: command, report (path of the HTML, or null), and all that
    report.json has (docs/report-schema.md)."""
    return {
        "command": "compare",
        "report": None if report is None else str(report),
        **comparison.to_dict(),
    }


def compare_blocks(comparison: Comparison, report: Path | None, *, verbose: bool) -> list[Block]:
    """The same as text: verdicts first, then what they rest on; `verbose` leaves nothing out."""
    blocks: list[Block] = []
    for candidate in comparison.candidates:
        blocks += [f"{candidate.member.name}: {candidate.verdict.headline}"]
        blocks += [candidate.verdict.text]
        blocks += [f"Note: {note}." for note in candidate.notes]
        blocks.append("")
    blocks += [*_tables(comparison, verbose=verbose), tables.text_line(comparison)]
    blocks += [f"Note: {note}." for note in comparison.data["notes"]]
    blocks.append(CAVEAT)
    if report is not None:
        blocks += ["", f"Report: {report}"]
    return blocks


def _tables(comparison: Comparison, *, verbose: bool) -> Iterator[Block]:
    candidates = comparison.candidates
    for start in range(0, len(candidates), ABREAST):
        yield _grid(tables.summary(comparison.source, candidates[start : start + ABREAST]))
        yield ""
    for candidate in candidates:
        yield _grid(tables.damage(candidate, None if verbose else LAYERS))
        yield ""
        worst = tables.linears(candidate, ALL_LINEARS if verbose else LINEARS)
        if worst.rows:
            yield _grid(worst)
            yield ""
    found = [tables.sizes(comparison), tables.newly_fitting(comparison)]
    for table in [*found, tables.per_gpu(comparison)] if verbose else found:
        if table.rows:
            yield _grid(table)
            yield ""


def _grid(table: Table) -> Grid:
    return Grid(
        title=table.title,
        columns=tuple(_short(name) for name in table.columns),
        rows=tuple(tuple(_short(cell, 28) for cell in row) for row in table.rows),
    )


def _short(text: str, width: int = NAME_WIDTH) -> str:
    """Names are as long as their folders' owners liked; a table has 80 columns."""
    mark = ">" if text.endswith(">") else ""
    bare = text.removesuffix(">")
    return text if len(bare) <= width else f"{bare[: width - 3]}...{mark}"
