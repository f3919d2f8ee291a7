"""Recording is exact: against plain NumPy over everything that was shown, however it was cut up."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from beamq.beam.config import BeamConfig
from beamq.calib import collector as collect
from beamq.calib import collector as watch
from beamq.calib.collector import Collector, LayerRecord, TokenWatch, combine, segment_amax
from beamq.calib.options import CalibrationOptions
from beamq.calib.statistics import InputStats
from beamq.errors import CalibrationError, Interrupted, UsageError
from beamq.options import from_keywords

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def config() -> BeamConfig:
    """Eight experts in layer 1; layer 0 is dense."""
    return BeamConfig.from_dict(
        {
            "model_type": "beam",
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "rms_norm_eps": 1e-6,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": False,
            "max_position_embeddings": 8192,
            "dtype": "bfloat16",
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": None,
            },
        }
    )


def noise(rows: int, width: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(x: torch.Tensor) -> NDArray[np.float32]:
    return x.float().numpy()


def show_experts(
    collector: Collector, batches: Sequence[torch.Tensor], cuts: Sequence[Sequence[int]]
) -> LayerRecord:
    """Each batch's rows cut over the eight experts of layer 1, shown in two slices."""
    for x, offsets in zip(batches, cuts, strict=True):
        for first, end in ((0, 3), (3, 8)):
            part = offsets[first : end + 1]
            rows = x[part[0] : part[-1]]
            collector.expert_input(1, "down_proj", rows, first, [each - part[0] for each in part])
    collector.routing(1, torch.zeros(4, 8), torch.tensor([[0, 1], [7, 1]]), torch.zeros(2, 2))
    return collector.take(1)


CUTS = ((0, 5, 5, 9, 20, 30, 31, 31, 40), (0, 0, 0, 0, 40, 40, 40, 40, 40))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_amax_and_rows_of_experts_over_batches_and_slices(
    config: BeamConfig, dtype: torch.dtype
) -> None:
    batches = [noise(40, 32, dtype, seed) for seed in (1, 2)]
    record = show_experts(Collector(config, CPU), batches, CUTS)
    entry = record.inputs["layers.1.experts.down"]
    for expert in range(8):
        parts = [plain(x)[c[expert] : c[expert + 1]] for x, c in zip(batches, CUTS, strict=True)]
        seen = np.abs(np.concatenate(parts))
        assert entry.rows[expert] == len(seen)
        assert entry.amax[expert] == (seen.max() if seen.size else 0.0)
    assert record.routed_tokens is not None
    assert record.routed_tokens.tolist() == [1, 2, 0, 0, 0, 0, 0, 1]
    assert record.suspects == {}


def test_names_of_all_groups(config: BeamConfig) -> None:
    collector = Collector(config, CPU)
    for group, width in (("qkv_gate", 64), ("o_proj", 64), ("gate_up", 64), ("down_proj", 96)):
        collector.linear_input(0, group, noise(3, width))
    record = collector.take(0)
    assert list(record.inputs) == [
        "layers.0.self_attn.qkv_gate",
        "layers.0.self_attn.o",
        "layers.0.mlp.gate_up",
        "layers.0.mlp.down",
    ]
    assert all(entry.amax.shape == () and entry.rows == 3 for entry in record.inputs.values())
    assert record.routed_tokens is None
    assert collector.take(0).inputs == {}, "the next layer starts from nothing"


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("values", [(NAN,), (INF,), (-INF,), (INF, -INF, NAN)])
def test_rows_that_are_not_finite_are_left_out_whole(
    dtype: torch.dtype, values: tuple[float, ...]
) -> None:
    x, offsets = noise(50, 16, dtype), (0, 10, 10, 30, 31, 50)
    x[12, 0] = 1000.0
    for place, value in enumerate(values):
        x[12, 3 + place] = value
    x[30] = values[0]
    clean = np.abs(plain(x))
    clean[[12, 30]] = 0
    amax, bad = segment_amax(x, offsets)
    assert bad.tolist() == [0, 0, 1, 1, 0]
    expected = [clean[a:b].max() if b > a else 0.0 for a, b in itertools.pairwise(offsets)]
    assert amax.tolist() == [pytest.approx(value, abs=0) for value in expected]
    by_rows = collect._by_rows(x, offsets)  # what a GPU runs
    assert torch.equal(by_rows[0], amax)
    assert torch.equal(by_rows[1], bad)


