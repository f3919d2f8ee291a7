"""Reports of a sensitivity: .json for programs, .md for people in a hurry, .html to look at.

In: a `Sensitivity`, the `Choice` if one was asked for. Out: tables of ready strings, and the three
files. Styles and pictures are inline; the page loads nothing and runs no script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from beamq.eval.charts import Chart, drawing
from beamq.eval.parts import NAMES, Choice, PartLoss, Sensitivity
from beamq.eval.report import markdown_table
from beamq.eval.report_files import page, write_report_files
from beamq.eval.tables import Table
from beamq.eval.verdict import figure
from beamq.roles import Role
from beamq.sizes import show_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "sensitivity.json", "sensitivity.md", "sensitivity.html"
NOTE = (
    "KLD: mean KL divergence from the source with this part alone quantized, nats a token."
    " Precise: bytes that leaving it precise would add. Nats per GB: what a decimal GB spent on it"
    " buys."
)
CURVE_POINTS = 12


def write_sensitivity(found: Sensitivity, choice: Choice | None, folder: str | Path) -> Path:
    """Write all three and return the path of the HTML. Raises `DiskError`."""
    data = {**found.to_dict(), "choice": None if choice is None else choice.to_dict()}
    texts = {
        JSON_NAME: json.dumps(data, indent=1, allow_nan=False) + "\n",
        MARKDOWN_NAME: _markdown(found, choice),
        HTML_NAME: _html(found, choice),
    }
    return write_report_files(folder, texts) / HTML_NAME


def headline(found: Sensitivity) -> str:
    """What the candidate costs whole, and whether its parts' losses add up to that."""
    ratio = f" ({found.sum_kld / found.whole.value:.0%} of it)" if found.whole.value > 0 else ""
    return (
        f"{found.checkpoint}: mean KLD {found.whole.value:.5f} nats with all"
        f" {len(found.parts)} parts quantized; alone they add up to {found.sum_kld:.5f}{ratio}."
    )


def choice_line(choice: Choice) -> str:
    """What a choice spares and what is expected of it."""
    return (
        f"Left precise: {names(choice.spared)}. Predicted mean KLD {choice.predicted_kld:.5f} nats,"
        f" {choice.bits_per_weight:.2f} bits a weight, {show_bytes(choice.tensor_nbytes)};"
        " predicted by adding up, so measure it with `beamq compare`."
    )


def names(parts: tuple[PartLoss, ...]) -> str:
    """`experts of layers 3, 5; attention of layer 0`."""
    texts = []
    for role, name in NAMES.items():
        layers = sorted(part.layer for part in parts if part.role is role)
        if layers:
            plural = "s" if len(layers) > 1 else ""
            texts.append(f"{name} of layer{plural} {', '.join(map(str, layers))}")
    return "; ".join(texts) or "nothing"


def parts_table(found: Sensitivity, limit: int | None = None) -> Table:
    """Parts by worth, the most first."""
    rows = [
        (
            str(part.layer),
            NAMES[part.role],
            figure(part.kld, "{:.5f}"),
            f"{part.same_top.value:.2%}",
            show_bytes(part.extra_nbytes),
            f"{part.nats_per_gb:.3g}",
        )
        for part in found.by_worth()
    ]
    return Table(
        title="What each part costs alone, by nats per GB",
        columns=("layer>", "part", "KLD>", "same top p>", "precise>", "nats per GB>"),
        rows=tuple(rows[:limit]),
    )


def curve_table(found: Sensitivity, points: int = CURVE_POINTS) -> Table:
    """Parts left precise one after the other, by worth: bits and predicted KL."""
    curve = found.curve()
    step = max(1, -(-len(curve) // points))
    rows = [
        (
            str(len(choice.spared)),
            f"{choice.bits_per_weight:.2f}",
            show_bytes(choice.tensor_nbytes),
            f"{choice.predicted_kld:.5f}",
        )
        for number, choice in enumerate(curve)
        if number % step == 0 or number == len(curve) - 1
    ]
    return Table(
        title="Leaving parts precise, most nats per GB first",
        columns=("parts>", "bits a weight>", "bytes>", "predicted KLD>"),
        rows=tuple(rows),
    )


def text_line(found: Sensitivity) -> str:
    """What it was measured on."""
    data, settings = found.data, found.settings
    return (
        f"{data['tokens']:,} tokens ({data['samples']} rows of {data['sequence_length']}) of"
        f" {data['description']}; activations in {settings['dtype']}, gemm {settings['gemm']}."
    )


def _markdown(found: Sensitivity, choice: Choice | None) -> str:
    parts = [f"# Sensitivity of {found.checkpoint}", headline(found), text_line(found)]
    if choice is not None:
        parts.append(choice_line(choice))
    for table in (parts_table(found), curve_table(found)):
        parts += [f"## {table.title}", markdown_table(table)]
    return "\n\n".join([*parts, NOTE]) + "\n"


def _html(found: Sensitivity, choice: Choice | None) -> str:
    return page(
        "sensitivity.html",
        title=f"Sensitivity of {found.checkpoint}",
        lines=[headline(found), text_line(found)],
        choice=None if choice is None else choice_line(choice),
        charts=_charts(found),
        tables=[parts_table(found), curve_table(found)],
        note=NOTE,
        settings=found.settings,
    )


def _charts(found: Sensitivity) -> list[Chart]:
    return [
        Chart(
            key="parts",
            title="What each part costs alone",
            text="Mean KLD from the source with one part quantized, by layer.",
            svg=drawing("parts", lambda axes: _by_layer(axes, found)),
        ),
        Chart(
            key="curve",
            title="What bytes buy",
            text="Predicted mean KLD against bits a weight, parts left precise one by one.",
            svg=drawing("curve", lambda axes: _curve(axes, found)),
        ),
    ]


def _by_layer(axes: Axes, found: Sensitivity) -> None:
    from beamq.eval.charts import lines

    series = []
    for role in (Role.EXPERT, Role.DENSE_MLP, Role.ATTENTION):
        own = [part for part in found.parts if part.role is role]
        if own:
            values = [part.kld.value for part in own]
            series.append((NAMES[role], [part.layer for part in own], values))
    lines(axes, series)
    axes.set_ylabel("KLD, nats")
    axes.set_ylim(bottom=0)


def _curve(axes: Axes, found: Sensitivity) -> None:
    from beamq.eval.charts import color

    curve = found.curve()
    axes.plot(
        [choice.bits_per_weight for choice in curve],
        [choice.predicted_kld for choice in curve],
        color=color(0),
        marker="o",
        markersize=3.5,
        linewidth=1.4,
    )
    axes.set_xlabel("bits a weight")
    axes.set_ylabel("predicted KLD, nats")
    axes.set_ylim(bottom=0)
