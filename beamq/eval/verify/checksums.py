"""Checksums alone: is every byte of a folder the one that was written?

In: a `Folder` whose beamq.json lists checksums. Out: findings under `checksums.*`. Nothing else is
judged: this is the check for a copy, at the speed of reading.

Work items are runs of neighbouring tensors of a few MiB, read at once, or one larger tensor, read
in pieces; `Readers` shares them out. A shard's checksum is made from its header and from the
checksums of its tensors.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

RUN_BYTES = 4 << 20
NOT_WRITTEN = "its bytes are not those that were written; copy or convert it again"

Unit = TypeVar("Unit")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """The threads of this process and, under torchrun, the other processes share the reading.

    Units of work are given in file order with their bytes. What is found in each is returned in
    that order on every rank, so a report does not depend on the number of readers. A rank takes
    neighbouring units, because files are read fastest from front to back. What is found is pickled
    and sent to all ranks, so it must be small. One process does not import torch.

    `progress` is called in the calling thread with bytes done and bytes in total, of this rank.
    """

    ranks: Ranks
    threads: int
    progress: Callable[[int, int], None] | None

    def agree(self, readable: bool, places: Iterable[tuple[str, int, int]]) -> None:
        """Raise `EnvironmentFault` on all ranks unless all are about to read the same places
        (file, offset, bytes), or nothing."""
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
        """What `work` returns for each unit. What it raises on one rank is raised on all, once all
        have stopped reading."""
        mine = stretch(sizes, self.ranks)
        with self.ranks.agreeing():
            found = self._read(units[mine.start : mine.stop], sizes[mine.start : mine.stop], work)
        return [each for share in self.ranks.gather(found) for each in share]

    def _read(
        self, units: Sequence[Unit], sizes: Sequence[int], work: Callable[[Unit], Found]
    ) -> list[Found]:
        """This rank's units, in threads; a few units per thread are queued at a time."""
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


def usable_manifest(folder: Folder, ledger: Ledger) -> Manifest | None:
    """The manifest, if its checksums can be compared; those of other files are compared here."""
    manifest = folder.manifest
    reason = "no usable beamq.json; see manifest.present"
    if manifest is not None and manifest.shards:
        try:
            new_checksum(manifest.algorithm)
        except BeamqError as fault:
            reason = str(fault)
        else:
            check_files(folder.root, manifest, ledger)
            return manifest
    ledger.skip(reason, "checksums.tensors", "checksums.shards", "checksums.files")
    return None


def check_files(root: Path, manifest: Manifest, ledger: Ledger) -> None:
    """Every file but the shards against beamq.json, and beamq.json against its own seal."""
    listed, check = manifest.files, "checksums.files"
    if not manifest.sealed and not manifest.data.keys().isdisjoint(("files", "seal")):
        ledger.fault(check, MANIFEST_NAME, NOT_WRITTEN)
    if listed is None:
        ledger.skip("beamq.json is of an earlier version, which lists no files", check)
        return
    ledger.examined(check, len(listed) + 1)
    for file, digest in listed.items():
        inside = PurePosixPath(file)
        if inside.is_absolute() or ".." in inside.parts or "\0" in file:
            ledger.fault(check, MANIFEST_NAME, f"names {file[:80]!r}, outside the folder")
            continue
        try:
            if file_checksum(root / file, manifest.algorithm) != digest:
                ledger.fault(check, file, NOT_WRITTEN)
        except BeamqError as fault:
            ledger.fault(check, file, str(fault).removeprefix(f"{root / file}: "))


def check_shards(
    folder: Folder, manifest: Manifest, ledger: Ledger, found: Mapping[str, str]
) -> None:
    """Each shard's checksum, made from its header and the checksums of its tensors that were found.

    A shard that is not listed is a finding of `manifest.present`.
    """
    listed = manifest.shards or {}
    for shard, specs in folder.shards.items():
        if shard not in listed:
            continue
        ledger.examined("checksums.shards")
        with (folder.root / shard).open("rb") as stream:
            lead = stream.read(8)  # the header's length
            header = lead + stream.read(int.from_bytes(lead, "little"))
        digests = [found.get(spec.name, "") for spec in specs]
        if shard_digest(header, digests, manifest.algorithm) != listed[shard].digest:
            same = all(found.get(name) == digest for name, digest in listed[shard].tensors.items())
            what = "header is not the one that was" if same else "tensors are not those that were"
            ledger.fault("checksums.shards", shard, f"its {what} written; copy or convert it again")


def check_sums(
    checkpoint: Checkpoint, folder: Folder, manifest: Manifest, ledger: Ledger, readers: Readers
) -> int:
    """Tensors, then shards. Returns the bytes read, by all ranks together."""
    runs = list(_runs(folder))
    sizes = [sum(spec.nbytes for spec in run) for run in runs]
    found: dict[str, str] = {}
    for sums in readers.read(runs, sizes, SumReader(checkpoint, manifest.algorithm).sums):
        found.update(sums)
    listed = manifest.shards or {}
    for shard, specs in folder.shards.items():
        if shard in listed:
            ledger.examined("checksums.tensors", len(specs))
            for spec in specs:
                if found[spec.name] != listed[shard].tensors.get(spec.name):
                    ledger.fault("checksums.tensors", spec.name, f"{NOT_WRITTEN} ({shard})")
    check_shards(folder, manifest, ledger, found)
    return sum(sizes)


def _runs(folder: Folder) -> Iterator[list[TensorSpec]]:
    """Neighbouring tensors of a file, together at most `RUN_BYTES`, or one larger alone."""
    for specs in folder.shards.values():
        run: list[TensorSpec] = []
        for spec in specs:
            if run and spec.offset + spec.nbytes - run[0].offset > RUN_BYTES:
                yield run
                run = []
            run.append(spec)
        if run:
            yield run


class SumReader(threading.local):
    """Makes the checksums of one pass; each thread gets its own buffer."""

    def __init__(self, checkpoint: Checkpoint, algorithm: str) -> None:
        self._checkpoint = checkpoint
        self._algorithm = algorithm
        self._buffer = memoryview(bytearray(RUN_BYTES))

    def sums(self, run: Sequence[TensorSpec]) -> dict[str, str]:
        """Checksums of neighbouring tensors. Raises `CheckpointError`, `DiskError`."""
        first, last = run[0], run[-1]
        if first.nbytes > RUN_BYTES:
            return {first.name: self._large(first)}
        view = self._buffer[: last.offset + last.nbytes - first.offset]
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
            view = self._buffer[: min(RUN_BYTES, spec.nbytes - start)]
            self._checkpoint.read_into(spec, view, start)
            checksum.update(view)
        return checksum.hexdigest()
