"""Tables: what one is, how it is drawn, and which ones a comparison has.

In: ready strings; a `Comparison`. Out: a `Table`, and its text for a terminal, Markdown or HTML.

The one idea: whoever has figures builds one `Table`, and three small functions draw it. Cells may
hold names that strangers chose, so each renderer escapes every cell. Measures that llama.cpp's
perplexity tool prints carry its names; Q stands for the candidate there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from beamq.beam.tensors import FP32_ROLES, Role
from beamq.errors import counted, printable
from beamq.eval.compare.footprint import smallest_each
from beamq.plan.serving import COUNTS, LAYOUTS
from beamq.units import show_bytes, show_gib

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from beamq.eval.compare.metrics import Estimate
    from beamq.eval.compare.records import Candidate, ComparedModel, Comparison
    from beamq.plan.plan import Plan

LAYOUT_NAMES = {"tensor": "TP", "expert": "EP"}
LEGEND = "TP: tensor parallel, EP: expert parallel"
FORMAT_NAMES = {
    "nvfp4": "NVFP4", "fp8": "FP8", "nvfp4-fp8": "NVFP4 and FP8", "mxfp8": "MXFP8",
    "fp8-block": "block FP8",
    "bf16": "BF16", "fp16": "FP16", "fp32": "FP32",
}  # fmt: skip
BETWEEN, LEAST_ROOM = 2, 20  # characters between columns, and the least for a last one of text
LEAST_TEXT = 12  # and for any column of text on a narrow terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells. Without `head` no header is drawn, without `rows` no table.

    `align` has a letter for each column: `l`, or `r` for figures, which are aligned right and never
    broken into lines. Its last letter holds for all further columns. `note` is prose below.
    """

    title: str = ""
    head: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    align: str = "l"
    note: str = ""

    def columns(self) -> Iterator[tuple[str, bool]]:
        """Each column's name and whether it is aligned right."""
        for place in range(len(self.rows[0] if self.rows else self.head)):
            name = self.head[place] if self.head else ""
            yield name, self.align[min(place, len(self.align) - 1)] == "r"

    def clipped(self, labels: Mapping[str, str], cell: int) -> Table:
        """The same with `labels` of names in the head, and with cells of at most so many characters
        (of a name, its label)."""
        return replace(
            self,
            head=tuple(labels.get(name, name) for name in self.head),
            rows=[
                tuple(labels.get(text, _clip(text, cell)) if len(text) > cell else text
                      for text in row)
                for row in self.rows
            ],
        )  # fmt: skip


def least_width(table: Table) -> int:
    """Characters that a table needs: its figures whole, its text in short lines."""
    cells = zip(*table.rows, strict=True)
    widths = [
        max(len(name), *map(len, column)) if right else min(LEAST_TEXT, max(map(len, column)))
        for (name, right), column in zip(table.columns(), cells, strict=True)
    ]
    return sum(widths) + BETWEEN * (len(widths) - 1)


def stacked(table: Table) -> list[Table]:
    """A table for each row, with a line for each column, where all columns do not fit abreast."""
    names = [name for name, _ in table.columns()]
    rows = [[pair for pair in zip(names, row, strict=True) if any(pair)] for row in table.rows]
    return [Table(rows=[*row, ("", "")]) for row in rows]


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def labels(names: Sequence[str], width: int) -> list[str]:
    """Names of at most `width` characters that still differ: cut at the end, the beginning or in
    the middle, or else with a number."""
    keep = width - 3
    cuts: list[Callable[[str], str]] = [
        lambda name: f"{name[:keep]}...",
        lambda name: f"...{name[-keep:]}",
        lambda name: f"{name[: keep // 2]}...{name[keep // 2 - keep :]}",
    ]
    for cut in cuts:
        found = [name if len(name) <= width else cut(name) for name in names]
        if len(set(found)) == len(set(names)):
            return found
    return [_clip(f"{place}: {name}", width) for place, name in enumerate(names)]


