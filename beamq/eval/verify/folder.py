"""A checkpoint folder as its headers and small files describe it, checked against its config.

In: a folder. Out: a `Folder` with everything that could be read, an `Inventory` that gives every
stored tensor its place in the model, and findings under `files.*`, `manifest.present`, `tensors.*`
and `scales.*`. No weight is read. Faults are findings, so that all of them are named; only a
folder in which there is nothing to check is an exception.

A linear counts as quantized if a scale belongs to it or its weight has the dtype of codes. It must
then have exactly the tensors of its format (plan/layout.py), and otherwise exactly one BF16 weight.
Any other name is a fault, because both engines stop at names that they do not know.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Sequence
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
    is_further_layer,
    packed_shape,
)
from beamq.errors import CheckpointError, ConfigError, shown_value
from beamq.eval.verify.checks import ENGINES, FP8, NVFP4, Ledger
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.companions import travels
from beamq.io.files import is_lfs_pointer, read_json_object, read_small
from beamq.io.manifest import (
    MANIFEST_FORMAT,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    SHA256,
    XXH3,
    Manifest,
)
from beamq.io.safetensors_header import CODE_DTYPES, TensorSpec, few
from beamq.io.source import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    SINGLE_NAME,
    LocalFiles,
    SourceFiles,
    safe_file_name,
)
from beamq.plan.layout import SCHEMES, SUFFIXES, WEIGHT_FORMATS, Outputs, stored_as
from beamq.plan.sources import is_quantized, packed_part

HF_QUANT_NAME = "hf_quant_config.json"
ARCHITECTURE = "BeamForCausalLM"
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|ckpt|h5|msgpack|partial)")
SCALE_SUFFIXES = SUFFIXES[1:]
SMALLEST_NORMAL = 2.0**-126
LARGEST_GLOBAL = 2.0**117  # above it, the product of a code and both scales overflows FP32
_FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}  # stored dtype by format of the folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """What could be read. `shards` maps a file to its tensors in file order.

    `config` is None where config.json describes no Beam. `broken` are shards that cannot be read.
    `plain` means that neither a config nor a tensor says that anything is quantized.
    """

    root: Path
    files: LocalFiles
    raw_config: dict[str, Any]
    config: BeamConfig | None
    hf_quant_config: dict[str, Any] | None
    manifest: Manifest | None
    index: dict[str, Any] | None
    shards: dict[str, tuple[TensorSpec, ...]] = field(repr=False)
    tensors: dict[str, TensorSpec] = field(repr=False)
    metadata: dict[str, dict[str, str]] = field(repr=False)
    broken: frozenset[str]
    plain: bool

    @property
    def beam(self) -> BeamConfig:
        """The config, for checks that are made only where there is one."""
        assert self.config is not None
        return self.config

    @property
    def block(self) -> dict[str, Any] | None:
        """config.json's `quantization_config`, if it is an object."""
        block = self.raw_config.get("quantization_config")
        return block if isinstance(block, dict) else None

    @property
    def any_float(self) -> bool:
        """Whether its weights may be F16 or F32: no BF16 that beamq wrote, but a source, or one
        with an adapter merged in."""
        return self.manifest is None or self.manifest.data.get("made_by") == "merge"

    @property
    def weight_map(self) -> dict[str, Any]:
        """Tensor -> file as the index has it; empty without an index."""
        entries = (self.index or {}).get("weight_map")
        return entries if isinstance(entries, dict) else {}


