"""How far a candidate is from the source: next-token distributions, hidden states, routers.

In: logits, hidden states and router choices of both, batch by batch. Out: a `Divergence` of the
distributions, and a `LayerError` for each layer; their figures are `Estimate`s.

Three ideas.

1. Logits are never stored. `TokenScores` reduces each chunk of tokens to a few numbers a token.
   Log-softmax and sums are in FP64, or the KL of nearly equal distributions would be the rounding
   error of two logarithms. Equal logits give exactly 0 and 100%.
2. After each layer a token has a noise power |h' - h|^2 and a signal power |h|^2. The relative
   error is the root of the ratio of their sums. A layer's `added` is the growth of that ratio over
   the layer. It may be negative: some layers average incoming noise away.
3. Standard errors are over rows (sequences), not tokens: tokens of one text depend on each other,
   and errors over tokens would be 2 to 3 times too small. The functions below take values [R, T]
   of R rows, or [R] where each value is a row of its own.

Names and meaning are those of llama.cpp's perplexity tool (KLD, PPL, Δp, same top p). That tool
scores the second half of each context; here every position counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from beamq.model.context import Observer

Floats = NDArray[np.float64]
TOP = 5
CHUNK_ELEMENTS = 1 << 22  # FP64 temporaries of 32 MiB
LAYER_CHUNK_ELEMENTS = 1 << 24
KLD_SHARES = (0.5, 0.9, 0.99, 0.999, 1.0)
HISTOGRAM_LOW, HISTOGRAM_HIGH, HISTOGRAM_STEP = -8.0, 2.0, 0.25  # log10 of nats


# --- figures ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and its standard error.

    A largest value has no standard error, nor has a figure over fewer than two rows. The figure is
    NaN where a value is not finite; it is never a figure of the remaining values.
    """

    value: float
    standard_error: float | None = None

    def __format__(self, spec: str) -> str:
        """`0.0205 ± 0.0004` by the format of a number; a `+` there signs the value alone."""
        value = format(self.value, spec)
        if self.standard_error is None:
            return value
        return f"{value} ± {format(self.standard_error, spec.removeprefix('+'))}"

    def map(self, value: float, slope: float) -> Estimate:
        """A function of this figure, by its value and its derivative there."""
        error = self.standard_error
        return Estimate(value=value, standard_error=None if error is None else abs(slope) * error)


