"""THE LOOP: source + recipe -> a folder that the engines load. The whole of `beamq quantize`.

    open -> plan -> preflight (places, disk, small tensors) -> lock, journal
         -> jobs by a crew of threads -> [ranks meet] -> finalise

Everything that can be known before the first long read is checked before it. Peak memory does
not depend on the number of layers or experts: it is the workers' pieces plus a bounded pool of
buffers for scale groups.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamq import output_folder
from beamq.checkpoint import Checkpoint, open_checkpoint
from beamq.checksum import DEFAULT_ALGORITHM
from beamq.config import read_json_object
from beamq.cpu_engine import PIECE_BYTES
from beamq.crew import Crew
from beamq.errors import Interrupted, MemoryBudgetError, ResumeError
from beamq.finalise import MANIFEST_NAME, finalise
from beamq.input_scales import InputScaleSource, choose_input_scales
from beamq.journal import Identity, Journal, OutputLock, check_identity
from beamq.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from beamq.preflight import check_small_tensors
from beamq.ranks import Ranks, current_ranks, share
from beamq.recipe import Recipe, load_recipe
from beamq.shards import publish
from beamq.version import __version__

DEFAULT_MEMORY_BYTES = 1_500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Told now and then during a conversion: source bytes read so far, and in all."""

    done_nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeResult:
    """What a conversion did. `manifest` is beamq.json, or None for a dry run or other ranks."""

    output: Path
    plan: Plan
    manifest: dict[str, Any] | None
    seconds: float
    resumed_shards: int


