"""PLAN: recipe x headers -> where every output byte comes from and goes to, before one is read.

In: an opened source, a `Recipe`, a shard size. Out: a `Plan`: jobs in layer order (a job is a
set of linears that share a scale, or one copied tensor), and output shards in which every tensor
already has its file and offset. Nothing here reads tensor data; a 501B model takes seconds.

Since all sizes are known, conversion can write any tensor at any time from any thread or
process, and disk, memory and every fault of names or shapes are known first. The same input
gives the same plan, byte for byte (`digest`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from beamq.checkpoint import Checkpoint, open_checkpoint
from beamq.config import BeamConfig
from beamq.errors import RecipeError, UsageError
from beamq.exclusion import Exclusion, apply_exclusions, quantized_units, tensor_parallel_notes
from beamq.formats import layout
from beamq.header import TensorSpec
from beamq.placement import Draft, fill_shards
from beamq.recipe import Recipe, load_recipe
from beamq.roles import PRECISE_FP32, Role, TensorRole, classify, fused_group
from beamq.shards import OutputTensor, Shard
from beamq.sources import Companion, SourceMap, SourceRange, companion_files, map_sources

PLAN_FORMAT = 1  # raised whenever the same input would give other bytes
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One source tensor of a job, [n, k] for a linear, and what it becomes."""

    role: TensorRole
    source: SourceRange
    outputs: tuple[OutputTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The unit of work: linears sharing a scale (`nvfp4`, `fp8`), or one tensor to `copy`."""

    kind: str
    group: str
    shard: int
    members: tuple[Member, ...]

    @property
    def source_nbytes(self) -> int:
        """Bytes to read."""
        return sum(member.source.nbytes for member in self.members)

    @property
    def files(self) -> frozenset[str]:
        """Source shards to read them from."""
        return frozenset(member.source.spec.file for member in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run reads and writes, whichever way it converts.

    `scales` is how NVFP4 block scales are chosen (see `Recipe`);
    `remote_shards` are the source's shards that have to be fetched first, with their bytes.
    """

    config: BeamConfig
    source_fingerprint: str
    recipe_digest: str
    jobs: tuple[Job, ...] = field(repr=False)
    shards: tuple[Shard, ...]
    companions: tuple[Companion, ...]
    total_parameters: int
    scales: str = "max"
    remote_shards: Mapping[str, int] = field(default_factory=dict, repr=False)

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all output tensors (the index's `total_size`)."""
        return sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors)

    @property
    def output_nbytes(self) -> int:
        """Bytes of all output shards, headers included, plus the files copied beside them."""
        files = sum(companion.nbytes for companion in self.companions)
        return sum(shard.nbytes for shard in self.shards) + files

    @property
    def largest_group_nbytes(self) -> int:
        """Source bytes of the largest set of linears that share an NVFP4 scale."""
        return max((job.source_nbytes for job in self.jobs if job.kind == "nvfp4"), default=0)

    def digest(self) -> str:
        """SHA-256 over every decision: recipe, sources, jobs and shard headers."""
        digest = hashlib.sha256(f"{PLAN_FORMAT} {self.recipe_digest}".encode())
        for shard in self.shards:
            digest.update(shard.name.encode() + shard.header)
        for job in self.jobs:
            for member in job.members:
                source = member.source
                digest.update(
                    f"\n{job.kind} {job.shard} {job.group} {source.spec.name} {source.spec.dtype}"
                    f" {source.start} {source.nbytes} {member.outputs[0].name}".encode()
                )
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Work):
    """A quantization: the work, and all that people and configs are told about it."""

    recipe: Recipe
    units: frozenset[layout.Unit]
    exclusions: tuple[Exclusion, ...]
    ignore: tuple[str, ...]
    dropped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    parameters: dict[str, int]
    quantized_parameters: int
    source_nbytes: int

    @property
    def bits_per_weight(self) -> float:
        """Output tensor bits over source elements, scales and precise tensors included."""
        return 8 * self.tensor_nbytes / self.total_parameters


