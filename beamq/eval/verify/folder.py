"""A checkpoint folder as it lies there, read tolerantly: faults are findings, not exceptions.

In: a folder. Out: a `Folder` with everything that could be read, and faults in the ledger under
`files.*` and `manifest.present`. `open_checkpoint` stops at the first fault, which is right for a
conversion; here the point is to name them all.

Only a missing folder, or a config.json that is no Beam's, is an error of the caller's.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beamq.beam.config import BeamConfig, read_config
from beamq.beam.tensors import (
    FP32_ROLES,
    QUANTIZABLE,
    Role,
    TensorRole,
    classify,
    expected_tensors,
    fused_group,
    packed_shape,
)
from beamq.errors import CheckpointError
from beamq.eval.verify.checks import FP8, NVFP4, Ledger
from beamq.io.checkpoint import Checkpoint
from beamq.io.files import read_json_object
from beamq.io.manifest import MANIFEST_FORMAT, MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from beamq.io.safetensors_header import CODE_DTYPES, TensorSpec, few
from beamq.io.source import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    SINGLE_NAME,
    LocalFiles,
    SourceFiles,
    safe_file_name,
)
from beamq.plan.layout import quantized_tensors
from beamq.plan.sources import is_quantized, packed_part

HF_QUANT_NAME = "hf_quant_config.json"
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|ckpt|h5|msgpack|partial)")
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """What could be read. `shards` maps a file to its tensors in file order.

    `plain` means that neither a config nor a tensor says that anything is quantized.
    """

    root: Path
    raw_config: dict[str, Any]
    config: BeamConfig
    hf_quant_config: dict[str, Any] | None
    manifest: Manifest | None
    index: dict[str, Any] | None
    shards: dict[str, tuple[TensorSpec, ...]] = field(repr=False)
    tensors: dict[str, TensorSpec] = field(repr=False)
    metadata: dict[str, dict[str, str]] = field(repr=False)
    plain: bool

    @property
    def block(self) -> dict[str, Any] | None:
        """config.json's `quantization_config`, if it is an object."""
        block = self.raw_config.get("quantization_config")
        return block if isinstance(block, dict) else None


def read_folder(root: Path, ledger: Ledger) -> Folder:
    """Read a folder and file its faults. Raises `CheckpointError` or `ConfigError`."""
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such folder; expected a checkpoint folder")
    raw_config = read_config(root)
    config = BeamConfig.from_dict(raw_config)
    index = optional_json(root / INDEX_NAME, "files.index", ledger, MAX_INDEX_BYTES)
    shards, metadata = read_shards(LocalFiles(root), index, ledger)
    ledger.examined("files.readable", len(shards), "shards")
    tensors: dict[str, TensorSpec] = {}
    for specs in shards.values():
        for spec in specs:
            if spec.name in tensors:
                ledger.fault(
                    "files.index", spec.name, f"in {tensors[spec.name].file} and {spec.file}"
                )
            tensors[spec.name] = spec
    hf_quant_config = optional_json(root / HF_QUANT_NAME, "config.agreement", ledger)
    made = optional_json(root / MANIFEST_NAME, "manifest.present", ledger, MAX_MANIFEST_BYTES)
    folder = Folder(
        root=root,
        raw_config=raw_config,
        config=config,
        hf_quant_config=hf_quant_config,
        manifest=None if made is None else Manifest.parse(made),
        index=index,
        shards=shards,
        tensors=tensors,
        metadata=metadata,
        plain=_is_plain(raw_config, hf_quant_config, tensors),
    )
    _check_index(folder, ledger)
    _check_names(folder, ledger)
    _check_manifest(folder, ledger)
    return folder


def _is_plain(
    raw_config: dict[str, Any],
    hf_quant_config: dict[str, Any] | None,
    tensors: dict[str, TensorSpec],
) -> bool:
    if raw_config.get("quantization_config") is not None or hf_quant_config is not None:
        return False
    return bool(tensors) and not any(is_quantized(spec) for spec in tensors.values())


def optional_json(
    path: Path, check: str, ledger: Ledger, limit: int = 16 << 20
) -> dict[str, Any] | None:
    """A small file that may be absent; one that is no JSON object is a fault of `check`."""
    if not path.exists() and not path.is_symlink():
        return None
    try:
        return read_json_object(path, CheckpointError, limit)
    except CheckpointError as fault:
        ledger.fault(check, path.name, str(fault).removeprefix(f"{path}: "))
        return None


