"""From a source and a recipe to a folder that the engines load: the whole of `beamq quantize`.

Everything that can be known before the first long read is checked before it: names, shapes,
patterns, scales, memory; then the runner checks disk and small tensors and does the work. Where
NVFP4 has no statistics to take its input scales from, the run calibrates on the way (`one_pass`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from beamq.calib.options import CalibrationOptions, TextKeywords
from beamq.convert import output as output_folder
from beamq.convert.cpu_worker import WorkerFactory
from beamq.convert.finalise import finalise
from beamq.convert.input_scales import InputScaleProvider, check_options, given_input_scales
from beamq.convert.options import ConvertOptions, RunKeywords
from beamq.convert.resources import (
    check_memory,
    choose_conversion_device,
    default_workers,
    open_workers,
    worker_sentence,
)
from beamq.convert.run import Conversion, Progress, RunOptions, open_run
from beamq.devices import check_device_name
from beamq.io.checkpoint import Checkpoint
from beamq.io.files import user_path
from beamq.io.journal import ShardRecord
from beamq.io.manifest import Manifest
from beamq.options import from_keywords, ignore, takes
from beamq.plan.plan import Plan, make_plan
from beamq.plan.recipe import Recipe, load_recipe
from beamq.ranks import Ranks, current_ranks
from beamq.report.model_card import check_base_model

if TYPE_CHECKING:
    from beamq.calib.run import LayerDone
    from beamq.calib.setup import CalibrationSetup
    from beamq.calib.statistics import CalibrationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeResult:
    """What a conversion did. `manifest` is beamq.json, or None for a dry run or other ranks.

    `engine` says what converted, "" for a dry run.
    `stats` is what a calibration on the way saw; None where there was none, or nothing was left to
    do.
    """

    output: Path
    plan: Plan
    manifest: dict[str, Any] | None
    seconds: float
    resumed_shards: int
    engine: str = ""
    stats: CalibrationStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conversion:
    """An opened source, its plan, and how to convert it."""

    checkpoint: Checkpoint
    plan: Plan
    output: Path
    options: ConvertOptions
    events: ConvertEvents
    ranks: Ranks
    threads: int

    def check_space(self) -> None:
        """Raise `DiskError` where the output would not fit."""
        options = self.options
        finished = output_folder.finished_nbytes(self.output, self.plan) if options.resume else 0
        output_folder.check_space(
            self.output, self.plan, finished, options.cache_bytes, replaced=options.overwrite
        )

    def calibrating(self, factory: WorkerFactory) -> InputScaleProvider:
        """Input scales from a calibration in the same pass as the conversion."""
        from beamq.calib.calibrate import CalibrationEvents  # torch, as the next one
        from beamq.convert.one_pass import OnePass

        options = self.options
        statistics = options.statistics
        return OnePass(
            self.checkpoint,
            self.plan,
            self.output,
            CalibrationOptions(device=options.device, **options.calibration_given()),
            self.ranks,
            factory,
            statistics=None if statistics is None else user_path(statistics),
            events=CalibrationEvents(on_start=self.events.on_start, on_layer=self.events.on_layer),
        )

    def run(
        self, factory: WorkerFactory, scales: InputScaleProvider
    ) -> tuple[Manifest | None, int]:
        """Convert, write and finalise. Returns as `Conversion.run`."""
        options = self.options

        def finish(records: Mapping[str, ShardRecord]) -> Manifest:
            return finalise(
                self.plan,
                source=self.checkpoint,
                output=self.output,
                records=records,
                input_scales=scales.known.record,
                files=scales.known.files,
                base_model=options.base_model,
            )

        return Conversion(
            checkpoint=self.checkpoint,
            work=self.plan,
            output=self.output,
            factory=factory,
            scales=scales,
            ranks=self.ranks,
            options=RunOptions(
                workers=self.threads,
                memory=options.max_host_memory,
                resume=options.resume,
                overwrite=options.overwrite,
                on_progress=self.events.on_progress,
                cache_bytes=options.cache_bytes,
            ),
            finalise=finish,
        ).run()


@dataclass(frozen=True, kw_only=True)
class ConvertEvents:
    """Called by `quantize`: with the plan before work, with a sentence on what converts and the
    memory it takes, by a calibration on the way, and with progress about every 32 MiB or hundredth
    of the total, whichever is less, from worker threads."""

    on_plan: Callable[[Plan], None] = ignore
    on_engine: Callable[[str], None] = ignore
    on_start: Callable[[CalibrationSetup], None] = ignore
    on_layer: Callable[[LayerDone], None] = ignore
    on_progress: Callable[[Progress], None] | None = None


class QuantizeKeywords(RunKeywords, TextKeywords, total=False):
    """Keywords of `quantize`."""

    on_progress: Callable[[Progress], None] | None
    recipe: str | Recipe
    calibration: str | Path | None
    no_calibration: bool
    seed: int | None
    experts: str | None
    dtype: str | None
    max_device_memory: int | None
    statistics: str | Path | None
    exclude: Sequence[str]
    kv_cache: str | None
    base_model: str | None
    max_host_memory: int
    dry_run: bool
    on_plan: Callable[[Plan], None]
    on_engine: Callable[[str], None]
    on_start: Callable[[CalibrationSetup], None]
    on_layer: Callable[[LayerDone], None]


@takes(ConvertOptions, ConvertEvents)
def quantize(
    source: str | Path, output: str | Path, **keywords: Unpack[QuantizeKeywords]
) -> QuantizeResult:
    """Convert a BF16, F16 or F32 Beam checkpoint into an NVFP4 or FP8 one.

    `source` is a folder or `org/name[@revision]` on the Hub, whose shards are fetched as they are
    needed, at most `cache_bytes` of them on disk at a time; `output` is a folder. `device` converts
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
    output, ranks, threads = user_path(output), current_ranks(), options.workers
    threads = threads or default_workers()
    check_device_name(options.device)
    check_base_model(options.base_model)
    recipe = load_recipe(options.recipe) if isinstance(options.recipe, str) else options.recipe
    recipe = recipe.with_options(exclude=tuple(options.exclude), kv_cache=options.kv_cache)
    output_folder.check_places(source, output)
    with ExitStack() as stack:
        checkpoint, plan = open_run(
            stack, source, output, options, ranks,
            lambda opened: make_plan(opened, recipe, max_shard_bytes=options.max_shard_bytes),
        )  # fmt: skip
        check_options(plan, options)
        scales = given_input_scales(plan, checkpoint, options)
        check_memory(plan, options.max_host_memory)
        # A dry run converts nothing, and where any device will do, none is refused.
        device = "cpu" if options.dry_run and options.device == "auto" else options.device
        choice = choose_conversion_device(
            device, plan, workers=threads, ranks=ranks, calibrates=scales is None
        )
        conversion = _Conversion(
            checkpoint=checkpoint, plan=plan, output=output, options=options, events=events,
            ranks=ranks, threads=threads,
        )  # fmt: skip
        manifest, kept, engine = None, 0, ""
        if options.dry_run:
            if ranks.first:
                events.on_plan(plan)
            conversion.check_space()
        else:
            factory = open_workers(
                choice, checkpoint, plan, memory=options.max_host_memory, workers=threads
            )
            engine = choice.text(factory.count(threads), ranks.world)
            if ranks.first:
                events.on_plan(plan)
                events.on_engine(worker_sentence(choice, factory, threads, processes=ranks.world))
            scales = scales or conversion.calibrating(factory)
            manifest, kept = conversion.run(factory, scales)
    return QuantizeResult(
        output=output,
        plan=plan,
        manifest=None if manifest is None else manifest.data,
        seconds=time.monotonic() - begun,
        resumed_shards=kept,
        engine=engine,
        stats=None if scales is None else scales.stats,
    )
