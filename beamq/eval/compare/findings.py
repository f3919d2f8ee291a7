"""What a run finds of each candidate, whether that is within bounds, and where it goes wrong.

In: what is gathered on the way through the layers, at each rank; the `Bounds` of a recipe. Out:
`Findings`, `Breach`es of the bounds, and the first layer where source and candidate part.

Under torchrun every rank computes the same hidden states, routers and logits. Each rank has only
its own experts: the errors of their linears are put in the order in which a single process meets
them. A tensor is damaged if any rank has read it so.

Whose bounds apply: those of the built-in recipe that the folder names; of its own recipe, if that
is not a built-in one; for a folder that names none, those of the built-in recipe that quantizes
the same parts. A file cannot loosen the bounds of a built-in name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from beamq.beam.tensors import Role, classify
from beamq.errors import RecipeError
from beamq.eval.compare.metrics import Divergence, Estimate, LayerError, RouteRecorder, TokenScores
from beamq.eval.compare.weight_error import WeightError
from beamq.io.manifest import Manifest
from beamq.plan.layout import WEIGHT_FORMATS, Unit
from beamq.plan.recipe import BUILT_IN, Bounds, load_recipe, parse_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """One candidate against the source.

    `activations_only_kld` is the mean KL with the source's weights and activations quantized as the
    candidate's are; None where it quantizes none. `kld_ratio_to_first` is the mean KL over the
    first candidate's on the same tokens; None for the first. `linears` are quantized or differ;
    `not_the_sources` are unquantized tensors that differ from the source's; `damaged` are tensors
    whose bytes are not those that the candidate's beamq.json records.
    """

    divergence: Divergence
    activations_only_kld: Estimate | None = None
    kld_ratio_to_first: Estimate | None = None
    layers: tuple[LayerError, ...]
    linears: tuple[WeightError, ...]
    not_the_sources: tuple[str, ...]
    damaged: tuple[str, ...] = ()


@dataclass(slots=True)
class Gathered:
    """What is collected of a candidate; `floor` scores its activations with exact weights."""

    scores: TokenScores = field(default_factory=TokenScores)
    floor: TokenScores | None = None
    routes: RouteRecorder = field(default_factory=RouteRecorder)
    layers: list[LayerError] = field(default_factory=list)
    linears: list[WeightError] = field(default_factory=list)
    not_the_sources: list[str] = field(default_factory=list)

    @property
    def square(self) -> float:
        """Squared relative error after the last layer so far."""
        return self.layers[-1].relative_error.value ** 2 if self.layers else 0.0

    def findings(self) -> Findings:
        """The findings, without those that need other candidates or checksums."""
        return Findings(
            divergence=self.scores.result(),
            activations_only_kld=None if self.floor is None else self.floor.result().mean_kld,
            layers=tuple(self.layers),
            linears=tuple(self.linears),
            not_the_sources=tuple(self.not_the_sources),
        )


def of_all_ranks(found: Sequence[Sequence[Findings]]) -> list[Findings]:
    """One list of findings, a candidate each, from the lists of all ranks in order of rank."""
    merged = []
    for first, *others in zip(*found, strict=True):
        linears = [*first.linears]
        linears += [each for share in others for each in share.linears if _turn(each.module)]
        linears.sort(key=lambda each: (each.layer, _turn(each.module)))
        damaged = {name for share in (first, *others) for name in share.damaged}
        merged.append(replace(first, linears=tuple(linears), damaged=tuple(sorted(damaged))))
    return merged


def _turn(module: str) -> int:
    """The order of a layer's linears in a single process: 0 for those that every rank has, 1 for
    all experts' gate_proj and up_proj, 2 for their down_proj. Ranks hold experts in order."""
    if classify(f"{module}.weight").role is not Role.EXPERT:
        return 0
    return 2 if module.endswith(".down_proj") else 1


# --- bounds ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One thing out of bounds. `measure` is finite, mean_kld, same_top, router_overlap,
    weight_error or unquantized; `text` is a sentence without a full stop."""

    measure: str
    text: str
    layer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds, and the recipe that they belong to; None where nothing is quantized."""

    recipe: str | None
    bounds: Bounds


