"""`report.html`: one file that needs nothing else, to read on any screen, in light or dark.

In: a `Comparison`. Out: HTML. Styles and pictures are inline; it loads nothing and runs no script.
Names come from strangers' folders: the template escapes every one of them, except in the drawings,
where matplotlib does.
"""

from __future__ import annotations

from typing import Any

from beamq.eval import tables
from beamq.eval.charts import charts
from beamq.eval.comparison import Candidate, Comparison
from beamq.eval.report_files import page
from beamq.eval.verdict import CAVEAT, listed
from beamq.sizes import show_seconds

SHOWN_LAYERS = 10
DAMAGE_NOTE = (
    "Error: of the hidden states behind the layer, over their size. Added: the layer's part of the"
    " squared error behind the last layer, its own damage and what it makes of noise that comes in."
    " Experts: overlap of the router's choices with the source's. In BF16: what keeping the layer"
    " unquantized would add; --exclude layers.N does it."
)
LINEARS_NOTE = (
    "Error: RMS of decoded minus source, over RMS of the source. Max: the largest difference."
    " Saturated: beyond what the element's scale can express. Underflow: not zero, but decoded to"
    " zero. A few percent of both are usual in NVFP4."
)


def report_html(comparison: Comparison) -> str:
    """The whole page."""
    return page(
        "report.html",
        title=title(comparison),
        text_line=tables.text_line(comparison),
        text_notes=comparison.data["notes"],
        candidates=comparison.candidates,
        caveat=CAVEAT,
        summary=tables.summary(comparison.source, comparison.candidates),
        charts=charts(comparison),
        damage_note=DAMAGE_NOTE,
        linears_note=LINEARS_NOTE,
        details=[_details(candidate) for candidate in comparison.candidates],
        memory=[
            tables.sizes(comparison),
            tables.per_gpu(comparison),
            tables.newly_fitting(comparison),
        ],
        settings=comparison.settings,
        seconds=show_seconds(comparison.seconds),
    )


def title(comparison: Comparison) -> str:
    """`beam-nano against nvfp4 and fp8`."""
    names = listed([candidate.member.name for candidate in comparison.candidates])
    return f"{comparison.source.name} and what became of it: {names}"


def _details(candidate: Candidate) -> dict[str, Any]:
    whole = tables.damage(candidate)
    shown = tables.damage(candidate, SHOWN_LAYERS)
    return {
        "name": candidate.member.name,
        "damage": shown,
        "more_damage": whole if len(whole.rows) > len(shown.rows) else tables.NOTHING,
        "linears": tables.linears(candidate),
    }
