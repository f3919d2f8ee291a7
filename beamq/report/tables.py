"""The tables of a comparison, as text: one source for terminal, Markdown and HTML.

In: a `Comparison`. Out: `Table`s of ready strings. A column whose name ends in `>` holds figures.
Measures that llama.cpp's perplexity tool prints are called as it calls them: Q is the candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from beamq.eval.compare.footprint import CONTEXTS
from beamq.eval.compare.records import Candidate, Comparison, Member
from beamq.eval.compare.verdict import figure, percent, signed, smallest_each
from beamq.plan.serving import COUNTS, LAYOUTS
from beamq.units import show_bytes, show_gib

LAYOUT_NAMES = {"tensor": "TP", "expert": "EP"}
FORMAT_NAMES = {"nvfp4": "NVFP4", "fp8": "FP8", "bf16": "BF16", "fp16": "FP16", "fp32": "FP32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Column names, rows of cells, and a title that may be empty."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


NOTHING = Table(title="", columns=(), rows=())


def format_name(name: str) -> str:
    """`NVFP4`, `FP8`, `BF16`."""
    return FORMAT_NAMES.get(name, name)


def summary(source: Member, candidates: Sequence[Candidate]) -> Table:
    """Accuracy and size: the source, then each candidate; standard errors over tokens after ±."""
    rows: list[tuple[str, str, Callable[[Candidate], str]]] = [
        ("format", format_name(source.format), lambda c: format_name(c.member.format)),
        (
            "Mean PPL",
            figure(candidates[0].divergence.ppl_base, "{:.3f}"),
            lambda c: figure(c.divergence.ppl, "{:.3f}"),
        ),
        ("ln(PPL(Q)/PPL(base))", "", lambda c: signed(c.divergence.ln_ppl_ratio)),
        ("Mean KLD", "", lambda c: figure(c.divergence.mean_kld, "{:.5f}")),
        ("Mean KLD, weights exact", "", _activations),
        *_ratios(candidates),
        ("Median KLD", "", lambda c: figure(c.divergence.median_kld, "{:.5f}")),
        ("90.0% KLD", "", lambda c: figure(c.divergence.kld_90)),
        ("99.0% KLD", "", lambda c: figure(c.divergence.kld_99)),
        ("99.9% KLD", "", lambda c: figure(c.divergence.kld_999)),
        ("Maximum KLD", "", lambda c: figure(c.divergence.max_kld)),
        ("Mean Δp", "", _mean_change),
        ("RMS Δp", "", lambda c: figure(c.divergence.rms_delta_p, "{:.2%}")),
        ("Same top p", "", lambda c: percent(c.divergence.same_top)),
        ("Top 5 overlap", "", lambda c: percent(c.divergence.top5_overlap)),
        ("Same experts, worst layer", "", lambda c: _worst_router(c, overlap=False)),
        ("Expert overlap, worst layer", "", lambda c: _worst_router(c, overlap=True)),
        ("Hidden error, last layer", "", lambda c: percent(c.layers[-1].relative)),
        ("SQNR, last layer", "", lambda c: _db(c.layers[-1].sqnr_db)),
        ("on disk", show_bytes(source.footprint.disk), lambda c: _disk(c.member)),
        ("bits a weight", _bits(source), lambda c: _bits(c.member)),
    ]
    return Table(
        title="Against the source (base): KLD in nats a token, ± standard error over tokens",
        columns=("", f"{source.name}>", *(f"{each.member.name}>" for each in candidates)),
        rows=tuple((label, base, *(cell(c) for c in candidates)) for label, base, cell in rows),
    )


def _ratios(candidates: Sequence[Candidate]) -> list[tuple[str, str, Callable[[Candidate], str]]]:
    """Mean KLD over the first candidate's, on the same tokens, where any but it is shown."""
    if all(candidate.kld_ratio is None for candidate in candidates):
        return []

    def cell(candidate: Candidate) -> str:
        return "1" if candidate.kld_ratio is None else figure(candidate.kld_ratio, "{:.3f}")

    return [("Mean KLD over the first's", "", cell)]


def _activations(candidate: Candidate) -> str:
    found = candidate.activations_kld
    return "not quantized" if found is None else figure(found, "{:.5f}")


def _disk(member: Member) -> str:
    return show_bytes(member.footprint.disk)


def _bits(member: Member) -> str:
    return f"{member.footprint.bits_per_weight:.2f}"


def _mean_change(candidate: Candidate) -> str:
    """Mean change of the true token's probability, in percent."""
    found = candidate.divergence.mean_delta_p
    sign = "+" if found.value > 0 else ""
    return sign + figure(found, "{:.2%}")


