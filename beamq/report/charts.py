"""Pictures of a comparison or a sensitivity, as SVG in the colours of the page that they stand in.

In: a `Comparison` or a `Sensitivity`. Out: `Chart`s: a title, one sentence of explanation, and SVG.

The one idea: matplotlib draws with stand-in colours (#010101 for ink, and so on), which are then
replaced by CSS variables, so that one drawing fits a light page and a dark one. Text stays text in
the page's own font. Lines differ by marker as well as by colour. matplotlib takes a second to
import, so it is imported where a report is written.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from beamq.eval.compare.records import Candidate, ComparedModel, Comparison
from beamq.eval.compare.sensitivity import NAMES, Sensitivity
from beamq.report.tables import labels
from beamq.units import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (4.6, 2.8)  # inches of 72 units
BAR_INCHES = 0.34  # height of a bar with its gap
SERIES = 6
_INK, _GRID = "#010101", "#020202"
_MARKERS = "osD^vPX"  # not as many as colours, so that 42 lines differ
_VARIABLES = {
    _INK: "var(--ink)",
    _GRID: "var(--grid)",
    **{f"#03030{n}": f"var(--series-{n + 1})" for n in range(SERIES)},
}
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # names are text, whatever they hold
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing with its caption. `svg` is markup for an HTML page; its ids begin with `key`."""

    key: str
    title: str
    text: str
    svg: str


def of_comparison(comparison: Comparison) -> list[Chart]:
    """All charts of a comparison that have anything to show."""
    candidates = comparison.candidates
    drawn = [
        _chart(
            "hidden",
            "Hidden state error after each layer",
            "Error of the hidden states relative to their size, over all tokens. A step up is a"
            " layer that hurts.",
            lambda axes: _by_layer(axes, candidates, "relative_error", "error, %"),
        ),
        _chart(
            "router",
            "Router agreement by layer",
            "Share of the experts that the source's router chooses for a token which the"
            " candidate's router chooses too.",
            lambda axes: _by_layer(
                axes, candidates, "expert_overlap", "experts in common, %", 100.2
            ),
        ),
        _chart(
            "kld",
            "KL divergence of single tokens",
            "Share of tokens by KL divergence from the source, in nats on a log scale.",
            lambda axes: _histogram(axes, candidates),
        ),
        _chart(
            "memory",
            "Bytes on disk",
            "Every file of each folder.",
            lambda axes: _bars(axes, comparison),
            bars=len(candidates) + 1,
        ),
    ]
    if all(layer.expert_overlap is None for layer in candidates[0].layers):
        del drawn[1]
    return drawn


def of_sensitivity(found: Sensitivity) -> list[Chart]:
    """What each part costs, and what bytes buy."""
    return [
        _chart(
            "parts",
            "What each part costs alone",
            "Mean KLD from the source with one part quantized, by layer.",
            lambda axes: _parts(axes, found),
        ),
        _chart(
            "curve",
            "What bytes buy",
            "Predicted mean KLD against bits a weight, keeping part after part in high precision.",
            lambda axes: _curve(axes, found),
        ),
    ]


def _chart(key: str, title: str, text: str, draw: Callable[[Axes], None], bars: int = 0) -> Chart:
    """A chart of what `draw` draws, high enough for that many bars."""
    import matplotlib
    from matplotlib.figure import Figure

    height = BAR_INCHES * bars + 0.5 if bars else SIZE[1]
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": key}):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        draw(figure.add_subplot())
        out = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    return Chart(key=key, title=title, text=text, svg=_for_page(out.getvalue(), key))