def mean(x_RT: NDArray[np.generic]) -> Estimate:
    """The mean. NaN for no tokens."""
    x = x_RT.astype(np.float64)
    if not x.size:
        return Estimate(value=math.nan)
    rows = x.reshape(len(x), -1).mean(1)
    error = float(rows.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else None
    return Estimate(value=float(x.mean()), standard_error=error)


def rms(x_RT: Floats) -> Estimate:
    """Root of the mean square."""
    square = mean(np.square(x_RT))
    root = math.sqrt(square.value)
    return square.map(root, 0.5 / root if root else 0.0)


def quantiles(x_RT: Floats, shares: tuple[float, ...]) -> list[Estimate]:
    """Quantiles, interpolated between neighbours; a share of 1 is the largest value.

    The standard error of the p-quantile q is half the distance between the quantiles of p - e and
    p + e, where e is the standard error of the share of values up to q (Woodruff 1952): no shape of
    the distribution is assumed.
    """
    if not x_RT.size or np.isnan(x_RT).any():
        return [Estimate(value=math.nan) for _ in shares]
    ordered = np.sort(x_RT, axis=None)
    found = []
    for share in shares:
        value = float(np.quantile(ordered, share))
        spread = mean(x_RT <= value).standard_error if 0 < share < 1 else None
        error = None
        if spread is not None:
            low, high = np.quantile(ordered, np.clip([share - spread, share + spread], 0.0, 1.0))
            error = float(high - low) / 2
        found.append(Estimate(value=value, standard_error=error))
    return found


def ratio_of_means(x_RT: Floats, y_RT: Floats) -> Estimate:
    """mean(x) / mean(y) over the same tokens; the error is that of the paired difference."""
    base = float(y_RT.mean()) if y_RT.size else 0.0
    if not base or not math.isfinite(base):
        return Estimate(value=math.nan)
    value = float(x_RT.mean()) / base
    rest = mean(x_RT - value * y_RT)
    error = None if rest.standard_error is None else rest.standard_error / abs(base)
    return Estimate(value=value, standard_error=error)


def root_of_ratio(noise_RT: Floats, signal_RT: Floats) -> Estimate:
    """sqrt(sum of noise / sum of signal): a relative error over all tokens."""
    if not signal_RT.any():
        return Estimate(value=0.0 if not noise_RT.any() else math.inf)
    ratio = ratio_of_means(noise_RT, signal_RT)
    root = math.sqrt(ratio.value) if math.isfinite(ratio.value) else math.nan
    return ratio.map(root, 0.5 / root if root else 0.0)


# --- next-token distributions -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseScores:
    """The source's scores of a chunk of T tokens, used for every candidate."""

    logp_TV: torch.Tensor
    p_TV: torch.Tensor
    top_Tk: torch.Tensor
    next_T: torch.Tensor
    logp_next_T: torch.Tensor


def score_base(logits_TV: torch.Tensor, next_T: torch.Tensor) -> BaseScores:
    """Scores of FP32 logits; `next_T` is the token that follows each, -1 at the end of a row."""
    logp_TV = logits_TV.double().log_softmax(-1)
    return BaseScores(
        logp_TV=logp_TV,
        p_TV=logp_TV.exp(),
        top_Tk=_top(logits_TV),
        next_T=next_T,
        logp_next_T=_of_next(logp_TV, next_T),
    )


class TokenScores:
    """A few numbers for each token that one candidate has been scored on, in rows of one length."""

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

    def _rows(self) -> list[NDArray[Any]]:
        """The columns of all tokens, [R, T]; tokens without the end of a row are one row."""
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        ends = int(np.count_nonzero(~columns[3]))
        return [column.reshape(max(1, ends), -1) for column in columns]

    @property
    def kld_RT(self) -> Floats:
        """KL divergence of each token so far, in nats."""
        return self._rows()[0].astype(np.float64)

    def result(self) -> Divergence:
        """The figures over all tokens."""
        kld_RT, same_RT, shared_RT, followed_RT, base_RT, other_RT = self._rows()
        base_RN, other_RN = (
            column[followed_RT].reshape(len(kld_RT), -1) for column in (base_RT, other_RT)
        )
        change_RN = np.exp(other_RN) - np.exp(base_RN)
        at = quantiles(kld_RT, KLD_SHARES)
        return Divergence(
            tokens=kld_RT.size,
            predicted=base_RN.size,
            not_finite=int(np.count_nonzero(~np.isfinite(kld_RT))),
            mean_kld=mean(kld_RT),
            median_kld=at[0],
            kld_90=at[1],
            kld_99=at[2],
            kld_999=at[3],
            max_kld=at[4],
            ppl_base=_exp(mean(-base_RN)),
            ppl=_exp(mean(-other_RN)),
            ln_ppl_ratio=mean(base_RN - other_RN),
            mean_delta_p=mean(change_RN),
            rms_delta_p=rms(change_RN),
            same_top=mean(same_RT),
            top5_overlap=mean(shared_RT / self._top),
            kld_histogram=_histogram(kld_RT.flatten()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Tokens by log10 of their KL divergence: `counts` for each `step` from `low` on.

    `below` and `above` count the tokens outside, `below` with those whose KL is exactly 0.
    """

    low: float
    step: float
    counts: tuple[int, ...]
    below: int
    above: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A candidate against the source. KLD in nats, probabilities and shares from 0 to 1.

    KLD and top tokens are over `tokens`; perplexity and Δp over `predicted`, the tokens that
    another one follows in their row. `not_finite` counts tokens whose KLD is not a number.
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
    kld_histogram: Histogram

    @property
    def exact(self) -> bool:
        """Whether every token has exactly the source's distribution."""
        return self.max_kld.value == 0.0 and not self.not_finite


def _top(logits_TV: torch.Tensor) -> torch.Tensor:
    return logits_TV.topk(min(TOP, logits_TV.shape[1]), dim=-1)[1]


def _of_next(logp_TV: torch.Tensor, next_T: torch.Tensor) -> torch.Tensor:
    """Log-probability of the token that follows; of token 0 at the end of a row."""
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


# --- hidden states and routers ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """A candidate after one layer. `relative_error` and `sqnr_db` are the same figure; `sqnr_db` is
    None where nothing differs.

    `added` is the layer's part of the squared relative error after the last layer, `share` that
    part over the whole. `same_experts` is the share of tokens whose router chooses exactly the
    source's experts, `expert_overlap` the share of the chosen experts in common; both are None for
    dense layers. `compare` fills in `kind` ("sliding, sparse"), `share`, and the bytes of the
    layer's quantized linears: `quantized_bytes`, and how many more they would take in BF16.
    """

    layer: int
    kind: str = ""
    relative_error: Estimate
    sqnr_db: float | None
    added: float
    share: float = 0.0
    same_experts: Estimate | None = None
    expert_overlap: Estimate | None = None
    quantized_bytes: int = 0
    extra_bytes_in_bf16: int = 0


class RouteRecorder(Observer):
    """Keeps a layer's router choices, one tensor a batch, until `take`."""

    expert_inputs = False

    def __init__(self) -> None:
        self._chosen: list[torch.Tensor] = []

    def routing(
        self, layer: int, logits_TE: torch.Tensor, experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
    ) -> None:  # fmt: skip
        """Keep the choice."""
        self._chosen.append(experts_Tk)

    def take(self) -> list[torch.Tensor]:
        """The choices of all batches since the last call."""
        chosen, self._chosen = self._chosen, []
        return chosen


def layer_error(
    layer: int,
    states: Iterable[tuple[torch.Tensor, torch.Tensor]],
    before: float,
    length: int,
    base: Sequence[torch.Tensor] = (),
    other: Sequence[torch.Tensor] = (),
) -> LayerError:
    """One layer's error, from the hidden states [T, K] of source and candidate in all batches.

    `before` is the squared relative error after the previous layer, `length` the tokens of a row;
    `base` and `other` are both routers' choices [T, k] in all batches, empty for a dense layer.
    """
    noise: list[torch.Tensor] = []
    signal: list[torch.Tensor] = []
    for base_TK, other_TK in states:
        step = max(1, LAYER_CHUNK_ELEMENTS // base_TK.shape[1])
        for start in range(0, base_TK.shape[0], step):
            signal_TK = base_TK[start : start + step].float()
            noise_TK = other_TK[start : start + step].float() - signal_TK
            noise.append(power(noise_TK).cpu())
            signal.append(power(signal_TK).cpu())
    noise_RT, signal_RT = (torch.cat(x).numpy().reshape(-1, length) for x in (noise, signal))
    relative = root_of_ratio(noise_RT, signal_RT)
    square = relative.value**2
    share_RT = _overlap(base, other).reshape(-1, length) if base else None
    return LayerError(
        layer=layer,
        relative_error=relative,
        sqnr_db=sqnr_db(square),
        added=square - before,
        same_experts=None if share_RT is None else mean(share_RT == 1.0),
        expert_overlap=None if share_RT is None else mean(share_RT),
    )


def power(x_TK: torch.Tensor) -> torch.Tensor:
    """|x|^2 of each row: an FP32 norm, which is accurate enough, squared in FP64."""
    norm_T: torch.Tensor = torch.linalg.vector_norm(x_TK, dim=-1)
    return norm_T.double().square()


def sqnr_db(noise_to_signal: float) -> float | None:
    """Signal over noise in decibels; None for no noise, and where the ratio is not finite."""
    if not noise_to_signal or not math.isfinite(noise_to_signal):
        return None
    return -10 * math.log10(noise_to_signal)


def _overlap(base: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> NDArray[Any]:
    """For each token, the share of the chosen experts that both routers choose, in any order."""
    shares = []
    for base_Tk, other_Tk in zip(base, other, strict=True):
        shared_T = (base_Tk[:, :, None] == other_Tk[:, None, :]).sum((1, 2))
        shares.append((shared_T.float() / base_Tk.shape[1]).cpu().numpy())
    return np.concatenate(shares)
