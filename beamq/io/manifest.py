"""beamq.json, a checkpoint's manifest: what made it, from what, and the checksum of every byte.

In: a finished conversion's records, or an untrusted file. Out: a frozen `Manifest`, or the file.

The file is written last, so its presence says that the conversion ended. A manifest that is read is
data to compare with and nothing more: its size and its nesting are bounded, and each accessor gives
the type it promises or nothing, whatever the file holds. What is damaged is for `verify` to report.

Checksums are XXH3-128, which costs next to nothing compared with copying memory; SHA-256 where the
`xxhash` package is missing. The manifest names the algorithm. They guard against accidents (a
flipped bit, a shard of another run), not against forgery.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from beamq.errors import BeamqError, CheckpointError, MissingDependencyError
from beamq.io.files import open_file, read_json_object, unreadable
from beamq.io.shard_writer import Shard, write_json
from beamq.io.source import INDEX_NAME, SourceFiles
from beamq.version import __version__

try:
    import xxhash
except ImportError:  # pragma: no cover - bare GPU machines
    xxhash = None  # type: ignore[assignment]

MANIFEST_NAME = "beamq.json"
MANIFEST_FORMAT = 1
MAX_MANIFEST_BYTES = 1 << 30
XXH3 = "xxh3-128"
SHA256 = "sha256"
DEFAULT_ALGORITHM = SHA256 if xxhash is None else XXH3
PIECE_BYTES = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{8,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedShard:
    """A shard as the manifest lists it: `nbytes` with its header, `tensors` in file order with
    the checksum of each. `sources` and `source_counts` are as in the journal's record, unchecked.
    `sound` is false where an entry is not in the form that beamq writes; `tensors` then holds those
    that are."""

    name: str
    nbytes: Any
    digest: str
    tensors: Mapping[str, str] = field(repr=False)
    sound: bool = True
    sources: Mapping[str, Any] = field(default_factory=dict, repr=False)
    source_counts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        shard: Shard,
        digests: Mapping[str, str],
        sources: Mapping[str, str],
        source_counts: Mapping[str, Mapping[str, int]],
    ) -> ListedShard:
        """The entry of a shard that was written, from its record."""
        tensors = {tensor.name: digests[tensor.name] for tensor in shard.tensors}
        digest = shard_digest(shard.header, tensors.values())
        return cls(
            name=shard.name,
            nbytes=shard.nbytes,
            digest=digest,
            tensors=tensors,
            sources=sources,
            source_counts=source_counts,
        )

    @classmethod
    def parse(cls, entry: Any) -> ListedShard:
        """The entry of a file, whatever it holds."""
        entry = _object(entry)
        name, digest, tensors = entry.get("name"), entry.get("digest"), entry.get("tensors")
        digests = {key: value for key, value in _object(tensors).items() if is_digest(value)}
        sound = isinstance(name, str) and is_digest(digest) and digests == tensors
        return cls(
            name=str(name),
            nbytes=entry.get("bytes"),
            digest=str(digest),
            tensors=digests,
            sound=sound,
            sources=_object(entry.get("sources")),
            source_counts=_object(entry.get("source_counts")),
        )

    def to_dict(self) -> dict[str, Any]:
        """The entry as it stands in the file."""
        return {
            "name": self.name,
            "bytes": self.nbytes,
            "digest": self.digest,
            "tensors": dict(self.tensors),
            **({"sources": dict(self.sources)} if self.sources else {}),
            **({"source_counts": dict(self.source_counts)} if self.source_counts else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One beamq.json. `data` is the whole JSON object, as read or as written."""

    data: dict[str, Any] = field(repr=False)
    listed: tuple[ListedShard, ...] = field(repr=False)

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Manifest:
        """A manifest of any JSON object."""
        shards = data.get("shards")
        entries = shards if isinstance(shards, list) else [None]  # one entry, not sound
        return cls(data=data, listed=tuple(map(ListedShard.parse, entries)))

    @classmethod
    def read(cls, path: Path, error: type[BeamqError] = CheckpointError) -> Manifest:
        """Raises `error` where the file is absent, too large, or no JSON object."""
        return cls.parse(read_json_object(path, error, MAX_MANIFEST_BYTES))

    @classmethod
    def of(cls, source: SourceFiles) -> Manifest | None:
        """That of a checkpoint, or None where it has none. Raises `CheckpointError`."""
        return cls.read(source.path(MANIFEST_NAME)) if source.has(MANIFEST_NAME) else None

    @classmethod
    def write(
        cls,
        folder: Path,
        content: Mapping[str, Any],
        shards: Iterable[ListedShard],
        others: Iterable[str],
    ) -> Manifest:
        """Write a checkpoint's last file: `content`, the checksums of `shards`, of the configs and
        of `others` (names of files in `folder`), and a seal over all of it. Raises `DiskError`.

        The model card is left out: people edit it, and `compare` writes into it.
        """
        names = {INDEX_NAME, "config.json", "hf_quant_config.json", *others} - {"README.md"}
        present = sorted(name for name in names if (folder / name).exists())
        listed = tuple(shards)
        data = {
            "format": MANIFEST_FORMAT,
            "beamq": __version__,
            **content,
            "checksum": DEFAULT_ALGORITHM,
            "shards": [shard.to_dict() for shard in listed],
            "files": {name: file_checksum(folder / name) for name in present},
        }
        data["seal"] = seal_of(data)
        write_json(folder / MANIFEST_NAME, data)
        return cls(data=data, listed=listed)

    @property
    def format(self) -> Any:
        """`MANIFEST_FORMAT`, unless another tool or version wrote it."""
        return self.data.get("format")

    @property
    def algorithm(self) -> str:
        """The checksum's name; `new_checksum` raises for one that it does not know."""
        return str(self.data.get("checksum"))

    @property
    def shards(self) -> dict[str, ListedShard] | None:
        """The shards by name; None where one is not in the form that beamq writes."""
        if not all(shard.sound for shard in self.listed):
            return None
        return {shard.name: shard for shard in self.listed}

    @property
    def tensors(self) -> dict[str, str]:
        """The checksum of every tensor that has one."""
        return {name: digest for shard in self.listed for name, digest in shard.tensors.items()}

    @property
    def files(self) -> dict[str, Any] | None:
        """Checksums of the files that are no shards, by path; None: made by an earlier version."""
        files = self.data.get("files")
        return files if isinstance(files, dict) else None

    @property
    def sealed(self) -> bool:
        """Whether nothing in the manifest was changed since it was written."""
        return bool(self.data.get("seal") == seal_of(self.data))

    @property
    def version(self) -> str | None:
        """beamq's version."""
        version = self.data.get("beamq")
        return version if isinstance(version, str) else None

    @property
    def recipe(self) -> dict[str, Any] | None:
        """The recipe as plain data; None where there is none, as in a dequantized checkpoint."""
        recipe = self.data.get("recipe")
        return recipe if isinstance(recipe, dict) else None

    @property
    def adapter(self) -> dict[str, Any] | None:
        """The record of the adapter that is merged into the weights."""
        found = self.data.get("adapter")
        return found if isinstance(found, dict) else None

    @property
    def input_scales(self) -> dict[str, Any]:
        """Where the input scales come from: description, digests, the calibration's data."""
        return _object(self.data.get("input_scales"))

    @property
    def digests(self) -> dict[str, Any]:
        """Of the plan, the recipe and the source."""
        return _object(self.data.get("digests"))

    @property
    def versions(self) -> dict[str, str]:
        """Versions of Python and of the packages that matter."""
        return {key: str(value) for key, value in _object(self.data.get("versions")).items()}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


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
    """Whether a value from an untrusted file has the form of a checksum."""
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


def seal_of(data: Mapping[str, Any]) -> str:
    """What a manifest's `seal` must be: SHA-256 of everything else in it."""
    rest = {key: value for key, value in data.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
