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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from beamq.checkpoint import Checkpoint, open_checkpoint
from beamq.checksum import DEFAULT_ALGORITHM, new_checksum, shard_digest
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
from beamq.eval.folder import Folder, listed_shards, read_folder
from beamq.eval.items import Item, Outcome, Sums, plan_items
from beamq.eval.origin import trace_source
from beamq.eval.rounding import rounding_rule
from beamq.eval.second_opinion import ask_second_opinion
from beamq.eval.structure import check_scalars, take_inventory
from beamq.eval.tensors import Examiner, examine_all
from beamq.small_files import user_path
from beamq.sources import SourceRange

DEFAULT_SAMPLE = 16
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
    level: Literal["structure", "tensors", "forward"] = "tensors",
    workers: int | None = None,
    sample: int = DEFAULT_SAMPLE,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Run every check that `level` and `source` allow; `report.ok` says whether none failed.

    `progress` is called in this thread with bytes done and bytes in all. `sample` linears are
    decoded a second time by Model-Optimizer or compressed-tensors; 0 leaves that out.
    Raises `CheckpointError` or `ConfigError` when `checkpoint` is no Beam folder, and what
    `open_checkpoint` and `map_sources` raise for `source`.
    """
    if level not in ("structure", "tensors", "forward"):
        raise UsageError(f"level is {level!r}, expected 'structure', 'tensors' or 'forward'")
    if level == "forward" and source is None:
        raise UsageError("level forward runs the checkpoint beside its source; give --source")
    started = time.monotonic()
    ledger = Ledger()
    folder = read_folder(user_path(checkpoint), ledger)
    fmt = declared_format(folder, ledger)
    check_config(folder, fmt, ledger)
    inventory = take_inventory(folder, fmt, ledger)
    stored = inventory.stored()
    check_ignore_covers(folder, fmt, stored, ledger)
    check_engines(folder, stored, ledger)
    nbytes = 0
    errors: list[RoleError] = []
    with ExitStack() as stack:
        origin: Checkpoint | None = None
        ranges: dict[str, SourceRange] = {}
        if source is not None:
            origin = stack.enter_context(open_checkpoint(source))
            ranges = trace_source(folder, inventory, origin, ledger)
        opened = _open(folder, ledger)
        if opened is not None:
            stack.enter_context(opened)
            check_scalars(opened, inventory, ledger)
            if level != "structure":
                items = plan_items(inventory, ranges)
                reader = _Reader(opened, origin, folder, ledger)
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


def _open(folder: Folder, ledger: Ledger) -> Checkpoint | None:
    """The folder opened for reading data, or None if its files do not allow it."""
    try:
        return open_checkpoint(folder.root)
    except BeamqError as fault:
        if not ledger.failed("files.readable", "files.index"):
            ledger.fault("files.readable", folder.root.name, str(fault))
        for name, (level, _) in CHECKS.items():
            if level != "structure" or name.startswith("scales."):
                ledger.skip(name, "the files cannot be read as a whole; see files.*")
        return None


class _Reader:
    """The full pass over an opened checkpoint, filing what it finds."""

    def __init__(
        self, opened: Checkpoint, origin: Checkpoint | None, folder: Folder, ledger: Ledger
    ) -> None:
        self._opened = opened
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
        rule = rounding_rule(self._folder.manifest)
        examiner = Examiner(self._opened, self._origin, checksums, algorithm, rule)
        threads = workers or min(os.cpu_count() or 1, 16)
        nbytes = 0
        totals: dict[str, _RoleTotal] = {}
        for outcome in examine_all(examiner, items, workers=threads, progress=progress):
            nbytes += outcome.nbytes
            for name, count in outcome.examined.items():
                self._ledger.examined(name, count, _UNITS[name])
            for name, where, detail in outcome.faults:
                self._ledger.fault(name, where, detail)
            if outcome.sums.elements:
                totals.setdefault(outcome.item.role.role.value, _RoleTotal()).add(outcome)
        formats = {item.linear.format for item in items if item.linear is not None}
        for fmt, names in _VALUES_OF.items():
            for name in names if fmt not in formats else ():
                self._ledger.skip(name, f"no {fmt.upper()} linears")
        return nbytes, [total.result(role) for role, total in sorted(totals.items())]

    def _checksums(self) -> tuple[dict[str, str], str]:
        """Tensor checksums that beamq.json lists, by name, and their algorithm."""
        manifest = self._folder.manifest or {}
        listed = listed_shards(manifest) if manifest else None
        names = ("checksums.tensors", "checksums.shards")
        if listed is None:
            for name in names:
                self._ledger.skip(name, "no usable beamq.json; see manifest.present")
            return {}, DEFAULT_ALGORITHM
        algorithm = str(manifest.get("checksum"))
        try:
            new_checksum(algorithm)
        except BeamqError as fault:
            for name in names:
                self._ledger.skip(name, str(fault))
            return {}, DEFAULT_ALGORITHM
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
            with (self._folder.root / shard).open("rb") as stream:
                lead = stream.read(8)
                header = lead + stream.read(int.from_bytes(lead, "little"))
            digests = [tensors.get(spec.name, "") for spec in specs]
            if shard_digest(header, digests, algorithm) != listed[shard]["digest"]:
                self._ledger.fault(
                    "checksums.shards", shard, "header or tensor list is not what was written"
                )


@dataclass(slots=True)
class _RoleTotal:
    """Sums over the linears of a role, and the worst of them."""

    sums: Sums = field(default_factory=Sums)
    linears: int = 0
    worst: str = ""
    worst_relative: float = -1.0

    def add(self, outcome: Outcome) -> None:
        found = outcome.sums
        self.linears += 1
        self.sums.error += found.error
        self.sums.source += found.source
        self.sums.worst = max(self.sums.worst, found.worst)
        self.sums.elements += found.elements
        # Ties are broken by name, so that thread timing does not show in a report.
        key = (found.relative_rms, outcome.item.role.module)
        if key > (self.worst_relative, self.worst):
            self.worst_relative, self.worst = key

    def result(self, role: str) -> RoleError:
        return RoleError(
            role=role,
            linears=self.linears,
            elements=self.sums.elements,
            relative_rms=self.sums.relative_rms,
            worst_linear=self.worst,
            worst_relative_rms=self.worst_relative,
            max_abs_error=self.sums.worst,
        )
