"""The source a checkpoint was made from: is everything of it accounted for, and where does it lie?

In: the checkpoint's `Folder`, its `Inventory`, and an opened source. Out: the source range behind
each stored weight (packed 3-D experts cut into rows), and findings under `source.accounted`,
`source.config` and `source.files`. Reads headers and the small companion files, no weights.

The source is the caller's input: if it is broken or quantized itself, that is an exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beamq.checkpoint import Checkpoint
from beamq.config import BeamConfig
from beamq.errors import UsageError
from beamq.eval.checks import Ledger
from beamq.eval.decoded import Decoded
from beamq.eval.folder import Folder
from beamq.eval.structure import Inventory
from beamq.header import TensorSpec
from beamq.sources import SourceRange, companion_files, map_sources, restored_name

OWN_KEYS = ("quantization_config", "dtype", "torch_dtype")  # config keys a conversion may change
CHUNK = 1 << 20


def trace_source(
    folder: Folder, inventory: Inventory, source: Checkpoint, ledger: Ledger
) -> dict[str, SourceRange]:
    """Output tensor name -> where its values lie in the source.

    Raises `TensorError`, `AlreadyQuantizedError` or `ConfigError` for a source that is no
    high-precision Beam.
    """
    mapping = map_sources(source, BeamConfig.from_dict(source.config))
    _check_config(folder.raw_config, source.config, ledger)
    _check_files(folder, source, _targets(source), ledger)
    ranges = {role.name: found for role, found in mapping.found}
    for spec in mapping.extra:
        ranges[spec.name] = _whole(spec)
    _check_accounted(inventory, ranges, len(mapping.dropped), ledger)
    return ranges


def trace_decoded(
    folder: Folder, inventory: Inventory, source: Decoded, ledger: Ledger
) -> dict[str, SourceRange]:
    """The same for a folder that was dequantized: the values that its quantized source decodes to.

    Raises `UsageError` for a source that is not quantized.
    """
    checkpoint = source.checkpoint
    if not source.quantized:
        raise UsageError(
            f"--source {checkpoint.name} is not quantized, and {folder.root} is not either; give"
            " the quantized folder that it was decoded from, or leave out --source"
        )
    _check_config(folder.raw_config, checkpoint.config, ledger)
    _check_files(folder, checkpoint, _restored(checkpoint), ledger)
    ranges = {name: _whole(spec) for name, spec in source.tensors.items()}
    _check_accounted(inventory, ranges, 0, ledger)
    return ranges


def _whole(spec: TensorSpec) -> SourceRange:
    return SourceRange(spec=spec, start=0, nbytes=spec.nbytes, shape=spec.shape)


def _check_accounted(
    inventory: Inventory, ranges: Mapping[str, SourceRange], dropped: int, ledger: Ledger
) -> None:
    stored: dict[str, tuple[int, ...]] = {
        linear.role.name: linear.shape for linear in inventory.linears if linear.parts
    }
    for spec in [spec for _, spec in inventory.precise] + inventory.unknown:
        stored[spec.name] = spec.shape
    ledger.examined("source.accounted", len(ranges) + dropped, "source tensors")
    for name, found in ranges.items():
        if name not in stored:
            ledger.fault("source.accounted", name, "is in the source, but not here")
        elif stored[name] != found.shape:
            ledger.fault(
                "source.accounted",
                name,
                f"is {list(stored[name])} here and {list(found.shape)} in the source",
            )
    for name in stored:
        if name not in ranges:
            ledger.fault("source.accounted", name, "is here, but not in the source")


def _check_config(ours: Mapping[str, Any], theirs: Mapping[str, Any], ledger: Ledger) -> None:
    keys = (ours.keys() | theirs.keys()).difference(OWN_KEYS)
    ledger.examined("source.config", len(keys), "keys")
    for key in sorted(keys):
        if ours.get(key) != theirs.get(key):
            ledger.fault(
                "source.config",
                key,
                f"is {str(ours.get(key))[:60]!r}, in the source {str(theirs.get(key))[:60]!r}",
            )


def _targets(source: Checkpoint) -> dict[str, str]:
    """What became of each file that travels with the weights: its name there -> here."""
    return {each.source: each.target for each in companion_files(source.source)}


def _restored(source: Checkpoint) -> dict[str, str]:
    """The same for decoding, which gives cards their old names back and drops the newest."""
    found = {each.source: restored_name(each) for each in companion_files(source.source)}
    return {name: target for name, target in found.items() if target is not None}


def _check_files(
    folder: Folder, source: Checkpoint, targets: Mapping[str, str], ledger: Ledger
) -> None:
    """Tokenizer, templates and the like must be the source's, bit for bit."""
    ledger.examined("source.files", len(targets), "files")
    for name, here in targets.items():
        target = folder.root / here
        if not target.is_file():
            ledger.fault("source.files", here, "is missing; the source has it")
        elif not _same_bytes(source.source.path(name), target):
            ledger.fault("source.files", here, "differs from the source's")
    if not targets:
        ledger.skip("source.files", "the source has no other files")


def _same_bytes(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as left, b.open("rb") as right:
        while True:
            chunk = left.read(CHUNK)
            if chunk != right.read(CHUNK):
                return False
            if not chunk:
                return True
