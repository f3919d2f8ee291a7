"""Which `input_scale` each NVFP4 linear gets: from statistics, or the constant 1.0, never guessed.

FP8 needs none (its activations are scaled per token when served). Where nothing is said about
NVFP4's, the conversion calibrates on the way (`one_pass`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from beamq.convert.open_shards import OpenShards
from beamq.convert.options import ConvertOptions
from beamq.errors import UsageError
from beamq.io.checkpoint import Checkpoint
from beamq.plan.plan import Job, Plan

if TYPE_CHECKING:
    from beamq.calib.statistics import CalibrationStats


# Where a run's input scales come from, and what may convert jobs on its way to them.
#
# Two protocols between the runner and what it is given: `InputScaleProvider` (a file, a constant,
# or a calibration that is still to be made) and `Feed`, the part of the last that does work.


class Feed(Protocol):
    """Something that converts jobs on its own way, before the crew takes what is left."""

    def run(
        self,
        jobs: Sequence[Job],
        shards: OpenShards,
        *,
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> Set[int]:
        """The `id` of each of `jobs` whose result was added to `shards`."""


class InputScaleProvider(Protocol):
    """Input scales of a run. With a `feed`, all but `digest` and `key` wait for it to have run.

    `digest` tells these scales from others before the run; a finished run's manifest has it under
    `key` of its `input_scales`, which are `record`. `files` are texts to keep beside the weights.
    `state_nbytes` is what finding them takes of the output's disk meanwhile; `calibrated` is how
    far that has come, as (layers, of how many), None before the first.
    """

    @property
    def state_nbytes(self) -> int: ...

    @property
    def calibrated(self) -> tuple[int, int] | None: ...

    @property
    def digest(self) -> str: ...

    @property
    def key(self) -> str: ...

    @property
    def record(self) -> Mapping[str, Any]: ...

    @property
    def files(self) -> Mapping[str, str]: ...

    @property
    def stats(self) -> CalibrationStats | None:
        """What a calibration of this run saw."""

    @property
    def feed(self) -> Feed | None: ...

    def of(self, module: str) -> float:
        """The scale of one linear."""

    def check_resumed(self) -> None:
        """Raise `ResumeError`, naming them, where an unfinished run was given other options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownScales:
    """A `InputScaleProvider` that is there before the run."""

    scale: Callable[[str], float]
    digest: str
    record: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    key: str = "digest"
    feed: Feed | None = None
    stats: CalibrationStats | None = None
    state_nbytes: int = 0
    calibrated: tuple[int, int] | None = None

    def of(self, module: str) -> float:
        """The scale of one linear."""
        return self.scale(module)

    def check_resumed(self) -> None:
        """Nothing: `digest` is all there is to compare."""


def no_scales(why: str) -> KnownScales:
    """For runs that write none; asking for one is a defect."""

    def refuse(module: str) -> float:
        raise RuntimeError(f"{module}: {why}")

    return KnownScales(scale=refuse, digest="none", record={"digest": "none"})


CONSTANT_NOTE = (
    "not calibrated: every input_scale is the constant 1.0 (activations up to 2688); dynamic"
    " block scales still adapt"
)
COVERAGE_NAME = "beamq-coverage.txt"
_SHOWN_SOURCES = 3


def check_options(plan: Plan, options: ConvertOptions) -> None:
    """Raise `UsageError` where options contradict each other or the recipe."""
    calibration, no_calibration = options.calibration, options.no_calibration
    calibrate = bool(options.calibration_given()) or options.statistics is not None
    if calibration is not None and no_calibration:
        raise UsageError("--calibration and --no-calibration contradict each other; give one")
    if calibrate and (calibration is not None or no_calibration):
        given = "--calibration" if calibration is not None else "--no-calibration"
        raise UsageError(
            f"{given} and --data (or another option of a calibration) contradict each other;"
            " give one"
        )
    method = plan.recipe.expert_method
    if method is not None and (calibration is not None or no_calibration):
        given = "--calibration" if calibration is not None else "--no-calibration"
        raise UsageError(
            f"recipe {plan.recipe.name} rounds experts by activations ({method}), which {given}"
            " does not bring; leave it out: this recipe calibrates on the way (--data for your own"
            " text)"
        )
    if plan.recipe.format == "fp8" and (calibration is not None or calibrate):
        raise UsageError(
            "FP8 activations are scaled per token when served; leave out --calibration, --data and"
            " their options"
        )


def given_input_scales(
    plan: Plan, checkpoint: Checkpoint, options: ConvertOptions
) -> InputScaleProvider | None:
    """The scales that are there before the run; None where a calibration has to make them.

    Raises `CalibrationError` for a statistics file that does not fit.
    """
    if plan.recipe.format == "fp8":
        return no_scales("FP8 has no input scale")
    if options.no_calibration:
        from beamq.calib.input_scales import constant_scales  # NumPy, only where scales are needed

        scales = constant_scales()
        return KnownScales(
            scale=lambda module: float(scales.scale(module)),
            digest=scales.digest,
            record={"digest": scales.digest, "description": CONSTANT_NOTE},
        )
    if options.calibration is None:
        return None
    from beamq.calib.statistics import load_stats

    stats = load_stats(Path(options.calibration))
    stats.check_model(checkpoint.content_digest(), checkpoint.label)
    return from_statistics(plan, stats)


def from_statistics(plan: Plan, stats: CalibrationStats) -> KnownScales:
    """Scales, record and coverage table; the same whether the statistics came from a file."""
    from beamq.calib.input_scales import coverage, input_scales

    scales = input_scales(stats, plan.config)
    scales.require(quantized_modules(plan))
    reached = coverage(stats, plan.config)
    record = {
        "digest": scales.digest,
        "calibration": stats.run_digest,
        "description": f"calibrated on {stats.total_tokens:,} tokens of {_sources(stats)};"
        f" {reached.calibrated:,} of {reached.experts:,} experts reached",
        "tokens": stats.total_tokens,
        "experts": stats.experts,
        "dropped_tokens": stats.dropped_rows,
        "dropped": list(stats.dropped_names),
        # Sorted, so that statistics give the same manifest before and after they were a file.
        "data": json.loads(json.dumps(stats.data, sort_keys=True)),
        "floored": list(scales.floored),
        "coverage": reached.to_dict(),
    }
    return KnownScales(
        scale=lambda module: float(scales.scale(module)),
        digest=scales.digest,
        record=record,
        files={COVERAGE_NAME: "\n".join(reached.lines()) + "\n"},
    )


def quantized_modules(plan: Plan) -> Iterator[str]:
    """Every linear that needs an input scale."""
    for job in plan.jobs:
        if job.kind == "nvfp4":
            for member in job.members:
                yield member.role.module


def _sources(stats: CalibrationStats) -> str:
    """What the data was, for people."""
    names = [
        str(source["name"])
        for record in stats.data
        for source in record.get("sources", ())
        if isinstance(source, Mapping) and "name" in source
    ]
    if not names:
        return "unnamed data"
    more = f" and {len(names) - _SHOWN_SOURCES} more" if len(names) > _SHOWN_SOURCES else ""
    return ", ".join(names[:_SHOWN_SOURCES]) + more
