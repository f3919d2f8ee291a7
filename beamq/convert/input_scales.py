"""Which `input_scale` each NVFP4 linear gets: from statistics, or the constant 1.0, never guessed.

In: a plan and the user's options. Out: an `InputScaleProvider`, whose scales are known before the
run, or None where NVFP4 has to calibrate during it (`one_pass.OnePass`, the other provider).
FP8 needs no input scale: its activations are scaled per token when served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.beam.tensors import Role
from beamq.convert.cpu_worker import JobContext
from beamq.convert.open_shards import OpenShards
from beamq.convert.options import ConvertOptions
from beamq.devices import driver_sees_a_gpu
from beamq.errors import UsageError
from beamq.io.checkpoint import Checkpoint
from beamq.io.files import user_path
from beamq.io.shard_writer import check_place
from beamq.plan.plan import Job, JobKind, Plan
from beamq.plan.recipe import Recipe
from beamq.ranks import Ranks

if TYPE_CHECKING:
    from beamq.calib.options import CalibrationOptions
    from beamq.calib.statistics import CalibrationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownScales:
    """The scale of each linear, and what the output folder says of them.

    `digest` tells these scales from others. `record` goes into the manifest, `files` (texts by
    name) next to the weights.
    """

    scale: Callable[[str], float]
    digest: str
    record: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)


class InputScaleProvider:
    """The input scales of a run, here those that are known before it.

    `digest` is known before the run in any case; the manifest of a finished run has it under `key`
    of its `input_scales`. A subclass may find the scales by a calibration: `state_nbytes` is what
    that keeps on the output's disk meanwhile, `calibrated` how far it is, as (layers, of how many),
    and `stats` what it saw.
    """

    key = "digest"
    state_nbytes = 0
    calibrated: tuple[int, int] | None = None
    stats: CalibrationStats | None = None

    def __init__(self, digest: str, known: KnownScales | None) -> None:
        self.digest = digest
        self._known = known

    @property
    def known(self) -> KnownScales:
        """The scales, once they are known."""
        if self._known is None:
            raise RuntimeError("input scales were asked for before the calibration was run")
        return self._known

    def convert_early(
        self, jobs: Sequence[Job], shards: OpenShards, context: JobContext
    ) -> Set[int]:
        """Find the scales and convert jobs on the way; the `Job.index` of each that is done."""
        return frozenset()

    def check_resumed(self) -> None:
        """Raise `ResumeError`, naming them, where an unfinished run was given other options.

        Scales from a file or a constant have no options, only their digest.
        """


def no_scales(why: str) -> InputScaleProvider:
    """For runs that write none; asking for one is a defect."""

    def refuse(module: str) -> float:
        raise RuntimeError(f"{module}: {why}")

    known = KnownScales(scale=refuse, digest="none", record={"digest": "none"})
    return InputScaleProvider(known.digest, known)


CONSTANT_NOTE = (
    "not calibrated: every input_scale is the constant 1.0 (activations up to 2688); dynamic"
    " block scales still adapt"
)
COVERAGE_NAME = "beamq-coverage.txt"
_SHOWN_SOURCES = 3


def check_options(plan: Plan, options: ConvertOptions) -> None:
    """Raise `UsageError` where options contradict each other or the recipe."""
    given = "--no-calibration" if options.no_calibration else ""
    if options.calibration is not None:
        if given:
            raise UsageError("--calibration and --no-calibration contradict each other; give one")
        given = "--calibration"
    calibrate = bool(options.calibration_given()) or options.statistics is not None
    if given and calibrate:
        raise UsageError(
            f"{given} and --data (or another option of a calibration) contradict each other;"
            " give one"
        )
    method = plan.recipe.expert_method
    if given and method is not None:
        raise UsageError(
            f"recipe {plan.recipe.name} rounds experts by activations ({method}), which {given}"
            " does not have; leave it out: this recipe calibrates during the conversion (--data for"
            " your own text)"
        )
    if not plan.recipe.calibrated and (calibrate or given == "--calibration"):
        raise UsageError(
            "FP8 activations are scaled per token when served; leave out --calibration, --data and"
            " their options"
        )


def check_headroom(recipe: Recipe, options: ConvertOptions) -> None:
    """Raise `UsageError` where `--activation-headroom` is given and widens nothing."""
    if options.activation_headroom is None:
        return
    why = "--no-calibration sets them to 1.0" if options.no_calibration else ""
    if not recipe.calibrated:
        why = "FP8 activations are scaled per token when served"
    if why:
        raise UsageError(
            f"--activation-headroom widens the calibrated input scales of NVFP4, and {why}; leave"
            " it out"
        )


def check_calibration(
    plan: Plan, checkpoint: Checkpoint, options: ConvertOptions, ranks: Ranks
) -> None:
    """Raise what a calibration in this run would, before it, for an option, a place or data. The
    data are read in a dry run; a real one reads them a little later."""
    from beamq.calib.options import CalibrationOptions

    with ranks.meeting():
        if not ranks.first:
            return
        how = CalibrationOptions(device=options.device, **options.calibration_given())
        if plan.recipe.expert_method is not None:
            _check_exact(plan, how)
        if options.statistics is not None:
            from beamq.calib.statistics import check_replaceable

            target = user_path(options.statistics)
            check_place(target, "--statistics")
            check_replaceable(target)
        if options.dry_run:
            from beamq.calib.data import load_calibration_data

            kind = "cpu" if options.device == "cpu" or not driver_sees_a_gpu() else "cuda"
            samples, length = how.size(kind, checkpoint.config)
            load_calibration_data(
                how.data, checkpoint.root, samples=samples, sequence_length=length, seed=how.seed
            )


def _check_exact(plan: Plan, options: CalibrationOptions) -> None:
    """Raise `UsageError` where experts cannot be rounded from what the forward pass holds."""
    for job in plan.jobs:
        for member in job.members:
            dtype = member.source.spec.dtype
            if member.role.role is Role.EXPERT and dtype != "BF16" and options.dtype != "float32":
                raise UsageError(
                    f"{member.role.name} is {dtype}, which activations in {options.dtype} would"
                    f" round; recipe {plan.recipe.name} then needs --dtype float32"
                )
    if plan.remote_shards and options.max_device_memory is not None:
        raise UsageError(
            f"recipe {plan.recipe.name} may read experts twice where --max-device-memory is small;"
            " download the source first"
        )


def given_input_scales(
    plan: Plan, checkpoint: Checkpoint, options: ConvertOptions
) -> InputScaleProvider | None:
    """The scales that are known before the run; None where a calibration has to find them.

    Raises `CalibrationError` for a statistics file that does not fit.
    """
    if not plan.recipe.calibrated:
        return no_scales("FP8 has no input scale")
    if options.no_calibration:
        from beamq.calib.input_scales import constant_scales  # NumPy, only where scales are needed

        scales = constant_scales()
        known = KnownScales(
            scale=lambda module: float(scales.scale(module)),
            digest=scales.digest,
            record={"digest": scales.digest, "description": CONSTANT_NOTE},
        )
    elif options.calibration is None:
        return None
    else:
        from beamq.calib.statistics import load_stats

        stats = load_stats(Path(options.calibration))
        stats.check_model(checkpoint.content_digest(), checkpoint.label)
        known = from_statistics(plan, stats)
    return InputScaleProvider(known.digest, known)


def from_statistics(plan: Plan, stats: CalibrationStats) -> KnownScales:
    """Scales, record and coverage table of statistics, from a file or from this run."""
    from beamq.calib.input_scales import coverage, input_scales

    headroom = plan.recipe.headroom
    scales = input_scales(stats, plan.config, headroom)
    scales.require(
        member.role.module
        for job in plan.jobs
        if job.kind is JobKind.NVFP4
        for member in job.members
    )
    reached = coverage(stats, plan.config)
    record = {
        "digest": scales.digest,
        "calibration": stats.run_digest,
        "description": f"calibrated on {stats.total_tokens:,} tokens of {_sources(stats)};"
        f" {reached.calibrated:,} of {reached.experts:,} experts reached; {_margin(headroom)}",
        "headroom": headroom,
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


def _margin(headroom: int) -> str:
    if headroom == 1:
        return "no room above the largest input"
    return f"room for {headroom} times the largest input"


def _sources(stats: CalibrationStats) -> str:
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
