"""Streaming: slices, spilling, sharing and budgets change nothing but memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from beamq.beam.config import BeamConfig
from beamq.errors import DeviceError, MemoryBudgetError, UsageError
from beamq.io.checkpoint import open_checkpoint
from beamq.model import logits as logits_module
from beamq.model.context import Observer, SequenceLayout
from beamq.model.forward import Batch, LayerPass
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import LayerWeights
from beamq.model.layer_stream import LayerStream, activation_bytes, experts_per_slice, layer_bytes
from beamq.model.loader import LayerLoader
from beamq.model.logits import embed, logits
from beamq.model.moe import ExpertSlice
from tests.helpers.model_fixtures import quantized_copy, random_beam, token_ids

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_beam(tmp_path_factory.mktemp("source"))


def open_loader(path: Path) -> LayerLoader:
    checkpoint = open_checkpoint(path)
    config = BeamConfig.from_dict(checkpoint.config)
    return LayerLoader(checkpoint, config, dtype=BF16, device=CPU)


def passed(
    path: Path,
    *,
    slice_experts: int | None = None,
    done: Callable[[int], None] | None = None,
    **options: object,
) -> list[torch.Tensor]:
    """Two batches, one of mixed lengths, through all layers."""
    loader = open_loader(path)
    ids = token_ids(1, 70, 96)[0]
    states = embed(loader, [ids[:40], ids[40:]])
    layouts = [SequenceLayout.rectangle(2, 20), SequenceLayout(lengths=(7, 23))]
    batches = [Batch(h_TK=h, layout=layout) for h, layout in zip(states, layouts, strict=True)]
    stream = LayerStream(loader, slice_experts=slice_experts)
    LayerPass(stream, batches, gemm=select_gemm("reference"), **options).run(done=done)
    return [batch.h_TK for batch in batches]


@pytest.mark.parametrize("slice_experts", [1, 3, 8])
@pytest.mark.parametrize("resident", [None, 0, 6000])
def test_slices_and_spilling_change_no_bit(
    source: Path, slice_experts: int, resident: int | None
) -> None:
    whole = passed(source)
    sliced = passed(source, slice_experts=slice_experts, resident_bytes=resident)
    assert all(torch.equal(a, b) for a, b in zip(whole, sliced, strict=True))


def test_a_batch_alone_gives_what_it_gives_in_company(source: Path) -> None:
    loader = open_loader(source)
    ids = token_ids(1, 70, 96)[0]
    (state,) = embed(loader, [ids[40:]])
    batch = Batch(h_TK=state, layout=SequenceLayout(lengths=(7, 23)))
    LayerPass(LayerStream(loader), [batch], gemm=select_gemm("reference")).run()
    assert torch.equal(batch.h_TK, passed(source)[1])


def test_no_token_sees_another_sample(source: Path) -> None:
    """Changing one sequence of a pack leaves the others' states as they were."""
    loader, layout = open_loader(source), SequenceLayout(lengths=(9, 30, 9, 1, 17))
    ids = token_ids(1, layout.tokens, 96)[0]
    changed = ids.clone()
    changed[9:39] = (changed[9:39] + 1) % 96
    results = []
    for vector in (ids, changed):
        (state,) = embed(loader, [vector])
        batch = Batch(h_TK=state, layout=layout)
        LayerPass(LayerStream(loader), [batch], gemm=select_gemm("reference")).run()
        results.append(batch.h_TK)
    same = (results[0] == results[1]).all(1)
    assert same[:9].all()
    assert same[39:].all()
    assert not same[9:39].any()


