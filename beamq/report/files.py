"""Reports as files: .json for programs, .md for a pull request, .html to look at; model cards.

In: a `Comparison`, or a `Sensitivity` with the `Choice` that was made; a folder. Out: files. Each
is written whole or not at all; an earlier report is replaced, other files are left alone.

The HTML is one file, for any screen, light or dark: it loads nothing and runs no script. Names come
from strangers' folders: the templates and `tables.html` escape them, matplotlib does so in
drawings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.errors import MissingDependencyError, UsageError, counted
from beamq.eval.compare.records import CAVEAT, Candidate, Comparison, listed
from beamq.eval.compare.sensitivity import NAMES, Choice, PartLoss, Sensitivity
from beamq.io.files import read_small, user_path
from beamq.io.shard_writer import check_place, disk_errors, make_folder, write_file
from beamq.options import takes
from beamq.report import charts, tables
from beamq.report.model_card import COMPARED, TASK, calibration_datasets, card_with_comparison
from beamq.report.tables import Table, inline, markdown, page
from beamq.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "report.json", "report.md", "report.html"
MAX_REPORT_BYTES = 1 << 30
SHOWN_LAYERS = 10
CURVE_POINTS = 12
DAMAGE_NOTE = (
    "Error: error of the hidden states after the layer, relative to their size. Added: the layer's"
    " part of the squared error after the last layer; it includes what the layer makes of earlier"
    " errors, and is negative where the layer reduces them. Experts: share of the router's choices"
    " that are the source's. In BF16: what keeping the layer unquantized would add to the files;"
    " --exclude layers.N keeps layer N."
)
ADAPTER_NOTE = (
    "Update: norm of the adapter's update over that of the weights. Left: norm of the difference"
    " that it makes to the rounded weights, over the update's. Cosine: direction of that"
    " difference; 1 is the update's own, near 0 is noise. The last candidate is the base without"
    " the adapter: its KLD is how far the adapter moves the model."
)
LINEARS_NOTE = (
    "Error: RMS of the decoded weight minus the source's, over the RMS of the source's. Max: the"
    " largest difference. Saturated: beyond what the element's scale can express. Underflow: not"
    " zero in the source, but decoded to zero. A few percent of both are normal in NVFP4."
)
PARTS_NOTE = (
    "KLD: mean KL divergence from the source with only this part quantized, in nats a token. Extra:"
    " bytes that keeping the part in high precision would add. Nats per GB: how much KLD each"
    " decimal GB spent on it saves."
)


# --- places and pages ---------------------------------------------------------------------------


def check_report_folder(folder: str | Path, stem: str) -> None:
    """Raise `DiskError` if a report could not be written there, `UsageError` if one of its files
    (`report.json`, ...) exists and beamq did not write it, and `MissingDependencyError` if nothing
    can draw its charts. Makes nothing."""
    if find_spec("matplotlib") is None:
        raise MissingDependencyError(
            "--report draws charts with matplotlib, which is not installed: pip install"
            ' "beamq[report]"'
        )
    target = user_path(folder)
    for path in (target / f"{stem}{suffix}" for suffix in (".json", ".md", ".html")):
        if path.is_file() and b"beamq" not in read_small(path, UsageError, MAX_REPORT_BYTES):
            raise UsageError(f"{path}: exists, and beamq did not write it; choose another --report")
    check_place(target / f"{stem}.json", "--report", makes_folders=True)


def check_new_file(file: str | Path, option: str) -> None:
    """Raise `DiskError` if the file of `option` could not be written, `UsageError` if it exists;
    its folder must exist."""
    target = user_path(file)
    check_place(target, option)
    if target.exists():
        raise UsageError(f"{target}: exists; choose another {option}, or delete it first")


def _write_files(folder: str | Path, texts: Mapping[str, str]) -> Path:
    target = user_path(folder)
    with disk_errors(target, "creating the folder of --report", resumable=False):
        make_folder(target)
    for name, text in texts.items():
        write_file(target / name, text.encode(), resumable=False)
    return target


# --- a comparison -----------------------------------------------------------------------------


def report_markdown(comparison: Comparison) -> str:
    """The report as GitHub's Markdown."""
    return page("report.md", **_values(comparison))


def _values(comparison: Comparison) -> dict[str, Any]:
    names = listed([candidate.model.name for candidate in comparison.candidates])
    return {
        "title": f"{names} compared with {comparison.source.name}",
        "text_line": tables.text_line(comparison),
        "text_notes": comparison.data["notes"],
        "candidates": comparison.candidates,
        "caveat": CAVEAT,
        "summary": tables.summary(comparison.source, comparison.candidates),
        "damage_note": DAMAGE_NOTE,
        "linears_note": LINEARS_NOTE,
        "adapter_note": ADAPTER_NOTE,
        "details": [
            {
                "name": candidate.model.name,
                "damage": tables.damage(candidate, SHOWN_LAYERS),
                "all_damage": tables.damage(candidate),
                "linears": tables.linears(candidate),
                "adapter": tables.adapter(candidate),
            }
            for candidate in comparison.candidates
        ],
        "memory": [
            tables.sizes(comparison),
            tables.per_gpu(comparison),
            tables.newly_fitting(comparison),
        ],
        "settings": comparison.settings,
        "seconds": show_seconds(comparison.seconds),
    }


