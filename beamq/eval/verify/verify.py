"""VERIFY: is this folder what the engines will load, and what the source said?

In: a checkpoint folder and, if given, the source it was made from. Out: a `VerifyReport` with one
result for every check in `checks.CHECKS`. Level `structure` reads headers and scalars; level
`tensors` reads every byte once (and the source's beside it); level `forward` also runs both.

Under torchrun the ranks share the reading of bytes (`readers`). All else every rank does alike, so
that all end with the same report; a sample decoded by other libraries is the first rank's.

The folder is judged as a stranger's: nothing is taken from the run that made it but beamq.json,
and that only for checksums and for the rule by which codes were made. Broken files, tensors and
configs are failed checks, never exceptions; an exception means the question could not be asked (no
such folder, no Beam, a source that is itself broken or quantized).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from beamq.errors import BeamqError, UsageError
from beamq.eval.verify.against_source import Decoded, trace_decoded, trace_source
from beamq.eval.verify.checks import CHECKS, FP8, NVFP4, Ledger, RoleError, VerifyReport
from beamq.eval.verify.checksums import Readers, check_sums, read_head, usable_manifest
from beamq.eval.verify.config_files import (
    check_config,
    check_engines,
    check_ignore_covers,
    declared_format,
)
from beamq.eval.verify.folder import Folder, Inventory, check_scalars, read_folder, take_inventory
from beamq.eval.verify.second_opinion import CHECK as OPINION
from beamq.eval.verify.second_opinion import ask_second_opinion
from beamq.eval.verify.values import Examiner, Item, Readable, RoleTotal, plan_items
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.files import user_path
from beamq.io.journal import refuse_unfinished
from beamq.io.manifest import DEFAULT_ALGORITHM, MANIFEST_NAME, Manifest, shard_digest
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.plan.sources import SourceRange
from beamq.ranks import Ranks, cores_here, current_ranks

# The full pass of `verify`: every byte of an opened checkpoint once, filed under its checks.
#
# In: an opened `Checkpoint`, its items, what beamq.json lists. Out: findings under `checksums.*`,
# `values.*` and `source.*`, and the quantization error by role. Outcomes are filed in file order,
# whichever thread of whichever rank they come from: the order of faults and the last bits of the
# errors are always the same.

_UNITS = {
    "checksums.tensors": "tensors",
    "values.block-scales": "scales",
    "values.row-scales": "scales",
    "values.codes": "codes",
    "values.finite": "tensors",
    "source.router": "tensors",
    "source.copied": "tensors",
    "source.bound": "elements",
}
_VALUES_OF = {NVFP4: ("values.block-scales",), FP8: ("values.row-scales", "values.codes")}


def make_examiner(
    opened: Checkpoint, source: Readable | None, folder: Folder, usable: Manifest | None
) -> Examiner:
    """What looks at the items; `source` is what values are compared with, `usable` checksums."""
    checksums = {} if usable is None else usable.tensors
    algorithm = DEFAULT_ALGORITHM if usable is None else usable.algorithm
    return Examiner(opened, source, checksums, algorithm, folder.manifest)


def check_shards(folder: Folder, manifest: Manifest, ledger: Ledger) -> None:
    """Header and listed tensor checksums must add up: guards names, shapes and offsets."""
    listed = manifest.shards or {}
    for shard, specs in folder.shards.items():
        if shard not in listed:
            continue
        ledger.examined("checksums.shards", 1, "shards")
        digests = [listed[shard].tensors.get(spec.name, "") for spec in specs]
        head = read_head(folder.root / shard)
        if shard_digest(head, digests, manifest.algorithm) != listed[shard].digest:
            ledger.fault("checksums.shards", shard, "header or tensor list is not what was written")


def read_all(
    examiner: Examiner, items: Sequence[Item], readers: Readers, ledger: Ledger
) -> tuple[int, list[RoleError]]:
    """Returns bytes read, by all ranks together, and the quantization error by role."""
    nbytes = 0
    totals: dict[str, RoleTotal] = {}
    outcomes = readers.read(items, [item.nbytes for item in items], examiner.examine)
    for item, outcome in zip(items, outcomes, strict=True):
        nbytes += outcome.nbytes
        for name, count in outcome.examined.items():
            ledger.examined(name, count, _UNITS[name])
        for name, where, detail in outcome.faults:
            ledger.fault(name, where, detail)
        if outcome.sums.elements:
            total = totals.setdefault(item.role.role.value, RoleTotal())
            total.add(item.role.module, outcome.sums)
    formats = {item.linear.format for item in items if item.linear is not None}
    for fmt, names in _VALUES_OF.items():
        for name in names if fmt not in formats else ():
            ledger.skip(name, f"no {fmt.upper()} linears")
    return nbytes, [total.result(role) for role, total in sorted(totals.items())]


DEFAULT_SAMPLE = 16
MAX_THREADS = 16
LEVELS = ("structure", "quick", "tensors", "forward")


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What headers and scalars tell. Without an `examiner` no bytes are to be read."""

    folder: Folder
    format: str
    origin: Checkpoint | None = None
    opened: Checkpoint | None = None
    items: list[Item] = field(default_factory=list)
    examiner: Examiner | None = None


