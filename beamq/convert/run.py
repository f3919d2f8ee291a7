"""Convert all jobs of a plan: to a whole folder, or to a state that the same call can resume.

    preflight -> prepare the folder -> convert the jobs -> [ranks meet] -> finalise

In: a `Conversion`, that is, a plan's work, the factory of the workers that do it, and what comes
last (`finalise`); quantize, dequantize and repair are one. Out: the output folder.

The one idea: only the jobs are scheduled. Worker threads take jobs in plan order, a few shards at a
time (`Scheduler`), so that reading is sequential and few shards are open at once. Meanwhile the
kernel reads the next jobs ahead (or their shards are fetched from the Hub) and `OpenShards` makes
whole shards durable. The first failure stops all threads between two pieces; finished shards stay
recorded, unfinished ones keep their temporary names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from beamq.adapter.merged import open_merged
from beamq.adapter.options import AdapterOptions
from beamq.beam.tensors import Role
from beamq.convert import output as output_folder
from beamq.convert.cpu_worker import JobContext, WorkerFactory
from beamq.convert.input_scales import InputScaleProvider
from beamq.convert.open_shards import OpenShards, join
from beamq.convert.options import ConvertOptions, DequantizeOptions, MergeOptions, RepairOptions
from beamq.convert.resources import check_cache, check_room, warn_of_slow_kernels
from beamq.errors import Interrupted, ResumeError, TensorError, counted
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.journal import STATE_DIR, Identity, Journal, ShardRecord, check_identity, sound_counts
from beamq.io.lock import check_shared
from beamq.io.manifest import DEFAULT_ALGORITHM, MANIFEST_NAME, Manifest
from beamq.io.shard_writer import publish
from beamq.plan.plan import Job, JobKind, Plan, Work
from beamq.ranks import Ranks, share
from beamq.signals import short_turns, stop_on_signals
from beamq.version import __version__

REPORT_STEP_BYTES = 1 << 25
REPORT_STEPS = 100  # where a hundredth of the total is less


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Source bytes that this process has done so far and has to do in all. Bytes count as done when
    they are read or, in a run that calibrates, when the forward pass has left their layer."""

    done_nbytes: int
    total_nbytes: int


W = TypeVar("W", bound=Work)