@takes()
def write_report(comparison: Comparison, folder: str | Path) -> Path:
    """Write all three and return the path of the HTML. Raises `DiskError`."""
    texts = {
        JSON_NAME: json.dumps(comparison.to_dict(), indent=1, allow_nan=False) + "\n",
        MARKDOWN_NAME: report_markdown(comparison),
        HTML_NAME: page(
            "report.html", charts=charts.of_comparison(comparison), **_values(comparison)
        ),
    }
    return _write_files(folder, texts) / HTML_NAME


def write_cards(comparison: Comparison, folders: Sequence[str | Path]) -> None:
    """Put each candidate's figures into the README.md of its folder. Raises `CheckpointError` for
    a folder without one."""
    # Not strict: the base, which --adapter makes the last candidate, has no card.
    for candidate, folder in zip(comparison.candidates, folders, strict=False):
        summary = tables.summary(comparison.source, [candidate])
        table = markdown(replace(summary, head=("", "source", "this checkpoint")))
        parts = [candidate.verdict.headline, table]
        if candidate.adapter:
            parts += [ADAPTER_NOTE, markdown(tables.adapter(candidate))]
            parts += [f"Note: {inline(note)}." for note in candidate.notes if "adapter" in note]
        parts += [tables.text_line(comparison), CAVEAT]
        results = _results(comparison, candidate)
        card_with_comparison(user_path(folder), "\n\n".join(parts), results)


def _results(comparison: Comparison, candidate: Candidate) -> list[EvalResult]:
    """The main figures as the Hub shows evaluations; those that are not finite are left out."""
    from huggingface_hub import EvalResult

    data, found = comparison.data, candidate.divergence
    datasets = calibration_datasets({"data": [data]})
    figures = {
        "perplexity": (f"Perplexity (source: {found.ppl_base.value:.3f})", found.ppl),
        "kl_divergence": ("Mean KL divergence from the source, nats a token", found.mean_kld),
        "same_top_token": (
            "Share of tokens whose likeliest next token is the source's",
            found.same_top,
        ),
    }
    return [
        EvalResult(
            task_type=TASK,
            task_name=COMPARED,
            dataset_type=datasets[0] if len(datasets) == 1 else "text",
            dataset_name=str(data["description"]),
            dataset_config=f"{counted(data['samples'], 'row')} of"
            f" {data['sequence_length']} tokens, digest {str(data['digest'])[:12]}",
            metric_type=kind,
            metric_name=name,
            metric_value=float(f"{figure.value:.6g}"),
        )
        for kind, (name, figure) in figures.items()
        if math.isfinite(figure.value)
    ]


# --- a sensitivity ----------------------------------------------------------------------------


def write_sensitivity(found: Sensitivity, choice: Choice | None, folder: str | Path) -> Path:
    """Write all three and return the path of the HTML. Raises `DiskError`."""
    data = {**found.to_dict(), "choice": None if choice is None else choice.to_dict()}
    values = {
        "title": f"Sensitivity of {found.checkpoint}",
        "lines": [headline(found), text_line(found)],
        "choice": None if choice is None else choice_line(choice),
        "charts": charts.of_sensitivity(found),
        "tables": [parts_table(found), curve_table(found)],
        "settings": found.settings,
    }
    texts = {
        "sensitivity.json": json.dumps(data, indent=1, allow_nan=False) + "\n",
        "sensitivity.md": page("sensitivity.md", **values),
        "sensitivity.html": page("sensitivity.html", **values),
    }
    return _write_files(folder, texts) / "sensitivity.html"


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
        f"Kept in high precision: {names(choice.spared)}. Predicted mean KLD"
        f" {choice.predicted_kld:.5f} nats, {choice.bits_per_weight:.2f} bits a weight,"
        f" {show_bytes(choice.tensor_bytes)}. The prediction adds up the losses of single parts;"
        " measure it with `beamq compare`."
    )


def names(parts: tuple[PartLoss, ...]) -> str:
    """`experts of layers 3, 5; attention of layer 0`."""
    texts = []
    for role, name in NAMES.items():
        if layers := sorted(part.layer for part in parts if part.part is role):
            plural = "s" if len(layers) > 1 else ""
            texts.append(f"{name} of layer{plural} {', '.join(map(str, layers))}")
    return "; ".join(texts) or "nothing"


def parts_table(found: Sensitivity, limit: int | None = None) -> Table:
    """The parts by falling nats per GB."""
    rows = [
        (
            str(part.layer),
            NAMES[part.part],
            f"{part.mean_kld:.5f}",
            f"{part.same_top.value:.2%}",
            show_bytes(part.extra_bytes),
            f"{part.nats_per_gb:.3g}",
        )
        for part in found.by_worth()[:limit]
    ]
    return Table(
        title="What each part costs alone, by nats per GB",
        head=("layer", "part", "KLD", "same top p", "extra", "nats per GB"),
        align="rlr",
        rows=rows,
        note=PARTS_NOTE,
    )


def curve_table(found: Sensitivity) -> Table:
    """Bits and predicted KL with more and more parts in high precision."""
    curve = found.curve()
    step = -(-len(curve) // CURVE_POINTS)
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
        title="Keeping parts in high precision, most nats per GB first",
        head=("parts", "bits a weight", "bytes", "predicted KLD"),
        align="r",
        rows=rows,
    )


def text_line(found: Sensitivity) -> str:
    """What it was measured on."""
    data, settings = found.data, found.settings
    return (
        f"{data['tokens']:,} tokens ({counted(data['samples'], 'row')} of"
        f" {data['sequence_length']:,}) of {data['description']}; activations in"
        f" {settings['dtype']}, GEMM {settings['gemm']}."
    )
