"""What a candidate's hidden states and router choices are worth after each layer.

In: hidden states of source and candidate behind the same layer, and both routers' choices, batch
by batch. Out: a `LayerError` for each layer.

The one idea: after layer l each token has a noise power |h' - h|^2 and a signal power |h|^2. The
relative error is the root of the ratio of their sums. Ratios of powers add up where noise is
independent, so `added` is the growth of that ratio over the layer, and all of them sum to the
ratio behind the last layer. It is the layer's own damage together with what it makes of noise
that comes in (it may be negative: a layer that is sure of itself averages noise away).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from beamq.eval.estimates import Estimate, mean, root_of_ratio
from beamq.model.observe import Quiet

CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterAgreement:
    """Both routers on the same token: share of tokens with the same experts, mean overlap."""

    same_experts: Estimate
    overlap: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """Behind one layer. `relative` and `sqnr_db` say the same; `sqnr_db` is None for no error.

    `added` is the layer's part of relative**2. `router` is None for dense layers.
    """

    layer: int
    relative: Estimate
    sqnr_db: float | None
    added: float
    router: RouterAgreement | None


class RouteRecorder(Quiet):
    """Keeps a layer's router choices, one tensor a batch, until `take`."""

    expert_inputs = False

    def __init__(self) -> None:
        self._chosen: list[torch.Tensor] = []

    def routing(
        self,
        layer: int,
        logits_TE: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
    ) -> None:
        """Keep the choice."""
        self._chosen.append(experts_Tk)

    def take(self) -> list[torch.Tensor]:
        """The choices of all batches since the last call."""
        chosen, self._chosen = self._chosen, []
        return chosen


class Powers:
    """Noise and signal of every token behind one layer, batch by batch."""

    def __init__(self) -> None:
        self._noise: list[torch.Tensor] = []
        self._signal: list[torch.Tensor] = []

    def add(self, base_TK: torch.Tensor, other_TK: torch.Tensor) -> None:
        """One batch's hidden states."""
        step = max(1, CHUNK_ELEMENTS // base_TK.shape[1])
        for start in range(0, base_TK.shape[0], step):
            signal_TK = base_TK[start : start + step].float()
            noise_TK = other_TK[start : start + step].float() - signal_TK
            self._noise.append(_power(noise_TK).cpu())
            self._signal.append(_power(signal_TK).cpu())

    def relative(self) -> Estimate:
        """sqrt(noise / signal) over all tokens."""
        return root_of_ratio(
            torch.cat(self._noise).numpy(),
            torch.cat(self._signal).numpy(),
        )


def _power(x_TK: torch.Tensor) -> torch.Tensor:
    """|x|^2 of each token: an FP32 norm, which is precise enough, squared in FP64."""
    norm_T: torch.Tensor = torch.linalg.vector_norm(x_TK, dim=-1)
    return norm_T.double().square()


def layer_error(
    layer: int, powers: Powers, before: float, router: RouterAgreement | None
) -> LayerError:
    """`before` is the squared relative error behind the layer before."""
    relative = powers.relative()
    square = relative.value**2
    return LayerError(
        layer=layer,
        relative=relative,
        sqnr_db=sqnr_db(square),
        added=square - before,
        router=router,
    )


def sqnr_db(noise_to_signal: float) -> float | None:
    """Signal over noise in decibels; None where there is no noise, or no sense in it."""
    if not noise_to_signal or not math.isfinite(noise_to_signal):
        return None
    return -10 * math.log10(noise_to_signal)


def router_agreement(
    base: Sequence[torch.Tensor], other: Sequence[torch.Tensor]
) -> RouterAgreement | None:
    """Choices [T, k] of all batches of one layer; None for a layer without a router."""
    if not base:
        return None
    shares = []
    for base_Tk, other_Tk in zip(base, other, strict=True):
        shared_T = (base_Tk[:, :, None] == other_Tk[:, None, :]).sum((1, 2))
        shares.append((shared_T / base_Tk.shape[1]).cpu().numpy())
    share_T = np.concatenate(shares)
    return RouterAgreement(same_experts=mean(share_T == 1.0), overlap=mean(share_T))