def limits_for(manifest: Manifest | None, formats: Mapping[Unit, str]) -> Limits:
    """Bounds of a checkpoint whose units are stored in `formats` (none: nothing is quantized)."""
    if not formats:
        return Limits(recipe=None, bounds=Bounds())
    named = None if manifest is None else manifest.recipe
    if named is not None:
        name = str(named.get("name"))
        if name in BUILT_IN:
            return Limits(recipe=name, bounds=load_recipe(name).bounds)
        try:
            own = parse_recipe(named, origin="beamq.json").bounds
        except RecipeError:
            own = Bounds()
        if own != Bounds():
            return Limits(recipe=name, bounds=own)
    stored = {(role, WEIGHT_FORMATS[fmt].rounding) for (_, role), fmt in formats.items()}
    closest = max(
        map(load_recipe, BUILT_IN),
        key=lambda recipe: (len(stored & recipe.rules.items()), -len(recipe.rules)),
    )
    return Limits(recipe=closest.name, bounds=closest.bounds)


def breaches(findings: Findings, bounds: Bounds) -> tuple[Breach, ...]:
    """Everything out of bounds, in the order of the measures."""
    found: list[Breach] = []

    def exceeds(measure: str, text: str, layer: int | None = None) -> None:
        found.append(Breach(measure=measure, text=text, layer=layer))

    seen = findings.divergence
    kld, top = seen.mean_kld.value, seen.same_top.value
    if seen.not_finite:
        count = f"{seen.not_finite:,} of {seen.tokens:,}"
        exceeds("finite", f"logits of {count} tokens are not finite")
    elif bounds.mean_kld is not None and not kld <= bounds.mean_kld:
        exceeds("mean_kld", f"mean KLD {kld:.4f} nats, at most {bounds.mean_kld:g} expected")
    if bounds.same_top is not None and not top >= bounds.same_top:
        exceeds("same_top", f"same top token {top:.1%}, at least {bounds.same_top:.1%} expected")
    least = bounds.router_overlap or 0.0
    low = [
        (layer.layer, layer.expert_overlap.value)
        for layer in findings.layers
        if layer.expert_overlap and layer.expert_overlap.value < least
    ]
    if low:
        layer, overlap = low[0]
        text = f"routers choose {overlap:.1%} of the same experts, at least {least:.1%} expected"
        exceeds("router_overlap", f"layer {layer}{_more(low)}: {text}", _cause(findings, layer))
    limit = bounds.weight_error
    if limit is not None and (bad := [x for x in findings.linears if not x.relative_rms <= limit]):
        text = f"error {bad[0].relative_rms:.3f} of the source's RMS, at most {limit:g} expected"
        exceeds("weight_error", f"{bad[0].module}{_more(bad)}: {text}", bad[0].layer)
    if names := findings.not_the_sources:
        text = f"{names[0]}{_more(names)}: not quantized, yet different from the source's"
        exceeds("unquantized", text, classify(names[0]).layer)
    return tuple(found)


def parting_layer(findings: Findings, found: tuple[Breach, ...]) -> int | None:
    """The first layer where candidate and source part: the first whose hidden states are not finite
    or that a breach names; without either, the first that adds at least half of the worst layer's
    error."""
    named = [breach.layer for breach in found if breach.layer is not None]
    for layer in findings.layers:
        if not math.isfinite(layer.relative_error.value):
            return min([layer.layer, *named])
    worst = max((layer.added for layer in findings.layers), default=0.0)
    jumps = [each.layer for each in findings.layers if worst > 0 and each.added >= worst / 2]
    return min(named or jumps, default=None)


def _cause(findings: Findings, router_layer: int) -> int:
    """The layer to blame for a router's choices: its own where the router is not the source's, else
    the one before it that adds the most error."""
    gate = f"model.layers.{router_layer}.mlp.gate."
    if any(name.startswith(gate) for name in findings.not_the_sources):
        return router_layer
    before = [each for each in findings.layers if each.layer < router_layer and each.added > 0]
    return max(before, key=lambda layer: layer.added).layer if before else router_layer


def _more(found: Sequence[object]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""
