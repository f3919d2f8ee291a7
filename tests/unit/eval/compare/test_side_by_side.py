"""Models side by side: the order of layers, what is alive at once, and errors of linears."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from beamq.beam.config import BeamConfig
from beamq.errors import ConfigError, EnvironmentFault
from beamq.eval.compare.side_by_side import (
    StreamOptions,
    expect_same_files,
    expect_same_shapes,
    run_side_by_side,
)
from beamq.eval.compare.weight_error import changed_tensors, weight_errors
from beamq.formats import nvfp4
from beamq.io.checkpoint import open_checkpoint
from beamq.model.gemm.select import select_gemm
from beamq.model.layer import LayerWeights
from beamq.model.layer_stream import LayerStream, in_turns
from beamq.model.loader import LayerLoader
from beamq.ranks import Ranks
from tests.helpers.model_fixtures import (
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    quantized_copy,
    random_beam,
    token_ids,
)

OPTIONS = StreamOptions(
    dtype=torch.float32, device=torch.device("cpu"), gemm=select_gemm("reference")
)


def loader(path: Path) -> LayerLoader:
    checkpoint = open_checkpoint(path)
    config = BeamConfig.from_dict(checkpoint.config)
    return LayerLoader(checkpoint, config, dtype=torch.float32, device=torch.device("cpu"))


def test_layers_come_in_turns(tmp_path: Path) -> None:
    models = [loader(random_beam(tmp_path / str(seed), seed=seed)) for seed in range(2)]
    streams = [LayerStream(models[0]), LayerStream(models[1], slice_experts=3)]
    seen = []
    for place, index, weights in in_turns(streams):
        assert weights.index == index
        seen.append((place, index))
    assert seen == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("layers", [3, 8])
@pytest.mark.parametrize("candidates", [1, 3])
def test_three_layers_live_at_once_whatever_the_model(
    layers: int, candidates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_beam(
        tmp_path / "source",
        num_hidden_layers=layers,
        layer_types=[SLIDING, FULL] * (layers // 2) + [SLIDING] * (layers % 2),
        mlp_layer_types=[DENSE] + [SPARSE] * (layers - 1),
    )
    folder = quantized_copy(source, tmp_path / "nvfp4", "nvfp4")
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    counts: list[int] = []
    load = LayerLoader.layer

    def counted(self: LayerLoader, index: int, *, experts: range | None = None) -> LayerWeights:
        weights = load(self, index, experts=experts)
        alive.add(weights.input_norm)
        counts.append(len(alive))
        return weights

    monkeypatch.setattr(LayerLoader, "layer", counted)
    ids = token_ids(2, 12, 96).numpy()
    others = [open_checkpoint(folder) for _ in range(candidates)]
    found = run_side_by_side(open_checkpoint(source), others, ids, OPTIONS)
    assert len(counts) == layers * (candidates + 1)
    assert max(counts) <= 3  # the source's, a candidate's, and the one read ahead
    assert len({each.divergence.mean_kld.value for each in found}) == 1


def test_batches_of_any_size_give_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_beam(tmp_path / "source")
    folder = quantized_copy(source, tmp_path / "fp8", "fp8")
    ids = token_ids(5, 12, 96).numpy()
    found = []
    for tokens in (1 << 14, 24):  # 24 tokens: batches of two rows, the last of one
        monkeypatch.setattr("beamq.eval.compare.side_by_side.BATCH_TOKENS", tokens)
        monkeypatch.setattr("beamq.eval.compare.side_by_side.HEAD_ELEMENTS", 96 * tokens)
        monkeypatch.setattr("beamq.eval.compare.side_by_side.CHUNK_ELEMENTS", 96 * 7)
        found += run_side_by_side(open_checkpoint(source), [open_checkpoint(folder)], ids, OPTIONS)
    whole, parts = found
    assert parts.divergence.tokens == 60
    assert parts.divergence.predicted == 55
    assert parts.divergence.mean_kld.value == pytest.approx(
        whole.divergence.mean_kld.value, rel=0.05
    )
    assert parts.layers[-1].relative_error.value == pytest.approx(
        whole.layers[-1].relative_error.value, rel=0.05
    )


def test_errors_of_linears_are_those_of_their_tensors(tmp_path: Path) -> None:
    """Fused rows are told apart: each linear against a plain decoding of its own tensors."""
    source = random_beam(tmp_path / "source")
    folder = quantized_copy(source, tmp_path / "nvfp4", "nvfp4")
    base, other = loader(source), loader(folder)
    names = []
    for layer in range(base.config.num_layers):
        for error in weight_errors(base.layer(layer), other.layer(layer), base.config):
            names.append(error.module)
            stored = nvfp4.QuantizedTensor(
                codes=other.checkpoint.tensor(f"{error.module}.weight"),
                block_scale=other.checkpoint.tensor(f"{error.module}.weight_scale"),
                global_scale=other.checkpoint.tensor(f"{error.module}.weight_scale_2"),
            )
            decoded = nvfp4.dequantize(stored, torch.float32).double()
            exact = base.checkpoint.tensor(f"{error.module}.weight").double()
            gap = decoded - exact
            assert error.elements == exact.numel()
            assert error.relative_rms == pytest.approx((gap.norm() / exact.norm()).item(), rel=1e-5)
            assert error.max_abs_error == pytest.approx(gap.abs().max().item(), rel=1e-5)
            lost = ((decoded == 0) & (exact != 0)).double().mean().item()
            assert error.underflowed_share == pytest.approx(lost)
            scale = stored.block_scale.double().repeat_interleave(16, 1) * stored.global_scale
            clipped = (exact.abs() > 6 * scale * (1 + 1e-6)).double().mean().item()
            assert error.saturated_share == pytest.approx(clipped)
    assert len(names) == len(set(names)) == 3 * 5 + 3 + 2 * 8 * 3


def test_what_is_not_quantized_and_not_the_sources(tmp_path: Path) -> None:
    source = loader(random_beam(tmp_path / "one", seed=0))
    other = loader(random_beam(tmp_path / "two", seed=1))
    assert changed_tensors(source.layer(1), source.layer(1)) == []
    assert not weight_errors(source.layer(1), source.layer(1), source.config)
    changed = changed_tensors(source.layer(1), other.layer(1))
    assert len(changed) == 9
    assert all(name in source.checkpoint.tensors for name in changed)
    dense = weight_errors(source.layer(0), other.layer(0), source.config)
    assert {error.format for error in dense} == {"dense"}
    assert all(1.2 < error.relative_rms < 1.6 for error in dense)


class Elsewhere(Ranks):
    """The first of two ranks; the other sees `theirs` in place of the first checkpoint, if set."""

    theirs = ""

    def gather(self, item: Any) -> list[Any]:
        return [item, [self.theirs or item[0], *item[1:]]]


def test_ranks_that_see_other_files_go_no_further(tmp_path: Path) -> None:
    opened = [open_checkpoint(random_beam(tmp_path / name)) for name in ("one", "two")]
    expect_same_files(opened, Ranks())
    ranks = Elsewhere(world=2)
    expect_same_files(opened, ranks)
    ranks.theirs = "another digest"
    with pytest.raises(EnvironmentFault, match="one: the ranks do not see the same files"):
        expect_same_files(opened, ranks)


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "intermediate_size", "moe_intermediate_size", "num_layers", "vocab_size",
     "num_heads", "num_kv_heads", "head_dim", "num_experts", "top_k", "mlp_layer_types"],
)  # fmt: skip
def test_another_model_cannot_be_compared(tmp_path: Path, key: str) -> None:
    config = loader(random_beam(tmp_path)).config
    expect_same_shapes(config, replace(config, rms_norm_eps=0.5, sliding_window=3), "candidate")
    value = getattr(config, key)
    other = replace(config, **{key: (*value, DENSE) if key == "mlp_layer_types" else value + 2})
    with pytest.raises(ConfigError, match=f"candidate: {key} is .*, in the source"):
        expect_same_shapes(config, other, "candidate")