def read_shards(
    files: SourceFiles, index: dict[str, Any] | None, ledger: Ledger
) -> tuple[dict[str, tuple[TensorSpec, ...]], dict[str, dict[str, str]]]:
    """(tensors in file order, metadata) of every shard whose header can be read."""
    shards: dict[str, tuple[TensorSpec, ...]] = {}
    metadata: dict[str, dict[str, str]] = {}
    named = _named_files(files, index, ledger)
    files.expect_headers([file for file in named if files.has(file)])
    for file in named:
        try:
            header, metadata[file] = files.header(file)
        except CheckpointError as fault:
            ledger.fault("files.readable", file, str(fault).removeprefix(f"{files.name}/{file}: "))
            continue
        shards[file] = tuple(header)
    return shards, metadata


def _named_files(files: SourceFiles, index: dict[str, Any] | None, ledger: Ledger) -> list[str]:
    """The shards the index names; without an index, the single file or whatever is there."""
    weight_map = (index or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        if index is not None:
            ledger.fault("files.index", INDEX_NAME, "has no weight_map")
        found = [name for name in files.names() if name.endswith(".safetensors")]
        if not found:
            ledger.fault("files.readable", files.label, f"no {SINGLE_NAME} and no {INDEX_NAME}")
        elif found != [SINGLE_NAME] and index is None:
            ledger.fault("files.index", INDEX_NAME, f"missing, but there are {len(found)} shards")
        return found
    named = {file for file in weight_map.values() if isinstance(file, str)}
    unsafe = sorted(file for file in named if not safe_file_name(file))
    for file in unsafe:
        ledger.fault("files.index", INDEX_NAME, f"names {file[:80]!r}, outside the folder")
    return sorted(named.difference(unsafe))


def _check_index(folder: Folder, ledger: Ledger) -> None:
    nbytes = sum(spec.nbytes for spec in folder.tensors.values())
    if folder.index is None:
        if len(folder.shards) == 1:
            ledger.skip("files.index", "a single file without an index")
            ledger.skip("files.total-size", "a single file without an index")
        return
    weight_map = folder.index.get("weight_map")
    entries: dict[str, Any] = weight_map if isinstance(weight_map, dict) else {}
    ledger.examined("files.index", len(entries), "entries")
    for name, file in entries.items():
        spec = folder.tensors.get(name)
        if spec is None:
            # Where the whole file is unreadable, that is the finding.
            if not isinstance(file, str):
                ledger.fault("files.index", name, f"the index says {str(file)[:60]}, not a file")
            elif file in folder.shards:
                ledger.fault("files.index", name, f"not in {file}, where the index puts it")
        elif spec.file != file:
            ledger.fault("files.index", name, f"is in {spec.file}, the index says {file}")
    for name, spec in folder.tensors.items():
        if name not in entries:
            ledger.fault("files.index", name, f"in {spec.file}, but not in the index")
    metadata = folder.index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    ledger.examined("files.total-size", 1, "sums")
    if ledger.failed("files.readable"):
        ledger.skip("files.total-size", "a shard cannot be read")
    elif total != nbytes:
        ledger.fault("files.total-size", INDEX_NAME, f"says {total}, tensors take {nbytes} bytes")


def _check_names(folder: Folder, ledger: Ledger) -> None:
    names = sorted(folder.shards) if folder.index is None else _indexed(folder.index)
    ledger.examined("files.shard-names", len(names), "names")
    if names != [SINGLE_NAME]:
        total = len(names)
        expected = [f"model-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]
        for name, wanted in zip(names, expected, strict=True):
            if name != wanted:
                ledger.fault("files.shard-names", name, f"expected {wanted}")
    present = [path.name for path in folder.root.iterdir() if WEIGHTS.fullmatch(path.name)]
    ledger.examined("files.unlisted", len(present), "weight files")
    for name in sorted(set(present).difference(names)):
        ledger.fault(
            "files.unlisted", name, "no index entry names it; vLLM may read it all the same"
        )
    ledger.examined("files.metadata", len(folder.metadata), "headers")
    for name, metadata in folder.metadata.items():
        if metadata.get("format") != "pt":
            said = json.dumps(metadata)[:80]
            ledger.fault("files.metadata", name, f'__metadata__ is {said}, expected "format": "pt"')


def _indexed(index: dict[str, Any]) -> list[str]:
    weight_map = index.get("weight_map")
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    return sorted({file for file in values if isinstance(file, str)})


def _check_manifest(folder: Folder, ledger: Ledger) -> None:
    """beamq.json must list these shards, sizes and tensors, each with a checksum."""
    name = "manifest.present"
    if folder.manifest is None and folder.plain:
        ledger.skip(name, "not quantized, and no beamq.json: not made by beamq")
        return
    if folder.manifest is None:
        ledger.fault(name, MANIFEST_NAME, "missing: the conversion did not end, or it was lost")
        return
    ledger.examined(name, len(folder.tensors), "tensors")
    if folder.manifest.format != MANIFEST_FORMAT:
        ledger.fault(
            name, MANIFEST_NAME, f"format {folder.manifest.format!r}, expected {MANIFEST_FORMAT}"
        )
        return
    listed = folder.manifest.shards
    if listed is None:
        ledger.fault(name, MANIFEST_NAME, "its list of shards is damaged")
        return
    for shard in sorted(set(listed).symmetric_difference(folder.shards)):
        where = "beamq.json" if shard in listed else "the folder"
        ledger.fault(name, shard, f"only in {where}")
    for shard, specs in folder.shards.items():
        if shard not in listed:
            continue
        stray = {spec.name for spec in specs}.symmetric_difference(listed[shard].tensors)
        if stray:
            ledger.fault(name, shard, f"beamq.json and the header differ: {few(sorted(stray))}")
        size = (folder.root / shard).stat().st_size
        if listed[shard].nbytes != size:
            ledger.fault(name, shard, f"{size} bytes, beamq.json says {listed[shard].nbytes}")


# --- tensors against the config -----------------------------------------------------------

_FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}  # stored dtype by format of the folder
SCALE_SUFFIXES = ("weight_scale", "weight_scale_2", "input_scale")
SMALLEST_NORMAL = 2.0**-126
LARGEST_GLOBAL = 2.0**117  # beyond it, a code times both scales leaves FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One quantizable linear [n, k] and its stored tensors by suffix (`weight`, ...)."""

    role: TensorRole
    shape: tuple[int, int]
    parts: dict[str, TensorSpec]

    @property
    def module(self) -> str:
        """Its dotted path."""
        return self.role.module

    @property
    def quantized(self) -> bool:
        """Whether anything says so: a scale, or a weight of codes."""
        weight = self.parts.get("weight")
        return any(suffix in self.parts for suffix in SCALE_SUFFIXES) or (
            weight is not None and weight.dtype in CODE_DTYPES
        )

    @property
    def format(self) -> str:
        """The format that the stored tensors themselves tell, whatever the config says."""
        weight = self.parts.get("weight")
        codes = weight is not None and weight.dtype == "U8"
        return NVFP4 if codes or "weight_scale_2" in self.parts else FP8


@dataclass(slots=True, kw_only=True)
class Inventory:
    """Everything stored, sorted out. `unknown` are tensors no Beam has."""

    linears: list[Linear] = field(default_factory=list)
    precise: list[tuple[TensorRole, TensorSpec]] = field(default_factory=list)
    unknown: list[TensorSpec] = field(default_factory=list)

    def stored(self) -> dict[str, bool]:
        """Module -> quantized, for every module of which something is stored."""
        stored = {linear.module: linear.quantized for linear in self.linears if linear.parts}
        for role, spec in self.precise:
            if role.role in (Role.HEAD, Role.EMBEDDING):
                stored[role.module] = spec.dtype in CODE_DTYPES
        for spec in self.unknown:
            module, _, suffix = spec.name.rpartition(".")
            if suffix in SCALE_SUFFIXES and module in stored:
                stored[module] = True
        return stored


def take_inventory(folder: Folder, fmt: str, ledger: Ledger) -> Inventory:
    """Sort every stored tensor and file what is missing, unknown, mis-shaped or mis-typed."""
    inventory = Inventory()
    left = dict(folder.tensors)
    precise = _FLOATS.get(fmt, "BF16") if folder.manifest is None else "BF16"
    packed = _packed(folder, left, precise, inventory, ledger) if folder.plain else frozenset()
    for name in ("tensors.known", "tensors.shape", "tensors.dtype"):
        ledger.examined(name, len(left), "tensors")
    for role, shape in expected_tensors(folder.config):
        ledger.examined("tensors.present", 1, "expected tensors")
        if role.role is Role.EXPERT and (role.layer, packed_part(role)) in packed:
            continue
        if role.role in QUANTIZABLE:
            inventory.linears.append(_linear(role, shape, left, fmt, precise, ledger))
            continue
        spec = left.pop(role.name, None)
        if spec is None:
            ledger.fault("tensors.present", role.name, "is missing")
            continue
        inventory.precise.append((role, spec))
        _check_shape(spec, shape, ledger)
        _check_precise_dtype(role, spec, precise, ledger)
    inventory.unknown = list(left.values())
    for spec in inventory.unknown:
        _unknown(spec, ledger)
    if not packed:
        _check_experts(inventory.linears, ledger)
    return inventory


def _packed(
    folder: Folder,
    left: dict[str, TensorSpec],
    precise: str,
    inventory: Inventory,
    ledger: Ledger,
) -> frozenset[tuple[int | None, str]]:
    """(layer, part) of experts that are stored packed, which only an unquantized Beam may do."""
    found = set()
    for spec in [spec for spec in left.values() if ".mlp.experts." in spec.name]:
        role = classify(spec.name)
        if role.packed is None or role.layer not in folder.config.sparse_layers:
            continue
        _check_shape(spec, packed_shape(folder.config, role.packed), ledger)
        _check_dtype(spec, precise, ledger)
        ledger.examined("tensors.experts", 1, "packed tensors")
        inventory.precise.append((role, left.pop(spec.name)))
        found.add((role.layer, role.packed))
    return frozenset(found)


def _linear(
    role: TensorRole,
    shape: tuple[int, ...],
    left: dict[str, TensorSpec],
    fmt: str,
    precise: str,
    ledger: Ledger,
) -> Linear:
    """Collect one linear's tensors out of `left`, and check them against its format."""
    n, k = shape
    parts: dict[str, TensorSpec] = {}
    for suffix in ("weight", *SCALE_SUFFIXES):
        spec = left.get(f"{role.module}.{suffix}")
        if spec is not None:
            parts[suffix] = spec
    linear = Linear(role=role, shape=(n, k), parts=parts)
    if not linear.quantized:
        left.pop(role.name, None)
        if "weight" not in parts:
            ledger.fault("tensors.present", role.name, "is missing")
            return linear
        _check_shape(parts["weight"], shape, ledger)
        _check_dtype(parts["weight"], precise, ledger)
        return linear
    # Without a declaration the tensors themselves tell the format.
    own = fmt if fmt in (NVFP4, FP8) else linear.format
    wanted_tensors = quantized_tensors(role.module, own, n, k)
    ledger.examined("tensors.present", len(wanted_tensors) - 1, "expected tensors")
    for name, dtype, wanted in wanted_tensors:
        spec = left.pop(name, None)
        if spec is None:
            ledger.fault("tensors.present", name, f"is missing; {own} needs it")
            continue
        _check_shape(spec, wanted, ledger)
        _check_dtype(spec, dtype, ledger)
    return linear


def _check_shape(spec: TensorSpec, wanted: tuple[int, ...], ledger: Ledger) -> None:
    if spec.shape != wanted:
        ledger.fault("tensors.shape", spec.name, f"is {list(spec.shape)}, expected {list(wanted)}")


def _check_dtype(spec: TensorSpec, wanted: str, ledger: Ledger) -> None:
    if spec.dtype != wanted:
        ledger.fault("tensors.dtype", spec.name, f"is {spec.dtype}, expected {wanted}")


def _check_precise_dtype(role: TensorRole, spec: TensorSpec, precise: str, ledger: Ledger) -> None:
    if role.role in FP32_ROLES:
        ledger.examined("tensors.router", 1, "tensors")
        if spec.dtype != "F32":
            ledger.fault("tensors.router", spec.name, f"is {spec.dtype}, expected F32")
    elif role.role in (Role.HEAD, Role.EMBEDDING):
        ledger.examined("tensors.head", 1, "tensors")
        if spec.dtype in CODE_DTYPES:
            ledger.fault("tensors.head", spec.name, f"is {spec.dtype}, expected {precise}")
        else:
            _check_dtype(spec, precise, ledger)
    else:
        _check_dtype(spec, precise, ledger)


def _unknown(spec: TensorSpec, ledger: Ledger) -> None:
    module, _, suffix = spec.name.rpartition(".")
    if module in ("lm_head", "model.embed_tokens") and suffix in SCALE_SUFFIXES:
        ledger.fault("tensors.head", spec.name, "a scale, but this must not be quantized")
    reason = "no engine knows it: vLLM raises ValueError, SGLang KeyError"
    if suffix in ("k_scale", "v_scale"):
        reason = "SGLang's Beam has no place for KV-cache scales (KeyError)"
    elif ".experts.gate_up_proj" in spec.name or ".experts.down_proj" in spec.name:
        reason = "packed experts; quantized checkpoints hold one tensor per expert"
    ledger.fault("tensors.known", spec.name, reason)


def _check_experts(linears: Iterable[Linear], ledger: Ledger) -> None:
    """Per layer: every expert whole, and all quantized or none; engines ask for expert 0 only."""
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        if linear.role.role is Role.EXPERT and linear.role.layer is not None:
            by_layer.setdefault(linear.role.layer, []).append(linear)
    if not by_layer:
        ledger.skip("tensors.experts", "this model has no experts")
    for layer, members in by_layer.items():
        ledger.examined("tensors.experts", 1, "layers")
        where = f"model.layers.{layer}.mlp.experts"
        gone = [m for m in members if "weight" not in m.parts]
        if gone:
            first = gone[0].module.removeprefix(where + ".")
            ledger.fault(
                "tensors.experts", where, f"{len(gone)} of {len(members)} missing, first {first}"
            )
        quantized = sum(m.quantized for m in members if m.parts)
        whole = sum(1 for m in members if m.parts)
        if 0 < quantized < whole:
            odd = next(m for m in members if m.parts and m.quantized == (2 * quantized < whole))
            ledger.fault(
                "tensors.experts",
                where,
                f"{quantized} of {whole} linears are quantized; all or none, see"
                f" {odd.module.removeprefix(where + '.')}",
            )


# --- scalars --------------------------------------------------------------------------------


def check_scalars(checkpoint: Checkpoint, inventory: Inventory, ledger: Ledger) -> None:
    """Values of the FP32 scalars: sane each, and equal to the bit over what engines fuse."""
    names = ("scales.global", "scales.shared", "scales.input", "scales.input-shared")
    if not any(linear.quantized and linear.format == NVFP4 for linear in inventory.linears):
        for name in names:
            ledger.skip(name, "no NVFP4 linears")
        return
    for suffix, one, shared in (
        ("weight_scale_2", "scales.global", "scales.shared"),
        ("input_scale", "scales.input", "scales.input-shared"),
    ):
        groups: dict[str, dict[bytes, str]] = {}
        for linear, raw in _scalars(checkpoint, inventory, suffix):
            ledger.examined(one, 1, "scalars")
            fault = scalar_fault(struct.unpack("<f", raw)[0])
            if fault:
                ledger.fault(one, f"{linear.module}.{suffix}", fault)
            groups.setdefault(fused_group(linear.role), {}).setdefault(raw, linear.module)
        ledger.examined(shared, len(groups), "groups")
        for group, values in groups.items():
            if len(values) > 1:
                shown = " and ".join(f"{struct.unpack('<f', raw)[0]!r}" for raw in values)
                ledger.fault(
                    shared,
                    group,
                    f"{suffix} differs ({shown}); engines keep one, others decode wrong",
                )


def _scalars(
    checkpoint: Checkpoint, inventory: Inventory, suffix: str
) -> Iterator[tuple[Linear, bytes]]:
    for linear in inventory.linears:
        spec = linear.parts.get(suffix)
        if spec is not None and spec.dtype == "F32" and spec.numel == 1:
            yield linear, bytes(checkpoint.read(spec.name))


def scalar_fault(value: float) -> str | None:
    """Why a scale cannot be used, or None. Engines divide by it, so it may not be denormal."""
    if not math.isfinite(value):
        return f"is {value}"
    if value <= 0.0:
        return f"is {value}, expected a positive number"
    if value < SMALLEST_NORMAL:
        return f"is {value}, so small that its reciprocal is infinite or denormals flush it to 0"
    return None