def read_folder(root: Path, ledger: Ledger) -> Folder:
    """Read a folder and record its faults. Raises `CheckpointError` where there is nothing."""
    files = LocalFiles(root)
    ledger.strangers = not _made_by_beamq(files)
    raw_config, config = _read_config(files, ledger)
    index = optional_json(root / INDEX_NAME, "files.index", ledger, MAX_INDEX_BYTES)
    named = named_files(files, index, ledger)
    shards, metadata = read_shards(files, named, ledger)
    ledger.examined("files.readable", len(shards))
    tensors: dict[str, TensorSpec] = {}
    for spec in (spec for specs in shards.values() for spec in specs):
        if spec.name in tensors:
            files_of = f"{tensors[spec.name].file} and {spec.file}"
            ledger.fault("files.index", spec.name, f"is stored twice, in {files_of}")
        tensors[spec.name] = spec
    hf = optional_json(root / HF_QUANT_NAME, "config.agreement", ledger)
    declared = raw_config.get("quantization_config") is not None or hf is not None
    made = optional_json(root / MANIFEST_NAME, "manifest.present", ledger, MAX_MANIFEST_BYTES)
    folder = Folder(
        root=root,
        files=files,
        raw_config=raw_config,
        config=config,
        hf_quant_config=hf,
        manifest=None if made is None else Manifest.parse(made),
        index=index if index and index.get("weight_map") else None,
        shards=shards,
        tensors=tensors,
        metadata=metadata,
        broken=frozenset(named) - shards.keys(),
        plain=not declared and bool(tensors) and not any(map(is_quantized, tensors.values())),
    )
    if shards:
        _check_index(folder, ledger)
        _check_names(folder, ledger)
        _check_manifest(folder, ledger)
    return folder


def _made_by_beamq(files: LocalFiles) -> bool:
    """Whether beamq.json, or the card where that is lost, says so."""
    if files.has(MANIFEST_NAME):
        return True
    try:
        return b"beamq" in read_small(files.path("README.md"), CheckpointError, 1 << 20)
    except CheckpointError:
        return False


def _read_config(files: LocalFiles, ledger: Ledger) -> tuple[dict[str, Any], BeamConfig | None]:
    """config.json, and what it describes, if that is a Beam."""
    raw: dict[str, Any] = {}
    if not files.has("config.json") and not any(map(WEIGHTS.fullmatch, files.names())):
        raise CheckpointError(f"{files.name}: no config.json and no weights; not a checkpoint")
    try:
        raw = read_config(files.folder())
        config = BeamConfig.from_dict(raw)
    except ConfigError as fault:
        reason = str(fault).removeprefix(f"{files.path('config.json')}: ")
        ledger.fault("config.model", "config.json", reason.removeprefix("config.json: "))
        return raw, None
    ledger.examined("config.model")
    if (named := raw.get("architectures", [ARCHITECTURE])) != [ARCHITECTURE]:
        reason = f"architectures is {shown_value(named)}, expected [{ARCHITECTURE!r}]"
        ledger.fault("config.model", "config.json", f"{reason}: engines build what it names")
    return raw, config


def optional_json(
    path: Path, check: str, ledger: Ledger, limit: int = 16 << 20
) -> dict[str, Any] | None:
    """A small file that may be absent; one that is not a JSON object is a fault of `check`."""
    if not path.exists() and not path.is_symlink():
        return None
    try:
        return read_json_object(path, CheckpointError, limit)
    except CheckpointError as fault:
        ledger.fault(check, path.name, str(fault).removeprefix(f"{path}: "))
        return None


def read_shards(
    files: SourceFiles, named: Sequence[str], ledger: Ledger
) -> tuple[dict[str, tuple[TensorSpec, ...]], dict[str, dict[str, str]]]:
    """(tensors in file order, metadata) of every shard whose header can be read."""
    shards: dict[str, tuple[TensorSpec, ...]] = {}
    metadata: dict[str, dict[str, str]] = {}
    files.expect_headers([file for file in named if files.has(file)])
    for file in named:
        try:
            header, metadata[file] = files.header(file)
        except CheckpointError as fault:
            reason = str(fault).removeprefix(f"{files.name}/{file}: ")
            remedy = "" if "; " in reason else "; copy or download it again"
            ledger.fault("files.readable", file, reason + remedy)
            continue
        shards[file] = tuple(header)
    return shards, metadata


