"""Run a plan's work to a whole folder, or to a state from which the same call can go on.

    preflight -> prepare the folder, lock, journal -> jobs by a crew -> [ranks meet] -> finalise

Shared by everything that turns one checkpoint into another; what differs (kernels, configs) is
in the work's jobs and in the `finalise` callable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from beamq.convert import output as output_folder
from beamq.convert.cpu_worker import WorkerFactory
from beamq.convert.input_scales import InputScaleProvider
from beamq.convert.limits import check_address_space, check_cache, check_small_tensors
from beamq.convert.open_shards import OpenShards, join
from beamq.convert.options import ConvertOptions, DequantizeOptions
from beamq.errors import Interrupted, ResumeError, counted
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.journal import STATE_DIR, Identity, Journal, ShardRecord, check_identity, sound_counts
from beamq.io.manifest import DEFAULT_ALGORITHM, MANIFEST_NAME, Manifest
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.io.shard_writer import publish
from beamq.io.source import Prefetch
from beamq.plan.plan import Job, Work
from beamq.ranks import Ranks, share
from beamq.signals import short_turns, stop_on_signals
from beamq.version import __version__

# Which job a worker takes next: a few shards at a time, each from front to back.
#
# In: jobs in plan order. Out: for each request, a job nobody has taken and one to read ahead.
#
# Writing takes the lock of the file written to, so workers that fill one shard queue up behind
# each other. Scheduler give them several: shards are dealt out in turn, a worker stays in its lane,
# and helps the longest one when its own is empty. With one lane the order is the plan's, which a
# remote source needs (its shards are fetched in that order) and two workers are served best by
# (they are seldom in each other's way, and read in sequence).

WORKERS_OF_A_LANE = 2
MAX_LANES = 8  # shards that a crash may leave unfinished
READ_AHEAD_JOBS = 2  # for each worker


def queue_count(workers: int, *, remote: bool) -> int:
    """Scheduler for so many workers."""
    return 1 if remote else max(1, min(MAX_LANES, workers // WORKERS_OF_A_LANE))


class Scheduler:
    """Hands out the indices of `jobs`. Shared by threads."""

    def __init__(self, jobs: Sequence[Job], *, workers: int, lanes: int) -> None:
        shards = dict.fromkeys(job.shard for job in jobs)
        lane_of = {shard: place % lanes for place, shard in enumerate(shards)}
        self._lanes: list[list[int]] = [[] for _ in range(lanes)]
        for index, job in enumerate(jobs):
            self._lanes[lane_of[job.shard]].append(index)
        self._taken = [0] * lanes
        self._ahead = -(-workers // lanes) * READ_AHEAD_JOBS
        self._lock = threading.Lock()

    def take(self, worker: int) -> tuple[int, int | None] | None:
        """(a job, one to read ahead or None) for a worker, numbered from 0; None at the end."""
        with self._lock:
            lane = worker % len(self._lanes)
            if not self._left(lane):
                lane = max(range(len(self._lanes)), key=self._left)
            if not self._left(lane):
                return None
            place, jobs = self._taken[lane], self._lanes[lane]
            self._taken[lane] += 1
            ahead = place + self._ahead
            return jobs[place], jobs[ahead] if ahead < len(jobs) else None

    def _left(self, lane: int) -> int:
        return len(self._lanes[lane]) - self._taken[lane]


# Worker threads over the jobs of a plan.
#
# Jobs are taken in plan order, a few shards at a time (`Scheduler`), so reading is sequential and
# only a few shards are open at once. While workers convert, the kernel reads the next jobs ahead
# (or their shards are fetched from the Hub) and `OpenShards` makes whole shards durable: network,
# disk, cores and memory overlap without any buffer of ours in between.
#
# The first failure stops everything: workers leave between two pieces, finished shards stay
# recorded, unfinished ones keep their temporary names.


class Crew:
    """Converts jobs into shards. Use once: `run`, from the main thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        jobs: Sequence[Job],
        shards: OpenShards,
        factory: WorkerFactory,
        *,
        workers: int,
        remote: bool,
        scales: str,
        input_scale: Callable[[str], float],
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        """`remote` says that the source's shards have to be fetched, in the order of jobs."""
        self._checkpoint = checkpoint
        self._jobs = jobs
        self._shards = shards
        self._factory = factory
        self._workers = min(factory.count(workers), max(len(jobs), 1))
        self._lanes = Scheduler(
            jobs, workers=self._workers, lanes=queue_count(self._workers, remote=remote)
        )
        self._scales = scales
        self._input_scale = input_scale
        self._advance = advance
        self._stop = stop
        self._prefetch = Prefetch()

    def run(self) -> None:
        """Convert all jobs. Raises `Interrupted` if `stop` was set; failures go to `shards`."""
        workers = [
            threading.Thread(
                target=self._shards.guard, args=(lambda number=number: self._work(number),),
                daemon=True,
            )
            for number in range(self._workers)
        ]  # fmt: skip
        with self._checkpoint.prefetch([job.files for job in self._jobs]) as self._prefetch:
            for thread in workers:
                thread.start()
            try:
                for thread in workers:
                    join(thread)
            except BaseException:  # a second Ctrl-C; nobody may be left writing
                self._stop.set()
                for thread in workers:
                    join(thread)
                raise
        if self._stop.is_set():
            raise Interrupted("interrupted")

    def _work(self, number: int) -> None:
        worker = self._factory.worker(
            scales=self._scales,
            input_scale=self._input_scale,
            stopped=self._stop.is_set,
            advance=self._advance,
        )
        while not self._stop.is_set():
            taken = self._lanes.take(number)
            if taken is None:
                return
            index, ahead = taken
            job = self._jobs[index]
            writer = self._shards.writer(job.shard)
            if ahead is not None:
                self._read_ahead(self._jobs[ahead])
            self._prefetch.wait(index, self._stop.is_set)
            self._shards.add(job, worker.run(job, writer))
            self._prefetch.finish(index)

    def _read_ahead(self, job: Job) -> None:
        for member in job.members:
            self._checkpoint.advise(member.source.spec, member.source.start, member.source.nbytes)


