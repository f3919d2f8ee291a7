"""Checksums alone: is every byte of a folder the one that was written?

In: a `Folder` whose beamq.json lists checksums. Out: findings under `checksums.*`. No value is
looked at, no engine's rules are played through, no library is asked: this is the check for a copy
that has crossed a network or lain on a disk for a year, at the speed of reading.

Work items are runs of neighbouring tensors of a few MiB, read at once, or one larger tensor, read
in pieces; `readers` deals them out. A shard's checksum is made from its header and from the
checksums of its tensors as they are now.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TypeVar

from beamq.errors import BeamqError, EnvironmentFault
from beamq.eval.verify.checks import Ledger
from beamq.eval.verify.folder import Folder
from beamq.io.checkpoint import Checkpoint
from beamq.io.manifest import MANIFEST_NAME, Manifest, file_checksum, new_checksum, shard_digest
from beamq.io.safetensors_header import TensorSpec
from beamq.ranks import Ranks, stretch

# Who reads a checkpoint for `verify`: the threads of this process, and torchrun's other processes.
#
# In: units of work in file order, their bytes, and what to do with one. Out: what was found in
# each, in that order, on every rank; so a report is the same however many have read for it.
#
# A rank takes a stretch of neighbours, since files are read fastest from front to back. What is
# found must be small enough to be pickled and sent to all ranks. With one process nothing of
# torch is imported.

Unit = TypeVar("Unit")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """`progress` is called in the calling thread with bytes done and bytes in all, of this rank."""

    ranks: Ranks
    threads: int
    progress: Callable[[int, int], None] | None

    def agree(self, readable: bool, places: Iterable[tuple[str, int, int]]) -> None:
        """Go on only if all ranks are about to read the same (file, offset, bytes), or nothing.

        Raises `EnvironmentFault` on all of them if not: their folders are not one.
        """
        if self.ranks.world == 1:
            return
        digest = hashlib.sha256(str(readable).encode())
        for place in places:
            digest.update(repr(place).encode())
        if len(set(self.ranks.gather(digest.hexdigest()))) > 1:
            raise EnvironmentFault(
                "the ranks do not see the same files; all need the same folders, complete"
            )

    def read(
        self, units: Sequence[Unit], sizes: Sequence[int], work: Callable[[Unit], Found]
    ) -> list[Found]:
        """What `work` returns for each unit. Raises what it raises on any rank, when all have
        stopped reading."""
        mine = stretch(sizes, self.ranks)
        with self.ranks.agreeing():
            found = self._read(units[mine.start : mine.stop], sizes[mine.start : mine.stop], work)
        return [each for share in self.ranks.gather(found) for each in share]

    def _read(
        self, units: Sequence[Unit], sizes: Sequence[int], work: Callable[[Unit], Found]
    ) -> list[Found]:
        """In threads, at most a few units in flight for each."""
        done, total = 0, sum(sizes)
        found: dict[int, Found] = {}
        left = iter(range(len(units)))
        pending: dict[Future[Found], int] = {}
        with ThreadPoolExecutor(self.threads, thread_name_prefix="beamq-verify") as pool:
            try:
                while True:
                    for index in islice(left, 4 * self.threads - len(pending)):
                        pending[pool.submit(work, units[index])] = index
                    if not pending:
                        return [found[index] for index in range(len(units))]
                    finished, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in finished:
                        index = pending.pop(future)
                        found[index] = future.result()
                        done += sizes[index]
                        if self.progress is not None:
                            self.progress(done, total)
            finally:
                pool.shutdown(cancel_futures=True)


RUN_BYTES = 4 << 20
NOT_WRITTEN = "its bytes are not those that were written"


def usable_manifest(folder: Folder, ledger: Ledger) -> Manifest | None:
    """The manifest if its checksums can be compared; those of the other files are, here and now."""
    manifest = folder.manifest
    if manifest is not None and manifest.shards:
        try:
            new_checksum(manifest.algorithm)
        except BeamqError as fault:
            reason = str(fault)
        else:
            check_files(folder.root, manifest, ledger)
            return manifest
    else:
        reason = "no usable beamq.json; see manifest.present"
    for name in ("checksums.tensors", "checksums.shards", "checksums.files"):
        ledger.skip(name, reason)
    return None


def check_files(root: Path, manifest: Manifest, ledger: Ledger) -> None:
    """Every file but the shards, against beamq.json, and beamq.json against itself."""
    listed, name = manifest.files, "checksums.files"
    if listed is None:
        ledger.skip(name, "beamq.json lists no files: of an earlier version")
        return
    if not manifest.sealed:
        ledger.fault(name, MANIFEST_NAME, NOT_WRITTEN)
    ledger.examined(name, len(listed) + 1, "files")
    for file, digest in listed.items():
        inside = PurePosixPath(file)
        if inside.is_absolute() or ".." in inside.parts or "\0" in file:
            ledger.fault(name, MANIFEST_NAME, f"names {file[:80]!r}, outside the folder")
            continue
        try:
            found = file_checksum(root / file, manifest.algorithm)
        except BeamqError as fault:
            ledger.fault(name, file, str(fault).removeprefix(f"{root / file}: "))
            continue
        if found != digest:
            ledger.fault(name, file, NOT_WRITTEN)


def read_head(path: Path) -> bytes:
    """A shard's length field and header."""
    with path.open("rb") as stream:
        lead = stream.read(8)
        return lead + stream.read(int.from_bytes(lead, "little"))


