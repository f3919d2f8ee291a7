"""Repair a published NVFP4 or FP8 Beam that engines refuse or misread: into a new folder.

    headers -> findings (`plan/repairs.py`) -> refuse, or convert -> verify of the result

In: a local folder, and its source where something of it is lost. Out: a folder with beamq.json, in
which `changes` lists every repair. The input is never changed. The loop is that of quantizing, so a
repair streams and resumes: most tensors are copied, some are edited on the way, and what is lost is
quantized again from the source.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import Role, expected_tensors, role_of
from beamq.convert import output as output_folder
from beamq.convert.cpu_worker import CpuWorkerFactory
from beamq.convert.dequantize import check_recorded_bytes
from beamq.convert.finalise import build_index, listed_shards, output_config
from beamq.convert.input_scales import InputScaleProvider, KnownScales
from beamq.convert.options import RepairOptions
from beamq.convert.resources import DEFAULT_MEMORY_BYTES, default_workers
from beamq.convert.run import Conversion, Progress
from beamq.errors import CheckpointError, TensorError, UsageError, counted
from beamq.eval.verify.checks import Ledger, VerifyReport
from beamq.eval.verify.folder import HF_QUANT_NAME, optional_json, read_shards
from beamq.eval.verify.verify import verify
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.companions import companion_files
from beamq.io.files import read_json_object, user_path
from beamq.io.journal import ShardRecord, refuse_unfinished
from beamq.io.manifest import Manifest
from beamq.io.safetensors_header import TensorSpec, few
from beamq.io.shard_writer import copy_file, write_json
from beamq.io.source import INDEX_NAME, MAX_INDEX_BYTES, LocalFiles, SourceFiles
from beamq.options import from_keywords, ignore, takes
from beamq.plan.layout import SCHEMES, hf_quant_config, ignore_list, quantization_config
from beamq.plan.plan import Work, place
from beamq.plan.repairs import RepairClass, RepairFinding, RepairPlan
from beamq.plan.sources import SourceRange, map_sources
from beamq.ranks import Ranks, current_ranks


@dataclass(frozen=True, kw_only=True)
class RepairEvents:
    """Called: `on_findings` before anything is refused or written, `on_progress` meanwhile."""

    on_findings: Callable[[Sequence[RepairFinding]], None] = ignore
    on_progress: Callable[[Progress], None] | None = None


class RepairKeywords(TypedDict, total=False):
    """Keywords of `repair`."""

    max_shard_bytes: int | str
    workers: int | None
    resume: bool
    overwrite: bool
    source: str | Path | None
    accept_bounded: bool
    on_findings: Callable[[Sequence[RepairFinding]], None]
    on_progress: Callable[[Progress], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """What was done; `nbytes` is the size of the result's tensors.

    Without findings nothing was written: `output` and `report` are None.
    """

    output: Path | None
    findings: tuple[RepairFinding, ...]
    report: VerifyReport | None
    nbytes: int
    seconds: float


@takes(RepairOptions, RepairEvents)
def repair(
    checkpoint: str | Path, output: str | Path, **keywords: Unpack[RepairKeywords]
) -> RepairResult:
    """Write a sound copy of a quantized folder, and verify it.

    Raises `TensorError` for what cannot be repaired with the options given, `CheckpointError` for
    files that cannot be read or differ from their checksums, and what `quantize` raises.
    """
    begun = time.monotonic()
    options = from_keywords(RepairOptions, keywords)
    events = from_keywords(RepairEvents, keywords)
    folder, output = user_path(checkpoint), user_path(output)
    threads = options.workers or default_workers()
    if current_ranks().world > 1:
        raise UsageError("repair runs in one process; start it without torchrun")
    for read in (folder, options.source or folder):
        output_folder.check_places(read, output)
    with ExitStack() as stack:
        damaged, origin = _open(stack, folder, options.source)
        findings, plan = examine(damaged, origin)
        events.on_findings(findings)
        _refuse(damaged, findings, options)
        if not findings:
            seconds = time.monotonic() - begun
            return RepairResult(output=None, findings=(), report=None, nbytes=0, seconds=seconds)
        if options.overwrite:
            output_folder.refuse_origin(damaged, output)
        check_recorded_bytes(damaged, threads, whole=False)
        work = _make_work(damaged, plan, findings, options.max_shard_bytes)
        known = KnownScales(scale=plan.input_scales.__getitem__, digest="none", record={})
        Conversion(
            checkpoint=damaged,
            work=work,
            output=output,
            factory=CpuWorkerFactory(damaged, DEFAULT_MEMORY_BYTES, threads, plan.edits),
            scales=InputScaleProvider(known.digest, known),
            ranks=Ranks(),
            options=options,
            workers=threads,
            memory=DEFAULT_MEMORY_BYTES,
            on_progress=events.on_progress,
            finalise=partial(_finalise, work, damaged, output, plan, findings),
        ).run()
    return RepairResult(
        output=output,
        findings=findings,
        report=verify(output, workers=options.workers),
        nbytes=work.tensor_nbytes,
        seconds=time.monotonic() - begun,
    )


def repairs_of(checkpoint: str | Path, *, values: bool) -> tuple[RepairFinding, ...]:
    """The findings in a folder, without a source; see `RepairPlan` for `values`."""
    with ExitStack() as stack:
        damaged, origin = _open(stack, user_path(checkpoint), None)
        return examine(damaged, origin, values=values)[0]


# --- opening ------------------------------------------------------------------------------------

_OF_SOURCE = "source:"  # before the names of the source's files


class _BothFiles(LocalFiles):
    """The damaged folder's files and the source's weights, which have a prefix in their names."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.origin: SourceFiles | None = None

    def read(self, file: str, offset: int, out: memoryview, name: str) -> None:
        if self.origin is not None and file.startswith(_OF_SOURCE):
            self.origin.read(file.removeprefix(_OF_SOURCE), offset, out, name)
        else:
            super().read(file, offset, out, name)

    def advise(self, file: str, offset: int, nbytes: int) -> None:
        if not file.startswith(_OF_SOURCE):
            super().advise(file, offset, nbytes)

    def changed(self) -> str | None:
        return super().changed() or (None if self.origin is None else self.origin.changed())


