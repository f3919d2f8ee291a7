"""The records of a comparison, and the JSON they become: `report.json`, documented and versioned.

In: what `compare` found. Out: a `Comparison`. docs/report-schema.md describes `to_dict`; `SCHEMA`
is raised when a key changes its meaning or goes away, not when one is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from beamq.eval.compare.findings import Breach, Limits
from beamq.eval.compare.footprint import Fitting, Footprint, LayerSize, smallest_each
from beamq.eval.compare.metrics import Divergence, Estimate, LayerError
from beamq.eval.compare.weight_error import WeightError

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """One of the models compared. `name` is unique within a comparison and has no path in it."""

    name: str
    format: str
    recipe: str | None
    input_scales: str | None
    footprint: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyVerdict:
    """Whether a candidate may be served, as far as bounds can tell; None where none apply.

    `text` is the answer in a few sentences, `reasons` what it rests on.
    """

    safe: bool | None
    headline: str
    text: str
    breaches: tuple[Breach, ...]
    parting_layer: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDamage:
    """What one layer costs, and what keeping it in BF16 would.

    `share` is its part of the error behind the last layer (`LayerError.added`, over the sum);
    `extra_bytes` what its linears would take more in BF16, 0 where nothing is quantized.
    """

    layer: int
    kind: str
    added: float
    share: float
    relative: float
    router_overlap: float | None
    quantized_bytes: int
    extra_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One candidate against the source.

    `activations_kld` is what its quantized activations cost with exact weights, None where they are
    not quantized; `kld_ratio` its mean KLD over the first candidate's, None for that one.
    """

    model: ComparedModel
    divergence: Divergence
    activations_kld: Estimate | None = None
    kld_ratio: Estimate | None = None
    layers: tuple[LayerError, ...]
    damage: tuple[LayerDamage, ...]
    weights: tuple[WeightError, ...]
    changed: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    newly_fits: tuple[Fitting, ...]
    limits: Limits
    verdict: SafetyVerdict
    notes: tuple[str, ...]

    def worst_weights(self, count: int = 20) -> tuple[WeightError, ...]:
        """Linears by falling relative error; ties by name."""
        ordered = sorted(self.weights, key=lambda w: (-w.relative_rms, w.module))
        return tuple(ordered[:count])

    def fewest_gpus(self) -> list[Fitting]:
        """Of the machines that it fits and the source does not, the smallest of each GPU."""
        return smallest_each(self.newly_fits)

    def worst_layers(self) -> tuple[LayerDamage, ...]:
        """Layers by falling damage."""
        return tuple(sorted(self.damage, key=lambda layer: (-layer.added, layer.layer)))


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
        data = {
            "schema": SCHEMA,
            "source": _model(self.source),
            "candidates": [_candidate(candidate) for candidate in self.candidates],
            "data": self.data,
            "settings": self.settings,
            "seconds": self.seconds,
        }
        plain: dict[str, Any] = _finite(data)
        return plain


def _finite(value: Any) -> Any:
    """JSON has no word for NaN and infinity; its null stands for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _model(model: ComparedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "format": model.format,
        "recipe": model.recipe,
        "input_scales": model.input_scales,
        "memory": model.footprint.to_dict(),
    }


def _candidate(found: Candidate) -> dict[str, Any]:
    verdict = found.verdict
    return {
        **_model(found.model),
        "verdict": {
            "safe": verdict.safe,
            "headline": verdict.headline,
            "text": verdict.text,
            "breaches": [asdict(breach) for breach in verdict.breaches],
            "parting_layer": verdict.parting_layer,
            "bounds_of": found.limits.recipe,
            "bounds": asdict(found.limits.bounds),
        },
        "divergence": _divergence(found.divergence),
        "activations_only_kld": (
            None if found.activations_kld is None else found.activations_kld.to_dict()
        ),
        "kld_ratio_to_first": None if found.kld_ratio is None else found.kld_ratio.to_dict(),
        "layers": [
            _layer(error, damage) for error, damage in zip(found.layers, found.damage, strict=True)
        ],
        "linears": [asdict(weight) for weight in found.weights],
        "not_the_sources": list(found.changed),
        "damaged": list(found.damaged),
        "newly_fits": [asdict(fitting) for fitting in found.newly_fits],
        "notes": list(found.notes),
    }


def _divergence(found: Divergence) -> dict[str, Any]:
    """Estimates as {value, standard_error}, counts as they are."""
    data: dict[str, Any] = {}
    for entry in fields(found):
        value = getattr(found, entry.name)
        if isinstance(value, Estimate):
            data[entry.name] = value.to_dict()
        elif entry.name == "histogram":
            data["kld_histogram"] = asdict(value)
        else:
            data[entry.name] = value
    return data


def _layer(error: LayerError, damage: LayerDamage) -> dict[str, Any]:
    router = error.router
    return {
        "layer": error.layer,
        "kind": damage.kind,
        "relative_error": error.relative.to_dict(),
        "sqnr_db": error.sqnr_db,
        "added": error.added,
        "share": damage.share,
        "same_experts": None if router is None else router.same_experts.to_dict(),
        "expert_overlap": None if router is None else router.overlap.to_dict(),
        "quantized_bytes": damage.quantized_bytes,
        "extra_bytes_in_bf16": damage.extra_bytes,
    }


def damage_of(
    layers: tuple[LayerError, ...], sizes: tuple[LayerSize, ...], kinds: tuple[str, ...]
) -> tuple[LayerDamage, ...]:
    """Errors by layer joined with bytes by layer. `kinds` describes each layer in a word or two."""
    total = sum(layer.added for layer in layers)
    by_layer = {size.layer: size for size in sizes}
    found = []
    for error, kind in zip(layers, kinds, strict=True):
        size = by_layer.get(error.layer)
        overlap = None if error.router is None else error.router.overlap.value
        found.append(
            LayerDamage(
                layer=error.layer,
                kind=kind,
                added=error.added,
                share=error.added / total if total else 0.0,
                relative=error.relative.value,
                router_overlap=overlap,
                quantized_bytes=size.quantized if size else 0,
                extra_bytes=size.bf16 - size.quantized if size else 0,
            )
        )
    return tuple(found)
