"""Convert what a forward pass reads: jobs run on the bytes that its loader has just fetched.

In: every tensor the loader reads, as stored (`tap`), and a layer's input scales once its
statistics are complete (`finish_layer`). Out: the same bytes in the same shards as the crew's.

The one idea: the codes of a weight do not depend on calibration, only `input_scale` does. So a
job runs in the reader thread that brings its last member, on the core whose cache holds it, and
ends when its four-byte scales are written a layer later. Reading and converting layer L + 1
overlap the forward pass of layer L, and no byte is read twice.

Experts that are rounded by their inputs (`calib.expert_rounding`) come another way: not tapped, but
handed over by `put` when they are rounded, before their layer ends.

Members that arrive before their partners (gate before up; q, k, v before the attention gate)
are copied. Partners are neighbours in the loader's list, so at most one group for each reader
thread waits; that is the memory this adds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from beamq.calib.expert_rounding import Group, RoundedGroup
from beamq.checkpoint import Checkpoint
from beamq.conversion.buffer_pool import BufferPool
from beamq.conversion.cpu_engine import CpuEngine
from beamq.conversion.open_shards import OpenShards
from beamq.conversion.sinks import JobResult, f32_bytes, write_input_scale, write_whole
from beamq.header import TensorSpec
from beamq.plan import Job
from beamq.roles import Role


class TapEngine:
    """Converts `jobs` as their bytes come by. `done` has the `id` of each finished job."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        jobs: Sequence[Job],
        shards: OpenShards,
        *,
        scales: str,
        visited: bool,
        advance: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> None:
        """With `visited`, experts in NVFP4 are left for `put`; `wanted` says which those are."""
        self.done: set[int] = set()
        self.wanted: dict[int, set[Group]] = {}
        self._visited: dict[tuple[int, Group], Job] = {}
        self._checkpoint = checkpoint
        self._jobs = jobs
        self._shards = shards
        self._scales = scales
        self._advance = advance
        self._stopped = stopped
        self._lock = threading.Lock()
        self._engines = threading.local()
        self._held: dict[int, dict[int, memoryview]] = {}
        self._late: dict[int, list[tuple[Job, JobResult]]] = {}
        # By tensor: the byte ranges of it that are members, as (begin, end, job, member).
        self._places: dict[str, list[tuple[int, int, int, int]]] = {}
        for index, job in enumerate(jobs):
            role = job.members[0].role
            if visited and job.kind == "nvfp4" and role.role is Role.EXPERT:
                self._leave_for_visit(job)
                continue
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

    def put(self, layer: int, group: Group, rounded: RoundedGroup) -> None:
        """Write a scale group that was rounded elsewhere; its input scales are still to come."""
        job = self._visited[layer, group]
        writer, result = self._shards.writer(job.shard), JobResult()
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
        self._advance(job.source_nbytes)
        with self._lock:
            self._late.setdefault(layer, []).append((job, result))

    def _leave_for_visit(self, job: Job) -> None:
        role = job.members[0].role
        if role.layer is None or role.expert is None:
            raise RuntimeError(f"{role.name}: an expert without a place")
        group = (role.expert, "down_proj" if role.proj == "down_proj" else "gate_up")
        self.wanted.setdefault(role.layer, set()).add(group)
        self._visited[role.layer, group] = job

    def finish_layer(self, layer: int, input_scale: Callable[[str], float]) -> None:
        """Write what the layer's jobs lack; they are then finished."""
        for job, result in self._late.pop(layer, ()):
            writer = self._shards.writer(job.shard)
            for member in job.members:
                write_input_scale(member, input_scale, writer, result)
            self._finish(job, result)

    def _arrive(self, index: int, views: dict[int, memoryview]) -> None:
        job = self._jobs[index]
        with self._lock:
            held = self._held.get(index, {})
            complete = len(held) + len(views) == len(job.members)
        if not complete:
            # The loader's buffers are its own once the tap returns.
            views = {number: memoryview(bytes(view)) for number, view in views.items()}
        with self._lock:
            held = self._held.setdefault(index, {})
            held.update(views)
            if len(held) < len(job.members):
                return
            del self._held[index]
        self._run(job, [held[number] for number in range(len(job.members))])

    def _run(self, job: Job, views: Sequence[memoryview]) -> None:
        result = self._engine().run(job, self._shards.writer(job.shard), views)
        layer = job.members[0].role.layer
        if job.kind == "nvfp4" and layer is not None:
            with self._lock:
                self._late.setdefault(layer, []).append((job, result))
        else:
            self._finish(job, result)

    def _finish(self, job: Job, result: JobResult) -> None:
        self._shards.add(job, result)
        with self._lock:
            self.done.add(id(job))

    def _engine(self) -> CpuEngine:
        """This thread's own."""
        engine: CpuEngine | None = getattr(self._engines, "engine", None)
        if engine is None:
            engine = self._engines.engine = CpuEngine(
                self._checkpoint,
                BufferPool(0),  # nothing is read here, so nothing is needed
                scales=self._scales,
                input_scale=None,
                stopped=self._stopped,
                advance=self._advance,
            )
        return engine


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).numpy())  # type: ignore[arg-type]
