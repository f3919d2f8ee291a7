"""The plan of a conversion: where every output byte comes from and goes to, before one is read.

In: an opened source, a `Recipe`, a shard size. Out: a `Plan`: jobs in layer order (a job is a
set of linears that share a scale, or one copied tensor), and output shards in which every tensor
already has its file and offset. Nothing here reads tensor data; a 501B model takes seconds.

All sizes follow from dtypes and shapes. So a conversion can write any tensor at any time from any
thread or process, and faults of names or shapes and the need of disk and memory are known before it
starts. The same input gives the same plan, byte for byte (`digest`).

A unit, (layer, expert|dense-mlp|attention), is quantized or not as a whole (ADR 7): an exclude
pattern that hits any linear of a unit is widened to the unit, and the plan says so.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Unpack

from beamq.adapter.merged import merge_hint, open_merged
from beamq.adapter.options import AdapterKeywords, AdapterOptions
from beamq.adapter.record import merged_notes
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import FP32_ROLES, QUANTIZABLE, Role, TensorRole, classify, fused_group
from beamq.errors import CheckpointError, RecipeError, UsageError
from beamq.io.checkpoint import ADAPTER_STAMP, Checkpoint
from beamq.io.companions import Companion, card_name, companion_files, file_notes, front_matter
from beamq.io.files import read_json_object
from beamq.io.hub import names_a_path
from beamq.io.safetensors_header import ITEMSIZE, few
from beamq.io.shard_writer import OutputTensor, Shard
from beamq.options import Flag, from_keywords, takes
from beamq.plan import layout
from beamq.plan.layout import (
    SCHEMES,
    WEIGHT_FORMATS,
    Outputs,
    Unit,
    WeightFormat,
    layer_units,
)
from beamq.plan.recipe import Recipe, load_recipe, matches
from beamq.plan.sources import SourceMap, SourceRange, map_sources
from beamq.units import short_repr, show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """What one pattern did: modules matched, how many of them the recipe would have quantized,
    the units left in high precision, and whether that is more than was matched."""

    pattern: str
    matched: tuple[str, ...]
    would_quantize: int
    units: tuple[Unit, ...]
    widened: bool


def apply_exclusion(pattern: str, recipe: Recipe, roles: Iterable[TensorRole]) -> Exclusion:
    """What a pattern excludes. A pattern that matches nothing is a `RecipeError`."""
    matched: list[str] = []
    hit: dict[Unit, int] = {}
    total: dict[Unit, int] = {}
    for role in roles:
        if role.role in (Role.NORM, Role.ROUTER_BIAS):
            continue
        planned = role.layer is not None and role.role in recipe.rules
        unit = (role.layer or 0, role.role)
        if planned:
            total[unit] = total.get(unit, 0) + 1
        if matches(pattern, role.module):
            matched.append(role.module)
            if planned:
                hit[unit] = hit.get(unit, 0) + 1
    if not matched:
        raise RecipeError(
            f"--exclude {pattern!r} matches no module; a plain word is one name between dots,"
            " globs and `re:` match the whole name (for example model.layers.3.mlp.experts*)"
        )
    return Exclusion(
        pattern=pattern,
        matched=tuple(matched),
        would_quantize=sum(hit.values()),
        units=tuple(hit),
        widened=any(hit[unit] < total[unit] for unit in hit),
    )


def quantized_units(
    config: BeamConfig, recipe: Recipe, exclusions: Iterable[Exclusion]
) -> frozenset[Unit]:
    """Units to quantize. Raises `RecipeError` if none is left or a width does not fit."""
    excluded = {unit for exclusion in exclusions for unit in exclusion.units}
    units = frozenset(
        unit for unit in layer_units(config) if unit[1] in recipe.rules and unit not in excluded
    )
    if not units:
        raise RecipeError(
            f"recipe {recipe.name}: nothing is left to quantize; its rules name"
            f" {', '.join(role.value for role in recipe.rules)}, and every such part is excluded"
            " or absent"
        )
    roles = {role for _, role in units}
    for role in filter(roles.__contains__, QUANTIZABLE):
        step = k_step(recipe, role)
        for name, k in input_widths(config, role).items():
            if k % step:
                raise RecipeError(
                    f"{name}: input width {k} is not a multiple of {step}, as {recipe.rules[role]}"
                    f" needs; use an FP8 recipe or one without {role.value}"
                )
    return units


def k_step(recipe: Recipe, role: Role) -> int:
    """What the input width of a role's linears must be a multiple of: the columns of a block."""
    rows, columns = WEIGHT_FORMATS[recipe.weight_format(role)].block
    return columns if rows == 1 and columns else 1


