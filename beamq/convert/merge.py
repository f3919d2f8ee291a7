"""From a Beam and a LoRA adapter to one Beam: the whole of `beamq merge`.

In: a high-precision source in any form, and an adapter. Out: a checkpoint with one tensor an
expert, in which adapted tensors are merged and all others are the source's, byte for byte.

It is a conversion whose jobs all copy: `adapter.merged` does the arithmetic as the source is read.
`quantize` with the adapter gives the bytes of this followed by `quantize`, without the second
terabyte.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from beamq.adapter.options import AdapterOptions
from beamq.adapter.record import merged_notes
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import classify
from beamq.convert import output as output_folder
from beamq.convert.cpu_worker import CpuWorkerFactory
from beamq.convert.finalise import build_index, listed_shards
from beamq.convert.input_scales import no_scales
from beamq.convert.options import MergeOptions, RunKeywords
from beamq.convert.resources import DEFAULT_MEMORY_BYTES, default_workers
from beamq.convert.run import Conversion, Progress, open_run
from beamq.io.checkpoint import Checkpoint
from beamq.io.companions import companion_files
from beamq.io.files import user_path
from beamq.io.hub import names_a_path
from beamq.io.journal import ShardRecord
from beamq.io.manifest import Manifest
from beamq.io.shard_writer import copy_file, write_file, write_json
from beamq.io.source import INDEX_NAME
from beamq.options import from_keywords, ignore, takes
from beamq.plan.plan import Draft, JobKind, Work, place
from beamq.plan.sources import SourceMap, map_sources, whole_range
from beamq.ranks import current_ranks
from beamq.report.model_card import merged_card, trace_origin
from beamq.units import short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What was merged: `adapter` is the record in beamq.json, `notes` say it in sentences."""

    __repr__ = short_repr

    output: Path
    adapter: Mapping[str, Any]
    notes: tuple[str, ...]
    tensor_nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MergeEvents:
    """Called: `on_plan` with the notes before work, `on_progress` meanwhile."""

    on_plan: Callable[[tuple[str, ...]], None] = ignore
    on_progress: Callable[[Progress], None] | None = None


class MergeKeywords(RunKeywords, total=False):
    """Keywords of `merge`."""

    expert_lora_layout: Literal["new", "old"] | None
    expert_lora_order: Literal["fastest", "slowest"] | None
    on_progress: Callable[[Progress], None] | None
    on_plan: Callable[[tuple[str, ...]], None]


@takes(MergeOptions, MergeEvents)
def merge(
    source: str | Path, adapter: str | Path, output: str | Path, **keywords: Unpack[MergeKeywords]
) -> MergeResult:
    """Merge a LoRA adapter into a BF16, F16 or F32 Beam, and write the result to `output`.

    `source` and `adapter` are folders or `org/name[@revision]` on the Hub. The sum is computed in
    FP32 and rounded once to the dtype that the source stores; router weights become F32. See
    `MergeOptions` and `MergeEvents` for the keywords. Raises `AdapterError` before a weight is
    read for an adapter that does not fit or is not plain LoRA or DoRA, `TensorError` for a merged
    weight that is not finite, and the same `EnvironmentFault`s as `quantize`.
    """
    begun = time.monotonic()
    options = from_keywords(MergeOptions, keywords)
    events = from_keywords(MergeEvents, keywords)
    output, ranks = user_path(output), current_ranks()
    threads = options.workers or default_workers()
    output_folder.check_places(source, output, adapter)
    how = AdapterOptions(
        adapter=adapter,
        expert_lora_layout=options.expert_lora_layout,
        expert_lora_order=options.expert_lora_order,
    )
    with ExitStack() as stack:
        merged, work = open_run(
            stack, source, output, options, ranks,
            lambda opened: make_merge_work(opened, options.max_shard_bytes), how,
        )  # fmt: skip
        notes = merged_notes(merged)
        if ranks.first:
            events.on_plan(notes)
        Conversion(
            checkpoint=merged,
            work=work,
            output=output,
            factory=CpuWorkerFactory(merged, DEFAULT_MEMORY_BYTES, threads),
            scales=no_scales("merging needs no input scale"),
            ranks=ranks,
            options=options,
            workers=threads,
            memory=DEFAULT_MEMORY_BYTES,
            on_progress=events.on_progress,
            finalise=partial(_finalise, work, merged, output),
        ).run()
        record = merged.source.merged or {}
    return MergeResult(
        output=output,
        adapter=record,
        notes=notes,
        tensor_nbytes=work.tensor_nbytes,
        seconds=time.monotonic() - begun,
    )


def make_merge_work(merged: Checkpoint, max_shard_bytes: int) -> Work:
    """Plan the copy of every tensor, in the model's order, each in the dtype that it is read in."""
    config = BeamConfig.from_dict(merged.config)
    sources = map_sources(merged, config)
    jobs, shards = place(list(_drafts(sources)), max_shard_bytes)
    return Work(
        config=config,
        source_fingerprint=merged.fingerprint(),
        recipe_digest="merge",
        jobs=jobs,
        shards=shards,
        companions=companion_files(merged.source.listing()),
        remote_shards=merged.source.missing_nbytes(),
        total_parameters=sum(math.prod(t.shape) for shard in shards for t in shard.tensors),
    )


def _drafts(sources: SourceMap) -> Iterator[Draft]:
    found = [*sources.found, *((classify(spec.name), whole_range(spec)) for spec in sources.extra)]
    for role, source in found:
        outputs = ((role.name, source.spec.dtype, source.shape),)
        yield Draft(kind=JobKind.COPY, group=role.name, members=[(role, source, outputs)])


def _finalise(
    work: Work, merged: Checkpoint, output: Path, records: Mapping[str, ShardRecord]
) -> Manifest:
    for companion in work.companions:
        copy_file(merged.source.path(companion.source), output, companion.target)
    origin = trace_origin(merged, work.source_fingerprint)
    content = {
        "made_by": "merge",
        "digests": {
            "plan": work.digest(),
            "recipe": work.recipe_digest,
            "source": work.source_fingerprint,
        },
        "source": origin.record(),
        "adapter": dict(merged.source.merged or {}),
        "input_scales": {"digest": "none"},
    }
    write_file(output / "README.md", merged_card(work, origin, merged_notes(merged)).encode())
    write_json(output / INDEX_NAME, build_index(work))
    own = names_a_path(merged.config.get("_name_or_path"))
    config = {key: v for key, v in merged.config.items() if not (own and key == "_name_or_path")}
    write_json(output / "config.json", config)
    others = [companion.target for companion in work.companions]
    return Manifest.write(output, content, listed_shards(work, records), others)
