"""The records of a comparison, whose fields are the keys of `report.json`.

In: what `compare` found. Out: a `Comparison`. docs/report-schema.md describes its `to_dict`;
`SCHEMA` rises when a key changes its meaning or is removed, not when one is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from beamq.eval.compare.findings import Breach, Findings
from beamq.eval.compare.footprint import Fitting, Footprint, LayerSize, smallest_each
from beamq.eval.compare.metrics import LayerError
from beamq.eval.compare.weight_error import WeightError
from beamq.plan.recipe import Bounds
from beamq.units import plain

SCHEMA = 1


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
    """Whether a candidate is safe to serve, as far as the `bounds` of the recipe `bounds_of` can
    tell; `safe` is None where no bounds apply. `text` gives the reasons in a few sentences."""

    safe: bool | None
    headline: str
    text: str
    breaches: tuple[Breach, ...]
    parting_layer: int | None
    bounds_of: str | None
    bounds: Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Findings):
    """One candidate: what was found of it, the verdict, and the machines that fit it only."""

    model: ComparedModel
    verdict: SafetyVerdict
    newly_fits: tuple[Fitting, ...]
    notes: tuple[str, ...]

    def worst_linears(self, count: int = 20) -> Sequence[WeightError]:
        """The linears with the largest relative error, in falling order; ties by name."""
        return sorted(self.linears, key=lambda each: (-each.relative_rms, each.module))[:count]

    def worst_layers(self) -> Sequence[LayerError]:
        """All layers by falling part of the error."""
        return sorted(self.layers, key=lambda each: (-each.added, each.layer))

    def fewest_gpus(self) -> Sequence[Fitting]:
        """Of the machines that fit the candidate only, the smallest of each kind of GPU."""
        return smallest_each(self.newly_fits)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; the model's keys are not nested."""
        data: dict[str, Any] = plain(self)
        data["newly_fits"] = [{**plain(each), "label": each.label} for each in self.newly_fits]
        return {**data.pop("model"), **data}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The source, and each candidate against it. `data` is the record of the text."""

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


def completed(
    layers: Sequence[LayerError], sizes: Mapping[int, LayerSize], kinds: Sequence[str]
) -> tuple[LayerError, ...]:
    """The layers with their share of the error, their sizes, and their kind in a word or two."""
    total = sum(layer.added for layer in layers)
    nothing = LayerSize(quantized=0, bf16=0)
    return tuple(
        replace(
            layer,
            kind=kind,
            share=layer.added / total if total else 0.0,
            quantized_bytes=(size := sizes.get(layer.layer, nothing)).quantized,
            extra_bytes_in_bf16=size.bf16 - size.quantized,
        )
        for layer, kind in zip(layers, kinds, strict=True)
    )
