"""A checkpoint folder as it lies there, read tolerantly: faults are findings, not exceptions.

In: a folder. Out: a `Folder` with everything that could be read, and faults in the ledger under
`files.*` and `manifest.present`. `open_checkpoint` stops at the first fault, which is right for a
conversion; here the point is to name them all.

Only a missing folder, or a config.json that is no Beam's, is an error of the caller's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beamq.beam.config import BeamConfig, read_config
from beamq.errors import CheckpointError
from beamq.eval.verify.checks import Ledger, few
from beamq.io.checksum import is_digest
from beamq.io.files import read_json_object
from beamq.io.manifest import MANIFEST_NAME
from beamq.io.safetensors_header import TensorSpec
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
MANIFEST_FORMAT = 1
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
    manifest: dict[str, Any] | None
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
    folder = Folder(
        root=root,
        raw_config=raw_config,
        config=config,
        hf_quant_config=hf_quant_config,
        manifest=optional_json(root / MANIFEST_NAME, "manifest.present", ledger, MAX_INDEX_BYTES),
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
    if folder.manifest.get("format") != MANIFEST_FORMAT:
        ledger.fault(name, MANIFEST_NAME, f"format {folder.manifest.get('format')!r}, expected 1")
        return
    listed = listed_shards(folder.manifest)
    if listed is None:
        ledger.fault(name, MANIFEST_NAME, "its list of shards is damaged")
        return
    for shard in sorted(set(listed).symmetric_difference(folder.shards)):
        where = "beamq.json" if shard in listed else "the folder"
        ledger.fault(name, shard, f"only in {where}")
    for shard, specs in folder.shards.items():
        if shard not in listed:
            continue
        stray = {spec.name for spec in specs}.symmetric_difference(listed[shard]["tensors"])
        if stray:
            ledger.fault(name, shard, f"beamq.json and the header differ: {few(sorted(stray))}")
        size = (folder.root / shard).stat().st_size
        if listed[shard].get("bytes") != size:
            ledger.fault(name, shard, f"{size} bytes, beamq.json says {listed[shard].get('bytes')}")


def listed_shards(manifest: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
    """beamq.json's shards by name, or None if they are not in the form that was written."""
    shards = manifest.get("shards")
    if not isinstance(shards, list):
        return None
    listed: dict[str, dict[str, Any]] = {}
    for shard in shards:
        if not isinstance(shard, dict) or not isinstance(shard.get("name"), str):
            return None
        tensors = shard.get("tensors")
        if not is_digest(shard.get("digest")) or not isinstance(tensors, dict):
            return None
        if not all(is_digest(digest) for digest in tensors.values()):
            return None
        listed[shard["name"]] = shard
    return listed