class SumReader:
    """One pass of `check_sums`; buffers are per thread."""

    def __init__(self, checkpoint: Checkpoint, algorithm: str) -> None:
        self._checkpoint = checkpoint
        self._algorithm = algorithm
        self._buffers = threading.local()

    def sums(self, run: Sequence[TensorSpec]) -> dict[str, str]:
        """Checksums of neighbouring tensors. Raises `CheckpointError`, `DiskError`."""
        first, last = run[0], run[-1]
        if len(run) == 1 and first.nbytes > RUN_BYTES:
            return {first.name: self._large(first)}
        nbytes = last.offset + last.nbytes - first.offset
        view = self._buffer()[:nbytes]
        self._checkpoint.source.read(first.file, first.offset, view, first.name)
        found = {}
        for spec in run:
            begin = spec.offset - first.offset
            checksum = new_checksum(self._algorithm)
            checksum.update(view[begin : begin + spec.nbytes])
            found[spec.name] = checksum.hexdigest()
        return found

    def _large(self, spec: TensorSpec) -> str:
        checksum = new_checksum(self._algorithm)
        for start in range(0, spec.nbytes, RUN_BYTES):
            view = self._buffer()[: min(RUN_BYTES, spec.nbytes - start)]
            self._checkpoint.read_into(spec, view, start)
            checksum.update(view)
        return checksum.hexdigest()

    def _buffer(self) -> memoryview:
        buffers: dict[str, bytearray] = self._buffers.__dict__
        if "run" not in buffers:
            buffers["run"] = bytearray(RUN_BYTES)
        return memoryview(buffers["run"])


def check_sums(
    checkpoint: Checkpoint,
    folder: Folder,
    manifest: Manifest,
    ledger: Ledger,
    readers: Readers,
) -> int:
    """Tensors, then shards. Returns the bytes read, by all ranks together."""
    runs = list(_runs(folder))
    sizes = [sum(spec.nbytes for spec in run) for run in runs]
    found: dict[str, str] = {}
    for sums in readers.read(runs, sizes, SumReader(checkpoint, manifest.algorithm).sums):
        found.update(sums)
    listed = manifest.shards or {}
    for shard, specs in folder.shards.items():
        if shard not in listed:
            continue  # a finding of manifest.present
        tensors = listed[shard].tensors
        ledger.examined("checksums.tensors", len(specs), "tensors")
        for spec in specs:
            if found[spec.name] != tensors.get(spec.name):
                ledger.fault("checksums.tensors", spec.name, f"{NOT_WRITTEN} ({shard})")
        ledger.examined("checksums.shards", 1, "shards")
        head = read_head(folder.root / shard)
        if (
            shard_digest(head, (found[spec.name] for spec in specs), manifest.algorithm)
            != listed[shard].digest
        ):
            ledger.fault("checksums.shards", shard, NOT_WRITTEN)
    return sum(sizes)


def _runs(folder: Folder) -> Iterator[list[TensorSpec]]:
    """Neighbouring tensors of a file, together at most `RUN_BYTES`, or one larger alone."""
    for specs in folder.shards.values():
        run: list[TensorSpec] = []
        begin = 0
        for spec in specs:
            if run and spec.offset + spec.nbytes - begin > RUN_BYTES:
                yield run
                run = []
            if not run:
                begin = spec.offset
            run.append(spec)
        if run:
            yield run