def input_widths(config: BeamConfig, role: Role) -> dict[str, int]:
    """K of the linears of a role: the dimension that blocks run along."""
    h = config.hidden_size
    if role is Role.ATTENTION:
        return {"self_attn.q_proj, k_proj, v_proj, gate_proj": h, "self_attn.o_proj": config.q_dim}
    width = config.moe_intermediate_size if role is Role.EXPERT else config.intermediate_size
    return {f"{role.value} gate_proj, up_proj": h, f"{role.value} down_proj": width}


def serving_notes(config: BeamConfig, recipe: Recipe, units: frozenset[Unit]) -> Iterator[str]:
    """Which engines load the format where SGLang does not, and a warning where a usual
    tensor-parallel size would cut a block of an input width."""
    scheme = SCHEMES[recipe.format]
    if "SGLang" in scheme.refusals:
        reasons = "; ".join(f"{engine}: {why}" for engine, why in scheme.refusals.items())
        yield f"{' and '.join(scheme.loaders)} alone can load this format ({reasons})"
    split: dict[int, list[int]] = {}
    for role in sorted({role for _, role in units}):
        width = list(input_widths(config, role).values())[1]
        split.setdefault(WEIGHT_FORMATS[recipe.weight_format(role)].block[1] or 1, []).append(width)
    for step, widths in split.items():
        sizes = [size for size in (1, 2, 4, 8, 16) if all(k % (size * step) == 0 for k in widths)]
        if step > 1 and not {1, 2, 4, 8} <= set(sizes):
            yield (
                f"tensor parallelism cuts blocks of {step} unless its size is one of"
                f" {', '.join(map(str, sizes))}; serve with one of these, or with expert"
                " parallelism"
            )


DraftMember = tuple[TensorRole, SourceRange, Outputs]


@dataclass(slots=True, kw_only=True)
class Draft:
    """A job whose outputs have no places yet."""

    kind: JobKind
    group: str
    members: list[DraftMember]

    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum(_nbytes(dtype, shape) for _, _, outs in self.members for _, dtype, shape in outs)


def _layout(index: int, count: int, drafts: list[Draft]) -> Shard:
    entries = [entry for draft in drafts for _, _, outs in draft.members for entry in outs]
    # Loaders view a file as typed memory and holes are not allowed, so the largest dtypes go first:
    # then each tensor is aligned to its own.
    entries.sort(key=lambda entry: -ITEMSIZE[entry[1]])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in entries:
        end = begin + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    tensors = []
    offset = len(raw)
    for name, dtype, shape in entries:
        nbytes = _nbytes(dtype, shape)
        tensors.append(
            OutputTensor(name=name, dtype=dtype, shape=shape, nbytes=nbytes, offset=offset)
        )
        offset += nbytes
    return Shard(
        name=f"model-{index + 1:05d}-of-{count:05d}.safetensors",
        header=raw,
        tensors=tuple(tensors),
        nbytes=offset,
    )


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return ITEMSIZE[dtype] * math.prod(shape)


PLAN_FORMAT = 1  # raised whenever the same input would give other bytes
DEFAULT_SHARD_BYTES = 5_000_000_000
HUB_FILE_BYTES = 50_000_000_000
_OF_A_MACHINE = re.compile(r"(?<!^_name_or_)path|_file|_dir|folder")
CONFIG_NAMES = ("config.json", "tokenizer_config.json", "generation_config.json")


