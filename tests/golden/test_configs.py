"""Both config blocks, held against the classes of the libraries whose layouts they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from beamq.convert.quantize import quantize
from beamq.io.checkpoint import open_checkpoint
from beamq.plan.layout import hf_quant_config, quantization_config
from beamq.plan.plan import make_plan
from beamq.plan.recipe import BUILT_IN, Recipe, load_recipe, parse_recipe

FP8 = [name for name in BUILT_IN if load_recipe(name).format == "fp8"]
NVFP4 = [name for name in BUILT_IN if load_recipe(name).calibrated]


def block_of(folder: Path, recipe: str | Recipe, kv_cache: str = "none") -> dict[str, Any]:
    with open_checkpoint(folder) as checkpoint:
        plan = make_plan(checkpoint, recipe, kv_cache=kv_cache)
    chosen = plan.recipe
    return quantization_config(chosen.format, list(plan.ignore), chosen.kv_cache, plan.formats)


@pytest.mark.parametrize("kv_cache", ["none", "fp8"])
@pytest.mark.parametrize("recipe", FP8)
def test_the_fp8_block_is_compressed_tensors_own(
    beam_nano: Path, recipe: str, kv_cache: str
) -> None:
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )

    block = block_of(beam_nano, recipe, kv_cache)
    eight_bit = {"num_bits": 8, "type": "float", "symmetric": True}
    theirs = QuantizationConfig(
        config_groups={
            "group_0": QuantizationScheme(
                targets=["Linear"],
                weights=QuantizationArgs(**eight_bit, strategy="channel", dynamic=False),
                input_activations=QuantizationArgs(**eight_bit, strategy="token", dynamic=True),
            )
        },
        format="float-quantized",
        quantization_status="compressed",
        ignore=block["ignore"],
        kv_cache_scheme=(
            QuantizationArgs(**eight_bit, strategy="tensor", dynamic=False)
            if kv_cache == "fp8"
            else None
        ),
    )
    ours = QuantizationConfig.model_validate(block)
    assert ours == theirs
    # What we write must be a part of what the class writes, key by key, with equal values.
    written = json.loads(theirs.model_dump_json())
    assert _contained(block, written)


def test_the_mxfp8_block_is_compressed_tensors_own(beam_nano: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import MXFP8

    block = block_of(beam_nano, "mxfp8")
    theirs = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], **MXFP8)},
        format="mxfp8-quantized",
        quantization_status="compressed",
        ignore=block["ignore"],
    )
    ours = QuantizationConfig.model_validate(block).model_dump()
    assert _contained(block, json.loads(theirs.model_dump_json()))
    assert {**ours, "config_groups": None} == {**theirs.model_dump(), "config_groups": None}
    assert block["ignore"] == IGNORED["fp8"]
    assert block_of(beam_nano, "mxfp8-experts")["ignore"] == IGNORED["fp8-experts"]


def test_the_block_of_block_fp8_names_every_linear_that_is_kept(beam_nano: Path) -> None:
    kept = {"lm_head", "model.embed_tokens", *(f"model.layers.{n}.mlp.gate" for n in range(3, 8))}
    block = block_of(beam_nano, "fp8-block")
    assert {key: block[key] for key in block if key != "ignored_layers"} == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip
    assert set(block["ignored_layers"]) == kept
    recipe = parse_recipe({"name": "x", "summary": "y", "rules": {"expert": "fp8-block"}})
    attention = {f"model.layers.0.self_attn.{part}_proj" for part in ("q", "k", "v", "gate", "o")}
    dense = {f"model.layers.2.mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert kept | attention | dense <= set(block_of(beam_nano, recipe)["ignored_layers"])


def _contained(part: object, whole: object) -> bool:
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and _contained(value, whole[key]) for key, value in part.items())
    return part == whole


@pytest.mark.parametrize("recipe", NVFP4)
def test_the_nvfp4_block_is_what_modelopt_makes_of_hf_quant_config(
    beam_nano: Path, recipe: str
) -> None:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    block = block_of(beam_nano, recipe)
    theirs = convert_hf_quant_config_format(hf_quant_config(block))
    assert {key: block[key] for key in theirs} == theirs, theirs


@pytest.mark.parametrize("kv_cache", ["none", "fp8"])
def test_the_nvfp4_block_is_written_out_whole(beam_nano: Path, kv_cache: str) -> None:
    four_bit = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    expected = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": four_bit, "input_activations": four_bit
            }
        },
        "ignore": [
            "lm_head",
            "model.embed_tokens",
            *(f"model.layers.{n}.{part}" for n in range(3) for part in ("self_attn*", "mlp*")),
            *(f"model.layers.{n}.{p}" for n in range(3, 8) for p in ("self_attn*", "mlp.gate")),
        ],
    }  # fmt: skip
    if kv_cache == "fp8":
        expected["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert block_of(beam_nano, "nvfp4", kv_cache) == expected


def test_the_mixed_block_is_written_out(beam_nano: Path) -> None:
    """vLLM asks for the algorithm of `mlp.experts` and of each other linear by these names."""
    block = block_of(beam_nano, "nvfp4-fp8")
    fp8 = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
    linears = [
        f"model.layers.{n}.self_attn.{part}_proj"
        for n in range(8)
        for part in ("q", "k", "v", "gate", "o")
    ]
    linears += [f"model.layers.{n}.mlp.{p}_proj" for n in range(3) for p in ("gate", "up", "down")]
    experts = [f"model.layers.{n}.mlp.experts" for n in range(3, 8)]
    assert block["quant_algo"] == "MIXED_PRECISION"
    assert block["quantized_layers"] == {
        **dict.fromkeys(linears, fp8),
        **dict.fromkeys(experts, nvfp4),
    }
    assert block["ignore"] == [
        "lm_head", "model.embed_tokens", *(f"model.layers.{n}.mlp.gate" for n in range(3, 8))
    ]  # fmt: skip
    assert hf_quant_config(block)["quantization"]["quantized_layers"] == block["quantized_layers"]


IGNORED = {
    "fp8": ["lm_head", r"re:.*\.mlp\.gate$"],
    "fp8-experts": [
        "lm_head",
        r"re:.*\.mlp\.gate$",
        r"re:.*\.self_attn\..*",
        r"re:.*\.mlp\.(gate_proj|up_proj|gate_up_proj|down_proj)$",
    ],
}


@pytest.mark.parametrize("recipe", FP8)
def test_the_fp8_ignore_list_is_the_one_both_engines_took(beam_nano: Path, recipe: str) -> None:
    assert block_of(beam_nano, recipe)["ignore"] == IGNORED[recipe]


def test_the_bytes_of_nano_are_known(beam_nano: Path, tmp_path: Path) -> None:
    """Shard digests of every recipe: a change here is a change of what users get."""
    golden = json.loads((Path(__file__).parent / "nano_shards.json").read_text())
    found = {}
    for recipe in golden:  # all but GPTQ's, whose bytes are those of a machine's FP32 sums
        result = quantize(
            beam_nano, tmp_path / recipe, recipe=recipe, no_calibration=recipe in NVFP4
        )
        assert result.manifest is not None
        found[recipe] = [shard["digest"] for shard in result.manifest["shards"]]
    assert found == golden