def make_plan(
    source: Checkpoint | str | Path,
    recipe: Recipe | str = "nvfp4",
    *,
    exclude: Sequence[str] = (),
    kv_cache: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Plan:
    """Plan the conversion of a folder, of a repository on the Hub, or of an opened source.

    `recipe` is a `Recipe`, a built-in name or the path of a YAML file; `exclude` and `kv_cache`
    are laid over it. Raises `CheckpointError`, `TensorError`, `AlreadyQuantizedError`,
    `ConfigError` for the source and `RecipeError` for a recipe that does not fit it.
    `max_shard_bytes` bounds a shard's tensor bytes; a job is never split, so one larger job gets
    a shard of its own.
    """
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    if exclude or kv_cache is not None:
        chosen = chosen.with_options(exclude=tuple(exclude), kv_cache=kv_cache)
    if isinstance(source, Checkpoint):
        return _plan(source, chosen, max_shard_bytes)
    with open_checkpoint(source) as checkpoint:
        return _plan(checkpoint, chosen, max_shard_bytes)


def _plan(checkpoint: Checkpoint, recipe: Recipe, max_shard_bytes: int) -> Plan:
    if max_shard_bytes < 1:
        raise UsageError(f"--max-shard-size is {max_shard_bytes} bytes, expected at least 1")
    config = BeamConfig.from_dict(checkpoint.config)
    sources = map_sources(checkpoint, config)
    exclusions = apply_exclusions(config, recipe, (role for role, _ in sources.found))
    units = quantized_units(config, recipe, exclusions)
    jobs, shards = place(_draft_jobs(config, recipe, sources, units), max_shard_bytes)
    modules = layout.harmless_entries(
        config, (classify(spec.name).module for spec in sources.extra if len(spec.shape) == 2)
    )
    make_ignore = (
        layout.compressed_tensors_ignore if recipe.format == "fp8" else layout.modelopt_ignore
    )
    parameters = _parameters_by_role(sources)
    return Plan(
        config=config,
        recipe=recipe,
        source_fingerprint=checkpoint.fingerprint(),
        jobs=jobs,
        shards=shards,
        units=units,
        exclusions=exclusions,
        ignore=tuple(make_ignore(config, units, modules)),
        dropped=sources.dropped,
        companions=companion_files(checkpoint.source),
        remote_shards=checkpoint.source.missing_nbytes(),
        notes=(*sources.notes, *tensor_parallel_notes(config, recipe, units)),
        parameters=parameters,
        scales=recipe.scales,
        total_parameters=sum(parameters.values()),
        recipe_digest=recipe.digest(),
        quantized_parameters=sum(
            member.source.shape[0] * member.source.shape[1]
            for job in jobs
            if job.kind != "copy"
            for member in job.members
        ),
        source_nbytes=sum(spec.nbytes for spec in checkpoint.tensors.values()),
    )


def _draft_jobs(
    config: BeamConfig, recipe: Recipe, sources: SourceMap, units: frozenset[layout.Unit]
) -> Iterator[Draft]:
    """Jobs without places, in the order of `expected_tensors`; groups close when all are in."""
    groups: dict[str, Draft] = {}
    for role, source in sources.found:
        if role.layer is None or (role.layer, role.role) not in units:
            yield _copy_job(role, source)
            continue
        n, k = source.shape
        fmt = recipe.rules[role.role]
        # FP8 rows share nothing, so each linear is a job of its own.
        group = role.module if fmt == "fp8" else fused_group(role)
        draft = groups.setdefault(group, Draft(kind=fmt, group=group, members=[]))
        outputs = layout.quantized_tensors(role.module, fmt, n, k)
        draft.members.append((role, source, outputs))
        if fmt == "fp8" or len(draft.members) == _group_size(group):
            yield groups.pop(group)
    if groups:
        raise RecipeError(f"internal: scale groups left open: {', '.join(groups)[:200]}")
    for spec in sources.extra:
        whole = SourceRange(spec=spec, start=0, nbytes=spec.nbytes, shape=spec.shape)
        role = classify(spec.name)
        yield Draft(
            kind="copy",
            group=spec.name,
            members=[(role, whole, ((spec.name, spec.dtype, spec.shape),))],
        )


def _group_size(group: str) -> int:
    return {"qkv_gate": 4, "gate_up": 2}.get(group.rsplit(".", 1)[-1], 1)


def _copy_job(role: TensorRole, source: SourceRange) -> Draft:
    dtype = "F32" if role.role in PRECISE_FP32 else "BF16"
    return Draft(
        kind="copy", group=role.name, members=[(role, source, ((role.name, dtype, source.shape),))]
    )


def place(drafts: Iterable[Draft], limit: int) -> tuple[tuple[Job, ...], tuple[Shard, ...]]:
    """Fill shards with whole jobs in order, then give every tensor its offset."""
    filled = fill_shards(drafts, limit)
    jobs: list[Job] = []
    for index, (inside, shard) in enumerate(filled):
        placed = {tensor.name: tensor for tensor in shard.tensors}
        jobs += [_finish_job(draft, index, placed) for draft in inside]
    return tuple(jobs), tuple(shard for _, shard in filled)


def _finish_job(draft: Draft, shard: int, placed: dict[str, OutputTensor]) -> Job:
    members = tuple(
        Member(role=role, source=source, outputs=tuple(placed[name] for name, _, _ in outs))
        for role, source, outs in draft.members
    )
    return Job(kind=draft.kind, group=draft.group, shard=shard, members=members)


def _parameters_by_role(sources: SourceMap) -> dict[str, int]:
    counts = dict.fromkeys((role.value for role in Role), 0)
    for role, source in sources.found:
        size = 1
        for length in source.shape:
            size *= length
        counts[role.role.value] += size
    for spec in sources.extra:
        counts[_extra_role(spec)] += spec.numel
    return counts


def _extra_role(spec: TensorSpec) -> str:
    return Role.HEAD.value if spec.name == "lm_head.weight" else Role.EXTRA.value
