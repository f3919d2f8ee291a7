"""A checkpoint as headers and byte ranges; tensor data is read only when asked for.

In: a folder of safetensors files, possibly from an untrusted source, or `org/name[@revision]` on
the Hub. Out: a `Checkpoint`: its config, every tensor's dtype, shape, file and byte range, and
positional reads of those ranges. `SourceFiles` knows where the bytes come from.

Headers are not trusted: sizes are bounded by the file before anything is allocated, every offset is
checked against its neighbours and against dtype x shape, and names may not leave the folder. Data
is read with `preadv` into the caller's buffer: that is thread safe, loads no whole file, and a file
that shrinks is an error, where mmap would crash. Pickle formats are never opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.errors import CheckpointError, ConfigError, TensorError
from beamq.io.files import read_json_object, user_path
from beamq.io.hub import hub_source, open_repo
from beamq.io.safetensors_header import TensorSpec
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.io.source import INDEX_NAME, LocalFiles, Prefetch, SourceFiles, check_index, weight_files
from beamq.options import Flag, takes
from beamq.units import short_repr

if TYPE_CHECKING:
    import torch

FLOAT_SOURCES = ("BF16", "F16", "F32")
SAMPLE_BYTES = 4096
HUB_STAMP = "hub:"  # what a repository's fingerprint begins with
ADAPTER_STAMP = "+adapter:"  # what follows it where an adapter is merged


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint. Reads are thread safe; `close` (or `with`) releases the files."""

    __repr__ = short_repr

    config: dict[str, Any]
    tensors: dict[str, TensorSpec]
    files: tuple[str, ...]
    metadata: dict[str, dict[str, str]]
    has_index: bool
    source: SourceFiles = field(repr=False)

    @property
    def name(self) -> str:
        """For messages: the folder, or `org/name@commit`."""
        return self.source.name

    @property
    def label(self) -> str:
        """What records may show: the folder's own name, or `org/name`; never a path."""
        return self.source.label

    @property
    def root(self) -> Path:
        """A local folder with everything but the shards.

        For a repository on the Hub, these files are fetched into its cache on first use.
        """
        return self.source.folder()

    def read_into(self, spec: TensorSpec, out: memoryview, start: int = 0) -> None:
        """Fill `out` (bytes) with the tensor's bytes from `start`.

        Raises `CheckpointError` when the file ends early or the device fails.
        """
        if start < 0 or start + out.nbytes > spec.nbytes:
            raise ValueError(f"{spec.name}: range {start}+{out.nbytes} of {spec.nbytes} bytes")
        self.source.read(spec.file, spec.offset + start, out, spec.name)

    def peek_many(self, wanted: Sequence[tuple[TensorSpec, int, int]]) -> Iterator[bytes]:
        """Small ranges (tensor, start, nbytes) from anywhere in the model, in order.

        For a repository on the Hub: several range requests at once, no shard is fetched.
        """

        def peek(item: tuple[TensorSpec, int, int]) -> bytes:
            spec, start, nbytes = item
            return self.source.peek(spec.file, spec.offset + start, nbytes, spec.name)

        parallel = self.source.parallel
        if parallel == 1:
            yield from map(peek, wanted)
            return
        with ThreadPoolExecutor(parallel, thread_name_prefix="beamq-peek") as pool:
            for begin in range(0, len(wanted), 2 * parallel):
                yield from pool.map(peek, wanted[begin : begin + 2 * parallel])

    def prefetch(self, jobs: Sequence[Collection[str]]) -> AbstractContextManager[Prefetch]:
        """Around a loop over jobs, each of which reads the shards named; see `SourceFiles`."""
        return self.source.prefetch(jobs)

    def read(self, name: str) -> bytearray:
        """All bytes of one tensor, in a new buffer."""
        spec = self.spec(name)
        buffer = bytearray(spec.nbytes)
        self.read_into(spec, memoryview(buffer))
        return buffer

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU, with the dtype it has on disk."""
        from beamq.formats.numerics import tensor_from_bytes  # torch takes seconds to import

        spec = self.spec(name)
        return tensor_from_bytes(self.read(name), spec.dtype, spec.shape)

    def spec(self, name: str) -> TensorSpec:
        """The record of one tensor. Raises `TensorError` if the checkpoint lacks it."""
        try:
            return self.tensors[name]
        except KeyError:
            raise TensorError(f"{self.name}: tensor {name} is missing") from None

    def advise(self, spec: TensorSpec, start: int, nbytes: int) -> None:
        """Ask the kernel to read part of a tensor ahead; a hint, free to fail."""
        self.source.advise(spec.file, spec.offset + start, nbytes)

    def fingerprint(self) -> str:
        """A text that changes when the files change.

        For a folder a SHA-256 over config, names, dtypes, shapes, offsets, file sizes and
        modification times; for a repository its name and commit. What is merged into it follows.
        """
        stamp = self.source.stamp(self.files)
        if not stamp.startswith(HUB_STAMP):
            digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
            digest.update(stamp.encode())
            digest.update(self.layout_digest().encode())
            stamp = digest.hexdigest()
        merged = _merged_stamp(self.source.merged)
        return f"{stamp}{ADAPTER_STAMP}{merged}" if merged else stamp

    def layout_digest(self) -> str:
        """SHA-256 over every tensor's name, dtype, shape and place; the same on any machine."""
        digest = hashlib.sha256()
        for spec in self.tensors.values():
            line = f"{spec.name}\t{spec.dtype}\t{spec.shape}\t{spec.file}\t{spec.offset}\n"
            digest.update(line.encode())
        return digest.hexdigest()

    def content_digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and samples of the values: differs between models.

        The samples are 4 KiB from the middle of every tensor, of experts every 16th: a few thousand
        reads for a 501B model. Copies and other shardings have the same digest.
        """
        digest = hashlib.sha256()
        digest.update(_merged_stamp(self.source.merged).encode())  # samples may miss what changes
        specs = [self.tensors[name] for name in sorted(self.tensors)]
        sampled = [
            ".experts." not in spec.name or position % 16 == 0
            for position, spec in enumerate(specs)
        ]
        values = self.peek_many(
            [_middle(spec) for spec, chosen in zip(specs, sampled, strict=True) if chosen]
        )
        for spec, chosen in zip(specs, sampled, strict=True):
            digest.update(f"{spec.name}\t{spec.dtype}\t{spec.shape}\n".encode())
            if chosen:
                digest.update(next(values))
        return digest.hexdigest()

    def check_unchanged(self, *, writes: bool = False) -> None:
        """Raise `CheckpointError` if a shard is no longer the file whose header was read.

        Called at the end of a run, which must have read the files that it began with. One that
        `writes` an output is started again with `--overwrite`.
        """
        changed = self.source.changed()
        if changed is not None:
            raise CheckpointError(
                f"{self.name}/{changed}: changed while it was read, so the result would mix two"
                " models; do not change it during a run, and start again"
                f"{' with --overwrite' if writes else ''}"
            )

    def close(self) -> None:
        """Close every open file."""
        self.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _merged_stamp(merged: Mapping[str, Any] | None) -> str:
    """The adapter in a record, and how its packed experts are read; "" where there is none."""
    if merged is None:
        return ""
    packed = merged["packed_experts"] or {}
    return "-".join([merged["digest"], *(packed[key] for key in ("layout", "order") if packed)])


def _middle(spec: TensorSpec) -> tuple[TensorSpec, int, int]:
    """The range in the middle of a tensor that is sampled."""
    size = min(spec.nbytes, SAMPLE_BYTES)
    return spec, (spec.nbytes - size) // 2, size


@takes(cache_bytes=Flag("", size=True))
def open_checkpoint(
    source: str | Path, *, cache_bytes: int = DEFAULT_CACHE_BYTES, cache_folder: Path | None = None
) -> Checkpoint:
    """Read a checkpoint's config, index and all headers; no tensor data.

    `source` is a folder, or `org/name[@revision]` on the Hub; a name that exists on disk is a
    path. `cache_bytes` bounds the shards of a repository that are on disk at a time, in
    `cache_folder` (made when needed) or in a folder under HF_HOME.
    Raises `CheckpointError` for anything broken, with the file's name; `ConfigError` for
    config.json; `HubError` and `HubUnreachableError`.
    """
    files = open_files(source, cache_bytes=cache_bytes, cache_folder=cache_folder)
    try:
        return _open(files)
    except BaseException:
        files.close()
        raise


def open_files(
    source: str | Path, *, cache_bytes: int = DEFAULT_CACHE_BYTES, cache_folder: Path | None = None
) -> SourceFiles:
    """The files of a folder or of a repository on the Hub; nothing is read yet."""
    asked = hub_source(source)
    if asked is None:
        return LocalFiles(user_path(source))
    from beamq.io.hub_source import HubFiles  # only where it is needed

    return HubFiles(open_repo(asked), cache_bytes=cache_bytes, cache_folder=cache_folder)


def _open(files: SourceFiles) -> Checkpoint:
    config = read_json_object(files.path("config.json"), ConfigError)
    shards, weight_map = weight_files(files)
    tensors: dict[str, TensorSpec] = {}
    metadata: dict[str, dict[str, str]] = {}
    files.expect_headers(shards)
    for file in shards:
        specs, metadata[file] = files.header(file)
        for spec in specs:
            earlier = tensors.get(spec.name)
            if earlier is not None:
                raise CheckpointError(
                    f"{spec.name}: stored twice, in {earlier.file} and {file}; remove one"
                )
            tensors[spec.name] = spec
    if weight_map is not None:
        check_index(f"{files.name}/{INDEX_NAME}", weight_map, tensors)
    return Checkpoint(
        config=config,
        tensors=tensors,
        files=tuple(shards),
        metadata=metadata,
        has_index=weight_map is not None,
        source=files,
    )
