"""How far one model's next-token distributions are from another's: KL, perplexity, top tokens.

In: FP32 logits [T, V] of the source ("base") and of a candidate, some tokens at a time, and the
token that really follows each. Out: a few numbers a token (`TokenScores`), then a `Divergence`.

The one idea: logits are never stored. Each chunk of tokens is reduced to four numbers a token
while it is there; log-softmax and sums are in FP64, so that the KL of nearly equal distributions
is not the rounding error of two logarithms. Equal logits give exactly 0 and 100%.

Measures that llama.cpp's perplexity tool prints have its names (KLD, PPL, Δp, same top p) and
mean the same, natural logarithms and KL(base || candidate) included. One thing differs: that tool
scores the second half of each context, here every position counts, and every position that is
followed by a token of its row counts for perplexity and Δp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from beamq.eval.estimates import Estimate, Floats, mean, quantiles, rms

TOP = 5
CHUNK_ELEMENTS = 1 << 22  # FP64 temporaries of 32 MiB
KLD_SHARES = (0.5, 0.9, 0.99, 0.999, 1.0)
HISTOGRAM_LOW, HISTOGRAM_HIGH, HISTOGRAM_STEP = -8.0, 2.0, 0.25  # log10 of nats


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseScores:
    """What the source says about a chunk of tokens; kept while the candidates are scored."""

    logp_TV: torch.Tensor
    p_TV: torch.Tensor
    top_Tk: torch.Tensor
    next_T: torch.Tensor
    logp_next_T: torch.Tensor


def score_base(logits_TV: torch.Tensor, next_T: torch.Tensor) -> BaseScores:
    """`next_T` is the token that follows each, or -1 where the row ends."""
    logp_TV = logits_TV.double().log_softmax(-1)
    return BaseScores(
        logp_TV=logp_TV,
        p_TV=logp_TV.exp(),
        top_Tk=_top(logits_TV),
        next_T=next_T,
        logp_next_T=_of_next(logp_TV, next_T),
    )


class TokenScores:
    """Scores of one candidate, a few numbers for each token seen so far."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._top = TOP

    def add(self, base: BaseScores, logits_TV: torch.Tensor) -> None:
        """Score the same chunk of tokens by the candidate's logits."""
        logp_TV = logits_TV.double().log_softmax(-1)
        top_Tk = _top(logits_TV)
        self._top = top_Tk.shape[1]
        logp_next_T = _of_next(logp_TV, base.next_T)
        shared_T = (base.top_Tk[:, :, None] == top_Tk[:, None, :]).sum((1, 2))
        same_T = base.top_Tk[:, 0] == top_Tk[:, 0]
        kld_T = logp_TV.neg_().add_(base.logp_TV).mul_(base.p_TV).sum(-1)
        columns = (kld_T, same_T, shared_T, base.next_T >= 0, base.logp_next_T, logp_next_T)
        self._parts.append(tuple(column.cpu().numpy() for column in columns))

    @property
    def kld_T(self) -> Floats:
        """KLD of each token so far."""
        return np.concatenate([part[0] for part in self._parts]).astype(np.float64)

    def result(self) -> Divergence:
        """The figures over all tokens."""
        kld_T, same_T, shared_T, followed_T, base_T, other_T = (
            np.concatenate(column) for column in zip(*self._parts, strict=True)
        )
        base_N, other_N = base_T[followed_T], other_T[followed_T]
        change_N = np.exp(other_N) - np.exp(base_N)
        at = quantiles(kld_T, KLD_SHARES)
        base, other, ratio = mean(-base_N), mean(-other_N), mean(base_N - other_N)
        return Divergence(
            tokens=kld_T.size,
            predicted=base_N.size,
            not_finite=int(np.count_nonzero(~np.isfinite(kld_T))),
            mean_kld=mean(kld_T),
            median_kld=at[0],
            kld_90=at[1],
            kld_99=at[2],
            kld_999=at[3],
            max_kld=at[4],
            ppl_base=_exp(base),
            ppl=_exp(other),
            ln_ppl_ratio=ratio,
            mean_delta_p=mean(change_N),
            rms_delta_p=rms(change_N),
            same_top=mean(same_T),
            top5_overlap=mean(shared_T / self._top),
            histogram=_histogram(kld_T),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Tokens by log10 of their KL divergence, in steps of a quarter from `low` on.

    `counts` has one entry for each step; what is less (exact zeros too) or more than the ends is
    in `below` and `above`.
    """

    low: float
    step: float
    counts: tuple[int, ...]
    below: int
    above: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A candidate against the source. KLD in nats, probabilities and shares from 0 to 1.

    `tokens` are behind KLD and top tokens, `predicted` (those a token follows in their row)
    behind perplexity and Δp; `not_finite` counts tokens whose KLD is no number.
    """

    tokens: int
    predicted: int
    not_finite: int
    mean_kld: Estimate
    median_kld: Estimate
    kld_90: Estimate
    kld_99: Estimate
    kld_999: Estimate
    max_kld: Estimate
    ppl_base: Estimate
    ppl: Estimate
    ln_ppl_ratio: Estimate
    mean_delta_p: Estimate
    rms_delta_p: Estimate
    same_top: Estimate
    top5_overlap: Estimate
    histogram: Histogram

    @property
    def exact(self) -> bool:
        """Whether not one token's distribution differs."""
        return self.max_kld.value == 0.0 and not self.not_finite


def _top(logits_TV: torch.Tensor) -> torch.Tensor:
    return logits_TV.topk(min(TOP, logits_TV.shape[1]), dim=-1)[1]


def _of_next(logp_TV: torch.Tensor, next_T: torch.Tensor) -> torch.Tensor:
    """log-probability of the token that follows; of token 0 where none does."""
    return logp_TV.gather(1, next_T.clamp(min=0)[:, None])[:, 0]


def _exp(log: Estimate) -> Estimate:
    value = math.exp(min(log.value, 700.0)) if not math.isnan(log.value) else math.nan
    return log.map(value, value)


def _histogram(kld_T: Floats) -> Histogram:
    steps = round((HISTOGRAM_HIGH - HISTOGRAM_LOW) / HISTOGRAM_STEP)
    with np.errstate(divide="ignore", invalid="ignore"):
        place_T = np.floor((np.log10(kld_T) - HISTOGRAM_LOW) / HISTOGRAM_STEP)
    place_T = np.nan_to_num(place_T, nan=-1.0, posinf=steps, neginf=-1.0)
    counts = np.bincount(np.clip(place_T, -1, steps).astype(int) + 1, minlength=steps + 2)
    return Histogram(
        low=HISTOGRAM_LOW,
        step=HISTOGRAM_STEP,
        counts=tuple(int(count) for count in counts[1:-1]),
        below=int(counts[0]),
        above=int(counts[-1]),
    )
