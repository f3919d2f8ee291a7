"""VERIFY: is this folder what the engines will load, and what the source said?

In: a checkpoint folder and, if given, the source it was made from. Out: a `VerifyReport` with one
result for every check in `checks.CHECKS`. Level `structure` reads headers and scalars; level
`tensors` reads every byte once (and the source's beside it); level `forward` also runs both.

The folder is judged as a stranger's: nothing is taken from the run that made it but beamq.json,
and that only for checksums and for the rule by which codes were made. Broken files, tensors and
configs are failed checks, never exceptions; an exception means the question could not be asked (no
such folder, no Beam, a source that is itself broken or quantized).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from beamq.checkpoint import Checkpoint, open_checkpoint
from beamq.checksum import DEFAULT_ALGORITHM, new_checksum, shard_digest
from beamq.conversion.unfinished import refuse_unfinished
from beamq.errors import BeamqError, UsageError
from beamq.eval.checks import CHECKS, Ledger, RoleError, VerifyReport
from beamq.eval.config_checks import (
    FP8,
    NVFP4,
    check_config,
    check_engines,
    check_ignore_covers,
    declared_format,
)
from beamq.eval.decoded import Decoded
from beamq.eval.folder import MANIFEST_NAME, Folder, listed_shards, read_folder
from beamq.eval.items import Item, RoleTotal, plan_items
from beamq.eval.origin import trace_decoded, trace_source
from beamq.eval.second_opinion import ask_second_opinion
from beamq.eval.structure import Inventory, check_scalars, take_inventory
from beamq.eval.sums import check_files, check_sums, read_head
from beamq.eval.tensors import Examiner, Readable, examine_all
from beamq.small_files import user_path
from beamq.sources import SourceRange

DEFAULT_SAMPLE = 16
Listing = tuple[dict[str, dict[str, Any]] | None, str]
"""beamq.json's shards with their checksums (None where they are no use), and the algorithm."""
LEVELS = ("structure", "quick", "tensors", "forward")
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
    `progress` is called in this thread with bytes done and bytes in all. `sample` linears are
    decoded a second time by Model-Optimizer or compressed-tensors; 0 leaves that out.
    A Beam that is not quantized is checked as what it is: its structure, checksums where it has a
    beamq.json, and against the quantized folder it was decoded from, if that is `source`.
    Raises `CheckpointError` or `ConfigError` when `checkpoint` is no Beam folder or its conversion
    has not ended, and what `open_checkpoint` and `map_sources` raise for `source`.
    """
    if level not in LEVELS:
        raise UsageError(f"level is {level!r}, expected one of {', '.join(LEVELS)}")
    if level == "quick" and source is not None:
        raise UsageError("--quick compares with beamq.json alone; leave out --source")
    if level == "forward" and source is None:
        raise UsageError("level forward runs the checkpoint beside its source; give --source")
    started = time.monotonic()
    ledger = Ledger()
    root = user_path(checkpoint)
    refuse_unfinished(root)
    folder = read_folder(root, ledger)
    if level == "quick":
        return _quick(str(checkpoint), folder, ledger, started, workers, progress)
    if level == "forward" and folder.plain:
        raise UsageError(
            f"{checkpoint} is not quantized, so level forward has no bounds to hold it to; `beamq"
            " compare` measures how it differs from another"
        )
    fmt = declared_format(folder, ledger)
    check_config(folder, fmt, ledger)
    inventory = take_inventory(folder, fmt, ledger)
    if not folder.plain:
        stored = inventory.stored()
        check_ignore_covers(folder, fmt, stored, ledger)
        check_engines(folder, stored, ledger)
    nbytes = 0
    errors: list[RoleError] = []
    listed: Listing = (None, DEFAULT_ALGORITHM)
    if level != "structure":
        listed = _listed_sums(folder, ledger)
    with ExitStack() as stack:
        origin: Checkpoint | None = None
        values: Readable | None = None
        ranges: dict[str, SourceRange] = {}
        if source is not None:
            origin = stack.enter_context(open_checkpoint(source))
            values, ranges = _trace(folder, inventory, origin, ledger)
        opened = _open(folder, ledger)
        if opened is not None:
            stack.enter_context(opened)
            check_scalars(opened, inventory, ledger)
            if level != "structure":
                items = plan_items(inventory, ranges)
                reader = _Reader(opened, values, folder, listed, ledger)
                nbytes, errors = reader.read(items, workers, progress)
                linears = [item.linear for item in items if item.linear is not None]
                ask_second_opinion(opened, linears, sample, ledger)
            if level == "forward" and origin is not None:
                from beamq.eval.forward_check import check_forward  # torch

                check_forward(opened, origin, folder.manifest, ledger, progress)
    return VerifyReport(
        checkpoint=str(checkpoint),
        level=level,
        format=fmt,
        source=None if source is None else str(source),
        checks=ledger.results(level, with_source=source is not None),
        errors=tuple(errors),
        tensors=len(folder.tensors),
        bytes_read=nbytes,
        seconds=time.monotonic() - started,
    )


def _trace(
    folder: Folder, inventory: Inventory, origin: Checkpoint, ledger: Ledger
) -> tuple[Readable, dict[str, SourceRange]]:
    """Where each value of the folder lies in its source; a decoded folder's is a quantized one."""
    if not folder.plain:
        return origin, trace_source(folder, inventory, origin, ledger)
    decoded = Decoded(origin)
    return decoded, trace_decoded(folder, inventory, decoded, ledger)


