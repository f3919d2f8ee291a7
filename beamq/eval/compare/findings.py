"""What a run side by side found of each candidate, and how the findings of ranks become one's.

In: what is gathered on the way through the layers, at each rank. Out: `Findings`, those that one
process would have.

The one idea: hidden states, routers and logits are alike at every rank, so what is said of those
is the first rank's. Of experts each rank has only its own: errors of their linears are put together
in the order in which one process meets them. A tensor is damaged if any rank has read it so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from beamq.beam.tensors import Role, classify
from beamq.errors import RecipeError
from beamq.eval.compare.metrics import Divergence, Estimate, LayerError, RouteRecorder, TokenScores
from beamq.eval.compare.weight_error import WeightError
from beamq.io.manifest import Manifest
from beamq.plan.layout import Unit
from beamq.plan.recipe import BUILT_IN, Bounds, load_recipe, parse_recipe


@dataclass(slots=True, kw_only=True)
class Findings:
    """One candidate against the source.

    `activations_kld` is the mean KL with exact weights and served activations; None where none are
    quantized. `kld_ratio` is the mean KL over the first candidate's, paired; None for that one.
    `damaged` are tensors whose bytes are not those that its beamq.json records.
    """

    divergence: Divergence
    activations_kld: Estimate | None = None
    kld_ratio: Estimate | None = None
    layers: tuple[LayerError, ...]
    weights: tuple[WeightError, ...]
    changed: tuple[str, ...]
    damaged: tuple[str, ...] = ()


@dataclass(slots=True)
class Gathered:
    """What is gathered of a candidate on the way."""

    scores: TokenScores = field(default_factory=TokenScores)
    floor: TokenScores | None = None
    routes: RouteRecorder = field(default_factory=RouteRecorder)
    layers: list[LayerError] = field(default_factory=list)
    weights: list[WeightError] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    @property
    def square(self) -> float:
        """Squared relative error behind the last layer so far."""
        return self.layers[-1].relative.value ** 2 if self.layers else 0.0

    def findings(self) -> Findings:
        """What it comes to, without what other candidates and checksums say."""
        return Findings(
            divergence=self.scores.result(),
            activations_kld=None if self.floor is None else self.floor.result().mean_kld,
            layers=tuple(self.layers),
            weights=tuple(self.weights),
            changed=tuple(self.changed),
        )


def of_all_ranks(found: Sequence[Sequence[Findings]]) -> list[Findings]:
    """The candidates' findings from those at each rank, in order of rank."""
    return [_merged(shares) for shares in zip(*found, strict=True)]


def _merged(shares: Sequence[Findings]) -> Findings:
    first, *others = shares
    experts = [w for share in others for w in share.weights if _turn(w.module)]
    weights = sorted([*first.weights, *experts], key=lambda w: (w.layer, _turn(w.module)))
    damaged = {name for share in shares for name in share.damaged}
    return replace(first, weights=tuple(weights), damaged=tuple(sorted(damaged)))


def _turn(module: str) -> int:
    """When a layer's linears come: what every rank has, all experts' gate and up, then their down.

    Within each, ranks are in the order of experts.
    """
    if classify(f"{module}.weight").role is not Role.EXPERT:
        return 0
    return 2 if module.endswith(".down_proj") else 1


# Is a candidate within what its recipe allows it to lose, and if not, where does it go wrong?
#
# In: a candidate's `Findings`, and the `Bounds` of its recipe. Out: `Breach`es, and the first layer
# where the two streams part.
#
# Which bounds: those of the built-in recipe the folder names; those that its own recipe brought
# along, where it is no built-in one; for a folder that names none, those of the built-in recipe
# that quantizes the same parts. Never looser ones than a name promises because a file says so.

