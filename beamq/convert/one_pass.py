"""Calibrate and convert in one pass over the source, for `quantize` without given scales.

In: a plan's jobs and `CalibrationOptions`. Out: shards, and the statistics from which their input
scales come (`OnePass`). The output has the same bytes as `calibrate` followed by `quantize
--calibration`.

The one idea: the codes of a weight do not depend on the calibration, only its `input_scale` does.
The forward pass reads a layer once, `StreamingConverter` converts it from the same buffers, and the
input scales are written when the layer's last sample has left it. The scheduler converts what the
forward pass never reads (the head, the last norm, tensors that are not Beam's), and the unfinished
shards of a resumed run's earlier layers.

Where the recipe rounds experts by their inputs (GPTQ), `ExpertWriter` writes them. A killed run
continues from the last saved layer, or starts again if rounded experts before it are not durable.

Under torchrun the pass splits experts over ranks. Where experts are rounded, each rank writes its
own, into shards of any rank. Otherwise the conversion follows the pass and reads the source again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path

import torch

from beamq.beam.tensors import Role
from beamq.calib.expert_rounding import Group, RoundedGroup, RoundingRequest
from beamq.calib.input_scales import input_scales
from beamq.calib.options import CalibrationOptions
from beamq.calib.run import CalibrationPass, CalibrationSetup, LayerDone
from beamq.calib.state import RunState
from beamq.calib.statistics import (
    CalibrationStats,
    run_digest,
    save_stats,
)
from beamq.convert.cpu_worker import JobContext, Worker, WorkerFactory
from beamq.convert.input_scales import InputScaleProvider, from_statistics
from beamq.convert.open_shards import JobResult, JobWriter, OpenShards, f32_bytes
from beamq.convert.options import ConvertOptions
from beamq.formats.numerics import tensor_bytes
from beamq.io.checkpoint import Checkpoint
from beamq.io.files import user_path
from beamq.io.journal import CALIBRATION, STATE_DIR
from beamq.io.safetensors_header import TensorSpec
from beamq.io.shard_writer import ShardWriter
from beamq.plan.plan import Job, JobKind, Nvfp4Outputs, Plan, Work
from beamq.ranks import Ranks


class OnePass(InputScaleProvider):
    """Input scales that are found during the run.

    Made once options are checked: it loads the data and looks for the device.
    """

    key = "calibration"

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        output: Path,
        options: ConvertOptions,
        ranks: Ranks,
        factory: WorkerFactory,
        *,
        on_start: Callable[[CalibrationSetup], None],
        on_layer: Callable[[LayerDone], None],
    ) -> None:
        how = CalibrationOptions(device=options.device, **options.calibration_given())
        self._method = plan.recipe.expert_method
        self._setup = CalibrationSetup(
            checkpoint,
            how,
            ranks,
            rounding=self._method,
            waiting_nbytes=_waiting_nbytes(plan, how.dtype),
            taken_nbytes=factory.device_nbytes,
        )
        digest = run_digest(self._setup.fingerprint, how.experts, [self._setup.data_record()])
        super().__init__(digest, known=None)
        self.state_nbytes = self._setup.state_nbytes
        self._plan = plan
        self._factory = factory
        self._output = output
        self._state_folder = output / STATE_DIR / CALIBRATION
        self._statistics = None if options.statistics is None else user_path(options.statistics)
        self._on_layer = on_layer
        if ranks.first:
            on_start(self._setup)

    def check_resumed(self) -> None:
        """See `InputScaleProvider`."""
        RunState(self._state_folder, self._setup.identity()).check_options()

    def convert_early(
        self, jobs: Sequence[Job], shards: OpenShards, context: JobContext
    ) -> Set[int]:
        """See `InputScaleProvider`."""
        ranks = self._setup.ranks
        experts: ExpertWriter | None = None
        streaming: StreamingConverter | None = None
        with ranks.talking():
            if self._method is not None:
                experts = ExpertWriter(
                    self._plan, jobs, shards, self._output, ranks, context.advance
                )
            if ranks.world == 1 or experts is not None:
                streamed = [job for job in jobs if experts is None or not is_rounded(job)]
                streaming = StreamingConverter(streamed, shards, self._factory, context)
            self.stats = self._calibrate(streaming, experts, context.stopped)
        known = from_statistics(self._plan, self.stats)
        held_out = [
            {"name": text.name, "rows": len(text.input_ids), "digest": text.digest}
            for text in self._setup.held_out
        ]
        if held_out:
            known = replace(known, record={**known.record, "held_out": held_out})
        self._known = known
        self.calibrated = self._plan.config.num_layers, self._plan.config.num_layers
        return {index for each in (streaming, experts) if each for index in each.done}

    def _calibrate(
        self,
        streaming: StreamingConverter | None,
        experts: ExpertWriter | None,
        stopped: Callable[[], bool],
    ) -> CalibrationStats:
        ranks = self._setup.ranks
        state = RunState(self._state_folder, self._setup.identity())
        converters = [each for each in (streaming, experts) if each is not None]

        def after(done: LayerDone) -> None:
            self.calibrated = done.layer + 1, done.layers
            if converters:
                headroom = self._plan.recipe.headroom
                scales = input_scales(done.stats, self._plan.config, headroom)
                for converter in converters:
                    converter.finish_layer(done.layer, lambda module: float(scales.scale(module)))
            if ranks.first:
                self._on_layer(done)

        if ranks.first:
            state.begin(resume=True)
        ranks.gather(None)  # no rank looks for a state before it is there
        rounding = None
        if experts is not None and experts.wanted:
            rounding = RoundingRequest(
                wanted=experts.wanted,
                method=str(self._method),
                headroom=self._plan.recipe.headroom,
                write=experts.put,
                stopped=stopped,
            )
        stats = CalibrationPass(
            self._setup,
            state,
            tap=None if streaming is None else streaming.tap,
            after=after,
            rounding=rounding,
            passed=None if streaming is None else streaming.passed,
            stopped=stopped,
        ).run()
        if ranks.first:
            state.save_final(stats)
            if self._statistics is not None:
                save_stats(stats, self._statistics)
        return stats


def _waiting_nbytes(plan: Plan, dtype: str) -> int:
    """Upper bound of the buffers that `StreamingConverter` adds: members waiting for partners.

    Only members that are cast on loading have buffers of their own. The loader's list is dealt out
    in `TAP_PLACES` stretches: of the experts, one group waits for each stretch and each reader; of
    all else, one of each kind in a layer.
    """
    from beamq.model.loader import TAP_PLACES, reader_count  # torch, only where a model runs

    as_stored = {"bfloat16": "BF16", "float32": "F32"}[dtype]
    experts = 0
    others: Counter[int | None] = Counter()
    for job in plan.jobs:
        role, largest = job.members[0].role, max(m.source.nbytes for m in job.members)
        waits = job.source_nbytes - largest
        if all(member.source.spec.dtype == as_stored for member in job.members):
            continue
        if role.role is Role.EXPERT:
            experts = max(experts, waits)
        else:
            others[role.layer] += waits
    return experts * (reader_count() + TAP_PLACES) + max(others.values(), default=0)


class StreamingConverter:
    """Converts `jobs` as their bytes come by, in the threads that read them for the forward pass.

    In: every tensor that the loader reads, as stored (`tap`), and a layer's input scales once its
    statistics are complete (`finish_layer`). A job runs in the thread that brings its last member,
    on the core whose cache holds it (or on the GPU, from the pass's page-locked buffers). It ends
    when its input scales are written, a layer later. So reading and converting layer L + 1 overlap
    the forward pass of layer L. Bytes of a layer count as its batches pass it (`passed`).

    `done` has the `Job.index` of each finished job.
    """

    def __init__(
        self, jobs: Sequence[Job], shards: OpenShards, factory: WorkerFactory, context: JobContext
    ) -> None:
        self.done: set[int] = set()
        self._jobs = {job.index: job for job in jobs}
        self._shards = shards
        self._factory = factory
        self._advance = context.advance
        # Input scales come a layer later, and progress as the layer is passed.
        self._context = replace(context, input_scale=None, advance=lambda nbytes: None)
        self._lock = threading.Lock()
        self._thread = threading.local()
        # Members wait here for their partners (gate for up; q, k, v for the attention gate), in
        # the loader's buffers, which live until all partners are read.
        self._held: dict[int, dict[int, memoryview]] = {}
        self._unscaled: dict[int, list[tuple[Job, JobResult]]] = {}  # by layer
        self._converted: Counter[int] = Counter()  # source bytes by layer
        self._reported: Counter[int] = Counter()
        # By tensor: the byte ranges of it that are members, as (begin, end, job, member).
        self._places: dict[str, list[tuple[int, int, int, int]]] = {}
        for job in jobs:
            for number, member in enumerate(job.members):
                source = member.source
                place = (source.start, source.start + source.nbytes, job.index, number)
                self._places.setdefault(source.spec.name, []).append(place)

    def tap(self, spec: TensorSpec, first: int, tensor: torch.Tensor) -> None:
        """See `model.loader.Tap`. Raises what converting raises (`TensorError`, `DiskError`)."""
        places = self._places.get(spec.name)
        if not places:
            return
        data = tensor_bytes(tensor.contiguous())
        base = first * (spec.nbytes // spec.shape[0]) if spec.shape else 0
        arrived: dict[int, dict[int, memoryview]] = {}
        for begin, end, index, number in places:
            if base <= begin and end <= base + data.nbytes:
                arrived.setdefault(index, {})[number] = data[begin - base : end - base]
        for index, views in arrived.items():
            self._arrive(self._jobs[index], views)

    def finish_layer(self, layer: int, input_scale: Callable[[str], float]) -> None:
        """Write the input scales of the layer's jobs; they are then finished."""
        for job, result in self._unscaled.pop(layer, ()):
            writer = self._shards.writer(job.shard)
            JobWriter(writer, result).write_input_scales(job, input_scale)
            self._finish(job, result)
        self.passed(layer, 1.0)

    def passed(self, layer: int, share: float) -> None:
        """That share (0 to 1) of the batches has passed the layer: count as much of its bytes."""
        with self._lock:
            due = int(share * self._converted[layer]) - self._reported[layer]
            if due > 0:
                self._reported[layer] += due
        if due > 0:
            self._advance(due)

    def _arrive(self, job: Job, views: dict[int, memoryview]) -> None:
        with self._lock:
            held = self._held.setdefault(job.index, {})
            held.update(views)
            if len(held) < len(job.members):
                return
            del self._held[job.index]
        views_in_order = [held[number] for number in range(len(job.members))]
        result = self._worker().run(job, self._shards.writer(job.shard), views_in_order)
        layer = job.members[0].role.layer
        if layer is None:
            self._advance(job.source_nbytes)
        else:
            with self._lock:
                self._converted[layer] += job.source_nbytes
        if job.kind is JobKind.NVFP4 and layer is not None:
            with self._lock:
                self._unscaled.setdefault(layer, []).append((job, result))
        else:
            self._finish(job, result)

    def _finish(self, job: Job, result: JobResult) -> None:
        self._shards.add(job, result)
        with self._lock:
            self.done.add(job.index)

    def _worker(self) -> Worker:
        worker: Worker | None = getattr(self._thread, "worker", None)
        if worker is None:
            worker = self._thread.worker = self._factory.worker(self._context)
        return worker


Key = tuple[int, Group]
"""A layer, and a scale group of its experts."""


class ExpertWriter:
    """Writes the experts that a forward pass rounds, from the process that rounded them.

    In: scale groups as `calib.expert_rounding` makes them (`put`), and a layer's input scales
    (`finish_layer`). Out: their bytes in the shards, and results for the owners of the shards.

    The one idea: every byte has its place before the run, so a rank may write into the shards of
    others. The owners create their shards first, and each rank writes the experts that it rounds.
    At the layer's end it makes these bytes durable and sends the owners the checksums; the owner
    of a shard records and renames it when all of it is in. All ranks see one output folder.

    `wanted` has, by layer, the groups still to be rounded, the same at every rank. `done` has the
    `Job.index` of each finished job of this rank's shards.
    """

    def __init__(
        self,
        work: Work,
        jobs: Sequence[Job],
        shards: OpenShards,
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
        self._unscaled: dict[int, list[tuple[Key, JobResult]]] = {}  # by layer
        self._own = {job.shard for job in jobs if is_rounded(job)}
        if ranks.world > 1:
            for shard in sorted(self._own):
                shards.writer(shard)  # there before another rank opens it
        unfinished = set().union(*ranks.gather(self._own))
        self._jobs = {
            _key(job): job for job in work.jobs if is_rounded(job) and job.shard in unfinished
        }
        for layer, group in self._jobs:
            self.wanted.setdefault(layer, set()).add(group)

    def put(self, layer: int, group: Group, rounded: RoundedGroup) -> None:
        """Write a scale group, all but its input scales. Any thread may call."""
        job = self._jobs[layer, group]
        out = JobWriter(self._writer(job.shard))
        result = out.result
        result.zero_blocks, result.underflow_blocks = rounded.zero_blocks, rounded.underflow_blocks
        result.swept_groups = int(rounded.swept)
        if rounded.amax == 0.0:
            result.zero_groups.append(job.group)
        first = 0
        for member in job.members:
            rows = slice(first, first + member.source.shape[0])
            first = rows.stop
            outputs = Nvfp4Outputs(*member.outputs)
            out.write(outputs.codes, tensor_bytes(rounded.codes[rows]))
            out.write(outputs.block_scale, tensor_bytes(rounded.block_scale[rows]))
            out.write(outputs.global_scale, f32_bytes(rounded.global_scale))
        if job.shard in self._own:
            self._advance(job.source_nbytes)
        with self._lock:
            self._unscaled.setdefault(layer, []).append(((layer, group), result))

    def finish_layer(self, layer: int, input_scale: Callable[[str], float]) -> None:
        """Write the input scales of the layer's groups; they are then finished, on every rank.

        All ranks call this for the same layers.
        """
        if layer not in self.wanted:
            return
        written = self._unscaled.pop(layer, [])
        for key, result in written:
            job = self._jobs[key]
            JobWriter(self._writer(job.shard), result).write_input_scales(job, input_scale)
        # Durable before the owners hear of it: they may record and rename the shard at once.
        for writer in self._foreign.values():
            writer.sync()
        self._foreign.clear()
        for rank, found in enumerate(self._ranks.gather(written)):
            for key, result in found:
                job = self._jobs[key]
                if job.shard in self._own:
                    self._shards.add(job, result)
                    self.done.add(job.index)
                    self._advance(job.source_nbytes if rank != self._ranks.rank else 0)

    def _writer(self, shard: int) -> ShardWriter:
        if shard in self._own:
            return self._shards.writer(shard)
        with self._lock:
            if shard not in self._foreign:
                layout = self._work.shards[shard]
                self._foreign[shard] = ShardWriter(self._output, layout, create=False)
            return self._foreign[shard]


def is_rounded(job: Job) -> bool:
    """Whether the pass rounds a job, where the recipe rounds experts: experts in NVFP4."""
    return job.kind is JobKind.NVFP4 and job.members[0].role.role is Role.EXPERT


def _key(job: Job) -> Key:
    role = job.members[0].role
    if role.layer is None or role.expert is None:
        raise RuntimeError(f"{role.name}: an expert without a place")
    return role.layer, (role.expert, "down_proj" if role.proj == "down_proj" else "gate_up")
