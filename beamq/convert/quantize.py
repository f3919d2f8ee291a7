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
from typing import TYPE_CHECKING, Any

from beamq.convert import output as output_folder
from beamq.convert.device_choice import choose_conversion_device, open_workers, worker_sentence
from beamq.convert.finalise import finalise
from beamq.convert.input_scales import InputScaleProvider, check_options, given_input_scales
from beamq.convert.limits import DEFAULT_MEMORY_BYTES, check_cache, check_memory, default_workers
from beamq.convert.run import Progress, Runner, RunOptions, cache_folder
from beamq.devices import check_device_name
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.files import user_path
from beamq.io.journal import ShardRecord
from beamq.io.manifest import Manifest
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.plan.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from beamq.plan.recipe import Recipe, load_recipe
from beamq.ranks import current_ranks
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


def quantize(
    source: str | Path,
    output: str | Path,
    *,
    recipe: str | Recipe = "nvfp4",
    calibration: str | Path | None = None,
    no_calibration: bool = False,
    data: Sequence[str] = (),
    samples: int | None = None,
    sequence_length: int | None = None,
    seed: int | None = None,
    experts: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    max_device_memory: int | None = None,
    statistics: str | Path | None = None,
    exclude: Sequence[str] = (),
    kv_cache: str | None = None,
    base_model: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    max_host_memory: int = DEFAULT_MEMORY_BYTES,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_plan: Callable[[Plan], None] = lambda plan: None,
    on_engine: Callable[[str], None] = lambda text: None,
    on_start: Callable[[CalibrationSetup], None] = lambda setup: None,
    on_layer: Callable[[LayerDone], None] = lambda done: None,
    on_progress: Callable[[Progress], None] | None = None,
) -> QuantizeResult:
    """Convert a BF16, F16 or F32 Beam checkpoint into an NVFP4 or FP8 one.

    `source` is a folder or `org/name[@revision]` on the Hub, whose shards are fetched as they are
    needed, at most `cache_bytes` of them on disk at a time; `output` is a folder.
    NVFP4 needs input scales: from `calibration` (a statistics file), or constant with
    `no_calibration`; otherwise the run calibrates on the way, reading each source byte once.
    `device` is what converts, and what calibrates: "cpu", "cuda", "cuda:N", or "auto" (see
    `conversion.engine_choice`); the bytes are the same.
    `data` to `max_device_memory` say how (see `CalibrationOptions`; without `data`, on the default
    text), and `statistics` is a file to keep what was seen. `base_model` is the source's id on the
    Hub, for the card. `max_host_memory` bounds the
    conversion's buffers, in bytes. `on_plan` is called before work, `on_engine` with a sentence on
    what converts and the memory it takes, `on_start` with what a
    calibration will run on, `on_layer` after each calibrated layer, `on_progress` about every
    32 MiB or hundredth of the total, whichever is less, from worker threads.
    Raises `BeamqError`s: `InputError` kinds before any work where headers can tell,
    `TensorError` for non-finite weights as they are met, `CalibrationError` for data or for
    activations that are not finite, `EnvironmentFault` kinds for disk and memory, `Interrupted`
    on SIGINT or SIGTERM; all but the first leave a resumable output.
    """
    begun = time.monotonic()
    output, ranks, threads = user_path(output), current_ranks(), workers or default_workers()
    check_device_name(device)
    check_base_model(base_model)
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    chosen = chosen.with_options(exclude=tuple(exclude), kv_cache=kv_cache)
    asked = _asked(
        data=tuple(data) or None,
        samples=samples,
        sequence_length=sequence_length,
        seed=seed,
        experts=experts,
        dtype=dtype,
        max_device_memory=max_device_memory,
    )
    output_folder.check_places(source, output)
    place, budget = cache_folder(output, ranks), cache_bytes // ranks.world
    with ExitStack() as stack:
        stack.callback(ranks.leave)  # torch aborts a process that ends as a member
        with ranks.meeting():
            if ranks.first:
                output_folder.check(output, resume=resume, overwrite=overwrite)
        with ranks.agreeing():
            checkpoint = stack.enter_context(
                open_checkpoint(source, cache_bytes=budget, cache_folder=place)
            )
            plan = make_plan(checkpoint, chosen, max_shard_bytes=max_shard_bytes)
        check_options(
            plan,
            calibration=calibration,
            no_calibration=no_calibration,
            calibrate=bool(asked) or statistics is not None,
        )
        scales: InputScaleProvider | None = given_input_scales(
            plan, checkpoint, calibration=calibration, no_calibration=no_calibration
        )
        check_memory(plan, max_host_memory)
        check_cache(plan, budget)
        choice = choose_conversion_device(
            # A dry run converts nothing, and where any device will do, none is refused.
            "cpu" if dry_run and device == "auto" else device,
            plan,
            workers=threads,
            ranks=ranks,
            calibrates=scales is None,
        )
        factory = None
        if not dry_run:
            factory = open_workers(
                choice, checkpoint, plan, memory=max_host_memory, workers=threads
            )
        if ranks.first:
            on_plan(plan)
        manifest, kept, engine = None, 0, ""
        if factory is None:
            finished = output_folder.finished_nbytes(output, plan) if resume else 0
            output_folder.check_space(output, plan, finished, cache_bytes, replaced=overwrite)
        else:
            engine = choice.text(factory.count(threads), ranks.world)
            if ranks.first:
                on_engine(worker_sentence(choice, factory, threads, processes=ranks.world))
            if scales is None:
                from beamq.calib.setup import CalibrationOptions
                from beamq.convert.one_pass import OnePass

                scales = OnePass(
                    checkpoint,
                    plan,
                    output,
                    CalibrationOptions(device=device, **asked),
                    ranks,
                    factory,
                    device_nbytes=factory.device_nbytes,
                    statistics=None if statistics is None else user_path(statistics),
                    on_start=on_start,
                    on_layer=on_layer,
                )
            manifest, kept = Runner(
                checkpoint=checkpoint,
                work=plan,
                output=output,
                factory=factory,
                scales=scales,
                ranks=ranks,
                options=RunOptions(
                    workers=threads,
                    memory=max_host_memory,
                    resume=resume,
                    overwrite=overwrite,
                    on_progress=on_progress,
                    cache_bytes=cache_bytes,
                ),
                finalise=_finalise(checkpoint, plan, output, scales, base_model),
            ).run()
    return QuantizeResult(
        output=output,
        plan=plan,
        manifest=None if manifest is None else manifest.data,
        seconds=time.monotonic() - begun,
        resumed_shards=kept,
        engine=engine,
        stats=None if scales is None else scales.stats,
    )


def _asked(**options: Any) -> dict[str, Any]:
    """The options of a calibration that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _finalise(
    checkpoint: Checkpoint,
    plan: Plan,
    output: Path,
    scales: InputScaleProvider,
    base_model: str | None,
) -> Callable[[Mapping[str, ShardRecord]], Manifest]:
    def finish(records: Mapping[str, ShardRecord]) -> Manifest:
        return finalise(
            plan,
            source=checkpoint,
            output=output,
            records=records,
            input_scales=scales.record,
            files=scales.files,
            base_model=base_model,
        )

    return finish
