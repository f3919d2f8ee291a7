"""Checksums of tensors and shards: XXH3-128, fast enough to vanish beside memory copies.

They guard against accidents (a flipped bit, a shard from another run), not against forgery. Where
the `xxhash` package is missing SHA-256 is used instead; the manifest names the algorithm.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from beamq.errors import CheckpointError, MissingDependencyError
from beamq.io.files import open_file, unreadable

try:
    import xxhash
except ImportError:  # pragma: no cover - bare GPU machines
    xxhash = None  # type: ignore[assignment]

XXH3 = "xxh3-128"
SHA256 = "sha256"
_DIGEST = re.compile(r"[0-9a-f]{8,128}")
PIECE_BYTES = 1 << 20
DEFAULT_ALGORITHM = SHA256 if xxhash is None else XXH3


class Checksum(Protocol):
    """A running checksum, as hashlib's."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


def new_checksum(algorithm: str = DEFAULT_ALGORITHM) -> Checksum:
    """A fresh checksum. Raises `MissingDependencyError` or `CheckpointError` (unknown name)."""
    if algorithm == SHA256:
        return hashlib.sha256()
    if algorithm != XXH3:
        raise CheckpointError(f"beamq.json: unknown checksum {algorithm[:40]!r}")
    if xxhash is None:
        raise MissingDependencyError("checksums of this checkpoint need: pip install xxhash")
    return xxhash.xxh3_128()


def shard_digest(header: bytes, tensors: Iterable[str], algorithm: str = DEFAULT_ALGORITHM) -> str:
    """A shard's checksum: over its header bytes and its tensors' hex digests in file order.

    Built from parts because tensors are written by many threads in any order; reading the whole
    file again only to hash it would cost as much as writing it.
    """
    checksum = new_checksum(algorithm)
    checksum.update(header)
    for digest in tensors:
        checksum.update(digest.encode())
    return checksum.hexdigest()


def is_digest(value: Any) -> bool:
    """Whether a value from somebody's file has the form of a checksum."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def file_checksum(path: Path, algorithm: str = DEFAULT_ALGORITHM) -> str:
    """Of a whole file, in bounded memory. Raises `CheckpointError` where it cannot be read."""
    checksum = new_checksum(algorithm)
    try:
        descriptor, _ = open_file(path)
        with open(descriptor, "rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                checksum.update(piece)
    except (OSError, ValueError) as fault:
        raise unreadable(path, fault, CheckpointError) from fault
    return checksum.hexdigest()


def seal_of(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of everything else in a manifest: what its `seal` must be."""
    data = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
