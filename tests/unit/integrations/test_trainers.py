"""The functions that trainers call, with doubles of what calls them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import beamq
from beamq.errors import UsageError
from beamq.integrations import miles, skyrl, verl

Tensors = dict[str, torch.Tensor]
FP8_BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


@pytest.fixture(scope="module")
def nano(beam_nano: Path) -> Tensors:
    return load_file(beam_nano / "model.safetensors")


@pytest.fixture(scope="module")
def config(beam_nano: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((beam_nano / "config.json").read_text())
    return found


def same(one: Tensors, other: Tensors) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype
        and torch.equal(
            one[name].view(-1).view(torch.uint8), other[name].view(-1).view(torch.uint8)
        )
        for name in one
    )


@pytest.mark.parametrize(
    ("recipe", "quantization_config", "profile"),
    [
        ("fp8", FP8_BLOCKS, "miles-fp8-block"),
        ("fp8", {"quant_method": "mxfp8"}, "miles-mxfp8"),
        ("fp8", {"quant_method": "compressed-tensors"}, "beamq"),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "beamq"),
    ],
)
def test_miles_hands_over_one_tensor_at_a_time(
    nano: Tensors, config: dict[str, Any], recipe: str, quantization_config: Any, profile: str
) -> None:
    quantize_params = miles.make_quantize_params(config, recipe)
    made: Tensors = {}
    for name, tensor in nano.items():
        made.update(
            quantize_params(SimpleNamespace(), "any", [(name, tensor)], quantization_config)
        )
    whole = dict(beamq.quantize_tensors(nano, recipe, config, profile=profile))
    assert same(made, whole)


def test_miles_without_and_with_another_quantization(nano: Tensors, config: dict[str, Any]) -> None:
    quantize_params = miles.make_quantize_params(config, "fp8")
    pair = ("model.norm.weight", nano["model.norm.weight"])
    assert quantize_params(None, "any", [pair], None) == [pair]
    for other in (
        {"quant_method": "fp8"},
        {**FP8_BLOCKS, "scale_fmt": "ue8m0"},
        {"quant_method": "awq"},
    ):
        with pytest.raises(UsageError, match="quantization_config has quant_method"):
            quantize_params(None, "any", [pair], other)


def test_verl_calls_with_a_generator(nano: Tensors, config: dict[str, Any]) -> None:
    quant_weights = verl.make_quant_weights(config)
    given = SimpleNamespace(weight_block_size=[128, 128])
    made = dict(quant_weights(iter(nano.items()), None, given, dtype=torch.bfloat16))
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in nano.items()}
    assert same(
        made, dict(beamq.quantize_tensors(rounded, "fp8", config, profile="verl-fp8-block"))
    )
    with pytest.raises(UsageError, match="weight_block_size None"):
        quant_weights(iter(()), None, SimpleNamespace(weight_block_size=None))


# SkyRL's classes, as far as a spec fills them in.


@dataclass(frozen=True)
class MoeProjection:
    hf_name: str
    vllm_param: str
    shard_id: str


@dataclass(frozen=True)
class MoeExpertSpec:
    experts_base: str
    projections: tuple[MoeProjection, ...]
    split_dim: int | None = None


@dataclass(frozen=True)
class ModelFp8Spec:
    name: str
    matches: Any
    should_quantize: Any
    ignored_layers: Any
    moe_expert_spec: Any
    unquantized_weight_suffixes: Any = lambda config, ranks: ()
    moe_module: str = "experts"
    moe_projections: tuple[MoeProjection, ...] = field(default=())


def test_skyrl_gets_a_spec(
    nano: Tensors, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ModuleType("base")
    registered: list[Any] = []
    for each in (MoeProjection, MoeExpertSpec, ModelFp8Spec):
        setattr(base, each.__name__, each)
    base.register_fp8_spec = lambda spec: registered.append(spec) or spec  # type: ignore[attr-defined,func-returns-value]
    path = "skyrl.backends.skyrl_train.weight_sync.fp8.models.base"
    for end in [place for place, letter in enumerate(path) if letter == "."]:
        monkeypatch.setitem(sys.modules, path[:end], ModuleType(path[:end]))
    monkeypatch.setitem(sys.modules, path, base)
    spec = skyrl.register()
    assert registered == [spec]
    hf_config = SimpleNamespace(**config)
    assert spec.matches(hf_config)
    assert not spec.matches(SimpleNamespace(model_type="qwen3_5"))
    made = dict(beamq.quantize_tensors(nano, "fp8", config, profile="skyrl-fp8-block"))
    for name, tensor in nano.items():
        quantized = spec.should_quantize(name, tuple(tensor.shape))
        assert quantized == (made[name].dtype == torch.float8_e4m3fn), name
    gate_up = spec.moe_expert_spec("model.layers.3.mlp.experts.gate_up_proj")
    assert [each.shard_id for each in gate_up.projections] == ["w1", "w3"]
    assert (gate_up.experts_base, gate_up.split_dim) == ("model.layers.3.mlp.experts", 1)
    down = spec.moe_expert_spec("model.layers.3.mlp.experts.down_proj")
    assert [(each.shard_id, each.vllm_param) for each in down.projections] == [("w2", "w2_weight")]
    assert down.split_dim is None
    assert spec.moe_expert_spec("model.layers.0.mlp.down_proj.weight") is None
    assert spec.moe_expert_spec("model.layers.3.mlp.experts.2.down_proj.weight") is None
    ignored = spec.ignored_layers(hf_config, model_prefix="model", tensor_parallel_size=1)
    assert ignored == ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(3, 8))]


def test_skyrl_is_not_installed() -> None:
    with pytest.raises(ImportError):
        skyrl.register()