class JobKind(StrEnum):
    """How the linears of a job are converted, or that its tensor is copied."""

    COPY = "copy"
    NVFP4 = "nvfp4"
    FP8 = "fp8"
    FP8_BLOCK = "fp8-block"
    MXFP8 = "mxfp8"
    DECODE_NVFP4 = "decode-nvfp4"
    DECODE_FP8 = "decode-fp8"
    DECODE_FP8_BLOCK = "decode-fp8-block"
    DECODE_MXFP8 = "decode-mxfp8"

    @property
    def weights(self) -> WeightFormat:
        """The format that linears are converted to, or decoded from. Not of a copy."""
        return WEIGHT_FORMATS[self.removeprefix("decode-")]


class Nvfp4Outputs(NamedTuple):
    """The outputs of a linear in NVFP4: `Nvfp4Outputs(*member.outputs)`."""

    codes: OutputTensor
    block_scale: OutputTensor
    global_scale: OutputTensor
    input_scale: OutputTensor


class Fp8Outputs(NamedTuple):
    """The outputs of a linear in FP8 of any kind: `Fp8Outputs(*member.outputs)`."""

    codes: OutputTensor
    scale: OutputTensor


FP8_KINDS = (JobKind.FP8, JobKind.FP8_BLOCK, JobKind.MXFP8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One source tensor of a job, [n, k] for a linear, and what it becomes.

    `outputs` is one tensor where the source is copied or decoded, else `Nvfp4Outputs` or
    `Fp8Outputs`, after the job's kind.
    """

    role: TensorRole
    source: SourceRange
    outputs: tuple[OutputTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The unit of work: linears that share a scale, or one tensor to copy or decode.

    `index` is its place in `Work.jobs`, `shard` that of its output in `Work.shards`.
    """

    index: int
    kind: JobKind
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
    `remote_shards` are the source's shards that have to be fetched first, with their bytes;
    `hints` are for the user alone: of files and paths of the source, which nothing may publish.
    """

    __repr__ = short_repr

    config: BeamConfig
    source_fingerprint: str
    recipe_digest: str
    jobs: tuple[Job, ...] = field(repr=False)
    shards: tuple[Shard, ...]
    companions: tuple[Companion, ...]
    total_parameters: int
    scales: str = "max"
    remote_shards: Mapping[str, int] = field(default_factory=dict, repr=False)
    hints: tuple[str, ...] = ()

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all output tensors (the index's `total_size`)."""
        return sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors)

    @property
    def output_nbytes(self) -> int:
        """Bytes of all output shards, headers included, plus the files that are copied."""
        files = sum(companion.nbytes for companion in self.companions)
        return sum(shard.nbytes for shard in self.shards) + files

    @property
    def largest_group_nbytes(self) -> int:
        """Source bytes of the largest set of linears that share an NVFP4 scale."""
        return max((job.source_nbytes for job in self.jobs if job.kind is JobKind.NVFP4), default=0)

    @property
    def largest_stripe_nbytes(self) -> int:
        """Source bytes of the most rows that share scales and are converted at once."""
        return max(
            (
                member.source.nbytes // member.source.shape[0] * job.kind.weights.block[0]
                for job in self.jobs
                if job.kind in FP8_KINDS
                for member in job.members
            ),
            default=0,
        )

    def digest(self) -> str:
        """SHA-256 over every decision: recipe, sources, jobs and shard headers."""
        digest = hashlib.sha256(f"{PLAN_FORMAT} {self.recipe_digest}".encode())
        digest.update("".join(self.source_fingerprint.partition(ADAPTER_STAMP)[1:]).encode())
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
    """A quantization: the work, and all that reports and configs say of it."""

    __repr__ = short_repr

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
    def formats(self) -> dict[Unit, str]:
        """The format of each quantized unit, a key of `layout.WEIGHT_FORMATS`."""
        return {unit: self.recipe.weight_format(unit[1]) for unit in sorted(self.units)}

    @property
    def bits_per_weight(self) -> float:
        """Output tensor bits over source elements, scales and unquantized tensors included."""
        return 8 * self.tensor_nbytes / self.total_parameters


