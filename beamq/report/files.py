"""Reports of a comparison: report.json for programs, report.md for a pull request, report.html.

In: a `Comparison` and a folder, or a candidate's own folder for its card. Out: files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.beam.tensors import Role
from beamq.errors import DiskError
from beamq.eval.compare.records import Candidate, Comparison
from beamq.eval.compare.sensitivity import NAMES, Choice, PartLoss, Sensitivity
from beamq.eval.compare.verdict import CAVEAT, listed
from beamq.io.files import user_path
from beamq.io.shard_writer import disk_errors, make_folder, write_file
from beamq.report import tables
from beamq.report.charts import Chart, charts, drawing
from beamq.report.model_card import card_with_comparison
from beamq.report.tables import Table, html, inline, markdown
from beamq.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# The files of a report: can they be written, asked before the work; texts, after it.
#
# In: the folder that `--report` names, and texts by file name. Each file is written whole or not at
# all; an earlier report in the folder is replaced, other files are left. Pages are made by jinja2
# from `templates/`, which share `base.html`.


def check_report_folder(folder: str | Path) -> None:
    """Raise `DiskError` where a report could not be written, before the work. Makes nothing."""
    target = user_path(folder)
    place = target.absolute()
    while not place.exists():
        place = place.parent
    _check_place(target, place, "--report")


def check_new_file(file: str | Path, option: str) -> None:
    """Raise `DiskError` where the file of `option` could not be written, before the work: its
    folder has to be there. Makes nothing."""
    target = user_path(file)
    if target.is_dir():
        raise DiskError(f"{target}: is a folder; choose another {option}")
    _check_place(target, target.parent, option)


def _check_place(target: Path, place: Path, option: str) -> None:
    if not place.is_dir():
        raise DiskError(f"{target}: {place} is not a folder; choose another {option}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise DiskError(f"{target}: {place} may not be written to; choose another {option}")


def write_report_files(folder: str | Path, texts: Mapping[str, str]) -> Path:
    """Write all texts; returns the folder. Raises `DiskError`."""
    target = user_path(folder)
    with disk_errors(target, "creating the folder of --report", resumable=False):
        make_folder(target)
    for name, text in texts.items():
        write_file(target / name, text.encode(), resumable=False)
    return target


def page(template: str, **values: Any) -> str:
    """A page of `templates/` with its values; strings are escaped, drawings go in as they are."""
    from jinja2 import Environment, FunctionLoader  # with matplotlib, only where it is written

    def source(name: str) -> str:
        return resources.files("beamq.report").joinpath(f"templates/{name}").read_text("utf-8")

    pages = Environment(loader=FunctionLoader(source), autoescape=True, trim_blocks=True)
    return pages.get_template(template).render(html=html, **values)


# `report.html`: one file that needs nothing else, to read on any screen, in light or dark.
#
# In: a `Comparison`. Out: HTML. Styles and pictures are inline; it loads nothing and runs no
# script. Names come from strangers' folders: the template escapes every one of them, except in
# the drawings, where matplotlib does.

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
    names = listed([candidate.model.name for candidate in comparison.candidates])
    return f"{comparison.source.name} and what became of it: {names}"


def _details(candidate: Candidate) -> dict[str, Any]:
    whole = tables.damage(candidate)
    shown = tables.damage(candidate, SHOWN_LAYERS)
    return {
        "name": candidate.model.name,
        "damage": shown,
        "more_damage": whole if len(whole.rows) > len(shown.rows) else Table(),
        "linears": tables.linears(candidate),
    }


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
    summary = tables.summary(comparison.source, [candidate])
    table = replace(summary, head=("", "source", "this checkpoint"))
    return "\n\n".join(
        [
            candidate.verdict.headline,
            markdown(table),
            tables.text_line(comparison),
            CAVEAT,
        ]
    )


def report_markdown(comparison: Comparison) -> str:
    """The report as GitHub's Markdown."""
    parts = [f"# {inline(title(comparison))}", inline(tables.text_line(comparison))]
    parts += [f"Note: {inline(note)}." for note in comparison.data["notes"]]
    parts.append("## Is it safe to serve?")
    for candidate in comparison.candidates:
        parts += [
            f"### {inline(candidate.model.name)}",
            f"**{inline(candidate.verdict.headline)}**",
            inline(candidate.verdict.text),
            *(f"Note: {inline(note)}." for note in candidate.notes),
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
            parts += [f"{inline(table.title)}:", markdown(table)]
    return parts


# Reports of a sensitivity: .json for programs, .md for people in a hurry, .html to look at.
#
# In: a `Sensitivity`, the `Choice` if one was asked for. Out: tables of ready strings, and the
# three files. Styles and pictures are inline; the page loads nothing and runs no script.

SENSITIVITY_JSON_NAME, SENSITIVITY_MARKDOWN_NAME, SENSITIVITY_HTML_NAME = (
    "sensitivity.json",
    "sensitivity.md",
    "sensitivity.html",
)
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
        SENSITIVITY_JSON_NAME: json.dumps(data, indent=1, allow_nan=False) + "\n",
        SENSITIVITY_MARKDOWN_NAME: _markdown(found, choice),
        SENSITIVITY_HTML_NAME: _html(found, choice),
    }
    return write_report_files(folder, texts) / SENSITIVITY_HTML_NAME


