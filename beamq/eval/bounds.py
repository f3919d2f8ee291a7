"""Is a candidate within what its recipe allows it to lose, and if not, where does it go wrong?

In: a candidate's `Findings`, and the `Bounds` of its recipe. Out: `Breach`es, and the first layer
where the two streams part.

Which bounds: those of the built-in recipe the folder names; those that its own recipe brought
along, where it is no built-in one; for a folder that names none, those of the built-in recipe
that quantizes the same parts. Never looser ones than a name promises because a file says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from beamq.errors import RecipeError
from beamq.eval.divergence import Divergence
from beamq.eval.findings import Findings
from beamq.formats.layout import Unit
from beamq.recipe import BUILT_IN, Bounds, load_recipe, parse_recipe
from beamq.roles import Role

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


def limits_for(
    manifest: Mapping[str, Any] | None, fmt: str | None, units: frozenset[Unit]
) -> Limits:
    """By beamq.json's recipe, else by what is stored in `fmt`. Unquantized: no limits."""
    if fmt is None:
        return Limits(recipe=None, bounds=Bounds())
    named = (manifest or {}).get("recipe")
    if isinstance(named, Mapping):
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