@takes(
    AdapterOptions,
    kv_cache=Flag("", choices=("none", "fp8")),
    engine=Flag("", choices=layout.ENGINE_NAMES),
    max_shard_bytes=Flag("", size=True),
)
def make_plan(
    source: Checkpoint | str | Path,
    recipe: Recipe | str | Path = "nvfp4",
    *,
    exclude: str | Sequence[str] = (),
    kv_cache: str | None = None,
    engine: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    **keywords: Unpack[AdapterKeywords],
) -> Plan:
    """Plan the conversion of a folder, of a repository on the Hub, or of an opened source.

    `recipe` is a `Recipe`, a built-in name or the path of a YAML file; `exclude` and `kv_cache`
    are added to it. A recipe that `engine` ("vllm", "sglang" or "transformers") does not load is
    refused. Raises `CheckpointError`, `TensorError`, `AlreadyQuantizedError`,
    `ConfigError` for the source and `RecipeError` for a recipe that does not fit it.
    `max_shard_bytes` bounds a shard's tensor bytes; a job is never split, so one larger job gets
    a shard of its own.
    """
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if exclude or kv_cache is not None:
        chosen = chosen.with_options(exclude=tuple(exclude), kv_cache=kv_cache)
    chosen.check_engine(engine)
    how = from_keywords(AdapterOptions, keywords)
    if isinstance(source, Checkpoint):
        if how.adapter is not None:
            raise UsageError("adapter goes with the path of a source, which is opened with it")
        return _plan(source, chosen, max_shard_bytes)
    with open_merged(source, how) as checkpoint:
        return _plan(checkpoint, chosen, max_shard_bytes)


def _plan(checkpoint: Checkpoint, recipe: Recipe, max_shard_bytes: int) -> Plan:
    if max_shard_bytes < 1:
        raise UsageError(f"--max-shard-size is {max_shard_bytes} bytes, expected at least 1")
    config = BeamConfig.from_dict(checkpoint.config)
    sources, files = map_sources(checkpoint, config), checkpoint.source.listing()
    roles = [role for role, _ in sources.found]
    exclusions = tuple(apply_exclusion(pattern, recipe, roles) for pattern in recipe.exclude)
    units = quantized_units(config, recipe, exclusions)
    jobs, shards = place(_draft_jobs(config, recipe, sources, units), max_shard_bytes)
    modules = layout.harmless_entries(
        config, (classify(spec.name).module for spec in sources.extra if len(spec.shape) == 2)
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
        ignore=tuple(layout.ignore_list(config, recipe.format, units, modules)),
        dropped=sources.dropped,
        companions=companion_files(files),
        remote_shards=checkpoint.source.missing_nbytes(),
        notes=(
            *merged_notes(checkpoint),
            *sources.notes,
            *serving_notes(config, recipe, units),
        ),
        hints=(*merge_hint(checkpoint), *_hints(checkpoint, files, max_shard_bytes)),
        parameters=parameters,
        scales=recipe.scales,
        total_parameters=sum(parameters.values()),
        recipe_digest=recipe.digest(),
        quantized_parameters=sum(
            member.source.shape[0] * member.source.shape[1]
            for job in jobs
            if job.kind is not JobKind.COPY
            for member in job.members
        ),
        source_nbytes=sum(spec.nbytes for spec in checkpoint.tensors.values()),
    )


