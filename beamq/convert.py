"""From a source and a recipe to a folder that the engines load: the whole of `beamq quantize`.

Everything that can be known before the first long read is checked before it: names, shapes,
patterns, scales, memory; then the runner checks disk and small tensors and does the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamq import output_folder
from beamq.checkpoint import open_checkpoint
from beamq.finalise import finalise
from beamq.input_scales import choose_input_scales
from beamq.journal import ShardRecord
from beamq.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from beamq.ranks import current_ranks
from beamq.recipe import Recipe, load_recipe
from beamq.runner import (
    DEFAULT_MEMORY_BYTES,
    Progress,
    Runner,
    RunOptions,
    check_memory,
    default_workers,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeResult:
    """What a conversion did. `manifest` is beamq.json, or None for a dry run or other ranks."""

    output: Path
    plan: Plan
    manifest: dict[str, Any] | None
    seconds: float
    resumed_shards: int


def quantize(
    source: str | Path,
    output: str | Path,
    *,
    recipe: str | Recipe = "nvfp4",
    calibration: str | Path | None = None,
    no_calibration: bool = False,
    exclude: Sequence[str] = (),
    kv_cache: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    max_host_memory: int = DEFAULT_MEMORY_BYTES,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> QuantizeResult:
    """Convert a BF16, F16 or F32 Beam checkpoint into an NVFP4 or FP8 one.

    `source` and `output` are folders. NVFP4 needs input scales: `calibration` (a statistics
    file) or `no_calibration` (constant 1.0). `max_host_memory` bounds the buffers, in bytes.
    `on_plan` is called before work, `on_progress` about every 32 MiB, from worker threads.
    Raises `BeamqError`s: `InputError` kinds before any work where headers can tell,
    `TensorError` for non-finite weights as they are met, `EnvironmentFault` kinds for disk and
    memory, `Interrupted` on SIGINT or SIGTERM; all but the first leave a resumable output.
    """
    begun = time.monotonic()
    source, output = Path(source).expanduser(), Path(output).expanduser()
    ranks = current_ranks()
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    chosen = chosen.with_options(exclude=tuple(exclude), kv_cache=kv_cache)
    output_folder.check_places(source, output)
    with open_checkpoint(source) as checkpoint:
        plan = make_plan(checkpoint, chosen, max_shard_bytes=max_shard_bytes)
        scales = choose_input_scales(
            plan, checkpoint, calibration=calibration, no_calibration=no_calibration
        )
        check_memory(plan, max_host_memory)
        if on_plan is not None and ranks.first:
            on_plan(plan)
        manifest, kept = None, 0
        if not dry_run:

            def finish(records: Mapping[str, ShardRecord]) -> dict[str, Any]:
                return finalise(
                    plan,
                    source=checkpoint.root,
                    source_config=checkpoint.config,
                    output=output,
                    records=records,
                    input_scales=scales.record,
                )

            manifest, kept = Runner(
                checkpoint=checkpoint,
                work=plan,
                output=output,
                input_scale=scales.of,
                input_scales_digest=scales.digest,
                ranks=ranks,
                options=RunOptions(
                    workers=workers or default_workers(),
                    memory=max_host_memory,
                    resume=resume,
                    overwrite=overwrite,
                    on_progress=on_progress,
                ),
                finalise=finish,
            ).run()
    return QuantizeResult(
        output=output,
        plan=plan,
        manifest=manifest,
        seconds=time.monotonic() - begun,
        resumed_shards=kept,
    )
