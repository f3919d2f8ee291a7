"""Calibrate and convert in one pass over the source: the feed behind `quantize --data`.

In: a plan's jobs and `CalibrationOptions`. Out: shards, and the statistics from which their input
scales came.

One process reads each source byte once: the forward pass reads a layer, `StreamingConverter`
converts it from the same buffers, and its input scales are written when its last sample has left
it. What the forward pass never reads (the head, the last norm, tensors that are not Beam's) is left
to the scheduler, and so are earlier layers of a resumed run whose shards were not finished. The
output has the same bytes as `calibrate` followed by `quantize --calibration`.

Where the recipe rounds experts by their inputs (GPTQ), these are converted by a visitor of the same
pass, layer by layer, from the weights that the forward pass holds. A run that is resumed then
starts the pass again if the saved state lies behind experts that are not durable yet.

The pass saves its state in the output's state folder, so a killed run goes on from the last
layer saved there.

Under torchrun the pass runs with experts split over ranks. Where they are rounded by it, each rank
writes its own into whoever's shard (`visited_experts`), and taps all else of its own shards.
Otherwise the conversion comes after the pass, split by shards: a shard's experts have passed other
ranks by then, so the source is read twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from beamq.beam.tensors import Role
from beamq.calib.expert_rounding import Group, RoundedGroup
from beamq.calib.input_scales import input_scales
from beamq.calib.options import CalibrationEvents, CalibrationOptions
from beamq.calib.setup import CalibrationSetup
from beamq.calib.statistics import CalibrationStats, run_digest, save_stats
from beamq.convert.cpu_worker import Worker, WorkerFactory
from beamq.convert.input_scales import Feed, KnownScales, from_statistics
from beamq.convert.open_shards import (
    JobResult,
    OpenShards,
    f32_bytes,
    write_input_scale,
    write_whole,
)
from beamq.errors import UsageError
from beamq.io.checkpoint import Checkpoint
from beamq.io.journal import CALIBRATION, STATE_DIR
from beamq.io.safetensors_header import TensorSpec
from beamq.io.shard_writer import ShardWriter
from beamq.plan.plan import Job, Plan, Work
from beamq.ranks import Ranks

if TYPE_CHECKING:
    from beamq.calib.run import LayerDone, RoundingRequest


class OnePass:
    """A `InputScaleProvider` and its own `Feed`.

    Made once options are checked: it loads the data and looks for the device. `statistics` is a
    file to save them in as well.
    """

    key = "calibration"

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        output: Path,
        options: CalibrationOptions,
        ranks: Ranks,
        factory: WorkerFactory,
        *,
        statistics: Path | None,
        events: CalibrationEvents,
    ) -> None:
        self._method = plan.recipe.expert_method
        if self._method is not None:
            _check_exact(plan, options)
        self._setup = CalibrationSetup(
            checkpoint,
            options,
            ranks,
            rounds_experts=self._method is not None,
            waiting_nbytes=_waiting_nbytes(plan, options.dtype),
            taken_nbytes=factory.device_nbytes,
        )
        self._plan = plan
        self._factory = factory
        self._output = output
        self._state_folder = output / STATE_DIR / CALIBRATION
        self._statistics = statistics
        self._on_layer = events.on_layer
        self._known: KnownScales | None = None
        self.state_nbytes = self._setup.state_nbytes
        self.calibrated: tuple[int, int] | None = None
        self.stats: CalibrationStats | None = None
        self.digest = run_digest(
            self._setup.fingerprint, options.experts, [self._setup.data_record()]
        )
        if ranks.first:
            events.on_start(self._setup)

    @property
    def feed(self) -> Feed:
        """This."""
        return self

    @property
    def record(self) -> Mapping[str, Any]:
        """What the manifest says of the scales."""
        return self._after_the_pass().record

    @property
    def files(self) -> Mapping[str, str]:
        """Texts to keep beside the weights."""
        return self._after_the_pass().files

    def of(self, module: str) -> float:
        """The scale of one linear. Raises `CalibrationError` for one that was not looked at."""
        return self._after_the_pass().of(module)

    def check_resumed(self) -> None:
        """See `InputScaleProvider`."""
        from beamq.calib.state import RunState  # torch, only where a model runs

        RunState(self._state_folder, self._setup.identity()).check_options()

    def _after_the_pass(self) -> KnownScales:
        if self._known is None:
            raise RuntimeError("input scales were asked for before the calibration was run")
        return self._known

    def run(
        self,
        jobs: Sequence[Job],
        shards: OpenShards,
        *,
        advance: Callable[[int], None],
        stop: threading.Event,
    ) -> Set[int]:
        """See `Feed`."""

        ranks = self._setup.ranks
        experts: ExpertWriter | None = None
        converter: StreamingConverter | None = None
        with ranks.talking():
            if self._method is not None:
                experts = ExpertWriter(
                    self._plan, jobs, shards, output=self._output, ranks=ranks, advance=advance
                )
            if ranks.world == 1 or experts is not None:
                converter = StreamingConverter(
                    [job for job in jobs if experts is None or not is_visited(job)],
                    shards,
                    self._factory,
                    scales=self._plan.scales,
                    advance=advance,
                    stopped=stop.is_set,
                )
            stats = self._pass(converter, experts, stop)
        self._known, self.stats = from_statistics(self._plan, stats), stats
        self.calibrated = self._plan.config.num_layers, self._plan.config.num_layers
        done = frozenset() if converter is None else frozenset(converter.done)
        return done if experts is None else done | experts.done

    def _visit(self, experts: ExpertWriter | None, stop: threading.Event) -> RoundingRequest | None:
        """Experts to round by their inputs, if there are any left."""
        if experts is None or not experts.wanted:
            return None
        from beamq.calib.run import RoundingRequest

        return RoundingRequest(
            wanted=experts.wanted,
            method=str(self._method),
            write=experts.put,
            stopped=stop.is_set,
        )

    def _pass(
        self,
        converter: StreamingConverter | None,
        experts: ExpertWriter | None,
        stop: threading.Event,
    ) -> CalibrationStats:
        from beamq.calib.run import CalibrationPass
        from beamq.calib.state import RunState

        setup, ranks = self._setup, self._setup.ranks
        state = RunState(self._state_folder, setup.identity())
        converters = [each for each in (converter, experts) if each is not None]

        def after(done: LayerDone) -> None:
            self.calibrated = done.layer + 1, done.layers
            if converters:
                scales = input_scales(done.stats, self._plan.config)
                for converter in converters:
                    converter.finish_layer(done.layer, lambda module: float(scales.scale(module)))
            if ranks.first:
                self._on_layer(done)

        if ranks.first:
            state.begin(resume=True)
        ranks.gather(None)  # nobody looks for a state before it is there
        stats = CalibrationPass(
            setup,
            state,
            tap=None if converter is None else converter.tap,
            after=after,
            rounding=self._visit(experts, stop),
            passed=None if converter is None else converter.passed,
            stopped=stop.is_set,
        ).run()
        if ranks.first:
            state.save_final(stats)
            if self._statistics is not None:
                save_stats(stats, self._statistics)
        return stats


def _waiting_nbytes(plan: Plan, dtype: str) -> int:
    """Upper bound of what `StreamingConverter` adds in buffers that wait for a partner's.

    Those are of members that are cast on loading; all others lie in the loader's own. Partners are
    neighbours in the loader's list, of which it deals out `TAP_PLACES` stretches: of experts one
    group waits for each stretch and each reader, of all else one of each kind in a layer.
    """
    from beamq.model.loader import (
        TAP_PLACES,  # torch, only where a model runs
        reader_count,
    )

    as_stored = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    experts = 0
    others: dict[int | None, int] = {}
    for job in plan.jobs:
        role, largest = job.members[0].role, max(m.source.nbytes for m in job.members)
        waits = job.source_nbytes - largest
        if all(member.source.spec.dtype == as_stored for member in job.members):
            continue
        if role.role is Role.EXPERT:
            experts = max(experts, waits)
        else:
            others[role.layer] = others.get(role.layer, 0) + waits
    return experts * (reader_count() + TAP_PLACES) + max(others.values(), default=0)


def _check_exact(plan: Plan, options: CalibrationOptions) -> None:
    """Raise `UsageError` where experts cannot be rounded from what the forward pass holds."""
    for job in plan.jobs:
        for member in job.members:
            dtype = member.source.spec.dtype
            if member.role.role is Role.EXPERT and dtype != "BF16" and options.dtype != "float32":
                raise UsageError(
                    f"{member.role.name} is {dtype}, which activations in {options.dtype} would"
                    f" round; recipe {plan.recipe.name} then needs --dtype float32"
                )
    if plan.remote_shards and options.max_device_memory is not None:
        raise UsageError(
            f"recipe {plan.recipe.name} may read experts twice where --max-device-memory is small;"
            " download the source first"
        )


# Convert what a forward pass reads: jobs run on the bytes that its loader has just fetched.
#
# In: every tensor the loader reads, as stored (`tap`), and a layer's input scales once its
# statistics are complete (`finish_layer`). Out: the same bytes in the same shards as the crew's.
#
# The one idea: the codes of a weight do not depend on calibration, only `input_scale` does. So a
# job runs in the reader thread that brings its last member, on the core whose cache holds it (or
# on the GPU, straight from the page-locked buffers that the pass itself uploads from), and ends
# when its four-byte scales are written a layer later. Reading and converting layer L + 1 overlap
# the forward pass of layer L, and no byte is read twice. Progress follows the pass, which takes
# the time: bytes of a layer count as its batches pass it (`passed`).
#
# Members that arrive before their partners (gate before up; q, k, v before the attention gate)
# stay where the loader has put them: partners are of one unit of loading, whose buffers live
# until all of it is read. Only what is cast on loading has a buffer of its own, which lives that
# much longer.


class StreamingConverter:
    """Converts `jobs` as their bytes come by. `done` has the `id` of each finished job."""

    def __init__(
        self,
        jobs: Sequence[Job],
        shards: OpenShards,
        factory: WorkerFactory,
        *,
        scales: str,
        advance: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.done: set[int] = set()
        self._jobs = jobs
        self._shards = shards
        self._new_worker = factory.worker
        self._scales = scales
        self._advance = advance
        self._stopped = stopped
        self._lock = threading.Lock()
        self._own = threading.local()
        self._held: dict[int, dict[int, memoryview]] = {}
        self._late: dict[int, list[tuple[Job, JobResult]]] = {}
        self._converted: dict[int, int] = {}  # source bytes by layer
        self._told: dict[int, int] = {}
        # By tensor: the byte ranges of it that are members, as (begin, end, job, member).
        self._places: dict[str, list[tuple[int, int, int, int]]] = {}
        for index, job in enumerate(jobs):
            for number, member in enumerate(job.members):
                source = member.source
                place = (source.start, source.start + source.nbytes, index, number)
                self._places.setdefault(source.spec.name, []).append(place)

    def tap(self, spec: TensorSpec, first: int, tensor: torch.Tensor) -> None:
        """See `model.fill.Tap`. Raises what converting raises (`TensorError`, `DiskError`, ...)."""
        places = self._places.get(spec.name)
        if not places:
            return
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        data = memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
        base = first * (spec.nbytes // spec.shape[0]) if spec.shape else 0
        arrived: dict[int, dict[int, memoryview]] = {}
        for begin, end, index, number in places:
            if base <= begin and end <= base + data.nbytes:
                arrived.setdefault(index, {})[number] = data[begin - base : end - base]
        for index, views in arrived.items():
            self._arrive(index, views)

    def finish_layer(self, layer: int, input_scale: Callable[[str], float]) -> None:
        """Write what the layer's jobs lack; they are then finished."""
        for job, result in self._late.pop(layer, ()):
            writer = self._shards.writer(job.shard)
            for member in job.members:
                write_input_scale(member, input_scale, writer, result)
            self._finish(job, result)
        self.passed(layer, 1.0)

    def passed(self, layer: int, share: float) -> None:
        """That share (0 to 1) of the batches has passed the layer: count as much of its bytes."""
        with self._lock:
            due = int(share * self._converted.get(layer, 0)) - self._told.get(layer, 0)
            if due > 0:
                self._told[layer] = self._told.get(layer, 0) + due
        if due > 0:
            self._advance(due)

    def _arrive(self, index: int, views: dict[int, memoryview]) -> None:
        job = self._jobs[index]
        with self._lock:
            held = self._held.setdefault(index, {})
            held.update(views)
            if len(held) < len(job.members):
                return
            del self._held[index]
        self._run(job, [held[number] for number in range(len(job.members))])

    def _run(self, job: Job, views: Sequence[memoryview]) -> None:
        result = self._worker().run(job, self._shards.writer(job.shard), views)
        layer = job.members[0].role.layer
        if layer is None:
            self._advance(job.source_nbytes)
        else:
            with self._lock:
                self._converted[layer] = self._converted.get(layer, 0) + job.source_nbytes
        if job.kind == "nvfp4" and layer is not None:
            with self._lock:
                self._late.setdefault(layer, []).append((job, result))
        else:
            self._finish(job, result)

    def _finish(self, job: Job, result: JobResult) -> None:
        self._shards.add(job, result)
        with self._lock:
            self.done.add(id(job))

    def _worker(self) -> Worker:
        """This thread's own."""
        worker: Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            worker = self._own.worker = self._new_worker(
                scales=self._scales,
                input_scale=None,
                stopped=self._stopped,
                advance=lambda nbytes: None,  # told as the layer is passed
            )
        return worker


