"""The records of a comparison, with fields as the keys of `report.json`, and the verdict in words.

In: what was found of each candidate, its bounds and sizes. Out: a `Comparison`, each candidate with
a `SafetyVerdict`: within the recipe's bounds or not, which layers hurt, what BF16 would cost there.
Every sentence of it states figures; a figure without a bound is stated and not judged.

docs/report-schema.md describes `Comparison.to_dict`; `SCHEMA` rises when a key changes its meaning
or is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from beamq.errors import counted
from beamq.eval.compare.adapter_effect import PartEffect
from beamq.eval.compare.findings import Breach, Findings, Limits, breaches, parting_layer
from beamq.eval.compare.footprint import Fitting, Footprint, smallest_each
from beamq.eval.compare.metrics import Divergence, LayerError
from beamq.eval.compare.weight_error import WeightError
from beamq.io.safetensors_header import few
from beamq.plan.recipe import Bounds
from beamq.units import plain, short_repr, show_bytes

SCHEMA = 1
NAMED_LAYERS = 3
CAVEAT = (
    "The verdict is based on next-token agreement with the source on this text and on the error of"
    " every linear. It says that the conversion is sound, not how a task will score. Bounds are"
    " those of the recipe; standard errors are over the rows of this text alone."
)
CLOSE = 2.0  # standard errors within which a figure and its bound cannot be told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """The source or a candidate. `name` is unique within a comparison and never a path."""

    name: str
    format: str
    recipe: str | None
    input_scales: str | None
    memory: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyVerdict:
    """Whether a candidate is within the `bounds` of the recipe `bounds_of`, and undamaged, on the
    text it was compared on. `safe` is None where no bounds apply; `text` gives the reasons."""

    safe: bool | None
    headline: str
    text: str
    breaches: tuple[Breach, ...]
    parting_layer: int | None
    bounds_of: str | None
    bounds: Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Findings):
    """One candidate: what was found of it, the verdict, the machines that fit it only, and what is
    left of the adapter that is merged into the source."""

    __repr__ = short_repr

    model: ComparedModel
    verdict: SafetyVerdict
    newly_fits: tuple[Fitting, ...]
    adapter: tuple[PartEffect, ...] = ()
    notes: tuple[str, ...]

    def worst_linears(self, count: int) -> Sequence[WeightError]:
        """The linears with the largest relative error, in falling order; ties by name."""
        return sorted(self.linears, key=lambda each: (-each.relative_rms, each.module))[:count]

    def worst_layers(self) -> Sequence[LayerError]:
        """All layers by falling part of the error."""
        return sorted(self.layers, key=lambda each: (-each.added, each.layer))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the model's keys are not nested."""
        data: dict[str, Any] = plain(self)
        data["newly_fits"] = [{**plain(each), "label": each.label} for each in self.newly_fits]
        return {**data.pop("model"), **data}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The source, and each candidate against it. `data` is the record of the text."""

    __repr__ = short_repr

    source: ComparedModel
    candidates: tuple[Candidate, ...]
    data: dict[str, Any]
    settings: dict[str, Any]
    seconds: float

    @property
    def safe(self) -> bool:
        """Whether no candidate is out of bounds."""
        return all(candidate.verdict.safe is not False for candidate in self.candidates)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; see docs/report-schema.md. NaN and infinity become None."""
        candidates = [candidate.to_dict() for candidate in self.candidates]
        return {"schema": SCHEMA, **plain(replace(self, candidates=())), "candidates": candidates}


# --- the verdict --------------------------------------------------------------------------------


