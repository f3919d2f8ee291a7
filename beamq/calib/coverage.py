"""Which experts the calibration data reached, layer by layer.

In: `CalibrationStats` (and the config, to check them by). Out: `Coverage`, as JSON or as lines of
at most 80 columns.

An expert is *uncalibrated* where no token stood behind its statistics (with `experts="all"` none
is), and has *zero amax* where tokens did but their values were all zero, or too small for a scale
of their own. Neither is an error (`calib.scales` gives both the largest of their peers), but a
layer with many says that the data does not exercise the model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from beamq.calib.scales import AMAX_PER_SCALE, MIN_SCALE, check_shapes
from beamq.calib.stats import CalibrationStats
from beamq.config import BeamConfig

WIDTH = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCoverage:
    """One sparse layer. Token counts are the router's choices; lists hold expert indices."""

    layer: int
    experts: int
    tokens_min: int
    tokens_median: float
    tokens_max: int
    unrouted: tuple[int, ...]
    uncalibrated: tuple[int, ...]
    zero_amax: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """All sparse layers. `calibrated` of `experts` had tokens behind their statistics."""

    mode: str
    total_tokens: int
    dropped_rows: int
    experts: int
    calibrated: int
    layers: tuple[LayerCoverage, ...]

    @property
    def percent(self) -> float:
        """Calibrated experts in percent; 100 for a model without any."""
        return 100.0 * self.calibrated / self.experts if self.experts else 100.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "percent": self.percent}

    def lines(self) -> list[str]:
        """A table for people, 80 columns wide at most, one line for each layer."""
        title = (
            f"experts calibrated: {self.calibrated:,} of {self.experts:,} ({self.percent:.1f}%),"
            f" {self.total_tokens:,} tokens, experts={self.mode}"
        )
        lines = [title[:WIDTH]]
        if self.dropped_rows:
            lines.append(f"rows dropped for non-finite values: {self.dropped_rows:,}")
        lines.append(f"{'layer':>5} {'min':>9} {'median':>9} {'max':>9}  experts to look at")
        for layer in self.layers:
            counts = f"{layer.tokens_min:>9,} {layer.tokens_median:>9,.0f} {layer.tokens_max:>9,}"
            lines.append(f"{layer.layer:>5} {counts}  {remarks(layer)}"[:WIDTH].rstrip())
        return lines


def coverage(stats: CalibrationStats, config: BeamConfig | None = None) -> Coverage:
    """Read coverage off the statistics. Raises `CalibrationError` where they don't fit `config`."""
    if config is not None:
        check_shapes(stats, config)
    layers = tuple(_layer(stats, layer) for layer in sorted(stats.routed_tokens))
    return Coverage(
        mode=stats.experts,
        total_tokens=stats.total_tokens,
        dropped_rows=stats.dropped_rows,
        experts=sum(layer.experts for layer in layers),
        calibrated=sum(layer.experts - len(layer.uncalibrated) for layer in layers),
        layers=layers,
    )


def _layer(stats: CalibrationStats, layer: int) -> LayerCoverage:
    tokens = stats.routed_tokens[layer]
    entries = {
        group: stats.inputs[name]
        for group in ("gate_up", "down")
        if (name := f"layers.{layer}.experts.{group}") in stats.inputs
    }
    seen = [entry.rows > 0 for entry in entries.values()] or [np.zeros(tokens.shape, dtype=bool)]
    return LayerCoverage(
        layer=layer,
        experts=tokens.size,
        tokens_min=int(tokens.min()),
        tokens_median=float(np.median(tokens)),
        tokens_max=int(tokens.max()),
        unrouted=_indices(tokens == 0),
        uncalibrated=_indices(~np.logical_and.reduce(seen)),
        zero_amax={
            group: _indices((entry.rows > 0) & (entry.amax / AMAX_PER_SCALE < MIN_SCALE))
            for group, entry in entries.items()
        },
    )


def _indices(chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.flatnonzero(chosen))


def remarks(layer: LayerCoverage) -> str:
    """What is to be seen in a layer, if anything is."""
    found = [f"uncalibrated {_short(layer.uncalibrated)}"] if layer.uncalibrated else []
    found += [f"zero {group} {_short(which)}" for group, which in layer.zero_amax.items() if which]
    return "; ".join(found)


def _short(experts: tuple[int, ...]) -> str:
    """Up to three indices, then how many there are."""
    shown = " ".join(map(str, experts[:3]))
    return shown if len(experts) <= 3 else f"{shown} ... ({len(experts)})"
