"""Hold a checkpoint's tensors against the checksums that its own `beamq.json` records.

For whoever is about to build on those bytes: decoding a flipped bit would give it fresh, correct
checksums, and nobody could find it any more. A folder without a manifest has nothing to check.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from beamq.checkpoint import Checkpoint
from beamq.checksum import is_digest, new_checksum
from beamq.config import read_json_object
from beamq.conversion.output_folder import MANIFEST_NAME
from beamq.errors import CheckpointError, counted
from beamq.header import few

PIECE_BYTES = 1 << 20
MAX_MANIFEST_BYTES = 1 << 30


def check_recorded_bytes(checkpoint: Checkpoint, workers: int) -> int:
    """Read every tensor that the manifest has a checksum of; returns how many.

    Raises `CheckpointError` naming those that differ or are recorded and gone.
    """
    path = checkpoint.root / MANIFEST_NAME
    if not path.exists():
        return 0
    manifest = read_json_object(path, CheckpointError, MAX_MANIFEST_BYTES)
    recorded = _recorded(manifest)
    algorithm = str(manifest.get("checksum"))
    gone = [name for name in recorded if name not in checkpoint.tensors]

    def differs(name: str) -> bool:
        return _digest(checkpoint, name, algorithm) != recorded[name]

    names = [name for name in recorded if name in checkpoint.tensors]
    with ThreadPoolExecutor(max_workers=workers) as pool:
        found = list(pool.map(differs, names))
    bad = gone + [name for name, wrong in zip(names, found, strict=True) if wrong]
    if bad:
        raise CheckpointError(
            f"{checkpoint.label}: {counted(len(bad), 'tensor is', 'tensors are')} not the bytes"
            f" that {MANIFEST_NAME} records: {few(bad)}; `beamq verify` tells more, make or fetch"
            " the checkpoint again"
        )
    return len(names)


def _recorded(manifest: dict[str, Any]) -> dict[str, str]:
    shards = manifest.get("shards")
    recorded: dict[str, str] = {}
    for shard in shards if isinstance(shards, list) else []:
        tensors = shard.get("tensors") if isinstance(shard, dict) else None
        for name, digest in tensors.items() if isinstance(tensors, dict) else ():
            if is_digest(digest):
                recorded[str(name)] = digest
    return recorded


def _digest(checkpoint: Checkpoint, name: str, algorithm: str) -> str:
    spec = checkpoint.tensors[name]
    checksum = new_checksum(algorithm)
    buffer = memoryview(bytearray(min(PIECE_BYTES, spec.nbytes)))
    for start in range(0, spec.nbytes, PIECE_BYTES):
        piece = buffer[: min(PIECE_BYTES, spec.nbytes - start)]
        checkpoint.read_into(spec, piece, start)
        checksum.update(piece)
    return checksum.hexdigest()
