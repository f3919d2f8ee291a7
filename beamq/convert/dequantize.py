"""An NVFP4 or FP8 checkpoint back to BF16: exact decoding, under the original names.

In: a quantized Beam folder in the layout beamq (and ModelOpt, compressed-tensors) writes. Out: a
BF16 folder that transformers and the engines load. Each value is FP32(code * scales) rounded to
BF16 once; what quantization lost stays lost. (MXFP8's values are exact in BF16, but for those below
2^-126, of which bits may be lost without a message.) The loop is the same as for quantizing
(`run`), so it streams, resumes and leaves only whole files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import FP32_ROLES, Role, TensorRole, classify, expected_tensors
from beamq.convert import output as output_folder
from beamq.convert.cpu_worker import CpuWorkerFactory
from beamq.convert.finalise import build_index, listed_shards, output_config
from beamq.convert.input_scales import no_scales
from beamq.convert.options import DequantizeOptions, RunKeywords
from beamq.convert.resources import DEFAULT_MEMORY_BYTES, default_workers
from beamq.convert.run import Conversion, Progress, open_run
from beamq.errors import CheckpointError, TensorError, counted
from beamq.eval.verify.checksums import SumReader
from beamq.io.checkpoint import Checkpoint
from beamq.io.companions import companion_files, file_notes, restored_name
from beamq.io.files import user_path
from beamq.io.journal import ShardRecord, refuse_unfinished
from beamq.io.manifest import MANIFEST_NAME, Manifest
from beamq.io.safetensors_header import TensorSpec, few
from beamq.io.shard_writer import copy_file, write_json
from beamq.io.source import INDEX_NAME
from beamq.options import from_keywords, ignore, takes
from beamq.plan.layout import SUFFIXES, WEIGHT_FORMATS, format_in
from beamq.plan.plan import Draft, JobKind, Work, place
from beamq.plan.sources import SourceRange
from beamq.ranks import current_ranks


def check_recorded_bytes(checkpoint: Checkpoint, workers: int, *, whole: bool = True) -> int:
    """Compare every tensor with its checksum in the folder's `beamq.json`; how many there are.

    Unless `whole`, tensors may be missing. Decoding a flipped bit would give it a fresh, correct
    checksum, and nobody could find it any more. Raises `CheckpointError`, which names the tensors
    that differ or are missing.
    """
    manifest = Manifest.of(checkpoint.source)
    if manifest is None:
        return 0
    recorded = manifest.tensors
    stored = [[checkpoint.tensors[name]] for name in recorded if name in checkpoint.tensors]
    found: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=workers) as pool:
        for sums in pool.map(SumReader(checkpoint, manifest.algorithm).sums, stored):
            found.update(sums)
    wanted = recorded if whole else {spec.name: recorded[spec.name] for (spec,) in stored}
    bad = [name for name, digest in wanted.items() if found.get(name) != digest]
    if bad:
        raise CheckpointError(
            f"{checkpoint.label}: {counted(len(bad), 'tensor does', 'tensors do')} not match the"
            f" checksums in {MANIFEST_NAME}: {few(bad)}; see `beamq verify`, then make or fetch the"
            " checkpoint again"
        )
    return len(recorded)


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizeResult:
    """What was decoded: linears, and everything else copied as it was."""

    output: Path
    decoded: int
    copied: int
    tensor_nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DequantizeEvents:
    """Called: `on_plan` before work, `on_unchecked` without checksums, `on_progress` meanwhile."""

    on_plan: Callable[[Work], None] = ignore
    on_unchecked: Callable[[], None] = ignore
    on_progress: Callable[[Progress], None] | None = None


class DequantizeKeywords(RunKeywords, total=False):
    """Keywords of `dequantize`."""

    on_progress: Callable[[Progress], None] | None
    on_plan: Callable[[Work], None]
    on_unchecked: Callable[[], None]


@takes(DequantizeOptions, DequantizeEvents)
def dequantize(
    checkpoint: str | Path, output: str | Path, **keywords: Unpack[DequantizeKeywords]
) -> DequantizeResult:
    """Decode every quantized linear of a folder, or of `org/name` on the Hub, to BF16 [N, K].

    A local folder is first checked against the checksums in its `beamq.json`. See
    `DequantizeOptions` and `DequantizeEvents` for the keywords. Raises `CheckpointError` where
    checksums differ, `TensorError` when nothing is quantized or scales are missing or mis-shaped,
    and the same `EnvironmentFault`s as `quantize`.
    """
    begun = time.monotonic()
    options = from_keywords(DequantizeOptions, keywords)
    events = from_keywords(DequantizeEvents, keywords)
    output, ranks, threads = user_path(output), current_ranks(), options.workers
    threads = threads or default_workers()
    output_folder.check_places(checkpoint, output)
    refuse_unfinished(user_path(checkpoint))
    with ExitStack() as stack:
        source, work = open_run(
            stack, checkpoint, output, options, ranks,
            lambda opened: make_decode_work(opened, options.max_shard_bytes),
        )  # fmt: skip
        if ranks.first:
            events.on_plan(work)
            if source.source.local and not check_recorded_bytes(source, threads):
                events.on_unchecked()

        Conversion(
            checkpoint=source,
            work=work,
            output=output,
            factory=CpuWorkerFactory(source, DEFAULT_MEMORY_BYTES, threads),
            scales=no_scales("decoding needs no input scale"),
            ranks=ranks,
            options=options,
            workers=threads,
            memory=DEFAULT_MEMORY_BYTES,
            on_progress=events.on_progress,
            finalise=partial(_finalise, work, source, output),
        ).run()
    decoded = sum(job.kind is not JobKind.COPY for job in work.jobs)
    return DequantizeResult(
        output=output,
        decoded=decoded,
        copied=len(work.jobs) - decoded,
        tensor_nbytes=work.tensor_nbytes,
        seconds=time.monotonic() - begun,
    )


def make_decode_work(source: Checkpoint, max_shard_bytes: int) -> Work:
    """Plan the decoding: one job for each tensor of the output, in the model's order."""
    config = BeamConfig.from_dict(source.config)
    drafts = list(_drafts(source, config))
    if all(draft.kind is JobKind.COPY for draft in drafts):
        raise TensorError(f"{source.name}: nothing is quantized here; it is BF16 already")
    jobs, shards = place(drafts, max_shard_bytes)
    files = source.source.listing()
    return Work(
        config=config,
        source_fingerprint=source.fingerprint(),
        recipe_digest="dequantize",
        jobs=jobs,
        shards=shards,
        companions=tuple(  # not the quantized folder's card, which says what is no longer true
            replace(companion, target=target)
            for companion in companion_files(files)
            if (target := restored_name(companion)) is not None
        ),
        remote_shards=source.source.missing_nbytes(),
        hints=file_notes(files, own=source.files),
        total_parameters=sum(math.prod(t.shape) for shard in shards for t in shard.tensors),
    )


