"""The answer in words: is it safe to serve, which layers hurt, what would BF16 there cost?

In: a candidate's figures, bounds and sizes. Out: a `SafetyVerdict`. Every sentence states figures;
a figure that has no bound is told without a judgement.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamq.eval.compare.findings import Breach, Findings, Limits, breaches, parting_layer
from beamq.eval.compare.footprint import Fitting, Footprint, smallest_each
from beamq.eval.compare.metrics import Divergence
from beamq.eval.compare.records import LayerDamage, SafetyVerdict
from beamq.io.safetensors_header import few
from beamq.units import show_bytes

NAMED_LAYERS = 3
CAVEAT = (
    "The verdict rests on next-token agreement with the source on this text and on the error of"
    " every linear. It says that the conversion is sound, not how a task will score. Bounds are"
    " those of the recipe; standard errors are over tokens of this text alone."
)
CLOSE = 2.0  # standard errors within which a figure and its bound cannot be told apart


def judge(
    findings: Findings,
    limits: Limits,
    damage: Sequence[LayerDamage],
    source: Footprint,
    own: Footprint,
    newly_fits: Sequence[Fitting],
) -> SafetyVerdict:
    """The verdict on one candidate."""
    broken = breaches(findings, limits.bounds)
    seen = findings.divergence
    parts = [
        _accuracy(seen, limits),
        *_close_calls(seen, limits),
        *(["Out of bounds: " + "; ".join(breach.text for breach in broken) + "."] * bool(broken)),
        _layers(damage, own),
        _size(source, own, newly_fits),
    ]
    safe = _safe(seen, limits, broken)
    parting = parting_layer(findings, broken) if broken else None
    headline = _headline(safe, seen, broken, parting)
    if findings.damaged:
        safe, headline = False, _damage(findings.damaged)
        parts.insert(0, "All figures are those of a damaged copy.")
    return SafetyVerdict(
        safe=safe,
        headline=headline,
        text=" ".join(part for part in parts if part),
        breaches=broken,
        parting_layer=parting,
    )


def _safe(seen: Divergence, limits: Limits, broken: Sequence[Breach]) -> bool | None:
    if broken:
        return False
    if seen.exact:
        return True
    return None if limits.recipe is None else True


def _headline(
    safe: bool | None, seen: Divergence, broken: Sequence[Breach], parting: int | None
) -> str:
    if safe is False:
        where = "" if parting is None else f"; it parts from the source at layer {parting}"
        return f"Not safe to serve: {broken[0].text}{where}."
    if seen.exact:
        return "Safe to serve: every distribution is exactly the source's."
    if safe is None:
        return "Not judged: nothing is quantized here, so no recipe's bounds apply."
    return "Safe to serve: every figure is within the bounds of its recipe."


def _damage(names: Sequence[str]) -> str:
    plural = "s are" if len(names) > 1 else " is"
    return (
        f"Not safe to serve: {len(names)} tensor{plural} not what beamq.json records"
        f" ({few(names)}); `beamq verify` tells more."
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
    pairs = (
        ("mean KLD", seen.mean_kld, limits.bounds.mean_kld),
        ("same top token", seen.same_top, limits.bounds.same_top),
    )
    return [
        f"The {name} is too close to its bound to be sure on {seen.tokens:,} tokens; use more"
        " --samples."
        for name, found, limit in pairs
        if limit is not None
        and found.standard_error
        and abs(found.value - limit) < CLOSE * found.standard_error
    ]


def _layers(damage: Sequence[LayerDamage], own: Footprint) -> str:
    """The quantized layers that hurt most, and what BF16 would cost there."""
    hurting = sorted((layer for layer in damage if layer.extra_bytes), key=lambda d: -d.added)
    worst = [layer for layer in hurting[:NAMED_LAYERS] if layer.added > 0]
    if not worst:
        return ""
    share = sum(layer.share for layer in worst)
    extra = sum(layer.extra_bytes for layer in worst)
    plural = "s" if len(worst) > 1 else ""
    verb = "adds" if len(worst) == 1 else "add"
    names = listed([str(layer.layer) for layer in worst])
    return (
        f"Layer{plural} {names} {verb} {share:.0%} of the error in the hidden states; kept in"
        f" BF16, {'they' if plural else 'it'} would take {show_bytes(extra)} more"
        f" ({extra / own.tensors:+.0%})."
    )


def _size(source: Footprint, own: Footprint, newly_fits: Sequence[Fitting]) -> str:
    text = (
        f"It takes {show_bytes(own.disk)} on disk, {own.disk / source.disk:.0%} of the source;"
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