def headline(found: Sensitivity) -> str:
    """What the whole candidate costs, and whether its parts' losses add up to that."""
    whole, total = found.mean_kld.value, found.sum_of_parts
    ratio = f" ({total / whole:.0%} of it)" if whole > 0 else ""
    count = len(found.parts)
    quantized = "its one part" if count == 1 else f"all {count} parts"
    return (
        f"{found.checkpoint}: mean KLD {whole:.5f} nats with {quantized} quantized; the losses of"
        f" single parts add up to {total:.5f}{ratio}."
    )


def choice_line(choice: Choice) -> str:
    """What a choice spares and what is expected of it."""
    return (
        f"Left precise: {names(choice.spared)}. Predicted mean KLD {choice.predicted_kld:.5f} nats,"
        f" {choice.bits_per_weight:.2f} bits a weight, {show_bytes(choice.tensor_bytes)};"
        " predicted by adding up, so measure it with `beamq compare`."
    )


def names(parts: tuple[PartLoss, ...]) -> str:
    """`experts of layers 3, 5; attention of layer 0`."""
    texts = []
    for role, name in NAMES.items():
        layers = sorted(part.layer for part in parts if part.part is role)
        if layers:
            plural = "s" if len(layers) > 1 else ""
            texts.append(f"{name} of layer{plural} {', '.join(map(str, layers))}")
    return "; ".join(texts) or "nothing"


def parts_table(found: Sensitivity, limit: int | None = None) -> Table:
    """Parts by worth, the most first."""
    rows = [
        (
            str(part.layer),
            NAMES[part.part],
            f"{part.mean_kld:.5f}",
            f"{part.same_top.value:.2%}",
            show_bytes(part.extra_bytes),
            f"{part.nats_per_gb:.3g}",
        )
        for part in found.by_worth()
    ]
    return Table(
        title="What each part costs alone, by nats per GB",
        head=("layer", "part", "KLD", "same top p", "precise", "nats per GB"),
        align="rlr",
        rows=rows[:limit],
    )


def curve_table(found: Sensitivity, points: int = CURVE_POINTS) -> Table:
    """Parts left precise one after the other, by worth: bits and predicted KL."""
    curve = found.curve()
    step = max(1, -(-len(curve) // points))
    rows = [
        (
            str(len(choice.spared)),
            f"{choice.bits_per_weight:.2f}",
            show_bytes(choice.tensor_bytes),
            f"{choice.predicted_kld:.5f}",
        )
        for number, choice in enumerate(curve)
        if number % step == 0 or number == len(curve) - 1
    ]
    return Table(
        title="Leaving parts precise, most nats per GB first",
        head=("parts", "bits a weight", "bytes", "predicted KLD"),
        align="r",
        rows=rows,
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
        parts += [f"## {table.title}", markdown(table)]
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
    from beamq.report.charts import lines

    series = []
    for role in (Role.EXPERT, Role.DENSE_MLP, Role.ATTENTION):
        own = [part for part in found.parts if part.part is role]
        if own:
            values = [part.mean_kld.value for part in own]
            series.append((NAMES[role], [part.layer for part in own], values))
    lines(axes, series)
    axes.set_ylabel("KLD, nats")
    axes.set_ylim(bottom=0)


def _curve(axes: Axes, found: Sensitivity) -> None:
    from beamq.report.charts import color

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