def _open(
    stack: ExitStack, folder: Path, source: str | Path | None
) -> tuple[Checkpoint, dict[str, SourceRange]]:
    """The folder, whatever its index says, and where each tensor is in the source.

    Of files that the index does not name, only tensors are taken that the others lack. Raises
    `CheckpointError` for a file that cannot be read or a tensor with two values, and what
    `map_sources` raises.
    """
    refuse_unfinished(folder)
    files, ledger = _BothFiles(folder), Ledger()
    stack.callback(files.close)
    config = read_json_object(files.path("config.json"), CheckpointError)
    index = optional_json(folder / INDEX_NAME, "files.index", ledger, MAX_INDEX_BYTES) or {}
    entries = index.get("weight_map")
    listed = {str(file) for file in entries.values()} if isinstance(entries, dict) else set()
    present = [name for name in files.names() if name.endswith(".safetensors")]
    shards, metadata = read_shards(files, [name for name in present if name in listed], ledger)
    strays, more = read_shards(files, [name for name in present if name not in listed], ledger)
    if broken := ledger.states["files.readable"].detail:
        raise CheckpointError(f"{folder}: {broken}")
    damaged = Checkpoint(
        config=config,
        tensors={},
        files=tuple({**shards, **strays}),
        metadata=metadata | more,
        has_index=bool(index),
        source=files,
    )
    for spec in (spec for specs in {**shards, **strays}.values() for spec in specs):
        if shards and spec.file in strays and role_of(spec.name).role is Role.EXTRA:
            continue
        first = damaged.tensors.setdefault(spec.name, spec)
        if first is spec or (spec.file in strays and first.file in shards):
            continue
        if not _same_bytes(damaged, first, spec):
            raise CheckpointError(
                f"{folder}: {spec.name} is stored twice, in {first.file} and {spec.file}, with"
                " different values; delete the file that does not belong to this checkpoint"
            )
    return damaged, {} if source is None else _open_source(stack, damaged, files, source)


def _same_bytes(damaged: Checkpoint, first: TensorSpec, second: TensorSpec) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    both = [memoryview(bytearray(spec.nbytes)) for spec in (first, second)]
    for spec, view in zip((first, second), both, strict=True):
        damaged.read_into(spec, view)
    return both[0] == both[1]


def _open_source(
    stack: ExitStack, damaged: Checkpoint, files: _BothFiles, source: str | Path
) -> dict[str, SourceRange]:
    opened = stack.enter_context(open_checkpoint(source))
    if not isinstance(opened.source, LocalFiles):
        raise CheckpointError(f"{opened.name}: repair reads a local source; download it first")
    files.origin = opened.source
    ranges = {}
    for role, found in map_sources(opened, BeamConfig.from_dict(opened.config)).found:
        spec = replace(found.spec, file=_OF_SOURCE + found.spec.file)
        ranges[role.name] = replace(found, spec=spec)
        stored = damaged.tensors.get(role.name)
        # Norms are never quantized: where one differs, this is not the source.
        norm = role.role is Role.NORM and stored is not None and stored.dtype == spec.dtype
        if norm and stored is not None and not _same_bytes(damaged, stored, spec):
            raise TensorError(
                f"{opened.name}: {role.name} differs from that of {damaged.name}, so it is not the"
                " source that was quantized; give the right --source"
            )
    return ranges


# --- judging ------------------------------------------------------------------------------------