def test_the_place_of_the_first_bad_input_is_named(config: BeamConfig) -> None:
    collector = Collector(config, CPU)
    x = noise(40, 32)
    x[7, 1] = NAN
    record = show_experts(collector, [x], CUTS[:1])
    assert record.suspects == {"model.layers.1.mlp.experts.2.down_proj": 1}
    assert record.inputs["layers.1.experts.down"].rows.tolist() == [5, 0, 3, 11, 10, 1, 0, 9]
    collector.linear_input(0, "qkv_gate", x)
    assert collector.take(0).suspects == {"model.layers.0.self_attn.q_proj": 1}


def test_every_expert_sees_every_token_when_asked(config: BeamConfig) -> None:
    collector = Collector(config, CPU, experts="all")
    x = noise(40, 32)
    for expert in range(8):
        collector.every_expert_input(1, "down_proj", x * (expert + 1), expert)
    entry = show_experts(collector, [100 * x], CUTS[:1]).inputs["layers.1.experts.down"]
    assert entry.rows.tolist() == [40] * 8
    assert entry.amax[3] == (x * 4).abs().max()


def test_tokens_of_each_domain(config: BeamConfig) -> None:
    """Over two batches of a layer, and again in the next layer."""
    collector = Collector(config, CPU)
    collector.tell_domains(np.array([0, 2, 2, 0, 1], dtype=np.uint16), 3)
    chosen = torch.tensor([[0, 1], [1, 2], [1, 7], [0, 3], [5, 0]])
    wanted = np.zeros((3, 8), dtype=int)
    wanted[0, [0, 1, 3]] = 2, 1, 1
    wanted[2, [1, 2, 7]] = 2, 1, 1
    wanted[1, [5, 0]] = 1, 1
    for layer in (1, 2):
        for rows in (slice(0, 2), slice(2, 5)):
            part = chosen[rows]
            collector.routing(layer, torch.zeros(len(part), 8), part, torch.ones(part.shape))
        found = collector.take(layer)
        assert found.domain_tokens is not None
        assert (found.domain_tokens == wanted).all()
        assert found.routed_tokens is not None
        assert (found.domain_tokens.sum(axis=0) == found.routed_tokens).all()
    both = combine([found, found]).domain_tokens
    assert both is not None
    assert (both == 2 * wanted).all()


def test_a_stop_ends_the_pass(config: BeamConfig) -> None:
    stop = threading.Event()
    collector = Collector(config, CPU, stopped=stop.is_set)
    collector.linear_input(0, "gate_up", noise(3, 64))
    stop.set()
    with pytest.raises(Interrupted):
        collector.linear_input(0, "down_proj", noise(3, 96))


def record_of(amax: list[float], rows: list[int], scalar: float) -> LayerRecord:
    return LayerRecord(
        layer=1,
        inputs={
            "layers.1.self_attn.o": InputStats(amax=np.array(scalar, np.float32),
                                               rows=np.array(9)),
            "layers.1.experts.down": InputStats(amax=np.array(amax, np.float32),
                                                rows=np.array(rows)),
        },
        routed_tokens=np.array([3, 4]),
        suspects={"model.layers.1.mlp.experts.0.down_proj": 1} if amax[0] else {},
    )  # fmt: skip


