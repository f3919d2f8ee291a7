"""Figures with their standard errors over tokens.

In: one FP64 number for each token. Out: an `Estimate` of a mean, a quantile, an RMS or a root of a
ratio of sums.

Standard errors treat tokens as independent draws. Tokens of one text are not quite: with text of
another kind a figure can move by more than its standard error, with more of the same text hardly.
A largest value has no standard error; it is None there, and wherever there are fewer than two
tokens. Values that are not finite make the figure NaN, never a figure of the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    standard_error: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """For JSON; what is not finite becomes null there."""
        return {"value": self.value, "standard_error": self.standard_error}

    def map(self, value: float, slope: float) -> Estimate:
        """A function of this figure, by its value and its derivative there."""
        error = self.standard_error
        return Estimate(value=value, standard_error=None if error is None else abs(slope) * error)


def mean(x_T: NDArray[np.generic]) -> Estimate:
    """The mean. NaN for no tokens."""
    x = x_T.astype(np.float64)
    if not x.size:
        return Estimate(value=math.nan)
    error = float(x.std(ddof=1)) / math.sqrt(x.size) if x.size > 1 else None
    return Estimate(value=float(x.mean()), standard_error=error)


def rms(x_T: Floats) -> Estimate:
    """Root of the mean square."""
    square = mean(np.square(x_T))
    root = math.sqrt(square.value)
    return square.map(root, 0.5 / root if root else 0.0)


def quantiles(x_T: Floats, shares: tuple[float, ...]) -> list[Estimate]:
    """Quantiles, interpolated between neighbours; a share of 1 is the largest value.

    The standard error of the p-quantile is half the distance between the values that stand
    sqrt(n p (1 - p)) places below and above it: no shape of the distribution is assumed.
    """
    if not x_T.size or np.isnan(x_T).any():
        return [Estimate(value=math.nan) for _ in shares]
    ordered = np.sort(x_T)
    last = ordered.size - 1
    found = []
    for share in shares:
        spread = math.sqrt(ordered.size * share * (1 - share)) / max(last, 1)
        error = None
        if 0 < share < 1 and last:
            ends = np.clip([share - spread, share + spread], 0.0, 1.0)
            low, high = np.quantile(ordered, ends)
            error = float(high - low) / 2
        value = float(np.quantile(ordered, share))
        found.append(Estimate(value=value, standard_error=error))
    return found


def ratio_of_means(x_T: Floats, y_T: Floats) -> Estimate:
    """mean(x) / mean(y) over the same tokens; the error is that of the paired difference."""
    base = float(y_T.mean()) if y_T.size else 0.0
    if not base or not math.isfinite(base):
        return Estimate(value=math.nan)
    value = float(x_T.mean()) / base
    rest = mean(x_T - value * y_T)
    error = None if rest.standard_error is None else rest.standard_error / abs(base)
    return Estimate(value=value, standard_error=error)


def root_of_ratio(noise_T: Floats, signal_T: Floats) -> Estimate:
    """sqrt(sum of noise / sum of signal): a relative error over all tokens.

    Its standard error is that of a ratio of two means over the same tokens.
    """
    signal = float(signal_T.sum())
    if not signal:
        return Estimate(value=0.0 if not noise_T.any() else math.inf)
    ratio = float(noise_T.sum()) / signal
    if not math.isfinite(ratio):
        return Estimate(value=math.nan)
    root, count = math.sqrt(ratio), noise_T.size
    if count < 2 or not root:
        return Estimate(value=root, standard_error=0.0 if count > 1 else None)
    rest = noise_T - ratio * signal_T
    error = math.sqrt(float(rest @ rest) / (count - 1) / count) / (signal / count)
    return Estimate(value=root, standard_error=error / (2 * root))
