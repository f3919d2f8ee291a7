"""INSPECT: what is this checkpoint? Format, sizes, what is quantized, who made it, what is unusual.

In: a folder with a config.json and safetensors files, Beam or not, complete or not. Out: an
`Inspection`. Reads headers and small JSON files only. The tensors decide the format; the config
says only what it claims. Whether a checkpoint is *right* is for `verify`: nothing passes or fails
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import FP32_ROLES, Role, expected_tensors, is_scale, role_of
from beamq.errors import BeamqError, ConfigError, counted
from beamq.eval.compare.footprint import stored_format
from beamq.eval.verify.checks import Ledger
from beamq.eval.verify.folder import HF_QUANT_NAME, named_files, optional_json, read_shards
from beamq.io.checkpoint import open_checkpoint, open_files
from beamq.io.files import MAX_CONFIG_BYTES, read_json_object, user_path
from beamq.io.hub import hub_source
from beamq.io.journal import refuse_unfinished
from beamq.io.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from beamq.io.safetensors_header import CODE_DTYPES, TensorSpec, few
from beamq.io.source import INDEX_NAME, MAX_INDEX_BYTES, LocalFiles, SourceFiles
from beamq.options import takes
from beamq.plan.content import REMEDY, zero_faults
from beamq.plan.layout import SCHEMES, said_format
from beamq.plan.sources import missing_tensors, packed_part
from beamq.units import short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleShare:
    """All tensors of one role. `parameters` counts weights as decoded."""

    role: str
    tensors: int
    parameters: int
    quantized_parameters: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint in brief. `format` is that of the tensors, `declared` what the config claims."""

    __repr__ = short_repr

    checkpoint: str
    format: str
    declared: str | None
    model_type: str | None
    layers: int | None
    experts: int | None
    files: int
    tensors: int
    tensor_bytes: int
    parameters: int
    quantized_parameters: int
    roles: tuple[RoleShare, ...]
    recipe: str | None
    made_by: str | None
    input_scales: str | None
    versions: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def share_quantized(self) -> float:
        """Quantized parameters over all parameters."""
        return self.quantized_parameters / self.parameters if self.parameters else 0.0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales included, over all parameters."""
        return 8 * self.tensor_bytes / self.parameters if self.parameters else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        shares = {"share_quantized": self.share_quantized, "bits_per_weight": self.bits_per_weight}
        return {**asdict(self), **shares}


@takes()
def inspect_checkpoint(checkpoint: str | Path) -> Inspection:
    """Look at a folder, or at a repository on the Hub, of which only headers are read.

    Raises `CheckpointError` (no folder, or its conversion has not ended), `ConfigError` (no
    config.json), `HubError`.
    """
    if hub_source(checkpoint) is None:
        refuse_unfinished(user_path(checkpoint))
    with closing(open_files(checkpoint)) as files:
        return _inspect(str(checkpoint), files)


def _inspect(name: str, files: SourceFiles) -> Inspection:
    raw = read_json_object(files.path("config.json"), ConfigError, MAX_CONFIG_BYTES)
    ledger = Ledger()

    def optional(file: str, check: str, limit: int) -> dict[str, Any] | None:
        return optional_json(files.path(file), check, ledger, limit) if files.has(file) else None

    index = optional(INDEX_NAME, "files.index", MAX_INDEX_BYTES)
    hf = optional(HF_QUANT_NAME, "config.agreement", MAX_CONFIG_BYTES)
    data = optional(MANIFEST_NAME, "manifest.present", MAX_MANIFEST_BYTES)
    shards, _ = read_shards(files, named_files(files, index, ledger), ledger)
    tensors = {spec.name: spec for specs in shards.values() for spec in specs}
    notes: list[str] = []
    try:
        config: BeamConfig | None = BeamConfig.from_dict(raw)
    except ConfigError as fault:
        config = None
        notes.append(f"not a Beam that engines could load: {fault}")
    roles = _role_shares(tensors)
    form = stored_format(tensors.values())
    declared = _declared(raw, hf)
    notes += _file_notes(files.names(), ledger, index, tensors)
    notes += _claim_notes(form, declared, made_by_beamq=data is not None)
    notes += _tensor_notes(tensors, config)
    if isinstance(files, LocalFiles):
        with suppress(BeamqError), open_checkpoint(name) as opened:
            notes += [f"{where} {what}; {REMEDY}" for where, what in zero_faults(opened)]
    manifest = Manifest.parse(data or {})
    return Inspection(
        checkpoint=name,
        format=form,
        declared=declared,
        model_type=_text(raw.get("model_type")),
        layers=config.num_layers if config else None,
        experts=config.num_experts if config and config.sparse_layers else None,
        files=len(shards),
        tensors=len(tensors),
        tensor_bytes=sum(spec.nbytes for spec in tensors.values()),
        parameters=sum(share.parameters for share in roles),
        quantized_parameters=sum(share.quantized_parameters for share in roles),
        roles=roles,
        recipe=_text((manifest.recipe or {}).get("name")),
        made_by=f"beamq {manifest.version}" if manifest.version else _producer(raw, hf),
        input_scales=_text(manifest.input_scales.get("description")),
        versions=manifest.versions,
        notes=tuple(notes),
    )


def _role_shares(tensors: Mapping[str, TensorSpec]) -> tuple[RoleShare, ...]:
    by_role: dict[Role, list[TensorSpec]] = {}
    for spec in tensors.values():
        by_role.setdefault(role_of(spec.name).role, []).append(spec)
    shares = []
    for role in (role for role in Role if role in by_role):
        parameters: Counter[str] = Counter()
        for spec in by_role[role]:
            if not is_scale(spec.name):
                # Two 4-bit codes share a byte; other code dtypes hold one parameter each.
                parameters[spec.dtype] += spec.numel * (2 if spec.dtype == "U8" else 1)
        share = RoleShare(
            role=role.value,
            tensors=len(by_role[role]),
            parameters=parameters.total(),
            quantized_parameters=sum(parameters[dtype] for dtype in CODE_DTYPES),
            nbytes=sum(spec.nbytes for spec in by_role[role]),
            dtypes=tuple(dtype for dtype, _ in parameters.most_common()),
        )
        shares.append(share)
    return tuple(shares)


# --- notes: one sentence for each thing that is unusual -------------------------------------


def _file_notes(
    names: Sequence[str],
    ledger: Ledger,
    index: Mapping[str, Any] | None,
    tensors: Mapping[str, TensorSpec],
) -> Iterator[str]:
    """Files (`names`) that are broken, missing or superfluous."""
    for check in ledger.results("structure", with_source=False):
        if check.status == "fail":
            yield check.detail
    entries = (index or {}).get("weight_map")
    if isinstance(entries, dict):
        stray = set(entries).symmetric_difference(tensors)
        if stray:
            some = counted(len(stray), "tensor")
            yield f"index and shards disagree about {some}: {few(sorted(stray))}"
        named = set(map(str, entries.values()))
        unnamed = [n for n in names if n.endswith(".safetensors") and n not in named]
        if unnamed:
            yield f"shards that the index does not name: {few(unnamed)}"
    pickles = [name for name in names if name.endswith(".bin")]
    if pickles:
        yield f"pickle files, which beamq never opens: {few(pickles)}"


def _claim_notes(form: str, declared: str | None, *, made_by_beamq: bool) -> Iterator[str]:
    """Where config or manifest and the tensors contradict each other."""
    quantized = form in (*SCHEMES, "mixed", "other")
    if declared and not quantized:
        yield f"config claims {declared}, but no tensor is quantized"
    if quantized and not declared:
        yield f"tensors are {form}, but no config says so: loaders will misread them"
    if declared and form in SCHEMES and SCHEMES[form].what.lower() not in declared.lower():
        yield f"tensors are {form}, config claims {declared}"
    if quantized and not made_by_beamq:
        yield f"no {MANIFEST_NAME}: not made by beamq, or unfinished"


def _tensor_notes(tensors: Mapping[str, TensorSpec], config: BeamConfig | None) -> Iterator[str]:
    """Tensors that are unusual for a Beam, missing, or of an unusual dtype."""
    roles = {name: role_of(name) for name in tensors}
    routers, heads, extra = [], [], []
    expert_forms: dict[int, set[bool]] = {}  # layer -> whether experts are stored as codes
    caches = [name for name in tensors if name.endswith((".k_scale", ".v_scale"))]
    for name, role in roles.items():
        codes, scale = tensors[name].dtype in CODE_DTYPES, is_scale(name)
        if role.role in FP32_ROLES and tensors[name].dtype != "F32":
            routers.append(name)
        elif role.role in (Role.HEAD, Role.EMBEDDING) and (codes or scale):
            heads.append(name)
        elif role.role is Role.EXTRA and name not in caches:
            extra.append(name)
        elif role.role is Role.EXPERT and role.layer is not None and not scale:
            expert_forms.setdefault(role.layer, set()).add(codes)
    if routers:
        dtypes = ", ".join(sorted({tensors[name].dtype for name in routers}))
        some = counted(len(routers), "router tensor is", "router tensors are")
        yield f"{some} {dtypes}, not F32: {few(routers)}"
    if heads:
        yield f"head or embeddings are quantized: {few(heads)}"
    packed = {(role.layer, role.packed) for role in roles.values() if role.packed}
    if packed:
        yield "experts are packed in 3-D tensors"
    if caches:
        some = counted(len(caches), "KV-cache scale")
        yield f"{some}, which SGLang's Beam refuses: {few(caches)}"
    if extra:
        some = counted(len(extra), "tensor that is", "tensors that are")
        yield f"{some} not Beam's: {few(extra)}"
    half = [f"model.layers.{n}" for n, forms in sorted(expert_forms.items()) if len(forms) > 1]
    if half:
        yield f"layers whose experts are quantized in part: {few(half)}"
    modules = {role.module for role in roles.values()}
    gone = [
        role.name
        for role, _ in (expected_tensors(config) if config is not None else ())
        if role.module not in modules
        and not (role.role is Role.EXPERT and (role.layer, packed_part(role)) in packed)
    ]
    if gone:
        yield f"{missing_tensors(len(gone))}: {few(gone)}"


def _declared(raw: Mapping[str, Any], hf: Mapping[str, Any] | None) -> str | None:
    """The format that the config files claim, as they name it."""
    block = raw.get("quantization_config")
    if isinstance(block, dict):
        what = said_format(block) or ""
        return f"{block.get('quant_method')} {what}".strip()[:80]
    algo = _dig(hf or {}, "quantization", "quant_algo")
    return f"modelopt {algo} ({HF_QUANT_NAME} only)"[:80] if algo else None


def _producer(raw: Mapping[str, Any], hf: Mapping[str, Any] | None) -> str | None:
    producer = _dig(raw, "quantization_config", "producer") or _dig(hf or {}, "producer")
    if not isinstance(producer, dict):
        return None
    return f"{producer.get('name')} {producer.get('version')}"[:80]


def _dig(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