def test_ranks_are_put_together(config: BeamConfig) -> None:
    ours, theirs = record_of([2.0, 0.0], [3, 0], 7.0), record_of([0.0, 5.0], [0, 4], 7.0)
    del theirs.inputs["layers.1.self_attn.o"]
    whole = combine([ours, theirs])
    assert whole.inputs["layers.1.experts.down"].amax.tolist() == [2.0, 5.0]
    assert whole.inputs["layers.1.experts.down"].rows.tolist() == [3, 4]
    assert whole.inputs["layers.1.self_attn.o"].rows == 9
    assert whole.routed_tokens is not None
    assert whole.routed_tokens.tolist() == [6, 8]
    assert whole.suspects == {"model.layers.1.mlp.experts.0.down_proj": 1}
    assert combine([ours]) is ours


def look(tokens: TokenWatch, record: LayerRecord, hidden: list[torch.Tensor]) -> None:
    """As two ranks do, each with every other batch."""
    found: dict[int, torch.Tensor] = {}
    for rank in (1, 0):
        found |= tokens.bad_tokens({n: h for n, h in enumerate(hidden) if n % 2 == rank})
    tokens.look(record, found)


def test_bad_tokens_are_named_once_and_counted(config: BeamConfig) -> None:
    tokens = TokenWatch(length=500, total=2000, first_rows=[0, 2])
    hidden = [noise(1000, 8), noise(1000, 8)]
    look(tokens, record_of([0.0, 0.0], [0, 0], 1.0), hidden)
    assert tokens.dropped == 0
    hidden[1][510, 3] = NAN
    look(tokens, record_of([1.0, 0.0], [1, 0], 1.0), hidden)
    hidden[1][512:520, 3] = INF
    look(tokens, record_of([0.0, 0.0], [1, 0], 1.0), hidden)
    assert tokens.dropped == 9
    hidden[0][0, 0] = -INF
    look(tokens, record_of([0.0, 0.0], [1, 0], 1.0), hidden)
    assert tokens.dropped == 10
    assert tokens.names == [
        "sequence 3, position 10: not finite at the input of"
        " model.layers.1.mlp.experts.0.down_proj",
        "sequence 0, position 0: not finite at the output of model.layers.1",
    ]
    again = TokenWatch(length=500, total=2000, first_rows=[0, 2])
    again.continue_from(hidden, tokens.dropped, tokens.names)
    look(again, record_of([0.0, 0.0], [1, 0], 1.0), hidden)
    assert (again.dropped, again.names) == (10, tokens.names)


def test_too_many_bad_tokens_stop_the_run(config: BeamConfig) -> None:
    total = 2000
    allowed = int(watch.MAX_DROPPED_SHARE * total)
    hidden = [noise(total, 8)]
    tokens = TokenWatch(length=500, total=total, first_rows=[0])
    hidden[0][:allowed] = NAN
    look(tokens, record_of([1.0, 0.0], [1, 0], 1.0), hidden)
    hidden[0][700] = NAN
    with pytest.raises(
        CalibrationError, match=r"21 of 2,000 tokens .*: sequence 1, position 200: not finite at"
    ):
        look(tokens, record_of([1.0, 0.0], [1, 0], 1.0), hidden)


def test_options_are_checked_and_have_a_size_for_each_device() -> None:
    for wrong in (
        {"samples": 0},
        {"sequence_length": 0},
        {"max_device_memory": 0},
        {"experts": "some"},
        {"dtype": "float16"},
    ):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            from_keywords(CalibrationOptions, wrong)
    model = {"max_position_embeddings": 8192}
    assert CalibrationOptions().size("cpu", model) == (128, 512)
    assert CalibrationOptions().size("cuda", model) == (256, 2048)
    assert CalibrationOptions().size("cuda", {"max_position_embeddings": 300}) == (256, 300)
    assert CalibrationOptions().size("cpu", {}) == (128, 512)
    asked = CalibrationOptions(samples=3, sequence_length=700)
    assert asked.size("cuda", model) == (3, 700)
    with pytest.raises(UsageError, match="beyond the model's max_position_embeddings"):
        asked.size("cpu", {"max_position_embeddings": 300})
