"""Reports of a comparison: report.json for programs, report.md for a pull request, report.html.

In: a `Comparison` and a folder, or a candidate's own folder for its card. Out: files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from beamq.card.page import card_with_comparison
from beamq.eval import tables
from beamq.eval.comparison import Candidate, Comparison
from beamq.eval.report_files import write_report_files
from beamq.eval.report_html import DAMAGE_NOTE, LINEARS_NOTE, SHOWN_LAYERS, report_html, title
from beamq.eval.tables import Table
from beamq.eval.verdict import CAVEAT

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "report.json", "report.md", "report.html"


def write_report(comparison: Comparison, folder: str | Path) -> Path:
    """Write all three and return the path of the HTML. Raises `DiskError`."""
    texts = {
        JSON_NAME: json.dumps(comparison.to_dict(), indent=1, allow_nan=False) + "\n",
        MARKDOWN_NAME: report_markdown(comparison),
        HTML_NAME: report_html(comparison),
    }
    return write_report_files(folder, texts) / HTML_NAME


def write_cards(comparison: Comparison, folders: Sequence[str | Path]) -> None:
    """Put each candidate's figures into the README.md of its folder, in the candidates' order.

    Raises `CheckpointError` for a folder without a card.
    """
    for candidate, folder in zip(comparison.candidates, folders, strict=True):
        card_with_comparison(Path(folder).expanduser(), card_section(comparison, candidate))


def card_section(comparison: Comparison, candidate: Candidate) -> str:
    """One candidate against the source, for a model card, which knows no other name for it."""
    table = replace(
        tables.summary(comparison.source, [candidate]), columns=("", "source>", "this checkpoint>")
    )
    return "\n\n".join(
        [
            candidate.verdict.headline,
            markdown_table(table),
            tables.text_line(comparison),
            CAVEAT,
        ]
    )


def report_markdown(comparison: Comparison) -> str:
    """The report as GitHub's Markdown."""
    parts = [f"# {_inline(title(comparison))}", _inline(tables.text_line(comparison))]
    parts += [f"Note: {_inline(note)}." for note in comparison.data["notes"]]
    parts.append("## Is it safe to serve?")
    for candidate in comparison.candidates:
        parts += [
            f"### {_inline(candidate.member.name)}",
            f"**{_inline(candidate.verdict.headline)}**",
            _inline(candidate.verdict.text),
            *(f"Note: {_inline(note)}." for note in candidate.notes),
        ]
    parts += [CAVEAT, "## Accuracy"]
    parts += _section([tables.summary(comparison.source, comparison.candidates)])
    parts += ["## Which layers hurt, and what would BF16 there cost?", DAMAGE_NOTE]
    parts += _section([tables.damage(each, SHOWN_LAYERS) for each in comparison.candidates])
    parts += ["## Linears with the largest error", LINEARS_NOTE]
    parts += _section([tables.linears(each) for each in comparison.candidates])
    parts.append("## Memory")
    parts += _section(
        [tables.sizes(comparison), tables.per_gpu(comparison), tables.newly_fitting(comparison)]
    )
    return "\n\n".join(parts) + "\n"


def _section(found: Sequence[Table]) -> list[str]:
    parts = []
    for table in found:
        if table.rows:
            parts += [f"{_inline(table.title)}:", markdown_table(table)]
    return parts


def markdown_table(table: Table) -> str:
    """A table whose columns of figures are right-aligned."""
    head = [_cell(name.removesuffix(">")) for name in table.columns]
    rule = ["---:" if name.endswith(">") else "---" for name in table.columns]
    rows = [head, rule, *([_cell(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _cell(text: str) -> str:
    return _inline(text).replace("|", "\\|")


def _inline(text: str) -> str:
    """Names come from strangers: no markup of theirs, no line breaks."""
    return " ".join(text.split()).replace("<", "&lt;").replace("[", "\\[").replace("`", "'")
