"""`input_scale` of every NVFP4 linear from calibration statistics, and which experts they cover.

In: `CalibrationStats` and the model's config. Out: `InputScales`, a lookup by module name; and
`Coverage`, as JSON or as lines of at most 80 columns.

    input_scale = headroom * amax / 2688
                                     in FP32; 2688 = 6 x 448, the largest E2M1 times the largest
                                     E4M3 value; the engines compute 1 / input_scale

The recipe's `headroom` is for other text than that of the calibration, whose inputs may be larger
and would be clipped. It is a power of two, so a larger range costs nothing: all block scales lose
the same power of two, and only the smallest can round differently.

Linears that an engine fuses read the same input, so they share the value: q, k, v and the output
gate; gate and up. All experts of a layer share one value for gate and up, and one for down: the
largest among them. The engines' expert kernels take that maximum anyway (vLLM over all of w13 and
w2, SGLang for each), so the file has what is served. An expert that no token reached, or whose
input was always zero, needs no further rule.

If every input of a layer was zero or nearly so, the scale is `MIN_SCALE` = 2**-64: a normal number
with a finite reciprocal, also as a product with a weight scale. An amax of 1e-36 would otherwise
give a denormal, whose reciprocal is infinite.

Limits: amax only, no clipping.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from beamq.beam.config import BeamConfig
from beamq.calib.statistics import CalibrationStats, entry_of, layer_of
from beamq.errors import CalibrationError

AMAX_PER_SCALE = np.float32(2688.0)
MIN_SCALE = np.float32(2.0**-64)
CONSTANT_SCALE = np.float32(1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputScales:
    """`input_scale` by module name. `by_entry` is None if every linear has the same constant.

    `floored` names the entries whose scale is `MIN_SCALE`; `digest` identifies all values.
    """

    by_entry: Mapping[str, np.float32] | None
    floored: tuple[str, ...]
    digest: str

    def scale(self, module: str) -> np.float32:
        """The scale of one linear (`model.layers.3.mlp.experts.7.down_proj`).

        Raises `CalibrationError` for a linear without statistics.
        """
        entry, _ = entry_of(module)
        if self.by_entry is None:
            return CONSTANT_SCALE
        if entry not in self.by_entry:
            raise _missing([module])
        return self.by_entry[entry]

    def require(self, modules: Iterable[str]) -> None:
        """Raise `CalibrationError` unless every linear in `modules` has a scale."""
        if self.by_entry is None:
            return
        absent = [module for module in modules if entry_of(module)[0] not in self.by_entry]
        if absent:
            raise _missing(absent)


def scale_for(amax: float | np.floating[Any], headroom: int) -> np.float32:
    """The `input_scale` for inputs of at most `headroom * amax`."""
    return max(np.float32(amax) / AMAX_PER_SCALE * np.float32(headroom), MIN_SCALE)


def input_scales(stats: CalibrationStats, config: BeamConfig, headroom: int) -> InputScales:
    """Scales from statistics. Raises `CalibrationError` if these do not fit `config`'s model, or if
    an entry has no token."""
    check_shapes(stats, config)
    scales: dict[str, np.float32] = {}
    floored: list[str] = []
    for name, entry in stats.inputs.items():
        if not int(entry.rows.sum()):
            raise CalibrationError(
                f"statistics: {name} saw no token in {stats.total_tokens:,};"
                " calibrate again with more data"
            )
        scales[name] = scale_for(entry.amax.max(), headroom)
        if scales[name] == MIN_SCALE:
            floored.append(name)
    text = "\n".join(f"{name} {scales[name].tobytes().hex()}" for name in sorted(scales))
    return InputScales(by_entry=scales, floored=tuple(floored), digest=_digest(text))


def constant_scales() -> InputScales:
    """1.0 for every linear (`--no-calibration`): represents |x| up to 2688."""
    return InputScales(by_entry=None, floored=(), digest=_digest("constant 1.0"))


def check_shapes(stats: CalibrationStats, config: BeamConfig) -> None:
    """Raise `CalibrationError` if an entry does not fit a model of this config."""
    for name, entry in stats.inputs.items():
        layer, group = layer_of(name), name.split(".", 2)[2]
        if layer >= config.num_layers:
            raise _unfit(name, f"the model has {config.num_layers} layers")
        kind = config.mlp_layer_types[layer]
        if group.startswith("mlp.") and kind != "dense":
            raise _unfit(name, f"layer {layer} is {kind}")
        if group.startswith("experts."):
            if kind != "sparse":
                raise _unfit(name, f"layer {layer} is {kind}")
            if entry.amax.shape != (config.num_experts,):
                raise _unfit(name, f"it has {entry.amax.size} experts, not {config.num_experts}")
    for layer, counts in stats.routed_tokens.items():
        if layer not in config.sparse_layers or counts.shape != (config.num_experts,):
            raise _unfit(
                f"layers.{layer}.experts.routed_tokens",
                f"the model's sparse layers have {config.num_experts} experts each",
            )


def _unfit(name: str, why: str) -> CalibrationError:
    return CalibrationError(
        f"statistics: {name} does not fit the model: {why}; calibrate this checkpoint"
    )


def _missing(modules: list[str]) -> CalibrationError:
    more = f" and {len(modules) - 1:,} more" if len(modules) > 1 else ""
    return CalibrationError(
        f"no calibration statistics for {modules[0]}{more}; calibrate again with the recipe that"
        " quantizes them, choose a recipe that does not, or pass --no-calibration"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(f"beamq input scales 1\n{text}".encode()).hexdigest()


# Coverage: an expert is *uncalibrated* if no token contributed to its statistics (never with
# `experts="all"`), and has *zero amax* if its inputs were all zero or too small for a scale. Both
# get the largest scale of their layer's experts and are no error, but a layer with many of them
# shows that the data does not exercise the model.

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


COVERED_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainCoverage:
    """How many experts read at least `rows` tokens of a domain's text; fewer say little of it."""

    name: str
    rows: int
    experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """All sparse layers. `calibrated` of `experts` have statistics from at least one token.
    `domains` is empty where the data has one."""

    mode: str
    total_tokens: int
    dropped_rows: int
    experts: int
    calibrated: int
    layers: tuple[LayerCoverage, ...]
    domains: tuple[DomainCoverage, ...] = ()

    @property
    def percent(self) -> float:
        """Calibrated experts in percent; 100 for a model without any."""
        return 100.0 * self.calibrated / self.experts if self.experts else 100.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {**asdict(self), "percent": self.percent}
        if not self.domains:
            del found["domains"]
        return found

    def lines(self) -> list[str]:
        """A table of at most 80 columns, one line for each layer."""
        title = (
            f"experts calibrated: {self.calibrated:,} of {self.experts:,} ({self.percent:.1f}%),"
            f" {self.total_tokens:,} tokens, experts={self.mode}"
        )
        lines = [title[:WIDTH]]
        if self.dropped_rows:
            lines.append(f"rows dropped for non-finite values: {self.dropped_rows:,}")
        for each in self.domains:
            count = f"{each.experts:,} of {self.experts:,} experts"
            lines.append(f"{count} read {each.rows} tokens or more of {each.name}"[:WIDTH])
        lines.append(f"{'layer':>5} {'min':>9} {'median':>9} {'max':>9}  experts with few tokens")
        for layer in self.layers:
            counts = f"{layer.tokens_min:>9,} {layer.tokens_median:>9,.0f} {layer.tokens_max:>9,}"
            lines.append(f"{layer.layer:>5} {counts}  {remarks(layer)}"[:WIDTH].rstrip())
        return lines