REPORT_STEP_BYTES = 1 << 25
REPORT_STEPS = 100  # where a hundredth of the total is less


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Told now and then during a run: source bytes done by this process so far, and in all. They
    are done when read; where a calibration is on the way, when their layer is passed."""

    done_nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to run, apart from what. `memory` bounds the group buffers, in bytes, `cache_bytes` the
    shards of a remote source that are on disk at a time."""

    workers: int
    memory: int
    resume: bool
    overwrite: bool
    on_progress: Callable[[Progress], None] | None
    cache_bytes: int = DEFAULT_CACHE_BYTES


Finalise = Callable[[Mapping[str, ShardRecord]], Manifest]


W = TypeVar("W", bound=Work)


def open_run(
    stack: ExitStack,
    source: str | Path,
    output: Path,
    options: ConvertOptions | DequantizeOptions,
    ranks: Ranks,
    make: Callable[[Checkpoint], W],
) -> tuple[Checkpoint, W]:
    """Check the output, open the source and plan its work, before anything is written.

    A failure at one rank is raised at all. Shards of a remote source are kept in the output's state
    folder, which goes at the end of the run.
    """
    stack.callback(ranks.leave)  # torch aborts a process that ends as a member
    with ranks.meeting():
        if ranks.first:
            output_folder.check(output, resume=options.resume, overwrite=options.overwrite)
    place, budget = output / STATE_DIR / f"source-{ranks.rank}", options.cache_bytes // ranks.world
    with ranks.agreeing():
        checkpoint = stack.enter_context(
            open_checkpoint(source, cache_bytes=budget, cache_folder=place)
        )
        work = make(checkpoint)
    check_cache(work, budget)
    return checkpoint, work