def open_run(
    stack: ExitStack,
    source: str | Path,
    output: Path,
    options: ConvertOptions | DequantizeOptions | MergeOptions,
    ranks: Ranks,
    make: Callable[[Checkpoint], W],
    adapter: AdapterOptions = AdapterOptions(),  # noqa: B008  # frozen
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
            open_merged(source, adapter, cache_bytes=budget, cache_folder=place)
        )
        if options.overwrite:
            output_folder.refuse_origin(checkpoint, output)
        work = make(checkpoint)
    check_cache(work, budget)
    return checkpoint, work


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One checkpoint turned into another: `run` does all of it.

    `workers` is how many threads to use at most, `memory` bounds the buffers of scale groups.
    """

    checkpoint: Checkpoint
    work: Work
    output: Path
    factory: WorkerFactory
    scales: InputScaleProvider
    ranks: Ranks
    options: ConvertOptions | DequantizeOptions | MergeOptions | RepairOptions
    workers: int
    memory: int
    on_progress: Callable[[Progress], None] | None
    finalise: Callable[[Mapping[str, ShardRecord]], Manifest]

    def run(self) -> tuple[Manifest | None, int]:
        """The manifest (None on ranks but the first), and how many shards were there already.

        Raises `BeamqError`s; what is durable by then can be resumed.
        """
        identity = self._identity()
        journal = Journal(self.output, identity, self.ranks.rank)
        claim: output_folder.Claim | None = None
        options, first = self.options, self.ranks.first
        try:
            with self.ranks.meeting():
                check_room(self.work, self.workers, self.memory)
                if first:
                    warn_of_slow_kernels(self.work, self.factory)
                    check_small_tensors(self.checkpoint, self.work)
                    claim = output_folder.Claim(
                        self.output, resume=options.resume, overwrite=options.overwrite
                    )
            check_shared(self.output, self.ranks)
            if options.resume and (whole := self._already_whole(identity)) is not None:
                if first:
                    journal.remove()  # the last step, if a crash came before it
                return (whole if first else None), len(self.work.shards)
            with self.ranks.meeting():
                if first:
                    self._begin(journal)
            with self.ranks.meeting():
                journal.load()
                kept = len(journal.done)
                journal.open()
            with self.ranks.meeting():
                self._convert(journal)
                self.checkpoint.check_unchanged(writes=True)
            if not first:
                return None, kept
            journal.load()  # the records of all ranks
            manifest = self.finalise(journal.done)
            journal.remove()
            return manifest, kept
        finally:
            journal.close()
            if claim is not None:
                claim.release()
            self.ranks.leave()

    def _convert(self, journal: Journal) -> None:
        """Convert this rank's jobs. The first failure in any thread is raised."""
        jobs = self._remaining_jobs(journal)
        stop = threading.Event()
        meter = _Meter(self.on_progress, sum(job.source_nbytes for job in jobs))
        context = JobContext(
            scale_rule=self.work.scales,
            input_scale=lambda module: self.scales.known.scale(module),
            stopped=stop.is_set,
            advance=meter.advance,
            # With an adapter, a GPU reads the bytes from before the merge.
            sums=isinstance(self.work, Plan) and self.checkpoint.source.merged is None,
        )
        try:
            with (
                stop_on_signals(stop),
                short_turns(self.factory.device_nbytes > 0),
                OpenShards(self.work, self.output, journal, jobs, stop) as shards,
            ):
                done = self.scales.convert_early(jobs, shards, context)
                jobs = [job for job in jobs if job.index not in done]
                self._run_workers(jobs, shards, context, stop)
        except Interrupted:
            raise self._interrupted(journal) from None

    def _run_workers(
        self, jobs: Sequence[Job], shards: OpenShards, context: JobContext, stop: threading.Event
    ) -> None:
        """The loop: each thread takes the next job, converts it, and adds it to its shard.

        `shards` finalises a shard when its last job is added.
        """
        count = min(self.factory.count(self.workers), len(jobs))
        merged = self.checkpoint.source.merged is not None
        if merged and not self.work.remote_shards:
            jobs = spread(jobs)
        queues = queue_count(count, in_order=merged or bool(self.work.remote_shards))
        scheduler = Scheduler(jobs, workers=count, queues=queues)

        def convert_jobs(number: int) -> None:
            worker = self.factory.worker(context)
            while not stop.is_set() and (taken := scheduler.take(number)) is not None:
                place, ahead = taken
                job = jobs[place]
                shard = shards.writer(job.shard)
                for member in () if ahead is None else jobs[ahead].members:
                    source = member.source
                    self.checkpoint.advise(source.spec, source.start, source.nbytes)
                prefetch.wait(place, stop.is_set)  # until the job's files are here
                shards.add(job, worker.run(job, shard))
                prefetch.finish(place)

        with self.checkpoint.prefetch([job.files for job in jobs]) as prefetch:
            bodies = [partial(convert_jobs, number) for number in range(count)]
            threads = [
                threading.Thread(target=shards.guard, args=(body,), daemon=True) for body in bodies
            ]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    join(thread)
            except BaseException:  # a second Ctrl-C; no thread may go on writing
                stop.set()
                for thread in threads:
                    join(thread)
                raise
        if stop.is_set():
            raise Interrupted("interrupted")

    def _remaining_jobs(self, journal: Journal) -> list[Job]:
        """The jobs of this rank's shards that are not finished."""
        shards, weights = self.work.shards, [0] * len(self.work.shards)
        for job in self.work.jobs:
            weights[job.shard] += job.source_nbytes
        mine = {i for i in share(weights, self.ranks) if shards[i].name not in journal.done}
        return [job for job in self.work.jobs if job.shard in mine]

    def _interrupted(self, journal: Journal) -> Interrupted:
        shards, layers = self.work.shards, ""
        finished = sum(shard.name in journal.done for shard in shards)
        if self.scales.calibrated is not None:
            layers = "{} of {} layers are calibrated, ".format(*self.scales.calibrated)
        return Interrupted(
            f"interrupted; {layers}{finished} of"
            f" {counted(len(shards), 'shard is', 'shards are')} finished."
            " Run the same command with --resume to continue"
        )

    def _identity(self) -> Identity:
        return Identity(
            version=__version__,
            source=self.work.source_fingerprint,
            recipe=self.work.recipe_digest,
            input_scales=self.scales.digest,
            plan=self.work.digest(),
            checksum=DEFAULT_ALGORITHM,
        )

    def _already_whole(self, identity: Identity) -> Manifest | None:
        """The manifest, if this very conversion is complete in the output already."""
        path = self.output / MANIFEST_NAME
        if not path.exists():
            return None
        manifest = Manifest.read(path, ResumeError)
        recorded = {
            **manifest.digests,
            "version": manifest.version,
            "checksum": manifest.algorithm,
            "input_scales": manifest.input_scales.get(self.scales.key),
        }
        check_identity(identity, recorded, self.output)
        if not sound_counts(manifest.data.get("counts", {})):
            raise ResumeError(f"{path}: its counts are damaged; start again with --overwrite")
        return manifest

    def _begin(self, journal: Journal) -> None:
        """First rank: make the folder ready, finish renames that a crash cut short."""
        if not self.options.resume:  # before anything of an earlier checkpoint is removed
            self._check_space(0, replaced=True)
            output_folder.clear(self.output)
        output_folder.unload(self.output)
        try:
            journal.load()
        except ResumeError:
            self.scales.check_resumed()  # names the options; the journal has only their digest
            raise
        finished = 0
        for shard in self.work.shards:
            record = journal.done.get(shard.name)
            if record is None:
                continue
            if list(record.tensors) != [tensor.name for tensor in shard.tensors]:
                raise ResumeError(
                    f"{self.output}: the journal's record of {shard.name} does not fit this plan;"
                    " start again with --overwrite"
                )
            final, partial = self.output / shard.name, self.output / f"{shard.name}.partial"
            if not final.exists() and partial.exists():
                publish(partial, final)
            if not final.exists() or final.stat().st_size != shard.nbytes:
                raise ResumeError(
                    f"{final}: recorded as finished but missing or of another size; start again"
                    " with --overwrite"
                )
            finished += shard.nbytes
        if self.options.resume:
            self._check_space(finished)
        output_folder.remove_stale(self.output, self.work)
        journal.open()

    def _check_space(self, finished: int, *, replaced: bool = False) -> None:
        output_folder.check_space(
            self.output,
            self.work,
            finished,
            self.options.cache_bytes,
            replaced=replaced,
            state_nbytes=self.scales.state_nbytes,
        )


