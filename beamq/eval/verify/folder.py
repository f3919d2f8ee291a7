"""A checkpoint folder as its headers and small files describe it.

In: a folder. Out: a `Folder` with everything that could be read, and findings under `files.*` and
`manifest.present`. No weight is read. Faults are findings, so that all of them are named; only a
folder in which there is nothing to check is an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beamq.beam.config import BeamConfig, read_config
from beamq.errors import CheckpointError, ConfigError, shown_value
from beamq.eval.verify.checks import Ledger
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
from beamq.io.safetensors_header import TensorSpec, few
from beamq.io.source import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    SINGLE_NAME,
    LocalFiles,
    SourceFiles,
    safe_file_name,
)
from beamq.plan.sources import is_quantized

HF_QUANT_NAME = "hf_quant_config.json"
ARCHITECTURE = "BeamForCausalLM"
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|ckpt|h5|msgpack|partial)")


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