class Runner:
    """One run. `run` returns the manifest (None on other ranks) and how many shards were kept."""

    def __init__(
        self,
        *,
        checkpoint: Checkpoint,
        work: Work,
        output: Path,
        factory: WorkerFactory,
        scales: InputScaleProvider,
        ranks: Ranks,
        options: RunOptions,
        finalise: Finalise,
    ) -> None:
        self._checkpoint = checkpoint
        self._work = work
        self._output = output
        self._factory = factory
        self._scales = scales
        self._ranks = ranks
        self._options = options
        self._finalise = finalise
        self._identity = Identity(
            version=__version__,
            source=work.source_fingerprint,
            recipe=work.recipe_digest,
            input_scales=scales.digest,
            plan=work.digest(),
            checksum=DEFAULT_ALGORITHM,
        )

    def run(self) -> tuple[Manifest | None, int]:
        """All steps. Raises `BeamqError`s; whatever is durable then can be resumed."""
        journal = Journal(self._output, self._identity, self._ranks.rank)
        claim: output_folder.Claim | None = None
        options = self._options
        try:
            with self._ranks.meeting():
                check_address_space(self._work, options.workers, options.memory)
                if self._ranks.first:
                    check_small_tensors(self._checkpoint, self._work)
                    claim = output_folder.Claim(
                        self._output, resume=options.resume, overwrite=options.overwrite
                    )
            if options.resume and (whole := self._already_whole()) is not None:
                if self._ranks.first:
                    journal.remove()  # the last step, if a crash came before it
                return (whole if self._ranks.first else None), len(self._work.shards)
            with self._ranks.meeting():
                if self._ranks.first:
                    self._begin(journal)
            with self._ranks.meeting():
                journal.load()
                kept = len(journal.done)
                journal.open()
            with self._ranks.meeting():
                self._convert(journal)
                self._checkpoint.check_unchanged()
            if not self._ranks.first:
                return None, kept
            journal.load()
            manifest = self._finalise(journal.done)
            journal.remove()
            return manifest, kept
        finally:
            journal.close()
            if claim is not None:
                claim.release()
            self._ranks.leave()

    def _already_whole(self) -> Manifest | None:
        """The manifest, if this very conversion is complete in the output already."""
        path = self._output / MANIFEST_NAME
        if not path.exists():
            return None
        manifest = Manifest.read(path, ResumeError)
        recorded = {
            **manifest.digests,
            "version": manifest.version,
            "checksum": manifest.algorithm,
            "input_scales": manifest.input_scales.get(self._scales.key),
        }
        check_identity(self._identity, recorded, self._output)
        if not sound_counts(manifest.data.get("counts", {})):
            raise ResumeError(f"{path}: its counts are damaged; start again with --overwrite")
        return manifest

    def _begin(self, journal: Journal) -> None:
        """First rank: make the folder ready, finish renames that a crash cut short."""
        if not self._options.resume:  # before anything of an earlier checkpoint is removed
            self._check_space(0, replaced=True)
            output_folder.clear(self._output)
        output_folder.unload(self._output)
        try:
            journal.load()
        except ResumeError:
            self._scales.check_resumed()  # may know the options, of which the journal has a digest
            raise
        finished = 0
        for shard in self._work.shards:
            record = journal.done.get(shard.name)
            if record is None:
                continue
            if list(record.tensors) != [tensor.name for tensor in shard.tensors]:
                raise ResumeError(
                    f"{self._output}: the journal's record of {shard.name} is not of this plan;"
                    " start again with --overwrite"
                )
            final, partial = self._output / shard.name, self._output / f"{shard.name}.partial"
            if not final.exists() and partial.exists():
                publish(partial, final)
            if not final.exists() or final.stat().st_size != shard.nbytes:
                raise ResumeError(
                    f"{final}: recorded as finished but missing or of another size; start again"
                    " with --overwrite"
                )
            finished += shard.nbytes
        if self._options.resume:
            self._check_space(finished)
        output_folder.remove_stale(self._output, self._work)
        journal.open()

    def _check_space(self, finished: int, *, replaced: bool = False) -> None:
        output_folder.check_space(
            self._output,
            self._work,
            finished,
            self._options.cache_bytes,
            replaced=replaced,
            state_nbytes=self._scales.state_nbytes,
        )

    def _convert(self, journal: Journal) -> None:
        work = self._work
        weights = [0] * len(work.shards)
        for job in work.jobs:
            weights[job.shard] += job.source_nbytes
        mine = [
            index
            for index in sorted(share(weights, self._ranks))
            if work.shards[index].name not in journal.done
        ]
        chosen = frozenset(mine)
        jobs = [job for job in work.jobs if job.shard in chosen]
        stop = threading.Event()
        meter = _Meter(self._options.on_progress, sum(weights[index] for index in mine))
        try:
            with (
                stop_on_signals(stop),
                short_turns(self._factory.device_nbytes > 0),
                OpenShards(work, self._output, journal, jobs, stop) as shards,
            ):
                if self._scales.feed is not None:
                    done = self._scales.feed.run(jobs, shards, advance=meter.advance, stop=stop)
                    jobs = [job for job in jobs if id(job) not in done]
                Crew(
                    self._checkpoint,
                    jobs,
                    shards,
                    self._factory,
                    workers=self._options.workers,
                    remote=bool(work.remote_shards),
                    scales=work.scales,
                    input_scale=self._scales.of,
                    advance=meter.advance,
                    stop=stop,
                ).run()
        except Interrupted:
            finished = sum(shard.name in journal.done for shard in work.shards)
            layers = ""
            if self._scales.calibrated is not None:
                layers = "{} of {} layers are calibrated, ".format(*self._scales.calibrated)
            raise Interrupted(
                f"interrupted; {layers}{finished} of"
                f" {counted(len(work.shards), 'shard is', 'shards are')} finished."
                " Run the same command with --resume to continue"
            ) from None


class _Meter:
    """Adds up bytes from many threads and reports in steps."""

    def __init__(self, report: Callable[[Progress], None] | None, total: int) -> None:
        self._report = report
        self._total = total
        self._step = min(REPORT_STEP_BYTES, total // REPORT_STEPS)
        self._done = 0
        self._told = 0
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            due = self._done - self._told >= self._step or self._done == self._total
            if due:
                self._told = self._done
            done = self._done
        if due and self._report is not None:
            self._report(Progress(done_nbytes=done, total_nbytes=self._total))