def _hints(checkpoint: Checkpoint, files: Mapping[str, int], max_shard_bytes: int) -> Iterator[str]:
    yield from file_notes(files, own=checkpoint.files)
    card = card_name(files)
    if card is not None and (fault := front_matter(checkpoint.source.path(card))[1]) is not None:
        yield f"the source's {card} could not be read, so its licence is not known: {fault}"
    if names_a_path(checkpoint.config.get("_name_or_path")):
        yield "_name_or_path in config.json is a folder, and is left out of the output's"
    for name in filter(files.__contains__, CONFIG_NAMES):
        with suppress(CheckpointError):  # whoever reads the file reports what is wrong with it
            data = read_json_object(checkpoint.source.path(name), CheckpointError)
            keys = [key for key in data if _OF_A_MACHINE.search(key) and names_a_path(data[key])]
            if keys:
                yield f"{name} names a folder of some machine ({few(keys)}), and is copied as it is"
    if max_shard_bytes > HUB_FILE_BYTES:
        yield (
            f"--max-shard-size allows files of {show_bytes(max_shard_bytes)}; the Hub asks for"
            f" files under {show_bytes(HUB_FILE_BYTES)} and refuses those over 500 GB"
        )


def _draft_jobs(
    config: BeamConfig, recipe: Recipe, sources: SourceMap, units: frozenset[layout.Unit]
) -> Iterator[Draft]:
    """Jobs without places, in the order of `expected_tensors`; groups close when all are in."""
    groups: dict[str, Draft] = {}
    for role, source in sources.found:
        if role.layer is None or (role.layer, role.role) not in units:
            yield _copy_job(role, source, "F32" if role.role in FP32_ROLES else "BF16")
            continue
        n, k = source.shape
        kind = JobKind(recipe.rules[role.role])
        # Only NVFP4 shares a scale, so each other linear is a job of its own.
        group = fused_group(role) if kind is JobKind.NVFP4 else role.module
        draft = groups.setdefault(group, Draft(kind=kind, group=group, members=[]))
        outputs = layout.quantized_tensors(role.module, recipe.weight_format(role.role), n, k)
        draft.members.append((role, source, outputs))
        size = {"qkv_gate": 4, "gate_up": 2}.get(group.rsplit(".", 1)[-1], 1)
        if len(draft.members) == size:
            yield groups.pop(group)
    if groups:
        raise RecipeError(f"internal: scale groups left open: {', '.join(groups)[:200]}")
    for spec in sources.extra:
        whole = SourceRange(spec=spec, start=0, nbytes=spec.nbytes, shape=spec.shape)
        yield _copy_job(classify(spec.name), whole, spec.dtype)


def _copy_job(role: TensorRole, source: SourceRange, dtype: str) -> Draft:
    outputs = ((role.name, dtype, source.shape),)
    return Draft(kind=JobKind.COPY, group=role.name, members=[(role, source, outputs)])


def place(drafts: Iterable[Draft], limit: int) -> tuple[tuple[Job, ...], tuple[Shard, ...]]:
    """Fill shards of at most `limit` bytes with whole jobs in order, and give every tensor its
    offset. A job larger than `limit` gets a shard of its own."""
    bins: list[list[Draft]] = []
    room = -1
    for draft in drafts:
        nbytes = draft.nbytes()
        if nbytes > room:
            bins.append([])
            room = limit
        bins[-1].append(draft)
        room -= nbytes
    shards = tuple(_layout(index, len(bins), inside) for index, inside in enumerate(bins))
    jobs: list[Job] = []
    for index, inside in enumerate(bins):
        placed = {tensor.name: tensor for tensor in shards[index].tensors}
        for draft in inside:
            members = tuple(
                Member(role=role, source=source, outputs=tuple(placed[name] for name, _, _ in outs))
                for role, source, outs in draft.members
            )
            kind, group = draft.kind, draft.group
            jobs.append(Job(index=len(jobs), kind=kind, group=group, shard=index, members=members))
    return tuple(jobs), shards


def _parameters_by_role(sources: SourceMap) -> dict[str, int]:
    counts = dict.fromkeys((role.value for role in Role), 0)
    for role, source in sources.found:
        counts[role.role.value] += math.prod(source.shape)
    for spec in sources.extra:
        role_of_extra = Role.HEAD if spec.name == "lm_head.weight" else Role.EXTRA
        counts[role_of_extra.value] += spec.numel
    return counts