_MINOR = ("float-dtype", "derived")  # no engine minds; changed only where something else is
_WRITTEN_ANEW = {"files": "files", "config": "configs", "engine": "configs"}
_LEFT_OUT = ("config.dtype", "files.readable", "manifest.present")


def examine(
    damaged: Checkpoint, origin: Mapping[str, SourceRange], *, values: bool = True
) -> tuple[tuple[RepairFinding, ...], RepairPlan]:
    """All findings, those of files and configs by verify's own checks; none if it is sound."""
    plan = RepairPlan(damaged, origin, values=values)
    checks = verify(damaged.root, level="structure").checks
    faulty = [each for each in checks if each.count and each.name not in _LEFT_OUT]
    for check in faulty:
        repair = _WRITTEN_ANEW.get(check.name.partition(".")[0])
        if check.name == "config.model":
            plan.note("other", RepairClass.IMPOSSIBLE, check.name, check.detail)
        elif repair is not None:
            plan.note(repair, RepairClass.EXACT, check.name, check.detail)
    for check in faulty:  # what only verify knows
        if check.status == "fail" and not plan.findings:
            plan.note("other", RepairClass.IMPOSSIBLE, check.name, check.detail)
    minor = all(found.repair in _MINOR for found in plan.findings)
    return () if minor else plan.findings, plan


def _refuse(damaged: Checkpoint, findings: Sequence[RepairFinding], options: RepairOptions) -> None:
    """Raise `TensorError` for findings that cannot be repaired with what was given."""
    remedies = {
        RepairClass.IMPOSSIBLE: "no repair is known",
        RepairClass.CALIBRATION: "quantize the source again with `beamq quantize`",
    }
    if options.source is None:
        remedies[RepairClass.SOURCE] = "give --source"
    if not options.accept_bounded:
        remedies[RepairClass.BOUNDED] = "give --accept-bounded"
    said = [
        f"{found.repair} ({counted(len(found.where), 'place')}, {few(found.where, 1)}:"
        f" {found.text}): {remedies[found.kind]}"
        for found in findings
        if found.kind in remedies
    ]
    if said:
        raise TensorError(f"{damaged.name}: not repaired; {'; '.join(said)}")


# --- converting ---------------------------------------------------------------------------------


def _make_work(
    damaged: Checkpoint, plan: RepairPlan, findings: Sequence[RepairFinding], max_shard_bytes: int
) -> Work:
    jobs, shards = place(plan.drafts, max_shard_bytes)
    decisions = json.dumps([found.to_dict() for found in findings])
    return Work(
        config=plan.config,
        source_fingerprint=damaged.fingerprint(),
        recipe_digest=f"repair {hashlib.sha256(decisions.encode()).hexdigest()}",
        jobs=jobs,
        shards=shards,
        companions=tuple(
            replace(companion, target=companion.source)
            for companion in companion_files(damaged.source.listing())
        ),
        total_parameters=sum(math.prod(shape) for _, shape in expected_tensors(plan.config)),
    )


def _finalise(
    work: Work,
    damaged: Checkpoint,
    output: Path,
    plan: RepairPlan,
    findings: Sequence[RepairFinding],
    records: Mapping[str, ShardRecord],
) -> Manifest:
    for companion in work.companions:
        copy_file(damaged.source.path(companion.source), output, companion.target)
    ignore = ignore_list(plan.config, plan.scheme, plan.formats, ())
    cached = "fp8" if _has_fp8_cache(damaged) and not plan.has("kv-scales") else "none"
    block = quantization_config(plan.scheme, ignore, cached, plan.formats)
    write_json(output / INDEX_NAME, build_index(work))
    if SCHEMES[plan.scheme].modelopt:
        write_json(output / HF_QUANT_NAME, hf_quant_config(block))
    write_json(output / "config.json", output_config(damaged.config, block))
    earlier = Manifest.of(damaged.source)
    content = {
        "made_by": "repair",
        "changes": [found.to_dict() for found in findings],
        "digests": {
            "plan": work.digest(),
            "recipe": work.recipe_digest,
            "source": work.source_fingerprint,
        },
        "input_scales": (earlier.input_scales if earlier else {}) | {"digest": "none"},
    }
    others = [companion.target for companion in work.companions]
    return Manifest.write(output, content, listed_shards(work, records), others)


def _has_fp8_cache(damaged: Checkpoint) -> bool:
    """Whether the config files declare an FP8 KV cache."""
    block = damaged.config.get("quantization_config")
    hf = optional_json(damaged.root / HF_QUANT_NAME, "config.agreement", Ledger()) or {}
    nested = hf.get("quantization")
    return bool(isinstance(block, dict) and block.get("kv_cache_scheme")) or (
        isinstance(nested, dict) and nested.get("kv_cache_quant_algo") == "FP8"
    )