def _worst_router(candidate: Candidate, *, overlap: bool) -> str:
    routers = [layer.router for layer in candidate.layers if layer.router is not None]
    found = [router.overlap if overlap else router.same_experts for router in routers]
    return percent(min(found, key=lambda each: each.value)) if found else "no experts"


def _db(value: float | None) -> str:
    return "exact" if value is None else f"{value:.1f} dB"


def damage(candidate: Candidate, count: int | None = None) -> Table:
    """Layers by falling part of the error, the `count` worst of them (None: all)."""
    layers = candidate.worst_layers()[:count]
    rows = tuple(
        (
            str(layer.layer),
            layer.kind,
            f"{layer.relative:.2%}",
            f"{layer.share:+.1%}",
            "" if layer.router_overlap is None else f"{layer.router_overlap:.1%}",
            show_bytes(layer.quantized_bytes) if layer.quantized_bytes else "",
            f"+{show_bytes(layer.extra_bytes)}" if layer.quantized_bytes else "",
        )
        for layer in layers
    )
    return Table(
        title=f"{candidate.member.name}: which layers hurt, and what BF16 there would cost",
        columns=("layer>", "kind", "error>", "added>", "experts>", "quantized>", "in BF16>"),
        rows=rows,
    )


def linears(candidate: Candidate, count: int = 20) -> Table:
    """The worst linears, by relative error."""
    rows = tuple(
        (
            weight.module.removeprefix("model.layers."),
            format_name(weight.format),
            _db(weight.sqnr_db),
            f"{weight.relative_rms:.4f}",
            f"{weight.max_abs_error:.3g}",
            f"{weight.saturated_share:.2%}",
            f"{weight.underflowed_share:.2%}",
        )
        for weight in candidate.worst_weights(count)
    )
    return Table(
        title=f"{candidate.member.name}: linears with the largest error",
        columns=("layers.", "", "SQNR>", "error>", "max>", "saturated>", "underflow>"),
        rows=rows,
    )


def _members(comparison: Comparison) -> list[Member]:
    return [comparison.source, *(candidate.member for candidate in comparison.candidates)]


def sizes(comparison: Comparison) -> Table:
    """Bytes on disk, bits a weight, KV cache of one sequence."""
    source = comparison.source.footprint
    return Table(
        title="Size, and KV cache of one sequence",
        columns=("", "disk>", "of source>", "bits>", "KV", *(f"{_context(n)}>" for n in CONTEXTS)),
        rows=tuple(
            (
                member.name,
                show_bytes(member.footprint.disk),
                f"{member.footprint.disk / source.disk:.0%}",
                f"{member.footprint.bits_per_weight:.2f}",
                format_name(member.footprint.kv_dtype),
                *(show_gib(member.footprint.kv[tokens]) for tokens in CONTEXTS),
            )
            for member in _members(comparison)
        ),
    )


def per_gpu(comparison: Comparison) -> Table:
    """Bytes of weights on each GPU, tensor and expert parallel."""
    rows = []
    for layout in LAYOUTS:
        for member in _members(comparison):
            found = (member.footprint.per_gpu[layout][count] for count in COUNTS)
            cells = ("-" if nbytes is None else show_bytes(nbytes) for nbytes in found)
            rows.append((LAYOUT_NAMES[layout], member.name, *cells))
    return Table(
        title="Weights on each GPU (TP: tensor parallel, EP: expert parallel)",
        columns=("", "", *(f"{count} GPU{'s' if count > 1 else ''}>" for count in COUNTS)),
        rows=tuple(rows),
    )


def newly_fitting(comparison: Comparison) -> Table:
    """The fewest GPUs of each kind that hold a candidate and a whole context, not the source."""
    context = _context(comparison.source.footprint.fit_context)
    rows = [
        (candidate.member.name, f"{found.count} x {found.label}", f"{found.sequences:,}")
        for candidate in comparison.candidates
        for found in smallest_each(candidate.newly_fits)
    ]
    return Table(
        title=f"Machines with room for weights and {context} tokens that the source does not fit",
        columns=("", "fewest GPUs", "sequences>"),
        rows=tuple(rows),
    )


def _context(tokens: int) -> str:
    if tokens % 2**20 == 0:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}K" if tokens % 1024 == 0 else f"{tokens:,}"


def text_line(comparison: Comparison) -> str:
    """What was run on what, in a sentence."""
    data, settings = comparison.data, comparison.settings
    return (
        f"{data['samples']} rows of {data['sequence_length']:,} tokens"
        f" ({data['description']}; digest {str(data['digest'])[:12]}), activations in"
        f" {settings['dtype']}, GEMM {settings['gemm']}, on {settings['device']}, beamq"
        f" {settings['beamq']}."
    )
