"""Which `input_scale` each NVFP4 linear gets: from statistics, or the constant 1.0, never guessed.

FP8 needs none (its activations are scaled per token when served).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.checkpoint import Checkpoint
from beamq.errors import UsageError
from beamq.plan import Plan

if TYPE_CHECKING:
    from beamq.calib.scales import InputScales

CONSTANT_NOTE = (
    "not calibrated: every input_scale is the constant 1.0 (activations up to 2688); dynamic"
    " block scales still adapt"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScaleSource:
    """`of(module)` is the scale of a linear; `digest` and `record` tell where it came from."""

    of: Callable[[str], float]
    digest: str
    record: Mapping[str, Any]


def choose_input_scales(
    plan: Plan,
    checkpoint: Checkpoint,
    *,
    calibration: str | Path | None,
    no_calibration: bool,
) -> InputScaleSource:
    """Pick by the options. Raises `UsageError` when they do not add up, `CalibrationError`."""
    if calibration is not None and no_calibration:
        raise UsageError("--calibration and --no-calibration contradict each other; give one")
    if plan.recipe.format == "fp8":
        if calibration is not None:
            raise UsageError(
                "FP8 activations are scaled per token when served; leave out --calibration"
            )
        return InputScaleSource(of=_no_scale, digest="none", record={"digest": "none"})
    from beamq.calib import scales as calibrated  # NumPy, only where scales are needed

    if no_calibration:
        return _source(calibrated.constant_scales(), {"description": CONSTANT_NOTE})
    if calibration is None:
        raise UsageError(
            f"recipe {plan.recipe.name} needs input scales. Either `beamq calibrate SOURCE"
            " STATS` and then --calibration STATS, or --no-calibration for the constant 1.0"
        )
    from beamq.calib.stats_file import load_stats

    stats = load_stats(Path(calibration))
    stats.check_model(checkpoint.content_digest(), checkpoint.root.name)
    scales = calibrated.input_scales(stats, plan.config)
    scales.require(
        member.role.module for job in plan.jobs if job.kind == "nvfp4" for member in job.members
    )
    record = {
        "description": f"calibrated on {stats.total_tokens:,} tokens",
        "tokens": stats.total_tokens,
        "experts": stats.experts,
        "data": [dict(entry) for entry in stats.data],
        "floored": list(scales.floored),
    }
    return _source(scales, record)


def _source(scales: InputScales, record: dict[str, Any]) -> InputScaleSource:
    def of(module: str) -> float:
        return float(scales.scale(module))

    return InputScaleSource(of=of, digest=scales.digest, record={"digest": scales.digest, **record})


def _no_scale(module: str) -> float:
    raise RuntimeError(f"{module}: FP8 has no input scale")
