"""INSPECT: what is this checkpoint? Format, sizes, what is quantized, who made it, what is odd.

In: a folder with a config.json and safetensors files, Beam or not, whole or not. Out: an
`Inspection`. Headers and small JSON files only; the tensors tell the format, the config only what
it claims. Whether a checkpoint is *right* is `verify`'s question; here nothing passes or fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from beamq.checkpoint import open_files
from beamq.config import MAX_CONFIG_BYTES, BeamConfig, read_json_object
from beamq.conversion.unfinished import refuse_unfinished
from beamq.errors import ConfigError
from beamq.eval.checks import Ledger
from beamq.eval.folder import HF_QUANT_NAME, MANIFEST_NAME, optional_json, read_shards
from beamq.eval.oddities import claim_notes, file_notes, is_scale, role_of, tensor_notes
from beamq.eval.structure import CODE_DTYPES
from beamq.header import TensorSpec
from beamq.hub.repo import hub_source
from beamq.roles import Role
from beamq.small_files import user_path
from beamq.source_files import SourceFiles
from beamq.weight_files import INDEX_NAME, MAX_INDEX_BYTES

FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleShare:
    """All tensors of one role. `parameters` counts weights as they are when decoded."""

    role: str
    tensors: int
    parameters: int
    quantized_parameters: int
    nbytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A checkpoint at a glance. `format` is what the tensors are, `declared` what config claims."""

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
        derived = {
            "share_quantized": self.share_quantized,
            "bits_per_weight": self.bits_per_weight,
        }
        return {**asdict(self), **derived}


def inspect_checkpoint(checkpoint: str | Path) -> Inspection:
    """Look at a folder, or at a repository on the Hub, of which only headers are read.

    Raises `CheckpointError` (no folder, a conversion that has not ended), `ConfigError` (no
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
    manifest = optional(MANIFEST_NAME, "manifest.present", MAX_INDEX_BYTES)
    shards, _ = read_shards(files, index, ledger)
    tensors = {spec.name: spec for specs in shards.values() for spec in specs}
    notes: list[str] = []
    try:
        config: BeamConfig | None = BeamConfig.from_dict(raw)
    except ConfigError as fault:
        config = None
        notes.append(f"not a Beam that engines could load: {fault}")
    census = _take_census(tensors)
    form = _format(census, tensors)
    declared = _declared(raw, hf)
    notes += file_notes(files.names(), ledger, index, tensors)
    notes += claim_notes(form, declared, manifest)
    notes += tensor_notes(tensors, config, form)
    made = manifest or {}
    versions = made.get("versions")
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
        parameters=sum(share.parameters for share in census.values()),
        quantized_parameters=sum(share.quantized for share in census.values()),
        roles=tuple(census[role].result(role) for role in Role if role in census),
        recipe=_text(_dig(made, "recipe", "name")),
        made_by=f"beamq {made['beamq']}" if _text(made.get("beamq")) else _producer(raw, hf),
        input_scales=_text(_dig(made, "input_scales", "description")),
        versions={k: str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        notes=tuple(notes),
    )


@dataclass(slots=True)
class _Share:
    tensors: int = 0
    parameters: int = 0
    quantized: int = 0
    nbytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)

    def result(self, role: Role) -> RoleShare:
        return RoleShare(
            role=role.value,
            tensors=self.tensors,
            parameters=self.parameters,
            quantized_parameters=self.quantized,
            nbytes=self.nbytes,
            dtypes=tuple(dtype for dtype, _ in self.dtypes.most_common()),
        )


def _take_census(tensors: Mapping[str, TensorSpec]) -> dict[Role, _Share]:
    census: dict[Role, _Share] = {}
    for spec in tensors.values():
        share = census.setdefault(role_of(spec.name).role, _Share())
        share.tensors += 1
        share.nbytes += spec.nbytes
        if is_scale(spec.name):
            continue
        # Two 4-bit codes share a byte; any other code dtype stands for one parameter each.
        parameters = spec.numel * (2 if spec.dtype == "U8" else 1)
        share.parameters += parameters
        share.quantized += parameters if spec.dtype in CODE_DTYPES else 0
        share.dtypes[spec.dtype] += parameters
    return census


def _format(census: Mapping[Role, _Share], tensors: Mapping[str, TensorSpec]) -> str:
    """Name of what is stored, by its codes if there are any, else by its most common float."""
    dtypes: Counter[str] = Counter()
    for share in census.values():
        dtypes.update(share.dtypes)
    codes = {dtype for dtype in dtypes if dtype in CODE_DTYPES}
    if not codes:
        common = next((dtype for dtype, _ in dtypes.most_common()), "")
        return FLOATS.get(common, "other")
    if codes == {"U8"} and any(name.endswith(".weight_scale_2") for name in tensors):
        return "nvfp4"
    if codes == {"F8_E4M3"}:
        return "fp8"
    return "mixed" if codes == {"U8", "F8_E4M3"} else "other"


def _declared(raw: Mapping[str, Any], hf: Mapping[str, Any] | None) -> str | None:
    """What the configs claim, in their own words."""
    block = raw.get("quantization_config")
    if isinstance(block, dict):
        what = block.get("quant_algo") or block.get("format") or ""
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