class Counter(Observer):
    """Counts tokens by layer and group."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], int] = {}

    def linear_input(self, layer: int, group: str, x_TK: torch.Tensor) -> None:
        self.rows[layer, group] = self.rows.get((layer, group), 0) + x_TK.shape[0]

    def expert_input(
        self, layer: int, group: str, x_SK: torch.Tensor, first: int, offsets: Sequence[int]
    ) -> None:
        assert offsets[-1] == x_SK.shape[0]
        self.linear_input(layer, f"experts.{group}", x_SK)


@pytest.mark.parametrize("slice_experts", [None, 3])
def test_observers_share_a_pass_and_change_nothing(source: Path, slice_experts: int | None) -> None:
    counters = [Counter(), Counter()]
    done: list[int] = []
    watched = passed(source, slice_experts=slice_experts, observers=counters, done=done.append)
    assert all(torch.equal(a, b) for a, b in zip(watched, passed(source), strict=True))
    assert done == [0, 1, 2]
    expected = {(layer, group): 70 for layer in range(3) for group in ("qkv_gate", "o_proj")}
    expected |= {(0, "gate_up"): 70, (0, "down_proj"): 70}
    for layer in (1, 2):
        expected |= {(layer, f"experts.{group}"): 140 for group in ("gate_up", "down_proj")}
    assert counters[0].rows == counters[1].rows == expected


@pytest.mark.parametrize("slice_experts", [None, 2])
def test_few_units_of_weights_live_at_once(
    tmp_path: Path, slice_experts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 9
    path = random_beam(
        tmp_path,
        num_hidden_layers=layers,
        layer_types=["sliding_attention"] * layers,
        mlp_layer_types=["sparse"] * layers,
    )
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def watch(unit: LayerWeights | ExpertSlice) -> None:
        nonlocal most
        parts = unit.mlp.experts if isinstance(unit, LayerWeights) else (unit,)
        for part in parts:
            alive.add(part.gate_up.w_NK)
        most = max(most, sum(t.shape[0] for t in alive))

    for name in ("layer", "experts"):
        original = getattr(LayerLoader, name)

        def loaded(*args: object, _original: object = original, **options: object) -> object:
            unit = _original(*args, **options)
            watch(unit)
            return unit

        monkeypatch.setattr(LayerLoader, name, loaded)
    passed(path, slice_experts=slice_experts)
    assert most <= 2 * (slice_experts or 8), f"{most} experts' weights lived at once"


def test_a_consumer_may_leave_experts_alone(source: Path) -> None:
    stream = LayerStream(open_loader(source), slice_experts=3)
    assert [(index, weights.index) for index, weights in stream] == [(0, 0), (1, 1), (2, 2)]
    some = LayerStream(open_loader(source), layers=[2, 0], slice_experts=3)
    assert [index for index, _ in some] == [2, 0]


def test_budget_decides_slices(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    config = BeamConfig.from_dict(checkpoint.config)
    sizes = layer_bytes(checkpoint, config, BF16)
    assert sizes.expert == 3 * 64 * 32 * 2
    fixed = activation_bytes(config, 100, BF16) + 2 * sizes.base
    share = [
        experts_per_slice(checkpoint, config, BF16, fixed + 2 * sizes.expert * n, 100)
        for n in (1, 3, 8)
    ]
    assert share == [1, 3, None]
    with pytest.raises(MemoryBudgetError, match="at least"):
        experts_per_slice(checkpoint, config, BF16, fixed, 100)


def test_logits_under_a_budget_are_the_same(source: Path, tmp_path: Path) -> None:
    ids = token_ids(2, 20, 96)
    for path in (source, quantized_copy(source, tmp_path / "q", "nvfp4")):
        checkpoint = open_checkpoint(path)
        config = BeamConfig.from_dict(checkpoint.config)
        sizes = layer_bytes(checkpoint, config, BF16)
        budget = activation_bytes(config, 40, BF16) + 2 * sizes.base + 4 * sizes.expert
        assert experts_per_slice(checkpoint, config, BF16, budget, 40) == 2
        assert torch.equal(logits(path, ids, max_device_memory=budget), logits(path, ids))


def test_logits_in_groups_of_rows(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = token_ids(5, 20, 96)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    mask[3] = 0
    whole = logits(source, ids, attention_mask=mask, dtype=torch.float32)
    monkeypatch.setattr(logits_module, "BATCH_TOKENS", 30)
    cut = logits(source, ids, attention_mask=mask, dtype=torch.float32)
    assert (whole - cut).abs().max() < 1e-5
    assert whole[3].eq(0).all()
    assert whole[1, :13].eq(0).all()
    assert whole[1, 13:].ne(0).any()


def test_refusals(source: Path) -> None:
    with pytest.raises(UsageError, match="token id 96"):
        logits(source, [[1, 96]])
    with pytest.raises(UsageError, match="token id -1 is outside"):
        logits(source, [[5, -1]])
    with pytest.raises(UsageError, match="expected that of input_ids"):
        logits(source, [[1, 2]], attention_mask=torch.ones(1, 3))
    with pytest.raises(UsageError, match="gemm 'fast'"):
        logits(source, [[1, 2]], gemm="fast")
    with pytest.raises(UsageError, match="expected auto, cpu, cuda"):
        logits(source, [[1, 2]], device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no usable NVIDIA GPU"):
            logits(source, [[1, 2]], device="cuda")
