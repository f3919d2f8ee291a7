"""From a source and a recipe to a folder that the engines load: the whole of `beamq quantize`.

Everything that can be known before the first long read is checked before it: names, shapes,
patterns, scales and memory here, disk and small tensors at the start of `run.Conversion`, which
does the work. Where NVFP4 is given no input scales, the run calibrates as well (`one_pass`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from beamq.adapter.options import AdapterKeywords, AdapterOptions
from beamq.calib.options import TextKeywords
from beamq.convert import output as output_folder
from beamq.convert.cpu_worker import WorkerFactory
from beamq.convert.finalise import finalise
from beamq.convert.input_scales import (
    InputScaleProvider,
    check_calibration,
    check_headroom,
    check_options,
    given_input_scales,
)
from beamq.convert.only_changed import Previous, ReusingFactory, open_previous
from beamq.convert.options import ConvertOptions, RunKeywords
from beamq.convert.resources import (
    check_memory,
    choose_conversion_device,
    default_workers,
    open_workers,
    worker_sentence,
)
from beamq.convert.run import Conversion, Progress, open_run
from beamq.io.checkpoint import Checkpoint
from beamq.io.files import user_path
from beamq.options import from_keywords, ignore, takes
from beamq.plan.plan import Plan, make_plan
from beamq.plan.recipe import Recipe, load_recipe
from beamq.ranks import Ranks, current_ranks
from beamq.report.model_card import check_base_model
from beamq.units import short_repr

if TYPE_CHECKING:
    import torch

    from beamq.calib.run import CalibrationSetup, LayerDone
    from beamq.calib.statistics import CalibrationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeResult:
    """What a conversion did. `manifest` is beamq.json, or None for a dry run or other ranks.

    `engine` says on which device and threads it ran, "" for a dry run. `stats` are those of a
    calibration in the same run; None where there was none, or nothing was left to do. `unchanged`
    says what was copied from `only_changed`.
    """

    __repr__ = short_repr

    output: Path
    plan: Plan
    manifest: dict[str, Any] | None
    seconds: float
    resumed_shards: int
    engine: str = ""
    stats: CalibrationStats | None = None
    unchanged: str = ""


@dataclass(frozen=True, kw_only=True)
class ConvertEvents:
    """Called by `quantize`: `on_plan` before work; `on_engine` with a sentence on what converts and
    the memory it takes; `on_start` and `on_layer` by a calibration in the same run; `on_progress`
    from worker threads, about every 32 MiB or hundredth of the total, whichever is less."""

    on_plan: Callable[[Plan], None] = ignore
    on_engine: Callable[[str], None] = ignore
    on_start: Callable[[CalibrationSetup], None] = ignore
    on_layer: Callable[[LayerDone], None] = ignore
    on_progress: Callable[[Progress], None] | None = None


class QuantizeKeywords(RunKeywords, TextKeywords, AdapterKeywords, total=False):
    """Keywords of `quantize`."""

    on_progress: Callable[[Progress], None] | None
    recipe: str | Recipe | Path
    calibration: str | Path | None
    no_calibration: bool
    seed: int | None
    experts: str | None
    dtype: str | torch.dtype | None
    max_device_memory: int | str | None
    statistics: str | Path | None
    activation_headroom: int | None
    only_changed: str | Path | None
    exclude: Sequence[str] | str
    kv_cache: str | None
    engine: str | None
    base_model: str | None
    max_host_memory: int | str
    dry_run: bool
    on_plan: Callable[[Plan], None]
    on_engine: Callable[[str], None]
    on_start: Callable[[CalibrationSetup], None]
    on_layer: Callable[[LayerDone], None]


@takes(ConvertOptions, ConvertEvents, AdapterOptions)
def quantize(
    source: str | Path, output: str | Path, **keywords: Unpack[QuantizeKeywords]
) -> QuantizeResult:
    """Convert a BF16, F16 or F32 Beam checkpoint into an NVFP4 or FP8 one.

    `source` is a folder or `org/name[@revision]` on the Hub, whose shards are fetched as they are
    needed, at most `cache_bytes` of them on disk at a time; `output` is a folder. With an `adapter`
    the bytes are those of `merge` followed by this. `device` converts
    and calibrates: "cpu", "cuda", "cuda:N", or "auto" (see `convert.resources`); the bytes are
    the same. See `ConvertOptions` and `ConvertEvents` for the keywords.

    Raises `BeamqError`s: `InputError` kinds before any work where headers can tell,
    `TensorError` for non-finite weights as they are met, `CalibrationError` for data or for
    activations that are not finite, `EnvironmentFault` kinds for disk and memory, `Interrupted`
    on SIGINT or SIGTERM; all but the first leave a resumable output.
    """
    begun = time.monotonic()
    options = from_keywords(ConvertOptions, keywords)
    events = from_keywords(ConvertEvents, keywords)
    output, ranks = user_path(output), current_ranks()
    check_base_model(options.base_model)
    recipe = load_recipe(options.recipe) if isinstance(options.recipe, str) else options.recipe
    check_headroom(recipe, options)
    recipe = recipe.with_options(
        exclude=tuple(options.exclude),
        kv_cache=options.kv_cache,
        headroom=options.activation_headroom,
    )
    recipe.check_engine(options.engine)
    how = from_keywords(AdapterOptions, keywords)
    output_folder.check_places(source, output, how.adapter)
    with ExitStack() as stack:
        checkpoint, plan = open_run(
            stack, source, output, options, ranks,
            lambda opened: make_plan(opened, recipe, max_shard_bytes=options.max_shard_bytes),
            how,
        )  # fmt: skip
        previous = None
        if options.only_changed is not None:
            with ranks.agreeing():
                previous = open_previous(stack, options.only_changed, plan, checkpoint, output)
        result = _convert(checkpoint, plan, output, options, events, ranks, previous)
    return replace(result, seconds=time.monotonic() - begun)


def _convert(
    checkpoint: Checkpoint,
    plan: Plan,
    output: Path,
    options: ConvertOptions,
    events: ConvertEvents,
    ranks: Ranks,
    previous: Previous | None,
) -> QuantizeResult:
    """Check the plan, choose the device and the input scales, convert."""
    threads, memory = options.workers or default_workers(), options.max_host_memory
    check_options(plan, options)
    scales = given_input_scales(plan, checkpoint, options)
    if scales is None:
        check_calibration(plan, checkpoint, options, ranks)
    check_memory(plan, memory)
    # A dry run converts nothing, and where any device will do, none is refused.
    device = "cpu" if options.dry_run and options.device == "auto" else options.device
    choice = choose_conversion_device(
        device, plan, workers=threads, ranks=ranks, calibrates=scales is None
    )
    result = QuantizeResult(output=output, plan=plan, manifest=None, seconds=0.0, resumed_shards=0)
    if options.dry_run:
        if ranks.first:
            events.on_plan(plan)
        _check_space(plan, output, options)
        return result
    factory = open_workers(choice, checkpoint, plan, memory=memory, workers=threads)
    if ranks.first:
        events.on_plan(plan)
        events.on_engine(worker_sentence(choice, factory, threads, processes=ranks.world))
    reusing = None
    if previous is not None:
        factory = reusing = ReusingFactory(
            factory, previous, checkpoint, plan, link=scales is not None
        )
    if scales is None:
        scales = _one_pass(checkpoint, plan, output, options, events, ranks, factory)
    manifest, kept = Conversion(
        checkpoint=checkpoint,
        work=plan,
        output=output,
        factory=factory,
        scales=scales,
        ranks=ranks,
        options=options,
        workers=threads,
        memory=memory,
        on_progress=events.on_progress,
        finalise=partial(finalise, plan, checkpoint, output, scales, base_model=options.base_model),
    ).run()
    return replace(
        result,
        manifest=None if manifest is None else manifest.data,
        resumed_shards=kept,
        engine=choice.text(factory.count(threads), ranks.world),
        stats=scales.stats,
        unchanged="" if reusing is None else reusing.sentence(ranks.world),
    )


def _check_space(plan: Plan, output: Path, options: ConvertOptions) -> None:
    """For a dry run."""
    finished = output_folder.finished_nbytes(output, plan) if options.resume else 0
    output_folder.check_space(
        output, plan, finished, options.cache_bytes, replaced=options.overwrite
    )


def _one_pass(
    checkpoint: Checkpoint,
    plan: Plan,
    output: Path,
    options: ConvertOptions,
    events: ConvertEvents,
    ranks: Ranks,
    factory: WorkerFactory,
) -> InputScaleProvider:
    """Input scales by a calibration in the same run."""
    from beamq.convert.one_pass import OnePass  # torch

    return OnePass(
        checkpoint, plan, output, options, ranks, factory,
        on_start=events.on_start, on_layer=events.on_layer,
    )  # fmt: skip