def named_files(files: SourceFiles, index: dict[str, Any] | None, ledger: Ledger) -> list[str]:
    """The shards the index names; without an index, the single file or all that are present."""
    weight_map = (index or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = [name for name in files.names() if name.endswith(".safetensors")]
        if index is not None:
            ledger.fault("files.index", INDEX_NAME, "has no weight_map; restore the file")
        elif not found:
            ledger.fault("files.readable", files.label, f"no {SINGLE_NAME} and no {INDEX_NAME}")
        elif found != [SINGLE_NAME] and not ledger.failed("files.index"):
            reason = f"is missing, but there are {len(found)} shards; restore it"
            ledger.fault("files.index", INDEX_NAME, reason)
        return found
    named = sorted({file for file in weight_map.values() if isinstance(file, str)})
    for file in named:
        if not safe_file_name(file):
            reason = f"names {file[:80]!r}, expected a .safetensors file in this folder"
            ledger.fault("files.index", INDEX_NAME, f"{reason}; restore the index")
    return [file for file in named if safe_file_name(file)]


def _check_index(folder: Folder, ledger: Ledger) -> None:
    check = "files.index"
    if folder.index is None:
        if len(folder.shards) == 1:
            ledger.skip("a single file without an index", check, "files.total-size")
        return
    ledger.examined(check, len(folder.weight_map))
    for name, file in folder.weight_map.items():
        spec = folder.tensors.get(name)
        if spec is not None and spec.file != file:
            ledger.fault(check, name, f"is in {spec.file}, but the index says {file}")
        elif spec is None and not isinstance(file, str):
            ledger.fault(check, name, f"the index says {str(file)[:60]}, expected a file's name")
        elif spec is None and file in folder.shards:  # else the file's own fault is recorded
            ledger.fault(check, name, f"is not in {file}, where the index puts it")
    for name, spec in folder.tensors.items():
        if name not in folder.weight_map:
            ledger.fault(check, name, f"is in {spec.file}, but not in the index")
    metadata = folder.index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    ledger.examined("files.total-size")
    if ledger.failed("files.readable"):
        ledger.skip("a shard cannot be read", "files.total-size")
    else:
        nbytes = sum(spec.nbytes for spec in folder.tensors.values())
        if total != nbytes:
            reason = f"total_size is {total}, but the tensors take {nbytes} bytes"
            ledger.fault("files.total-size", INDEX_NAME, reason)


def _check_names(folder: Folder, ledger: Ledger) -> None:
    listed = folder.shards if folder.index is None else folder.weight_map.values()
    names = sorted({file for file in listed if isinstance(file, str)})
    ledger.examined("files.shard-names", len(names))
    if names != [SINGLE_NAME]:
        for number, name in enumerate(names, start=1):
            wanted = f"model-{number:05d}-of-{len(names):05d}.safetensors"
            if name != wanted and not folder.broken:
                ledger.fault("files.shard-names", name, f"expected {wanted}")
    present = {path.name for path in folder.root.iterdir() if WEIGHTS.fullmatch(path.name)}
    ledger.examined("files.unlisted", len(present))
    for name in sorted(present.difference(names, folder.broken)):
        reason = "is not in the index, but vLLM may read it; delete it"
        ledger.fault("files.unlisted", name, reason)
    check = "files.companions"
    paths = [path.relative_to(folder.root).as_posix() for path in sorted(folder.root.rglob("*"))]
    ledger.examined(check, len(paths))
    for name in paths:
        if travels(name) and is_lfs_pointer(folder.root / name):
            ledger.fault(check, name, "is only a Git LFS pointer; run `git lfs pull`")
    if folder.files.has("adapter_config.json"):
        reason = "makes transformers, with peft installed, look for an adapter; delete it"
        ledger.fault(check, "adapter_config.json", reason)
    ledger.examined("files.metadata", len(folder.metadata))
    for name, metadata in folder.metadata.items():
        if metadata.get("format") != "pt":
            reason = f'__metadata__ is {json.dumps(metadata)[:80]}, expected "format": "pt"'
            ledger.fault("files.metadata", name, reason)


def _check_manifest(folder: Folder, ledger: Ledger) -> None:
    """beamq.json must list these shards, sizes and tensors, each with a checksum.

    A shard that cannot be read is a finding of `files.readable` alone.
    """
    check, manifest = "manifest.present", folder.manifest
    if manifest is None and ledger.strangers and folder.plain:
        ledger.skip("not quantized, and no beamq.json: not made by beamq", check)
        return
    if manifest is None:
        if not ledger.failed(check):  # else the file is there, and its fault is recorded
            reason = "is missing, so nothing can be compared with checksums"
            remedy = "beamq did not make this folder, or the file was lost"
            if not ledger.strangers:
                remedy = "README.md says that beamq made this folder; copy the file from there"
            ledger.fault(check, MANIFEST_NAME, f"{reason}: {remedy}")
        return
    ledger.examined(check, len(folder.tensors))
    listed = manifest.shards
    problem = None if listed is not None else "its list of shards is damaged"
    if manifest.algorithm not in (XXH3, SHA256):
        problem = f"checksum is {manifest.algorithm[:40]!r}, expected {XXH3} or {SHA256}"
    if manifest.format != MANIFEST_FORMAT:
        problem = f"format is {manifest.format!r}, expected {MANIFEST_FORMAT}"
    if problem is not None or listed is None:
        ledger.fault(check, MANIFEST_NAME, f"{problem}; restore the file")
        return
    for shard in sorted(set(listed).symmetric_difference(folder.shards) - folder.broken):
        where = "in beamq.json, but not in the folder" if shard in listed else "not in beamq.json"
        ledger.fault(check, shard, f"is {where}")
    for shard, specs in folder.shards.items():
        if shard not in listed:
            continue
        stray = {spec.name for spec in specs}.symmetric_difference(listed[shard].tensors)
        if stray:
            reason = f"beamq.json and its header name other tensors ({few(sorted(stray))})"
            ledger.fault(check, shard, f"{reason}; is it a shard of another conversion?")
        size = (folder.root / shard).stat().st_size
        if listed[shard].nbytes != size:
            reason = f"has {size} bytes, but beamq.json says {listed[shard].nbytes}"
            ledger.fault(check, shard, reason)


# --- tensors against the config -------------------------------------------------------------


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
        """Whether a stored tensor says so: a scale, or a weight of codes."""
        weight = self.parts.get("weight")
        return any(suffix in self.parts for suffix in SCALE_SUFFIXES) or (
            weight is not None and weight.dtype in CODE_DTYPES
        )

    @property
    def format(self) -> str:
        """The format of the stored tensors, whatever the config says."""
        found = stored_as({suffix: (s.dtype, s.shape) for suffix, s in self.parts.items()})
        return found or FP8

    def wanted(self, scheme: str) -> Outputs:
        """The tensors that it must have in a folder of a scheme ("": whatever is declared).

        Its own format decides which of the scheme's it is in.
        """
        own, fmt = WEIGHT_FORMATS[self.format].rounding, self.format
        if scheme in SCHEMES:
            fmt = SCHEMES[scheme].roundings.get(own, SCHEMES[scheme].formats[0])
        return WEIGHT_FORMATS[fmt].tensors(self.module, *self.shape)


@dataclass(slots=True, kw_only=True)
class Inventory:
    """Every stored tensor in its place. `unknown` are tensors that no Beam has."""

    linears: list[Linear] = field(default_factory=list)
    high_precision: list[tuple[TensorRole, TensorSpec]] = field(default_factory=list)
    unknown: list[TensorSpec] = field(default_factory=list)

    def stored(self) -> dict[str, str]:
        """Module -> rounding of its format, "" if it is not quantized, for every module of which
        something is stored."""
        stored = {
            linear.module: WEIGHT_FORMATS[linear.format].rounding if linear.quantized else ""
            for linear in self.linears
            if linear.parts
        }
        for role, spec in self.high_precision:
            if role.role in (Role.HEAD, Role.EMBEDDING):
                codes = {"U8": NVFP4}.get(spec.dtype, FP8)
                stored[role.module] = codes if spec.dtype in CODE_DTYPES else ""
        for spec in self.unknown:
            module, _, suffix = spec.name.rpartition(".")
            if suffix in SCALE_SUFFIXES and module in stored:
                stored[module] = stored[module] or FP8
        return stored


class Sorter:
    """Takes tensors out of `_left`, one expected tensor or linear after the other."""

    def __init__(self, folder: Folder, fmt: str, ledger: Ledger) -> None:
        self._folder = folder
        self._format = fmt
        self._ledger = ledger
        self._left = dict(folder.tensors)
        self._float = _FLOATS.get(fmt, "BF16") if folder.any_float else "BF16"
        self._inventory = Inventory()

    def sort(self) -> Inventory:
        """Give every stored tensor its place; record what is missing, unknown or malformed."""
        ledger, inventory = self._ledger, self._inventory
        packed = self._packed_experts() if self._folder.plain else frozenset()
        for check in ("tensors.known", "tensors.shape", "tensors.dtype"):
            ledger.examined(check, len(self._left))
        for role, shape in expected_tensors(self._folder.beam):
            ledger.examined("tensors.present")
            if role.role is Role.EXPERT and (role.layer, packed_part(role)) in packed:
                continue
            if role.role in QUANTIZABLE:
                inventory.linears.append(self._linear(role, (shape[0], shape[1])))
            elif (spec := self._left.pop(role.name, None)) is None:
                ledger.fault("tensors.present", role.name, "is missing")
            else:
                inventory.high_precision.append((role, spec))
                ledger.expect("tensors.shape", spec.name, list(spec.shape), list(shape))
                self._check_kept_dtype(role, spec)
        inventory.unknown = list(self._left.values())
        for spec in inventory.unknown:
            _unknown(spec, self._folder.beam, ledger)
        if not packed:
            _check_experts(inventory.linears, ledger)
        return inventory

    def _packed_experts(self) -> frozenset[tuple[int | None, str]]:
        """(layer, part) of experts stored in packed tensors, which only an unquantized Beam may."""
        config = self._folder.beam
        found = set()
        for spec in [spec for spec in self._left.values() if ".mlp.experts." in spec.name]:
            role = classify(spec.name)
            if role.packed is None or role.layer not in config.sparse_layers:
                continue
            self._check_form(spec, packed_shape(config, role.packed), self._float)
            self._ledger.examined("tensors.experts", unit="packed tensors")
            self._inventory.high_precision.append((role, self._left.pop(spec.name)))
            found.add((role.layer, role.packed))
        return frozenset(found)

    def _linear(self, role: TensorRole, shape: tuple[int, int]) -> Linear:
        """Collect one linear's tensors, and check them against its format."""
        parts = {
            suffix: self._left[name]
            for suffix in SUFFIXES
            if (name := f"{role.module}.{suffix}") in self._left
        }
        linear = Linear(role=role, shape=shape, parts=parts)
        wanted: tuple[tuple[str, str, tuple[int, ...]], ...] = ((role.name, self._float, shape),)
        need = ""
        if linear.quantized:
            wanted = linear.wanted(self._format)
            need = f"; {self._format if self._format in SCHEMES else linear.format} needs it"
            self._ledger.examined("tensors.present", len(wanted) - 1)
        for name, dtype, part_shape in wanted:
            spec = self._left.pop(name, None)
            if spec is None:
                self._ledger.fault("tensors.present", name, f"is missing{need}")
            else:
                self._check_form(spec, part_shape, dtype)
        return linear

    def _check_form(self, spec: TensorSpec, shape: tuple[int, ...], dtype: str) -> None:
        self._ledger.expect("tensors.shape", spec.name, list(spec.shape), list(shape))
        # Engines cast floats, but FP32 scalars are read as they are.
        soft = bool(shape) and {spec.dtype, dtype} <= set(FLOAT_SOURCES)
        self._ledger.expect("tensors.dtype", spec.name, spec.dtype, dtype, soft=soft)

    def _check_kept_dtype(self, role: TensorRole, spec: TensorSpec) -> None:
        """A tensor that is never quantized has its role's float type."""
        check, dtype = "tensors.dtype", self._float
        if role.role in FP32_ROLES:
            check, dtype = "tensors.router", "F32"
            self._ledger.examined(check)
        elif role.role in (Role.HEAD, Role.EMBEDDING):
            self._ledger.examined("tensors.head")
            if spec.dtype in CODE_DTYPES:
                check = "tensors.head"
        soft = spec.dtype in FLOAT_SOURCES
        self._ledger.expect(check, spec.name, spec.dtype, dtype, soft=soft)


def _unknown(spec: TensorSpec, config: BeamConfig, ledger: Ledger) -> None:
    """A tensor that no Beam has. transformers warns of such names, and loads the rest."""
    if "rotary_emb.inv_freq" in spec.name:
        ledger.fault("tensors.known", spec.name, "is computed by every engine", soft=True)
        return
    module, _, suffix = spec.name.rpartition(".")
    if module in ("lm_head", "model.embed_tokens") and suffix in SCALE_SUFFIXES:
        ledger.fault("tensors.head", spec.name, "is a scale, but this module is never quantized")
    reason = "is unknown to the engines: vLLM raises ValueError, SGLang KeyError"
    stopped = {"vLLM", "SGLang"}
    if is_further_layer(spec.name, config.num_layers):
        reason = f"is beyond the {config.num_layers} layers of config.json: vLLM raises ValueError,"
        reason += " SGLang passes over it"
        stopped = {"vLLM"}
    elif suffix in ("k_scale", "v_scale"):
        reason = "is a KV-cache scale, for which SGLang's Beam has no place (KeyError)"
        stopped = {"SGLang"}
    elif ".experts.gate_up_proj" in spec.name or ".experts.down_proj" in spec.name:
        reason = "packs experts, but a quantized checkpoint has one tensor per expert"
        stopped = set(ENGINES)
    ledger.fault("tensors.known", spec.name, reason)
    ledger.stopped |= stopped


def _check_experts(linears: Iterable[Linear], ledger: Ledger) -> None:
    """Each layer's experts are complete, and all or none quantized: engines look at expert 0."""
    check = "tensors.experts"
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        if linear.role.role is Role.EXPERT and linear.role.layer is not None:
            by_layer.setdefault(linear.role.layer, []).append(linear)
    if not by_layer:
        ledger.skip("this model has no experts", check)
    for layer, members in by_layer.items():
        ledger.examined(check)
        where = f"model.layers.{layer}.mlp.experts"
        gone = [m.module.removeprefix(f"{where}.") for m in members if "weight" not in m.parts]
        if gone:
            reason = f"{len(gone)} of {len(members)} are missing, the first is {gone[0]}"
            ledger.fault(check, where, reason)
        whole = [member for member in members if member.parts]
        quantized = sum(member.quantized for member in whole)
        if 0 < quantized < len(whole):
            few_are = 2 * quantized < len(whole)
            odd = next(m.module for m in whole if m.quantized == few_are).removeprefix(f"{where}.")
            some = f"{quantized} of {len(whole)} linears are quantized"
            ledger.fault(check, where, f"{some}, expected all or none; {odd} differs from most")


# --- scalars --------------------------------------------------------------------------------


def check_scalars(
    checkpoint: Checkpoint, inventory: Inventory, manifest: Manifest | None, ledger: Ledger
) -> None:
    """The FP32 scalars: each usable, and equal to the bit over linears that the engines fuse.

    A pass says the room that input scales have, where beamq.json records it.
    """
    checks = {
        "weight_scale_2": ("scales.global", "scales.shared"),
        "input_scale": ("scales.input", "scales.input-shared"),
    }
    if not any(linear.quantized and linear.format == NVFP4 for linear in inventory.linears):
        for names in checks.values():
            ledger.skip("no NVFP4 linears", *names)
        return
    for suffix, (one, shared) in checks.items():
        groups: dict[str, dict[bytes, float]] = {}
        for linear in inventory.linears:
            spec = linear.parts.get(suffix)
            if spec is None or spec.dtype != "F32" or spec.numel != 1:
                continue
            raw = bytes(checkpoint.read(spec.name))
            value: float = struct.unpack("<f", raw)[0]
            ledger.examined(one)
            fault = scalar_fault(value)
            if fault:
                ledger.fault(one, f"{linear.module}.{suffix}", fault)
            groups.setdefault(fused_group(linear.role), {})[raw] = value
        ledger.examined(shared, len(groups))
        for group, values in groups.items():
            if len(values) > 1:
                shown = " and ".join(map(repr, values.values()))
                reason = "engines keep one value, and decode the other linears with it"
                ledger.fault(shared, group, f"{suffix} differs ({shown}); {reason}")
    headroom = None if manifest is None else manifest.input_scales.get("headroom")
    state = ledger.states["scales.input"]
    if isinstance(headroom, int) and state.examined:
        room = f"for {headroom} x the largest calibrated input"
        state.measured = f"{state.unit}: {state.examined:,}, {room}"


def scalar_fault(value: float) -> str | None:
    """Why a scale cannot be used, or None. Engines divide by it, so it may not be denormal."""
    if not math.isfinite(value):
        return f"is {value}"
    if value <= 0.0:
        return f"is {value}, expected a positive number"
    if value < SMALLEST_NORMAL:
        return f"is {value}, so small that its reciprocal is infinite or denormals flush it to 0"
    return None