# Experts that a forward pass rounds, written by the process that has them.
#
# In: scale groups as `calib.expert_rounding` makes them (`put`), and a layer's input scales
# (`finish_layer`). Out: their bytes in the shards, and results for the shards' owners.
#
# The one idea: every byte has its place before the run, so a process may write into a shard that
# is not its own. Shards belong to ranks and experts do too, but not alike; so the owners create
# their shards first, and then each rank writes what it has rounded where it belongs, whoever's
# file it is. At the layer's end it makes that durable and tells the owners the checksums; who
# owns a shard still records and names it, when all of it is in.
#
# With one process all shards are its own, and nothing is exchanged. Limits: all processes see one
# output folder, as they must anyway.

Key = tuple[int, Group]
"""A layer, and a scale group of its experts."""


class ExpertWriter:
    """`wanted` has, by layer, the groups still to be rounded, at every rank the same. `done` has
    the `id` of each finished job of this rank's shards."""

    def __init__(
        self,
        work: Work,
        jobs: Sequence[Job],
        shards: OpenShards,
        *,
        output: Path,
        ranks: Ranks,
        advance: Callable[[int], None],
    ) -> None:
        """`jobs` are this rank's. All ranks make theirs at the same time."""
        self.done: set[int] = set()
        self.wanted: dict[int, set[Group]] = {}
        self._work = work
        self._shards = shards
        self._output = output
        self._ranks = ranks
        self._advance = advance
        self._lock = threading.Lock()
        self._foreign: dict[int, ShardWriter] = {}
        self._late: dict[int, list[tuple[Key, JobResult]]] = {}
        self._own = {job.shard for job in jobs if is_visited(job)}
        if ranks.world > 1:
            for shard in sorted(self._own):
                shards.writer(shard)  # there before another rank opens it
        unfinished = set().union(*ranks.gather(self._own))
        self._jobs = {
            _key(job): job for job in work.jobs if is_visited(job) and job.shard in unfinished
        }
        for layer, group in self._jobs:
            self.wanted.setdefault(layer, set()).add(group)

    def put(self, layer: int, group: Group, rounded: RoundedGroup) -> None:
        """Write a scale group; its input scales are still to come. Any thread may call."""
        job = self._jobs[layer, group]
        writer, result = self._writer(job.shard), JobResult()
        result.zero_blocks, result.underflow_blocks = rounded.zero_blocks, rounded.underflow_blocks
        if rounded.amax == 0.0:
            result.zero_groups.append(job.group)
        first = 0
        for member in job.members:
            rows = slice(first, first + member.source.shape[0])
            first = rows.stop
            contents = (_bytes(rounded.codes[rows]), _bytes(rounded.block_scale[rows]))
            scale = f32_bytes(rounded.global_scale)
            for tensor, content in zip(member.outputs[:3], (*contents, scale), strict=True):
                write_whole(writer, tensor, content, result)
        if job.shard in self._own:
            self._advance(job.source_nbytes)
        with self._lock:
            self._late.setdefault(layer, []).append(((layer, group), result))

    def finish_layer(self, layer: int, input_scale: Callable[[str], float]) -> None:
        """Write what the layer's groups lack; then they are finished, whoever rounded them.

        All ranks call this for the same layers.
        """
        if layer not in self.wanted:
            return
        late = self._late.pop(layer, [])
        for key, result in late:
            job = self._jobs[key]
            for member in job.members:
                write_input_scale(member, input_scale, self._writer(job.shard), result)
        for writer in self._foreign.values():
            writer.sync()
        self._foreign.clear()
        for rank, found in enumerate(self._ranks.gather(late)):
            for key, result in found:
                job = self._jobs[key]
                if job.shard in self._own:
                    self._shards.add(job, result)
                    self.done.add(id(job))
                    self._advance(job.source_nbytes if rank != self._ranks.rank else 0)

    def _writer(self, shard: int) -> ShardWriter:
        if shard in self._own:
            return self._shards.writer(shard)
        with self._lock:
            if shard not in self._foreign:
                self._foreign[shard] = ShardWriter(
                    self._output, self._work.shards[shard], create=False
                )
            return self._foreign[shard]


def is_visited(job: Job) -> bool:
    """Whether a job is left for the visitor, where there is one: experts in NVFP4."""
    return job.kind == "nvfp4" and job.members[0].role.role is Role.EXPERT


def _key(job: Job) -> Key:
    role = job.members[0].role
    if role.layer is None or role.expert is None:
        raise RuntimeError(f"{role.name}: an expert without a place")
    return role.layer, (role.expert, "down_proj" if role.proj == "down_proj" else "gate_up")


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).numpy())  # type: ignore[arg-type]