@dataclass(slots=True, kw_only=True)
class _Found:
    """What a report says besides its checks."""

    format: str
    tensors: int
    nbytes: int = 0
    errors: list[RoleError] = field(default_factory=list)


def verify(
    checkpoint: str | Path,
    *,
    source: str | Path | None = None,
    level: Literal["structure", "quick", "tensors", "forward"] = "tensors",
    workers: int | None = None,
    sample: int = DEFAULT_SAMPLE,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Run every check that `level` and `source` allow; `report.ok` says whether none failed.

    Level `quick` compares every byte with its checksum in beamq.json and looks at nothing else.
    `progress` is called in this thread with bytes done and bytes in all, of this rank. `sample`
    linears are decoded a second time by Model-Optimizer or compressed-tensors; 0 leaves that out.
    A Beam that is not quantized is checked as what it is: its structure, checksums where it has a
    beamq.json, and against the quantized folder it was decoded from, if that is `source`.
    Under torchrun all ranks must make the same call (level `structure` is not shared).
    Raises `CheckpointError` or `ConfigError` when `checkpoint` is no Beam folder or its conversion
    has not ended, what `open_checkpoint` and `map_sources` raise for `source`, and
    `EnvironmentFault` where another rank failed.
    """
    _check_asked(level, source)
    started = time.monotonic()
    ranks = Ranks() if level == "structure" else current_ranks()
    threads = workers or min(cores_here(), MAX_THREADS)
    readers = Readers(ranks=ranks, threads=threads, progress=progress)
    ledger = Ledger()
    try:
        with ExitStack() as stack:
            job = _Pass(checkpoint, source, level, readers, ledger, stack)
            found = job.quick() if level == "quick" else job.full(sample)
    finally:
        ranks.leave()
    return VerifyReport(
        checkpoint=str(checkpoint),
        level=level,
        format=found.format,
        source=None if source is None else str(source),
        checks=ledger.results(level, with_source=source is not None),
        errors=tuple(found.errors),
        tensors=found.tensors,
        bytes_read=found.nbytes,
        seconds=time.monotonic() - started,
    )


def _check_asked(level: str, source: str | Path | None) -> None:
    if level not in LEVELS:
        raise UsageError(f"level is {level!r}, expected one of {', '.join(LEVELS)}")
    if level == "quick" and source is not None:
        raise UsageError("--quick compares with beamq.json alone; leave out --source")
    if level == "forward" and source is None:
        raise UsageError("level forward runs the checkpoint beside its source; give --source")


class _Pass:
    """One call of `verify`. What is opened is closed with `stack`."""

    def __init__(
        self,
        checkpoint: str | Path,
        source: str | Path | None,
        level: str,
        readers: Readers,
        ledger: Ledger,
        stack: ExitStack,
    ) -> None:
        self._name = str(checkpoint)
        self._root = user_path(checkpoint)
        self._source = source
        self._level = level
        self._readers = readers
        self._ranks = readers.ranks
        self._ledger = ledger
        self._stack = stack

    def full(self, sample: int) -> _Found:
        """Every level but `quick`."""
        with self._ranks.agreeing():
            seen = self._look()
        self._readers.agree(seen.examiner is not None, (item.place for item in seen.items))
        found = _Found(format=seen.format, tensors=len(seen.folder.tensors))
        if seen.opened is None or seen.examiner is None:
            return found
        found.nbytes, found.errors = read_all(
            seen.examiner, seen.items, self._readers, self._ledger
        )
        self._ask_second_opinion(seen.opened, seen.items, sample)
        if self._level == "forward" and seen.origin is not None:
            from beamq.eval.verify.forward import check_forward  # torch

            check_forward(
                seen.opened,
                seen.origin,
                seen.folder.manifest,
                self._ledger,
                self._readers.progress,
            )
        return found

    def _look(self) -> _Seen:
        """Everything that needs no more than headers, scalars and small files."""
        ledger = self._ledger
        folder = self._read_folder()
        if self._level == "forward" and folder.plain:
            raise UsageError(
                f"{self._name} is not quantized, so level forward has no bounds to hold it to;"
                " `beamq compare` measures how it differs from another"
            )
        seen = _Seen(folder=folder, format=declared_format(folder, ledger))
        check_config(folder, seen.format, ledger)
        inventory = take_inventory(folder, seen.format, ledger)
        if not folder.plain:
            stored = inventory.stored()
            check_ignore_covers(folder, seen.format, stored, ledger)
            check_engines(folder, stored, ledger)
        every_byte = self._level != "structure"
        usable = usable_manifest(folder, ledger) if every_byte else None
        values: Readable | None = None
        ranges: dict[str, SourceRange] = {}
        if self._source is not None:
            cache_bytes = DEFAULT_CACHE_BYTES // self._ranks.world
            seen.origin = open_checkpoint(self._source, cache_bytes=cache_bytes)
            self._stack.enter_context(seen.origin)
            values, ranges = _trace(folder, inventory, seen.origin, ledger)
        seen.opened = self._open(folder)
        if seen.opened is None:
            return seen
        check_scalars(seen.opened, inventory, ledger)
        if usable is not None:
            check_shards(folder, usable, ledger)
        if every_byte:
            seen.items = plan_items(inventory, ranges)
            seen.examiner = make_examiner(seen.opened, values, folder, usable)
        return seen

    def quick(self) -> _Found:
        """Checksums alone."""
        ledger = self._ledger
        with self._ranks.agreeing():
            folder = self._read_folder()
            if folder.manifest is None and folder.plain:
                ledger.fault(
                    "manifest.present", MANIFEST_NAME, "missing: there is nothing to compare with"
                )
            manifest = usable_manifest(folder, ledger)
            opened = self._open(folder)
        specs = () if opened is None else opened.tensors.values()
        readable = opened is not None and manifest is not None
        self._readers.agree(readable, ((spec.file, spec.offset, spec.nbytes) for spec in specs))
        nbytes = 0
        if opened is not None and manifest is not None:
            nbytes = check_sums(opened, folder, manifest, ledger, self._readers)
        fmt = str((folder.block or {}).get("quant_algo", "not looked at"))[:40]
        return _Found(format=fmt, tensors=len(folder.tensors), nbytes=nbytes)

    def _read_folder(self) -> Folder:
        refuse_unfinished(self._root)
        return read_folder(self._root, self._ledger)

    def _open(self, folder: Folder) -> Checkpoint | None:
        """The folder opened for reading data, or None if its files do not allow it."""
        ledger = self._ledger
        try:
            return self._stack.enter_context(open_checkpoint(folder.root))
        except BeamqError as fault:
            if not ledger.failed("files.readable", "files.index"):
                ledger.fault("files.readable", folder.root.name, str(fault))
            for name, (level, _) in CHECKS.items():
                if name != "checksums.files" and (
                    level != "structure" or name.startswith("scales.")
                ):
                    ledger.skip(name, "the files cannot be read as a whole; see files.*")
            return None

    def _ask_second_opinion(self, opened: Checkpoint, items: list[Item], sample: int) -> None:
        """The first rank asks and tells the others: the libraries take seconds to import."""
        with self._ranks.agreeing():
            if self._ranks.first:
                linears = [item.linear for item in items if item.linear is not None]
                ask_second_opinion(opened, linears, sample, self._ledger)
        told = self._ranks.gather(self._ledger.entry(OPINION) if self._ranks.first else None)
        self._ledger.replace(OPINION, told[0])


def _trace(
    folder: Folder, inventory: Inventory, origin: Checkpoint, ledger: Ledger
) -> tuple[Readable, dict[str, SourceRange]]:
    """Where each value of the folder lies in its source; a decoded folder's is a quantized one."""
    if not folder.plain:
        return origin, trace_source(folder, inventory, origin, ledger)
    decoded = Decoded(origin)
    return decoded, trace_decoded(folder, inventory, decoded, ledger)