MEASURES = ("finite", "mean_kld", "same_top", "router_overlap", "weight_error", "unquantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One thing out of bounds: which measure, a sentence without a full stop, and its layer."""

    measure: str
    text: str
    layer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds and the name of the recipe they are of; `recipe` is None where nothing is known."""

    recipe: str | None
    bounds: Bounds


def limits_for(manifest: Manifest | None, fmt: str | None, units: frozenset[Unit]) -> Limits:
    """By beamq.json's recipe, else by what is stored in `fmt`. Unquantized: no limits."""
    if fmt is None:
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
    alike = _like(fmt, frozenset(role for _, role in units))
    return Limits(recipe=alike, bounds=load_recipe(alike).bounds)


def _like(fmt: str, roles: frozenset[Role]) -> str:
    """The built-in recipe of a format that quantizes these roles and the fewest others."""
    recipes = [load_recipe(name) for name in BUILT_IN]
    covering = [r for r in recipes if r.format == fmt and roles <= r.rules.keys()]
    return min(covering, key=lambda recipe: len(recipe.rules)).name


def breaches(findings: Findings, bounds: Bounds) -> tuple[Breach, ...]:
    """All of them, in the order of `MEASURES`."""
    checks = (
        _finite(findings.divergence),
        _kld(findings.divergence, bounds),
        _top(findings.divergence, bounds),
        _router(findings, bounds),
        _weights(findings, bounds),
        _unquantized(findings),
    )
    return tuple(breach for breach in checks if breach is not None)


def parting_layer(findings: Findings, found: tuple[Breach, ...]) -> int | None:
    """The first layer where the streams part: the first one that a breach names, or the first
    whose hidden states are not finite or lose at least half as much as those of the worst."""
    named = [breach.layer for breach in found if breach.layer is not None]
    for layer in findings.layers:
        if not math.isfinite(layer.relative.value):
            return min([layer.layer, *named])
    worst = max((layer.added for layer in findings.layers), default=0.0)
    jumps = [each.layer for each in findings.layers if worst > 0 and each.added >= worst / 2]
    return min(named or jumps, default=None)


def _finite(divergence: Divergence) -> Breach | None:
    if not divergence.not_finite:
        return None
    return Breach(
        measure="finite",
        text=f"logits of {divergence.not_finite:,} of {divergence.tokens:,} tokens are not finite",
    )


def _kld(divergence: Divergence, bounds: Bounds) -> Breach | None:
    found, limit = divergence.mean_kld.value, bounds.mean_kld
    if limit is None or found <= limit or divergence.not_finite:
        return None
    return Breach(measure="mean_kld", text=f"mean KLD {found:.4f} nats, at most {limit:g} expected")


def _top(divergence: Divergence, bounds: Bounds) -> Breach | None:
    found, limit = divergence.same_top.value, bounds.same_top
    if limit is None or found >= limit:
        return None
    return Breach(
        measure="same_top", text=f"same top token {found:.1%}, at least {limit:.1%} expected"
    )


def _router(findings: Findings, bounds: Bounds) -> Breach | None:
    limit = bounds.router_overlap
    low = [
        (layer, layer.router.overlap.value)
        for layer in findings.layers
        if limit is not None and layer.router is not None and layer.router.overlap.value < limit
    ]
    if not low:
        return None
    layer, found = low[0]
    more = f" and {len(low) - 1} more" if len(low) > 1 else ""
    return Breach(
        measure="router_overlap",
        text=f"layer {layer.layer}{more}: routers choose {found:.1%} of the same experts, at least"
        f" {limit:.1%} expected",
        layer=_cause(findings, layer.layer),
    )


def _cause(findings: Findings, router_layer: int) -> int:
    """A router errs for what came before it (the worst layer up to its own), if it is sound."""
    if any(name.startswith(f"model.layers.{router_layer}.mlp.gate.") for name in findings.changed):
        return router_layer
    before = [each for each in findings.layers if each.layer < router_layer and each.added > 0]
    return max(before, key=lambda layer: layer.added).layer if before else router_layer


def _weights(findings: Findings, bounds: Bounds) -> Breach | None:
    limit = bounds.weight_error
    bad = [
        weight
        for weight in findings.weights
        if limit is not None and not weight.relative_rms <= limit
    ]
    if not bad:
        return None
    first = bad[0]
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return Breach(
        measure="weight_error",
        text=f"{first.module}{more}: error {first.relative_rms:.3f} of the source's RMS, at most"
        f" {limit:g} expected",
        layer=first.layer,
    )


def _unquantized(findings: Findings) -> Breach | None:
    if not findings.changed:
        return None
    first, count = findings.changed[0], len(findings.changed)
    more = f" and {count - 1} more" if count > 1 else ""
    return Breach(
        measure="unquantized",
        text=f"{first}{more}: not quantized, and yet not the source's",
        layer=_layer_of(first),
    )


def _layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if name.startswith("model.layers.") else None