def judge(
    findings: Findings,
    limits: Limits,
    source: Footprint,
    own: Footprint,
    newly_fits: Sequence[Fitting],
) -> SafetyVerdict:
    """The verdict on one candidate, whose layers are complete with their sizes."""
    broken = breaches(findings, limits.bounds)
    seen = findings.divergence
    parts = [
        _accuracy(seen, limits),
        *_close_calls(seen, limits),
        f"Out of bounds: {'; '.join(breach.text for breach in broken)}." if broken else "",
        _layers(findings.layers, own),
        _size(source, own, newly_fits),
    ]
    parting = parting_layer(findings, broken) if broken else None
    safe: bool | None = not (findings.damaged or broken)
    if damaged := findings.damaged:
        parts.insert(0, "All figures describe a damaged copy.")
        headline = (
            f"Damaged: {counted(len(damaged), 'tensor does', 'tensors do')} not match the checksums"
            f" in beamq.json ({few(damaged)}); `beamq verify` says more."
        )
    elif broken:
        where = "" if parting is None else f"; it departs from the source at layer {parting}"
        headline = f"Out of bounds: {broken[0].text}{where}."
    elif seen.exact:
        headline = "Within bounds: all next-token distributions are exactly the source's."
    elif limits.recipe is None:
        safe = None
        headline = "Not judged: nothing is quantized here, so no recipe's bounds apply."
    else:
        headline = "Within bounds: all figures that the recipe bounds are within them on this text."
    return SafetyVerdict(
        safe=safe,
        headline=headline,
        text=" ".join(filter(None, parts)),
        breaches=broken,
        parting_layer=parting,
        bounds_of=limits.recipe,
        bounds=limits.bounds,
    )


def _accuracy(seen: Divergence, limits: Limits) -> str:
    bounds = limits.bounds
    return (
        f"Mean KLD is {seen.mean_kld:.4f} nats a token"
        f"{_limit('at most', bounds.mean_kld, '{:g}')}; the likeliest next token is the source's"
        f" for {seen.same_top:.1%} of {seen.tokens:,} tokens"
        f"{_limit('at least', bounds.same_top, '{:.0%}')}; perplexity goes from"
        f" {seen.ppl_base.value:.3f} to {seen.ppl.value:.3f} (ln ratio {seen.ln_ppl_ratio:+.4f})."
    )


def _limit(word: str, limit: float | None, form: str) -> str:
    return "" if limit is None else f" ({word} {form.format(limit)} is expected)"


def _close_calls(seen: Divergence, limits: Limits) -> list[str]:
    if seen.mean_kld.standard_error is None and not seen.exact:
        return ["One row has no standard error; use more --samples for a sure verdict."]
    pairs = (
        ("mean KLD", seen.mean_kld, limits.bounds.mean_kld),
        ("same top token", seen.same_top, limits.bounds.same_top),
    )
    return [
        f"The {name} is too close to its bound to be judged from {seen.tokens:,} tokens; use"
        " more --samples."
        for name, found, limit in pairs
        if limit is not None
        and found.standard_error
        and abs(found.value - limit) < CLOSE * found.standard_error
    ]


def _layers(layers: Sequence[LayerError], own: Footprint) -> str:
    """The quantized layers that hurt most, and what BF16 would cost there.

    Their share is of what all layers add: layers that reduce the error do not count, or the share
    could be more than all of it.
    """
    hurting = sorted((layer for layer in layers if layer.added > 0), key=lambda each: -each.added)
    worst = [layer for layer in hurting if layer.extra_bytes_in_bf16][:NAMED_LAYERS]
    if not worst:
        return ""
    share = sum(layer.added for layer in worst) / sum(layer.added for layer in hurting)
    extra = sum(layer.extra_bytes_in_bf16 for layer in worst)
    names = listed([str(layer.layer) for layer in worst])
    subject, it = (
        (f"Layer {names} adds", "it") if len(worst) == 1 else (f"Layers {names} add", "they")
    )
    return (
        f"{subject} {share:.0%} of the error in the hidden states; kept in BF16, {it} would take"
        f" {show_bytes(extra)} more ({extra / own.tensor_bytes:+.0%})."
    )


def _size(source: Footprint, own: Footprint, newly_fits: Sequence[Fitting]) -> str:
    share = own.disk_bytes / source.disk_bytes
    text = (
        f"It takes {show_bytes(own.disk_bytes)} on disk, {share:.0%} of the source;"
        f" {own.bits_per_weight:.2f} bits a weight."
    )
    if newly_fits:
        machines = listed([f"{found.count} x {found.label}" for found in smallest_each(newly_fits)])
        text += f" It fits where the source does not: {machines}."
    return text


def listed(names: Sequence[str]) -> str:
    """`3`, `3 and 5`, `3, 5 and 7`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
