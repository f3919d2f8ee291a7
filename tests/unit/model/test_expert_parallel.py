"""How processes divide a pass, and how what they saw is put together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from beamq.beam.config import BeamConfig
from beamq.calib.collector import LayerRecord, combine
from beamq.calib.statistics import InputStats
from beamq.model.expert_parallel import ExpertExchange, PipelinedReduce
from beamq.ranks import Ranks

QKV, DOWN = "layers.0.self_attn.qkv_gate", "layers.0.experts.down"


def chain(rank: int, config: BeamConfig, *, divided: bool = True) -> PipelinedReduce:
    return PipelinedReduce(Ranks(rank=rank, world=3), config, divided=divided)


def test_each_batch_and_expert_has_one_home(beam_nano: Path) -> None:
    config = BeamConfig.from_dict(json.loads((beam_nano / "config.json").read_text()))
    homes = [[chain(rank, config).mine(batch) for batch in range(7)] for rank in range(3)]
    assert np.array(homes).sum(0).tolist() == [1] * 7
    assert np.array(homes).sum(1).tolist() == [3, 2, 2]
    experts = [e for rank in range(3) for e in chain(rank, config).experts]
    assert experts == list(ExpertExchange(config).experts)
    assert all(chain(rank, config, divided=False).mine(4) for rank in range(3))


def record(rank: int) -> LayerRecord:
    down = np.where(np.arange(3) == rank, rank + 1, 0)
    return LayerRecord(
        layer=0,
        inputs={
            QKV: InputStats(amax=np.float32([2, 5, 3])[rank], rows=np.asarray(10 + rank)),
            DOWN: InputStats(amax=down.astype(np.float32), rows=down),
        },
        routed_tokens=np.array([1, 2, rank]),
        suspects={"q_proj": 1 + rank},
    )


def test_records_of_divided_batches_add_up() -> None:
    whole = combine([record(rank) for rank in range(3)])
    assert (whole.inputs[QKV].amax, whole.inputs[QKV].rows) == (5, 33)
    assert whole.inputs[QKV].amax.dtype == np.float32
    assert whole.inputs[DOWN].rows.tolist() == [1, 2, 3]
    assert whole.routed_tokens is not None
    assert whole.routed_tokens.tolist() == [3, 6, 3]
    assert whole.suspects == {"q_proj": 6}