def _quick(
    name: str,
    folder: Folder,
    ledger: Ledger,
    started: float,
    workers: int | None,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    nbytes = 0
    if folder.manifest is None and folder.plain:
        ledger.fault("manifest.present", MANIFEST_NAME, "missing: there is nothing to compare with")
    listed, algorithm = _listed_sums(folder, ledger)
    opened = _open(folder, ledger)
    if opened is not None:
        with opened:
            if listed is not None:
                nbytes = check_sums(
                    opened,
                    folder,
                    listed,
                    algorithm,
                    ledger,
                    workers=workers or _threads(),
                    progress=progress,
                )
    return VerifyReport(
        checkpoint=name,
        level="quick",
        format=str((folder.block or {}).get("quant_algo", "not looked at"))[:40],
        source=None,
        checks=ledger.results("quick", with_source=False),
        errors=(),
        tensors=len(folder.tensors),
        bytes_read=nbytes,
        seconds=time.monotonic() - started,
    )


def _threads() -> int:
    return min(os.cpu_count() or 1, 16)


def _listed_sums(folder: Folder, ledger: Ledger) -> Listing:
    """What beamq.json lists; the files beside the shards are compared with it here and now."""
    manifest = folder.manifest or {}
    listed = listed_shards(manifest) if manifest else None
    algorithm = str(manifest.get("checksum"))
    reason = None if listed else "no usable beamq.json; see manifest.present"
    try:
        new_checksum(algorithm if listed else DEFAULT_ALGORITHM)
    except BeamqError as fault:
        reason = str(fault)
    if reason is None:
        check_files(folder, algorithm, ledger)
        return listed, algorithm
    for name in ("checksums.tensors", "checksums.shards", "checksums.files"):
        ledger.skip(name, reason)
    return None, DEFAULT_ALGORITHM


def _open(folder: Folder, ledger: Ledger) -> Checkpoint | None:
    """The folder opened for reading data, or None if its files do not allow it."""
    try:
        return open_checkpoint(folder.root)
    except BeamqError as fault:
        if not ledger.failed("files.readable", "files.index"):
            ledger.fault("files.readable", folder.root.name, str(fault))
        for name, (level, _) in CHECKS.items():
            if name != "checksums.files" and (level != "structure" or name.startswith("scales.")):
                ledger.skip(name, "the files cannot be read as a whole; see files.*")
        return None


class _Reader:
    """The full pass over an opened checkpoint, filing what it finds."""

    def __init__(
        self,
        opened: Checkpoint,
        origin: Readable | None,
        folder: Folder,
        listed: Listing,
        ledger: Ledger,
    ) -> None:
        self._opened = opened
        self._listed = listed
        self._origin = origin
        self._folder = folder
        self._ledger = ledger

    def read(
        self,
        items: list[Item],
        workers: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[int, list[RoleError]]:
        """Returns bytes read and the quantization error by role."""
        checksums, algorithm = self._checksums()
        examiner = Examiner(self._opened, self._origin, checksums, algorithm, self._folder.manifest)
        threads = workers or _threads()
        nbytes = 0
        totals: dict[str, RoleTotal] = {}
        for outcome in examine_all(examiner, items, workers=threads, progress=progress):
            nbytes += outcome.nbytes
            for name, count in outcome.examined.items():
                self._ledger.examined(name, count, _UNITS[name])
            for name, where, detail in outcome.faults:
                self._ledger.fault(name, where, detail)
            if outcome.sums.elements:
                totals.setdefault(outcome.item.role.role.value, RoleTotal()).add(outcome)
        formats = {item.linear.format for item in items if item.linear is not None}
        for fmt, names in _VALUES_OF.items():
            for name in names if fmt not in formats else ():
                self._ledger.skip(name, f"no {fmt.upper()} linears")
        return nbytes, [total.result(role) for role, total in sorted(totals.items())]

    def _checksums(self) -> tuple[dict[str, str], str]:
        """Tensor checksums that beamq.json lists, by name, and their algorithm."""
        listed, algorithm = self._listed
        if listed is None:
            return {}, algorithm
        self._check_shards(listed, algorithm)
        return {
            name: digest
            for shard in listed.values()
            for name, digest in shard["tensors"].items()
            if name in self._folder.tensors
        }, algorithm

    def _check_shards(self, listed: Mapping[str, Mapping[str, Any]], algorithm: str) -> None:
        """Header and listed tensor checksums must add up: guards names, shapes and offsets."""
        for shard, specs in self._folder.shards.items():
            if shard not in listed:
                continue
            self._ledger.examined("checksums.shards", 1, "shards")
            tensors = listed[shard]["tensors"]
            digests = [tensors.get(spec.name, "") for spec in specs]
            if (
                shard_digest(read_head(self._folder.root / shard), digests, algorithm)
                != listed[shard]["digest"]
            ):
                self._ledger.fault(
                    "checksums.shards", shard, "header or tensor list is not what was written"
                )
