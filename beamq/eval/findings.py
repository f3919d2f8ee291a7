"""What a run side by side found of each candidate, and how the findings of ranks become one's.

In: what is gathered on the way through the layers, at each rank. Out: `Findings`, those that one
process would have.

The one idea: hidden states, routers and logits are alike at every rank, so what is said of those
is the first rank's. Of experts each rank has only its own: errors of their linears are put together
in the order in which one process meets them. A tensor is damaged if any rank has read it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from beamq.eval.divergence import Divergence, TokenScores
from beamq.eval.estimates import Estimate
from beamq.eval.layer_error import LayerError, RouteRecorder
from beamq.eval.weight_error import WeightError
from beamq.roles import Role, classify


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