WORKERS_OF_A_QUEUE = 2
MAX_QUEUES = 8  # shards that a crash may leave unfinished
READ_AHEAD_JOBS = 2  # for each worker


def spread(jobs: Sequence[Job]) -> list[Job]:
    """The jobs of one layer after the other, those of a layer dealt from its shards in turn.

    A packed adapter is held a layer at a time, so all workers convert the same layer; and those
    that write to one file wait for each other.
    """
    found: list[Job] = []
    for _, layer in groupby(jobs, key=lambda job: job.members[0].role.layer):
        by_shard: dict[int, list[Job]] = {}
        for job in layer:
            by_shard.setdefault(job.shard, []).append(job)
        places = [
            ((place + 0.5) / len(each), job)
            for each in by_shard.values()
            for place, job in enumerate(each)
        ]
        found += [job for _, job in sorted(places, key=itemgetter(0))]
    return found


def queue_count(workers: int, *, in_order: bool) -> int:
    """How many queues the jobs are dealt into for so many workers."""
    return 1 if in_order else max(1, min(MAX_QUEUES, workers // WORKERS_OF_A_QUEUE))


class Scheduler:
    """Hands out the places of jobs in `jobs`: a few shards at a time, each from front to back.

    Workers that write to one file wait for each other. So shards are dealt out to several queues in
    turn; a worker takes from its own, and from the longest one when its own is empty. One queue
    keeps the plan's order, in which a remote source's shards are fetched; it also suits two workers
    best. Shared by threads.
    """

    def __init__(self, jobs: Sequence[Job], *, workers: int, queues: int) -> None:
        shards = dict.fromkeys(job.shard for job in jobs)
        queue_of = {shard: place % queues for place, shard in enumerate(shards)}
        self._queues: list[list[int]] = [[] for _ in range(queues)]
        for place, job in enumerate(jobs):
            self._queues[queue_of[job.shard]].append(place)
        self._taken = [0] * queues
        self._ahead = -(-workers // queues) * READ_AHEAD_JOBS
        self._lock = threading.Lock()

    def take(self, worker: int) -> tuple[int, int | None] | None:
        """(a job, one to read ahead or None) for a worker, numbered from 0; None at the end."""
        with self._lock:
            number = worker % len(self._queues)
            if not self._left(number):
                number = max(range(len(self._queues)), key=self._left)
            if not self._left(number):
                return None
            taken, places = self._taken[number], self._queues[number]
            self._taken[number] += 1
            ahead = taken + self._ahead
            return places[taken], places[ahead] if ahead < len(places) else None

    def _left(self, number: int) -> int:
        return len(self._queues[number]) - self._taken[number]


class _Meter:
    """Adds up bytes from many threads and reports in steps."""

    def __init__(self, report: Callable[[Progress], None] | None, total: int) -> None:
        self._report = report
        self._total = total
        self._step = min(REPORT_STEP_BYTES, total // REPORT_STEPS)
        self._done = 0
        self._reported = 0
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            due = self._done - self._reported >= self._step or self._done == self._total
            if due:
                self._reported = self._done
            done = self._done
        if due and self._report is not None:
            self._report(Progress(done_nbytes=done, total_nbytes=self._total))


SMALL_BYTES = 1 << 20
ROUTER_BYTES = 64 << 20
COMPARE_BYTES = 1 << 22


def check_small_tensors(checkpoint: Checkpoint, work: Work) -> None:
    """Raise `TensorError` for a non-finite value in a small tensor, or a head that should equal the
    embeddings and does not.

    So a broken norm in the last layer is found in the first second. Large weights come later.
    """
    small = []
    for job in work.jobs:
        role, spec = job.members[0].role.role, job.members[0].source.spec
        limit = ROUTER_BYTES if role is Role.ROUTER else SMALL_BYTES
        floats = role is not Role.EXTRA and spec.dtype in FLOAT_SOURCES  # a repair copies codes too
        if job.kind is JobKind.COPY and floats and spec.nbytes <= limit:
            small.append((spec, 0, spec.nbytes))
    for (spec, _, _), data in zip(small, checkpoint.peek_many(small), strict=True):
        found = cpu.amax(memoryview(data), spec.dtype)
        if found.nonfinite:
            raise TensorError(
                f"{spec.file}: {spec.name} holds {found.nonfinite} NaN or infinite values (first"
                f" at element {found.first_nonfinite}); repair the source, such a model cannot be"
                " served"
            )
    if work.config.tie_word_embeddings and "lm_head.weight" in checkpoint.tensors:
        _check_tied(checkpoint)


def _check_tied(checkpoint: Checkpoint) -> None:
    head = checkpoint.spec("lm_head.weight")
    embedding = checkpoint.spec("model.embed_tokens.weight")
    same = head.dtype == embedding.dtype and head.shape == embedding.shape
    for start in range(0, head.nbytes if same else 0, COMPARE_BYTES):
        size = min(COMPARE_BYTES, head.nbytes - start)
        a, b = checkpoint.peek_many([(head, start, size), (embedding, start, size)])
        if a != b:
            same = False
            break
    if not same:
        raise TensorError(
            "config.json ties the embeddings, but lm_head.weight differs from"
            " model.embed_tokens.weight; set tie_word_embeddings to false or remove the head"
        )
