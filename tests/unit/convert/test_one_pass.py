"""Experts that one rank rounds and another one owns: durable before the owner hears of them.
Members of a scale group that arrive in any order are converted in the plan's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beamq.calib.expert_rounding import RoundedGroup
from beamq.convert.cpu_worker import JobContext
from beamq.convert.one_pass import ExpertWriter, StreamingConverter, is_rounded
from beamq.convert.open_shards import JobResult
from beamq.io.checkpoint import open_checkpoint
from beamq.io.safetensors_header import TensorSpec
from beamq.io.shard_writer import PARTIAL, ShardWriter
from beamq.plan.plan import Job, make_plan
from beamq.ranks import Ranks


class SecondRank(Ranks):
    """Rank 1 of 2, next to a rank 0 that owns the shards `owned` and rounds nothing."""

    def __init__(self, owned: set[int], events: list[str]) -> None:
        super().__init__(rank=1, world=2)
        self._owned = owned
        self._events = events

    def gather(self, item: Any) -> list[Any]:
        self._events.append("gather")
        return [self._owned if isinstance(item, set) else [], item]


def rounded(n: int, k: int) -> RoundedGroup:
    return RoundedGroup(
        codes=torch.full((n, k // 2), 0x21, dtype=torch.uint8),
        block_scale=torch.full((n, k // 16), 0x38, dtype=torch.uint8),
        global_scale=0.5,
        amax=1.0,
        zero_blocks=0,
        underflow_blocks=0,
    )


def test_experts_in_shards_of_others_are_durable_before_their_owners_hear(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may record and rename its shard as soon as it knows the checksums. Where ranks are
    on several hosts, its own flush does not cover what this one still holds in memory."""
    plan = make_plan(beam_nano, "nvfp4-gptq", max_shard_bytes=100_000)
    jobs = [job for job in plan.jobs if is_rounded(job) and job.members[0].role.layer == 3]
    owned = {job.shard for job in jobs}
    for shard in owned:
        ShardWriter(tmp_path, plan.shards[shard])
    events: list[str] = []
    genuine = {"pwrite": os.pwrite, "fsync": os.fsync}

    def noted(name: str) -> Any:
        def call(descriptor: int, *rest: Any) -> Any:
            events.append(f"{name} {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
            return genuine[name](descriptor, *rest)

        return call

    for name in genuine:
        monkeypatch.setattr(os, name, noted(name))
    shards: Any = None  # none is this rank's own
    ranks = SecondRank(owned, events)
    writer = ExpertWriter(plan, [], shards, tmp_path, ranks, lambda nbytes: None)
    for job in jobs:
        role = job.members[0].role
        n = sum(member.source.shape[0] for member in job.members)
        group = "down_proj" if role.proj == "down_proj" else "gate_up"
        writer.put(3, (role.expert or 0, group), rounded(n, job.members[0].source.shape[1]))
    writer.finish_layer(3, lambda module: 0.25)
    assert events.count("gather") == 2
    told = len(events) - 1 - events[::-1].index("gather")
    assert len(owned) > 2
    for shard in owned:
        name = plan.shards[shard].name + PARTIAL
        last_write = max(n for n, event in enumerate(events) if event == f"pwrite {name}")
        assert f"fsync {name}" in events[last_write:told], name


def test_members_that_arrive_in_any_order_are_converted_in_the_plans(
    beam_nano: Path,
) -> None:
    """Reader threads bring gate after up now and then: codes must not change places."""
    seen: dict[int, list[bytes]] = {}

    class Recorder:
        def run(self, job: Job, shard: object, views: Sequence[memoryview]) -> JobResult:
            seen[job.index] = [bytes(view) for view in views]
            return JobResult()

    factory: Any = SimpleNamespace(worker=lambda context: Recorder())
    shards: Any = SimpleNamespace(writer=lambda shard: None, add=lambda job, result: None)
    context = JobContext(
        scale_rule="max", input_scale=None, stopped=lambda: False, advance=lambda nbytes: None
    )
    with open_checkpoint(beam_nano) as checkpoint:
        jobs = [job for job in make_plan(checkpoint, "nvfp4-all").jobs if len(job.members) > 1]
        stored: dict[int, list[bytes]] = {}
        specs: list[TensorSpec] = []
        for job in jobs:
            own = [member.source.spec for member in job.members]
            stored[job.index] = [bytes(checkpoint.read(spec.name)) for spec in own]
            specs += own
        converter = StreamingConverter(jobs, shards, factory, context)
        for spec in reversed(specs):
            data = torch.frombuffer(bytearray(checkpoint.read(spec.name)), dtype=torch.bfloat16)
            converter.tap(spec, 0, data.view(spec.shape))
    assert seen == stored
