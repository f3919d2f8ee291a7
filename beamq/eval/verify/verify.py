"""VERIFY: is this folder what the engines will load, and does it equal its source?

In: a checkpoint folder and, if given, the source it was made from. Out: a `VerifyReport` with one
result for every check in `checks.CHECKS`. Level `structure` reads headers and scalars; level
`tensors` reads every byte once, and with a source the source's bytes too; level `forward` also runs
both models.

Under torchrun the ranks share the reading of tensors (`Readers`). Every rank does everything else
in the same way, so all end with the same report; only the second opinion is the first rank's.

The folder is judged as if a stranger had made it. Only beamq.json is used, for checksums and for
the rule by which codes were made. Broken files, tensors and configs are failed checks, never
exceptions. An exception means that the question makes no sense: nothing to check, or a source that
is broken or quantized itself. Where a shard or the config cannot be read, that is the one finding:
the checks that need it are skipped, and whatever bytes can be read are compared with checksums.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Unpack

from beamq.adapter.merged import open_merged
from beamq.adapter.options import AdapterKeywords, AdapterOptions
from beamq.calib.options import WORKERS
from beamq.errors import CheckpointError, UsageError
from beamq.eval.verify.against_source import (
    DecodedCheckpoint,
    refuse_without_adapter,
    trace_decoded,
    trace_source,
)
from beamq.eval.verify.checks import CHECKS, ENGINES, Ledger, RoleError, VerifyReport
from beamq.eval.verify.checksums import Readers, check_shards, check_sums, usable_manifest
from beamq.eval.verify.config_files import (
    check_config,
    check_engines,
    check_ignore_covers,
    declared_format,
)
from beamq.eval.verify.drafter import is_drafter_place, verify_drafter
from beamq.eval.verify.folder import Folder, read_folder
from beamq.eval.verify.inventory import Sorter, check_scalars
from beamq.eval.verify.second_opinion import SECOND_OPINION, ask_second_opinion
from beamq.eval.verify.values import Examiner, Item, Readable, plan_items, read_all
from beamq.io.checkpoint import Checkpoint
from beamq.io.files import user_path
from beamq.io.hub import hub_source
from beamq.io.journal import refuse_unfinished
from beamq.io.manifest import MANIFEST_NAME
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.options import Flag, from_keywords, takes
from beamq.plan.content import REMEDY, zero_faults
from beamq.plan.layout import ENGINE_NAMES
from beamq.plan.sources import SourceRange
from beamq.ranks import Ranks, cores_here, current_ranks

DEFAULT_SAMPLE = 16
MAX_THREADS = 16


@takes(
    AdapterOptions,
    workers=WORKERS,
    sample=Flag("", at_least=0),
    engine=Flag("", choices=ENGINE_NAMES),
)
def verify(
    checkpoint: str | Path,
    *,
    source: str | Path | None = None,
    level: Literal["structure", "quick", "tensors", "forward"] = "tensors",
    engine: str | None = None,
    workers: int | None = None,
    sample: int = DEFAULT_SAMPLE,
    progress: Callable[[int, int], None] | None = None,
    **keywords: Unpack[AdapterKeywords],
) -> VerifyReport:
    """Run every check that `level` and `source` allow; `report.ok` says whether none failed.

    Level `structure` reads headers, `tensors` every byte, in `workers` threads; `forward` also runs
    both models; `quick` compares every byte with its checksum in beamq.json and nothing else. A
    folder that `engine` ("vllm", "sglang" or "transformers") does not load fails; without it there
    are sound folders that only some engines load. `sample` linears of each format are decoded a
    second time by Model-Optimizer or compressed-tensors; 0 omits that. `progress` is called in this
    thread with this rank's bytes done and in total. A Beam that is not quantized is checked for its
    structure, for checksums if it has a beamq.json, and against the quantized folder it was decoded
    from, if `source` is that folder; a DFlash2 drafter against the Beam `source` that it must fit.
    Under torchrun all ranks make the same call (`structure` is not shared). Raises
    `CheckpointError` where there is no checkpoint or its conversion has not ended, what
    `map_sources` raises for `source`, and `EnvironmentFault` for a lost rank.
    """
    if hub_source(checkpoint) is None and is_drafter_place(checkpoint):
        return verify_drafter(checkpoint, target=source, level=level, progress=progress)
    adapter = from_keywords(AdapterOptions, keywords)
    _check_source(source, level, adapter)
    started = time.monotonic()
    ranks = Ranks() if level == "structure" else current_ranks()
    threads = workers or min(cores_here(), MAX_THREADS)
    readers = Readers(ranks=ranks, threads=threads, progress=progress)
    try:
        with ExitStack() as stack:
            job = _Pass(
                name=checkpoint, source=source, adapter=adapter,
                level=level, engine=engine, readers=readers, stack=stack,
            )  # fmt: skip
            if level == "quick":
                job.quick()
            else:
                job.full(sample)
    finally:
        ranks.leave()
    return VerifyReport(
        checkpoint=str(checkpoint),
        level=level,
        format=job.format,
        source=None if source is None else str(source),
        checks=job.ledger.results(level, with_source=source is not None),
        errors=tuple(job.errors),
        tensors=job.tensors,
        bytes_read=job.nbytes,
        seconds=time.monotonic() - started,
        stopped=tuple(engine for engine in ENGINES if engine in job.ledger.stopped),
        refused=tuple(engine for engine in ENGINES if engine in job.ledger.refused),
    )


def _check_source(source: str | Path | None, level: str, adapter: AdapterOptions) -> None:
    """Raise `UsageError` for a source that is given or missing where it should not be."""
    if level == "quick" and source is not None:
        raise UsageError("--quick compares with beamq.json alone; leave out --source")
    if adapter.adapter is not None and source is None:
        raise UsageError("--adapter is merged into the source; give --source")
    if level == "forward" and source is None:
        raise UsageError("level forward runs the checkpoint next to its source; give --source")


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One call of `verify`, and what it finds. What is opened is closed with `stack`."""

    name: str | Path
    source: str | Path | None
    adapter: AdapterOptions
    level: str
    engine: str | None
    readers: Readers
    stack: ExitStack
    ledger: Ledger = field(default_factory=Ledger)
    format: str = ""
    tensors: int = 0
    nbytes: int = 0
    errors: list[RoleError] = field(default_factory=list)
    opened: Checkpoint | None = None
    origin: Checkpoint | None = None
    items: list[Item] = field(default_factory=list)

    def full(self, sample: int) -> None:
        """Every level but `quick`."""
        with self.readers.ranks.agreeing():
            folder = self._read_folder()
        if folder.config is None or folder.broken or not folder.shards:
            self._checksums(folder)
            return
        with self.readers.ranks.agreeing():
            examiner = self._read_headers(folder)
        places = ((item.spec.file, item.spec.offset, item.nbytes) for item in self.items)
        self.readers.agree(examiner is not None, places)
        if self.opened is None or examiner is None:
            return
        read = read_all(examiner, self.items, self.readers, self.ledger)
        self.nbytes, self.errors, digests = read
        if examiner.checksums is not None:
            check_shards(folder, examiner.checksums, self.ledger, digests)
        self._ask_second_opinion(self.opened, sample)
        if self.level == "forward" and self.origin is not None:
            from beamq.eval.verify.forward import check_forward  # torch

            progress = self.readers.progress
            check_forward(self.opened, self.origin, folder.manifest, self.ledger, progress)

    def _read_headers(self, folder: Folder) -> Examiner | None:
        """All that headers, scalars and small files show. No examiner: no tensors are read."""
        ledger = self.ledger
        if self.level == "forward" and folder.plain:
            raise UsageError(
                f"{self.name} is not quantized, so level forward has no bounds to check it by;"
                " `beamq compare` measures how it differs from another"
            )
        self.format = declared_format(folder, ledger)
        check_config(folder, self.format, ledger)
        inventory = Sorter(folder, self.format, ledger).sort()
        if not folder.plain:
            stored = inventory.stored()
            check_ignore_covers(folder, self.format, stored, ledger)
            check_engines(folder, self.format, stored, self.engine, ledger)
        every_byte = self.level != "structure"
        manifest = usable_manifest(folder, ledger) if every_byte else None
        values: Readable | None = None
        ranges: dict[str, SourceRange] = {}
        if self.source is not None:
            cache_bytes = DEFAULT_CACHE_BYTES // self.readers.ranks.world
            origin = open_merged(self.source, self.adapter, cache_bytes=cache_bytes)
            values = self.origin = self.stack.enter_context(origin)
            if self.adapter.adapter is None:
                refuse_without_adapter(folder, origin)
            # A plain folder is decoded from a quantized source, or merged from a plain one.
            if folder.plain and self.adapter.adapter is None:
                values = decoded = DecodedCheckpoint(origin)
                ranges = trace_decoded(folder, inventory, decoded, ledger)
            else:
                ranges = trace_source(folder, inventory, origin, ledger)
        self.opened = self._open(folder)
        if self.opened is None:
            return None
        check_scalars(self.opened, inventory, folder.manifest, ledger)
        if not every_byte:
            return None
        ledger.examined("values.zeros", len(self.opened.tensors))
        for where, what in zero_faults(self.opened):
            ledger.fault("values.zeros", where, f"{what}; {REMEDY}")
        self.items = plan_items(inventory, ranges)
        return Examiner(self.opened, values, folder.manifest, manifest)

    def quick(self) -> None:
        """Checksums alone."""
        with self.readers.ranks.agreeing():
            folder = self._read_folder()
            if self.ledger.strangers:
                self.ledger.strangers = False
                reason = "is missing, so there is nothing to compare with"
                self.ledger.fault("manifest.present", MANIFEST_NAME, reason)
        self._checksums(folder)
        self.format = str((folder.block or {}).get("quant_algo", "not looked at"))[:40]

    def _checksums(self, folder: Folder) -> None:
        """All that can be said without a config. Where shards are missing, that is enough."""
        ledger, every_byte = self.ledger, self.level != "structure"
        whole = bool(folder.shards) and not folder.broken
        with self.readers.ranks.agreeing():
            manifest = usable_manifest(folder, ledger) if every_byte else None
            opened = self._open(folder) if every_byte and whole else None
        if not whole:
            ledger.skip_rest(
                "not checked, because shards are missing or broken; see files.readable"
            )
        elif self.level != "quick" and folder.config is None:
            reason = "not checked, because it needs the config; see config.model"
            ledger.skip_rest(reason, but="checksums.")
        specs = () if opened is None else opened.tensors.values()
        readable = opened is not None and manifest is not None
        self.readers.agree(readable, ((spec.file, spec.offset, spec.nbytes) for spec in specs))
        if opened is not None and manifest is not None:
            self.nbytes = check_sums(opened, folder, manifest, ledger, self.readers)

    def _read_folder(self) -> Folder:
        if (asked := hub_source(self.name)) is not None:
            raise CheckpointError(
                f"{self.name}: no such folder, and verify reads no repository on the Hub; download"
                f" it first: hf download {asked.repo} --local-dir FOLDER"
            )
        root = user_path(self.name)
        refuse_unfinished(root)
        folder = read_folder(root, self.ledger)
        self.tensors = len(folder.tensors)
        return folder

    def _open(self, folder: Folder) -> Checkpoint | None:
        """The folder for reading data, or None if index and shards disagree."""
        if self.ledger.failed("files.index"):
            for name, check in CHECKS.items():
                reads = check.level != "structure" or name.startswith("scales.")
                if reads and name != "checksums.files":
                    self.ledger.skip("the files cannot be read as a whole; see files.index", name)
            return None
        self.stack.callback(folder.files.close)
        return Checkpoint(
            config=folder.raw_config,
            tensors=folder.tensors,
            files=tuple(folder.shards),
            metadata=folder.metadata,
            has_index=folder.index is not None,
            source=folder.files,
        )

    def _ask_second_opinion(self, opened: Checkpoint, sample: int) -> None:
        """The first rank asks for all, because importing the libraries takes seconds."""
        ranks, ledger = self.readers.ranks, self.ledger
        with ranks.agreeing():
            if ranks.first:
                linears = [item.linear for item in self.items if item.linear is not None]
                ask_second_opinion(opened, linears, sample, ledger)
        states = ranks.gather(ledger.states[SECOND_OPINION] if ranks.first else None)
        ledger.states[SECOND_OPINION] = states[0]