def quantize(
    source: str | Path,
    output: str | Path,
    *,
    recipe: str | Recipe = "nvfp4",
    calibration: str | Path | None = None,
    no_calibration: bool = False,
    exclude: Sequence[str] = (),
    kv_cache: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    max_host_memory: int = DEFAULT_MEMORY_BYTES,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> QuantizeResult:
    """Convert a BF16, F16 or F32 Beam checkpoint into an NVFP4 or FP8 one.

    `source` and `output` are folders. NVFP4 needs input scales: `calibration` (a statistics
    file) or `no_calibration` (constant 1.0). `max_host_memory` bounds the buffers, in bytes.
    `on_plan` is called before work, `on_progress` about every 32 MiB, from worker threads.
    Raises `BeamqError`s: `InputError` kinds before any work where headers can tell,
    `TensorError` for non-finite weights as they are met, `EnvironmentFault` kinds for disk and
    memory, `Interrupted` on SIGINT or SIGTERM; all but the first leave a resumable output.
    """
    begun = time.monotonic()
    source, output = Path(source).expanduser(), Path(output).expanduser()
    ranks = current_ranks()
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    chosen = chosen.with_options(exclude=tuple(exclude), kv_cache=kv_cache)
    output_folder.check_places(source, output)
    with open_checkpoint(source) as checkpoint:
        plan = make_plan(checkpoint, chosen, max_shard_bytes=max_shard_bytes)
        scales = choose_input_scales(
            plan, checkpoint, calibration=calibration, no_calibration=no_calibration
        )
        check_memory(plan, max_host_memory)
        if on_plan is not None and ranks.first:
            on_plan(plan)
        if dry_run:
            seconds = time.monotonic() - begun
            return QuantizeResult(
                output=output, plan=plan, manifest=None, seconds=seconds, resumed_shards=0
            )
        run = _Run(
            checkpoint=checkpoint,
            plan=plan,
            output=output,
            scales=scales,
            ranks=ranks,
            workers=workers or default_workers(),
            memory=max_host_memory,
            on_progress=on_progress,
        )
        manifest, kept = run.convert(resume=resume, overwrite=overwrite)
    return QuantizeResult(
        output=output,
        plan=plan,
        manifest=manifest,
        seconds=time.monotonic() - begun,
        resumed_shards=kept,
    )


def default_workers() -> int:
    """Threads: the cores this process may use, at most 32."""
    return max(1, min(32, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4))


def largest_group_nbytes(plan: Plan) -> int:
    """Source bytes of the largest set of linears that share an NVFP4 scale."""
    return max((job.source_nbytes for job in plan.jobs if job.kind == "nvfp4"), default=0)


def predicted_host_nbytes(plan: Plan, workers: int, budget: int = DEFAULT_MEMORY_BYTES) -> int:
    """Upper bound of the buffers a conversion holds, in bytes, without the interpreter."""
    largest = largest_group_nbytes(plan)
    return max(min(workers * largest, budget), largest) + workers * 4 * PIECE_BYTES


def check_memory(plan: Plan, budget: int) -> None:
    """Raise `MemoryBudgetError` if one scale group does not fit the budget."""
    largest = largest_group_nbytes(plan)
    if largest > budget:
        raise MemoryBudgetError(
            f"--max-host-memory {budget / 1e9:.2f} GB is less than the largest group of linears"
            f" that share a scale ({largest / 1e9:.2f} GB); allow at least that"
        )


class _Run:
    """One conversion under way; exists to keep the steps short."""

    def __init__(
        self,
        *,
        checkpoint: Checkpoint,
        plan: Plan,
        output: Path,
        scales: InputScaleSource,
        ranks: Ranks,
        workers: int,
        memory: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._output = output
        self._scales = scales
        self._ranks = ranks
        self._workers = workers
        self._memory = memory
        self._on_progress = on_progress
        self._identity = Identity(
            version=__version__,
            source=plan.source_fingerprint,
            recipe=plan.recipe.digest(),
            input_scales=scales.digest,
            plan=plan.digest(),
            checksum=DEFAULT_ALGORITHM,
        )

    def convert(self, *, resume: bool, overwrite: bool) -> tuple[dict[str, Any] | None, int]:
        """All steps from the preflight on. Returns the manifest (first rank) and shards kept."""
        lock: OutputLock | None = None
        journal = Journal(self._output, self._identity, self._ranks.rank)
        try:
            with self._meeting():
                if self._ranks.first:
                    check_small_tensors(self._checkpoint, self._plan)
                    output_folder.prepare(self._output, resume=resume, overwrite=overwrite)
                    lock = OutputLock(self._output)
                    if resume and (whole := self._already_whole()) is not None:
                        return whole, len(self._plan.shards)
                    self._begin(journal, resume=resume)
            with self._meeting():
                journal.load()
                kept = len(journal.done)
                journal.open()
            with self._meeting():
                self._work(journal)
            if not self._ranks.first:
                return None, kept
            journal.load()
            manifest = finalise(
                self._plan,
                source=self._checkpoint.root,
                source_config=self._checkpoint.config,
                output=self._output,
                records=journal.done,
                input_scales=self._scales.record,
            )
            journal.remove()
            return manifest, kept
        finally:
            journal.close()
            if lock is not None:
                lock.release()
            self._ranks.leave()

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Run a step on all ranks; leave it together, or fail together."""
        try:
            yield
        except BaseException as error:
            self._ranks.meet(error)
            raise
        self._ranks.meet()

    def _already_whole(self) -> dict[str, Any] | None:
        """The manifest, if this very conversion is complete in the output already."""
        path = self._output / MANIFEST_NAME
        if not path.exists():
            return None
        manifest = read_json_object(path, ResumeError, 1 << 30)
        recorded = {
            "version": manifest.get("beamq"),
            "checksum": manifest.get("checksum"),
            "input_scales": (manifest.get("input_scales") or {}).get("digest"),
            **(manifest.get("digests") or {}),
        }
        check_identity(self._identity, recorded, self._output)
        return manifest

    def _begin(self, journal: Journal, *, resume: bool) -> None:
        """First rank: make the folder ready, finish renames that a crash cut short."""
        if not resume:
            output_folder.clear(self._output)
        journal.load()
        finished = 0
        for shard in self._plan.shards:
            record = journal.done.get(shard.name)
            if record is None:
                continue
            final, partial = self._output / shard.name, self._output / f"{shard.name}.partial"
            if not final.exists() and partial.exists():
                publish(partial, final)
            if not final.exists() or final.stat().st_size != shard.nbytes:
                raise ResumeError(
                    f"{final}: recorded as finished but missing or of another size; start again"
                    " with --overwrite"
                )
            finished += shard.nbytes
        output_folder.check_space(self._output, self._plan, finished)
        output_folder.remove_stale(self._output, self._plan)
        journal.open()

    def _work(self, journal: Journal) -> None:
        weights = [0] * len(self._plan.shards)
        for job in self._plan.jobs:
            weights[job.shard] += job.source_nbytes
        mine = [
            index
            for index in sorted(share(weights, self._ranks))
            if self._plan.shards[index].name not in journal.done
        ]
        stop = threading.Event()
        crew = Crew(
            self._checkpoint,
            self._plan,
            self._output,
            journal,
            shards=mine,
            workers=self._workers,
            memory_budget=self._memory,
            input_scale=self._scales.of,
            advance=_Meter(self._on_progress, sum(weights[index] for index in mine)).advance,
            stop=stop,
        )
        with _stop_on_signals(stop):
            try:
                crew.run()
            except Interrupted:
                done = sum(shard.name in journal.done for shard in self._plan.shards)
                raise Interrupted(
                    f"interrupted; {done} of {len(self._plan.shards)} shards are finished."
                    " Run the same command with --resume to continue"
                ) from None


class _Meter:
    """Adds up bytes from many threads and reports in steps of 32 MiB."""

    def __init__(self, report: Callable[[Progress], None] | None, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0
        self._told = 0
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            due = self._done - self._told >= 1 << 25 or self._done == self._total
            if due:
                self._told = self._done
            done = self._done
        if due and self._report is not None:
            self._report(Progress(done_nbytes=done, total_nbytes=self._total))


@contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on the first SIGINT or SIGTERM; a second one acts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, previous[number])

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