def _for_page(svg: str, key: str) -> str:
    """SVG without its prologue and size, with unique ids and the page's colours and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{key}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{key}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    return re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL).replace("&#8722;", "-")


def _color(place: int) -> str:
    return f"#03030{place % SERIES}"


def _lines(axes: Axes, series: Sequence[tuple[str, list[int], list[float]]]) -> None:
    for place, (name, layers, values) in enumerate(series):
        marker = _MARKERS[place % len(_MARKERS)]
        axes.plot(layers, values, color=_color(place), marker=marker, label=name)
    axes.set_xlabel("layer")
    _whole_numbers(axes)
    axes.legend()


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _by_layer(
    axes: Axes, candidates: Sequence[Candidate], field: str, label: str, top: float | None = None
) -> None:
    """A line for each candidate: the figure `field` of every layer that has it, in percent."""
    series = []
    names = _names([candidate.model for candidate in candidates])
    for name, candidate in zip(names, candidates, strict=True):
        found = [(layer.layer, getattr(layer, field)) for layer in candidate.layers]
        points = [(layer, 100 * each.value) for layer, each in found if each is not None]
        layers, values = (list(each) for each in zip(*points, strict=True))
        series.append((name, layers, values))
    _lines(axes, series)
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0 if top is None else None, top=top)


def _histogram(axes: Axes, candidates: Sequence[Candidate]) -> None:
    low, high = math.inf, -math.inf
    names = _names([candidate.model for candidate in candidates])
    for place, (name, candidate) in enumerate(zip(names, candidates, strict=True)):
        found = candidate.divergence.kld_histogram
        edges = [found.low + found.step * n for n in range(len(found.counts) + 1)]
        shares = [100 * count / candidate.divergence.tokens for count in found.counts]
        if found.below:
            name += f" ({found.below / candidate.divergence.tokens:.0%} less)"
        axes.stairs(shares, edges, color=_color(place), linewidth=1.4, label=name)
        axes.stairs(shares, edges, color=_color(place), alpha=0.15, fill=True)
        seen = [n for n, count in enumerate(found.counts) if count]
        if seen:
            low, high = min(low, edges[seen[0]]), max(high, edges[seen[-1] + 1])
    if low < high:
        axes.set_xlim(low - 0.25, high + 0.25)
    _whole_numbers(axes)
    axes.set_xlabel("log10 of KLD, nats")
    axes.set_ylabel("tokens, %")
    axes.set_ylim(bottom=0)
    axes.legend()


def _bars(axes: Axes, comparison: Comparison) -> None:
    models = [comparison.source, *(each.model for each in comparison.candidates)]
    sizes = [model.memory.disk_bytes for model in models]
    colors = [_GRID, *(_color(place) for place in range(len(models) - 1))]
    places, gap = range(len(models)), 0.01 * max(sizes)
    axes.barh(places, sizes, color=colors, height=0.62)
    for place, size in zip(places, sizes, strict=True):
        share = f" ({size / sizes[0]:.0%})" if place else ""
        axes.text(size + gap, place, f"{show_bytes(size)}{share}", va="center", fontsize=8)
    axes.set_yticks(places, _names(models))
    axes.set_xlim(0, 1.35 * max(sizes))
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.spines[["bottom"]].set_visible(False)


def _names(models: Sequence[ComparedModel]) -> list[str]:
    """Names that fit a legend; matplotlib leaves out names that begin with `_`."""
    found = labels([model.name for model in models], 24)
    return [name.lstrip("_") or "?" for name in found]


def _parts(axes: Axes, found: Sensitivity) -> None:
    series = []
    for role, name in NAMES.items():
        if own := [part for part in found.parts if part.part is role]:
            layers, values = [part.layer for part in own], [part.mean_kld.value for part in own]
            series.append((name, layers, values))
    _lines(axes, series)
    axes.set_ylabel("KLD, nats")
    axes.set_ylim(bottom=0)


def _curve(axes: Axes, found: Sensitivity) -> None:
    curve = found.curve()
    bits, kld = zip(*((each.bits_per_weight, each.predicted_kld) for each in curve), strict=True)
    axes.plot(bits, kld, color=_color(0), marker="o")
    axes.set_xlabel("bits a weight")
    axes.set_ylabel("predicted KLD, nats")
    axes.set_ylim(bottom=0)