def _drafts(source: Checkpoint, config: BeamConfig) -> Iterator[Draft]:
    used: set[str] = set()
    for role, shape in expected_tensors(config):
        spec = source.spec(role.name)
        used.add(role.name)
        fmt = format_in(source.tensors, role.module)
        names = {f"{role.module}.{suffix}" for suffix in SUFFIXES}
        if fmt is None or not (names & source.tensors.keys()) - {role.name}:
            yield _copy(role, spec, shape)
            continue
        used.update(names)
        _check_quantized(source, role.module, fmt, shape)
        yield _draft(JobKind(f"decode-{WEIGHT_FORMATS[fmt].rounding}"), role, spec, "BF16", shape)
    for name, spec in source.tensors.items():
        if name not in used:
            yield _copy(classify(name), spec, spec.shape)


def _copy(role: TensorRole, spec: TensorSpec, shape: tuple[int, ...]) -> Draft:
    if spec.shape != shape:
        raise TensorError(f"{spec.name}: shape {list(spec.shape)}, expected {list(shape)}")
    dtype = spec.dtype
    if role.role is not Role.EXTRA:
        if dtype not in ("BF16", "F16", "F32"):
            raise TensorError(f"{spec.name}: {dtype} without a weight_scale; cannot be decoded")
        dtype = "F32" if role.role in FP32_ROLES else "BF16"
    return _draft(JobKind.COPY, role, spec, dtype, shape)


def _draft(
    kind: JobKind, role: TensorRole, spec: TensorSpec, dtype: str, shape: tuple[int, ...]
) -> Draft:
    """From a whole tensor to one of the same name."""
    whole = SourceRange(spec=spec, start=0, nbytes=spec.nbytes, shape=spec.shape)
    group = spec.name if kind is JobKind.COPY else role.module
    return Draft(kind=kind, group=group, members=[(role, whole, ((spec.name, dtype, shape),))])


def _check_quantized(source: Checkpoint, module: str, fmt: str, shape: tuple[int, ...]) -> None:
    """Raise `TensorError` unless a linear has all that decoding needs, in the form of its format.

    A scalar may have the shape [1].
    """
    n, k = shape
    for name, dtype, wanted in WEIGHT_FORMATS[fmt].tensors(module, n, k):
        if name.endswith(".input_scale"):
            continue
        found = source.spec(name)
        if found.dtype != dtype or found.shape not in (wanted, wanted or (1,)):
            raise TensorError(
                f"{name}: {found.dtype} {list(found.shape)}, expected {dtype} {list(wanted)}"
            )


def _finalise(
    work: Work, source: Checkpoint, output: Path, records: Mapping[str, ShardRecord]
) -> Manifest:
    for companion in work.companions:
        copy_file(source.source.path(companion.source), output, companion.target)
    content = {
        "made_by": "dequantize",
        "digests": {
            "plan": work.digest(),
            "recipe": work.recipe_digest,
            "source": work.source_fingerprint,
        },
        "input_scales": {"digest": "none"},
    }
    write_json(output / INDEX_NAME, build_index(work))
    write_json(output / "config.json", output_config(source.config))
    others = [companion.target for companion in work.companions]
    return Manifest.write(output, content, listed_shards(work, records), others)
