"""Convert what a forward pass reads: jobs run on the bytes that its loader has just fetched.

In: every tensor the loader reads, as stored (`tap`), and a layer's input scales once its
statistics are complete (`finish_layer`). Out: the same bytes in the same shards as the crew's.

The one idea: the codes of a weight do not depend on calibration, only `input_scale` does. So a
job runs in the reader thread that brings its last member, on the core whose cache holds it (or on
the GPU, straight from the page-locked buffers that the pass itself uploads from), and ends when its
four-byte scales are written a layer later. Reading and converting layer L + 1 overlap the forward
pass of layer L, and no byte is read twice. Progress follows the pass, which takes the time: bytes
of a layer count as its batches pass it (`passed`).

Members that arrive before their partners (gate before up; q, k, v before the attention gate) stay
where the loader has put them: partners are of one unit of loading, whose buffers live until all of
it is read. Only what is cast on loading has a buffer of its own, which lives that much longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from beamq.conversion.engines import Engine, Engines
from beamq.conversion.open_shards import OpenShards
from beamq.conversion.sinks import JobResult, write_input_scale
from beamq.header import TensorSpec
from beamq.plan import Job


class TapEngine:
    """Converts `jobs` as their bytes come by. `done` has the `id` of each finished job."""

    def __init__(
        self,
        jobs: Sequence[Job],
        shards: OpenShards,
        engines: Engines,
        *,
        scales: str,
        advance: Callable[[int], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.done: set[int] = set()
        self._jobs = jobs
        self._shards = shards
        self._new_engine = engines.engine
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
        result = self._engine().run(job, self._shards.writer(job.shard), views)
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

    def _engine(self) -> Engine:
        """This thread's own."""
        engine: Engine | None = getattr(self._own, "engine", None)
        if engine is None:
            engine = self._own.engine = self._new_engine(
                scales=self._scales,
                input_scale=None,
                stopped=self._stopped,
                advance=lambda nbytes: None,  # told as the layer is passed
            )
        return engine