def terminal(table: Table, width: int) -> RichTable:
    """For rich's `Console.print`, at most `width` characters wide unless figures need more."""
    from rich import box  # with rich.text and rich.table, only where there is a console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(
        # A rule of hyphens under the header and nothing else: the same in every encoding.
        box=box.Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True),
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="",
        show_header=any(table.head),
    )
    columns = list(table.columns())
    for name, right in columns:
        drawn.add_column(
            Text(name), justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    room = _last_room(table, width)
    for row in table.rows:
        *others, last = (printable(cell, len(cell)) for cell in row)  # no escape codes, no markup
        drawn.add_row(*map(Text, others), Text(_in_pieces(last, room)))
    return drawn


def _last_room(table: Table, width: int) -> int:
    """Characters that a last column of text has if the others are as wide as their cells; the
    whole width where that is next to nothing, or where it holds figures, which are never folded."""
    *columns, (_, last_is_right) = table.columns()
    cells = zip(*table.rows, strict=True)
    used = sum(
        max(len(name), *map(len, column)) + BETWEEN
        for (name, _), column in zip(columns, cells, strict=False)
    )
    return width - used if width - used >= LEAST_ROOM and not last_is_right else width


def _in_pieces(text: str, room: int) -> str:
    """Words longer than a line, broken after a dot or slash; rich would break them anywhere."""
    pieces = []
    for word in text.split(" "):
        rest = word
        while len(rest) > room and (cut := max(rest.rfind(mark, 0, room) for mark in "./")) > 0:
            pieces.append(rest[: cut + 1] + "\n")
            rest = rest[cut + 1 :]
        pieces.append(rest + " ")
    return "".join(pieces)[:-1]


def markdown(table: Table) -> str:
    """GitHub's Markdown, without the title; columns of figures are aligned right."""
    names, rights = zip(*table.columns(), strict=True)
    lines = [[*map(inline, names)], ["---:" if right else "---" for right in rights]]
    lines += [[*map(inline, row)] for row in table.rows]
    drawn = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{drawn}\n\n{table.note}" if table.note else drawn


def inline(text: str) -> str:
    """Text for a line or a cell of Markdown: no markup and no line breaks of its own."""
    flat = " ".join(text.split()).replace("\\", "\\\\").replace("<", "&lt;").replace("`", "'")
    return flat.replace("[", "\\[").replace("|", "\\|")


def html(table: Table) -> str:
    """A scrolling `<table>`, without the title, and its note; nothing without rows."""
    if not table.rows:
        return ""
    columns = list(table.columns())
    classes = [' class="n"' if right else "" for _, right in columns]
    head = "".join(
        f'<th scope="col"{css}>{escape(name)}</th>'
        for (name, _), css in zip(columns, classes, strict=True)
    )
    rows = (
        "".join(f"<td{css}>{escape(cell)}</td>" for cell, css in zip(row, classes, strict=True))
        for row in table.rows
    )
    body = "\n".join(f"<tr>{cells}</tr>" for cells in rows)
    note = f'<p class="soft">{escape(table.note)}</p>\n' if table.note else ""
    region = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
    return (
        f"{region}<table>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n{note}"
    )


def page(template: str, **values: Any) -> str:
    """A page of `templates/`. HTML escapes strings; Markdown escapes them by `inline`."""
    from jinja2 import Environment, FunctionLoader  # only where a report is written

    def source(name: str) -> str:
        return resources.files("beamq.report").joinpath(f"templates/{name}").read_text("utf-8")

    escaped = template.endswith(".html")
    # Each template is filled once, so optimizing it costs more than it saves.
    pages = Environment(
        loader=FunctionLoader(source), autoescape=escaped, trim_blocks=True, optimized=False
    )
    pages.globals.update(html=html, inline=inline, markdown=markdown)
    return pages.get_template(template).render(**values).rstrip() + "\n"


# --- the tables of a comparison ---------------------------------------------------------------


def format_name(name: str) -> str:
    """`NVFP4`, `FP8`, `BF16`."""
    return FORMAT_NAMES.get(name, name)


@dataclass(slots=True)
class RoleSum:
    """Tensors of one role before and after a conversion; fields as in the JSON of `beamq plan`."""

    role: str
    tensors: int = 0
    parameters: int = 0
    source_bytes: int = 0
    becomes: set[str] = field(default_factory=set)
    output_bytes: int = 0

    def stored_as(self, joint: str) -> str:
        """`NVFP4`, or several formats where exclusions split a role."""
        return joint.join(sorted(self.becomes, reverse=True))


def role_sums(plan: Plan) -> dict[Role, RoleSum]:
    """A sum for each role that the source has, in the order of `Role`."""
    sums = {role: RoleSum(role.value, parameters=plan.parameters[role.value]) for role in Role}
    for job in plan.jobs:
        for member in job.members:
            role = member.role.role
            if member.source.spec.name == "lm_head.weight":
                role = Role.HEAD
            entry = sums[role]
            entry.tensors += 1
            entry.source_bytes += member.source.nbytes
            entry.output_bytes += sum(tensor.nbytes for tensor in member.outputs)
            copied = "as it is" if role is Role.EXTRA else "FP32" if role in FP32_ROLES else "BF16"
            entry.becomes.add(FORMAT_NAMES.get(job.kind, copied))
    return {role: entry for role, entry in sums.items() if entry.tensors}


DIVERGENCE = (
    ("Median KLD", "median_kld", ".5f"),
    ("90.0% KLD", "kld_90", ".4f"),
    ("99.0% KLD", "kld_99", ".4f"),
    ("99.9% KLD", "kld_999", ".4f"),
    ("Maximum KLD", "max_kld", ".4f"),
    ("Mean Δp", "mean_delta_p", "+.2%"),
    ("RMS Δp", "rms_delta_p", ".2%"),
    ("Same top p", "same_top", ".1%"),
    ("Top 5 overlap", "top5_overlap", ".1%"),
)
"""Rows of `summary`: label, field of `Divergence`, format."""


def summary(source: ComparedModel, candidates: Sequence[Candidate]) -> Table:
    """Accuracy and size: the source, then each candidate; standard errors over rows after ±."""
    seen = [each.divergence for each in candidates]
    last = [each.layers[-1] for each in candidates]
    models = [source, *(each.model for each in candidates)]
    rows = [
        ("format", *(format_name(each.format) for each in models)),
        ("Mean PPL", f"{seen[0].ppl_base:.3f}", *(f"{each.ppl:.3f}" for each in seen)),
        ("ln(PPL(Q)/PPL(base))", "", *(f"{each.ln_ppl_ratio:+.4f}" for each in seen)),
        ("Mean KLD", "", *(f"{each.mean_kld:.5f}" for each in seen)),
    ]
    floors = [each.activations_only_kld for each in candidates]
    if any(floors):  # none, if only weights are quantized
        label = "Mean KLD, weights exact"
        rows.append((label, "", *(_or("not quantized", each, ".5f") for each in floors)))
    ratios = [each.kld_ratio_to_first for each in candidates]  # None for the first of all
    if any(ratios):
        rows.append(("Mean KLD, ratio to first", "", *(_or("1", each, ".3f") for each in ratios)))
    rows += [
        (label, "", *(format(getattr(each, field), form) for each in seen))
        for label, field, form in DIVERGENCE
    ]
    rows += [
        ("Same experts, worst layer", "", *(_worst(c, "same_experts") for c in candidates)),
        ("Expert overlap, worst layer", "", *(_worst(c, "expert_overlap") for c in candidates)),
        ("Hidden error, last layer", "", *(f"{layer.relative_error:.1%}" for layer in last)),
        ("SQNR, last layer", "", *(_db(layer.sqnr_db) for layer in last)),
        ("on disk", *(show_bytes(each.memory.disk_bytes) for each in models)),
        ("bits a weight", *(f"{each.memory.bits_per_weight:.2f}" for each in models)),
    ]
    return Table(
        title="Against the source (base): KLD in nats a token, ± standard error over rows",
        head=("", *(each.name for each in models)),
        align="lr",
        rows=rows,
    )


def _or(nothing: str, found: Estimate | None, spec: str) -> str:
    return nothing if found is None else format(found, spec)


def _worst(candidate: Candidate, field: str) -> str:
    found = [each for layer in candidate.layers if (each := getattr(layer, field)) is not None]
    return _or("no experts", min(found, key=lambda each: each.value, default=None), ".1%")


def _db(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f} dB"


def damage(candidate: Candidate, count: int | None = None) -> Table:
    """The `count` layers that add the most error (None: all of them)."""
    rows = [
        (
            str(layer.layer),
            layer.kind,
            f"{layer.relative_error.value:.2%}",
            f"{layer.share:+.1%}",
            "" if layer.expert_overlap is None else f"{layer.expert_overlap.value:.1%}",
            show_bytes(layer.quantized_bytes) if layer.quantized_bytes else "",
            f"+{show_bytes(layer.extra_bytes_in_bf16)}" if layer.quantized_bytes else "",
        )
        for layer in candidate.worst_layers()[:count]
    ]
    return Table(
        title=f"{candidate.model.name}: which layers hurt, and what BF16 would cost there",
        head=("layer", "kind", "error", "added", "experts", "quantized", "in BF16"),
        align="rlr",
        rows=rows,
    )


def linears(candidate: Candidate, count: int = 20) -> Table:
    """The `count` linears with the largest relative error."""
    rows = [
        (
            weight.module.removeprefix("model.layers."),
            format_name(weight.format),
            _db(weight.sqnr_db),
            f"{weight.relative_rms:.4f}",
            f"{weight.max_abs_error:.3g}",
            f"{weight.saturated_share:.2%}",
            f"{weight.underflowed_share:.2%}",
        )
        for weight in candidate.worst_linears(count)
    ]
    return Table(
        title=f"{candidate.model.name}: linears with the largest error",
        head=("layers.", "", "SQNR", "error", "max", "saturated", "underflow"),
        align="llr",
        rows=rows,
    )


def adapter(candidate: Candidate) -> Table:
    """What is left of an adapter's update in each part that is adapted and quantized."""
    rows = [
        (
            each.part,
            f"{each.sampled:,} of {each.weights:,}",
            f"{each.size:.2%}",
            f"{each.kept:.2f}",
            f"{each.cosine:.3f}",
        )
        for each in candidate.adapter
    ]
    return Table(
        title=f"{candidate.model.name}: what rounding leaves of the adapter",
        head=("part", "linears", "update", "left", "cosine"),
        align="lr",
        rows=rows,
    )


def _models(comparison: Comparison) -> list[ComparedModel]:
    return [comparison.source, *(candidate.model for candidate in comparison.candidates)]


def sizes(comparison: Comparison) -> Table:
    """Every model's bytes on disk, bits a weight, and KV cache of one sequence."""
    source = comparison.source.memory
    return Table(
        title="Size, and KV cache of one sequence",
        head=("", "disk", "of source", "bits", "KV", *map(_context, source.kv_bytes)),
        align="lrrrlr",
        rows=[
            (
                model.name,
                show_bytes(model.memory.disk_bytes),
                f"{model.memory.disk_bytes / source.disk_bytes:.0%}",
                f"{model.memory.bits_per_weight:.2f}",
                format_name(model.memory.kv_dtype),
                *map(show_gib, model.memory.kv_bytes.values()),
            )
            for model in _models(comparison)
        ],
    )


def per_gpu(comparison: Comparison) -> Table:
    """Bytes of every model's weights on each GPU."""
    return weights_per_gpu(
        {model.name: model.memory.weight_bytes_per_gpu for model in _models(comparison)}
    )


def weights_per_gpu(models: Mapping[str, Mapping[str, Mapping[int, int | None]]]) -> Table:
    """Bytes of weights on each GPU by model, layout and number of GPUs; None: not divisible."""
    rows = []
    for layout in LAYOUTS:
        for name, sizes in models.items():
            found = (sizes[layout][count] for count in COUNTS)
            cells = ("-" if nbytes is None else show_bytes(nbytes) for nbytes in found)
            rows.append((LAYOUT_NAMES[layout], name, *cells))
    return Table(
        title=f"Weights on each GPU ({LEGEND})",
        head=("", "", *(counted(count, "GPU") for count in COUNTS)),
        align="llr",
        rows=rows,
    )


def newly_fitting(comparison: Comparison) -> Table:
    """The fewest GPUs of each kind that hold a candidate and a context, but not the source."""
    context = _context(comparison.source.memory.fits.context)
    rows = [
        (candidate.model.name, f"{found.count} x {found.label}", f"{found.sequences:,}")
        for candidate in comparison.candidates
        for found in smallest_each(candidate.newly_fits)
    ]
    return Table(
        title=f"Machines that fit the weights and {context} tokens, but not the source's",
        head=("", "fewest GPUs", "sequences"),
        align="llr",
        rows=rows,
    )


def _context(tokens: int) -> str:
    if tokens % 2**20 == 0:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}K" if tokens % 1024 == 0 else f"{tokens:,}"


def text_line(comparison: Comparison) -> str:
    """The text and the settings, in a sentence."""
    data, settings = comparison.data, comparison.settings
    return (
        f"{counted(data['samples'], 'row')} of {data['sequence_length']:,} tokens"
        f" ({data['description']}; digest {str(data['digest'])[:12]}), activations in"
        f" {settings['dtype']}, GEMM {settings['gemm']}, on {settings['device']}, beamq"
        f" {settings['beamq']}."
    )
