"""Experts that a forward pass rounds, written by the process that has them.

In: scale groups as `calib.expert_rounding` makes them (`put`), and a layer's input scales
(`finish_layer`). Out: their bytes in the shards, and results for the shards' owners.

The one idea: every byte has its place before the run, so a process may write into a shard that is
not its own. Shards belong to ranks and experts do too, but not alike; so the owners create their
shards first, and then each rank writes what it has rounded where it belongs, whoever's file it is.
At the layer's end it makes that durable and tells the owners the checksums; who owns a shard still
records and names it, when all of it is in.

With one process all shards are its own, and nothing is exchanged. Limits: all processes see one
output folder, as they must anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from beamq.calib.expert_rounding import Group, RoundedGroup
from beamq.conversion.open_shards import OpenShards
from beamq.conversion.sinks import JobResult, f32_bytes, write_input_scale, write_whole
from beamq.plan import Job, Work
from beamq.ranks import Ranks
from beamq.roles import Role
from beamq.shards import ShardWriter

Key = tuple[int, Group]
"""A layer, and a scale group of its experts."""


class VisitedExperts:
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