def coverage(stats: CalibrationStats, config: BeamConfig | None = None) -> Coverage:
    """Coverage from statistics. Raises `CalibrationError` if they do not fit `config`."""
    if config is not None:
        check_shapes(stats, config)
    layers = tuple(_layer(stats, layer) for layer in sorted(stats.routed_tokens))
    names = tuple(dict.fromkeys(stats.domains)) if stats.domain_tokens else ()
    rows = [[at for at, each in enumerate(stats.domains) if each == name] for name in names]
    reached = {
        name: sum(
            int((counts[own].sum(axis=0) >= COVERED_ROWS).sum())
            for counts in stats.domain_tokens.values()
        )
        for name, own in zip(names, rows, strict=True)
    }
    return Coverage(
        mode=stats.experts,
        total_tokens=stats.total_tokens,
        dropped_rows=stats.dropped_rows,
        experts=sum(layer.experts for layer in layers),
        calibrated=sum(layer.experts - len(layer.uncalibrated) for layer in layers),
        layers=layers,
        domains=tuple(
            DomainCoverage(name=name, rows=COVERED_ROWS, experts=count)
            for name, count in reached.items()
        ),
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
    """What is remarkable in a layer, or an empty string."""
    found = [f"uncalibrated {_short(layer.uncalibrated)}"] if layer.uncalibrated else []
    found += [f"zero {group} {_short(which)}" for group, which in layer.zero_amax.items() if which]
    return "; ".join(found)


def _short(experts: tuple[int, ...]) -> str:
    """Up to three indices, then how many there are."""
    shown = " ".join(map(str, experts[:3]))
    return shown if len(experts) <= 3 else f"{shown} ... ({len(experts)})"
