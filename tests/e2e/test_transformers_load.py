"""transformers loads what we write: FP8 as it is, decoded checkpoints as plain BF16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import beamq
from beamq.convert.dequantize import dequantize
from beamq.convert.quantize import quantize
from beamq.errors import CheckpointError
from beamq.io.checkpoint import open_checkpoint
from tests.helpers import safetensors_edit as st


def stacked(folder: Path, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of a per-expert BF16 folder in transformers' packed form."""
    with open_checkpoint(folder) as checkpoint:
        base = f"model.layers.{layer}.mlp.experts"
        count = checkpoint.config["num_experts"]
        gate_up = [
            torch.cat([checkpoint.tensor(f"{base}.{e}.{p}_proj.weight") for p in ("gate", "up")])
            for e in range(count)
        ]
        down = [checkpoint.tensor(f"{base}.{e}.down_proj.weight") for e in range(count)]
    return torch.stack(gate_up), torch.stack(down)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-experts"])
def test_fp8_loads_and_equals_our_decoding(beam_nano: Path, tmp_path: Path, recipe: str) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    quantize(beam_nano, tmp_path / "fp8", recipe=recipe)
    dequantize(tmp_path / "fp8", tmp_path / "bf16")
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8",
        dtype=torch.bfloat16,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    loaded = model.state_dict()
    with open_checkpoint(tmp_path / "bf16") as decoded:
        plain = [name for name in decoded.tensors if ".experts." not in name]
        for name in plain:
            assert loaded[name].equal(decoded.tensor(name)), name
    for layer in range(3, 8):
        gate_up, down = stacked(tmp_path / "bf16", layer)
        prefix = f"model.layers.{layer}.mlp.experts."
        assert loaded[prefix + "gate_up_proj"].equal(gate_up)
        assert loaded[prefix + "down_proj"].equal(down)


def test_a_decoded_nvfp4_checkpoint_loads_as_plain_bf16(beam_nano: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantize(beam_nano, tmp_path / "nvfp4", recipe="nvfp4-all", no_calibration=True)
    dequantize(tmp_path / "nvfp4", tmp_path / "bf16")
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    gate_up, _ = stacked(tmp_path / "bf16", 4)
    assert model.state_dict()["model.layers.4.mlp.experts.gate_up_proj"].equal(gate_up)


def test_block_fp8_loads_as_it_decodes(beam_nano: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    quantize(beam_nano, tmp_path / "blocks", recipe="fp8-block")
    dequantize(tmp_path / "blocks", tmp_path / "bf16")
    block = json.loads((tmp_path / "blocks" / "config.json").read_text())["quantization_config"]
    how = FineGrainedFP8Config(
        dequantize=True, modules_to_not_convert=block["ignored_layers"],
        weight_block_size=tuple(block["weight_block_size"]),
    )  # fmt: skip
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "blocks", dtype=torch.bfloat16, quantization_config=how,
        output_loading_info=True,
    )  # fmt: skip
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_mxfp8_is_refused(beam_nano: Path, tmp_path: Path) -> None:
    """It stops with an error: never weights that are something else."""
    from transformers import AutoModelForCausalLM

    quantize(beam_nano, tmp_path / "mx", recipe="mxfp8")
    with pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(tmp_path / "mx", dtype=torch.bfloat16)


def test_a_model_in_memory_is_quantized_as_its_folder(beam_nano: Path) -> None:
    """transformers' own config and names, and its packed experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(beam_nano, dtype=torch.bfloat16)
    config = model.config.to_dict()
    found = dict(beamq.quantize_tensors(model.state_dict(), "nvfp4-all", config))
    with open_checkpoint(beam_nano) as source:
        stored = {name: source.tensor(name) for name in source.tensors}
    wanted = dict(beamq.quantize_tensors(stored, "nvfp4-all", beam_nano))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.flatten().view(torch.uint8).equal(wanted[name].flatten().view(torch.uint8))
    assert beamq.quantization_config("fp8", config) == beamq.quantization_config("fp8", beam_nano)


def test_flipped_bits_are_not_decoded_into_a_clean_checkpoint(
    beam_nano: Path, tmp_path: Path
) -> None:
    output = tmp_path / "fp8"
    quantize(beam_nano, output, recipe="fp8")
    name = "model.layers.4.mlp.experts.3.up_proj.weight"

    def flip(tensors: st.Tensors) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[:100] + bytes([data[100] ^ 4]) + data[101:])

    st.edit(output / "model-00001-of-00001.safetensors", flip)
    with pytest.raises(CheckpointError, match=rf"1 tensor does not match .*: {name}"):
        dequantize(output, tmp_path / "bf16")
    assert not (tmp_path / "bf16").exists()
    (output / "beamq.json").unlink()
    dequantize(output, tmp_path / "bf16")
