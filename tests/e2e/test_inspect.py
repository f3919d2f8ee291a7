"""`inspect_checkpoint` says what the tensors are, whatever the config claims, and what is odd."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from beamq.convert.quantize import quantize
from beamq.errors import CheckpointError, ConfigError
from beamq.eval.verify.inspect import Inspection, inspect_checkpoint
from tests.helpers import safetensors_edit
from tests.helpers.checkpoint_damage import edit_json, pack_layer_3, shards

PARAMETERS = 3_619_568
EXPERT_PARAMETERS = 5 * 16 * 3 * 64 * 128


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory, beam_nano: Path) -> Path:
    output = tmp_path_factory.mktemp("inspect") / "nvfp4"
    quantize(beam_nano, output, recipe="nvfp4", no_calibration=True)
    return output


def test_a_source(beam_nano: Path) -> None:
    found = inspect_checkpoint(beam_nano)
    assert (found.format, found.declared, found.recipe, found.notes) == ("bf16", None, None, ())
    assert (found.parameters, found.quantized_parameters) == (PARAMETERS, 0)
    assert (found.layers, found.experts, found.files, found.tensors) == (8, 16, 1, 358)
    assert found.bits_per_weight == pytest.approx(16.0456, abs=1e-4)  # the routers are FP32


def test_an_nvfp4_checkpoint(nvfp4: Path) -> None:
    found = inspect_checkpoint(nvfp4)
    assert (found.format, found.declared) == ("nvfp4", "modelopt NVFP4")
    assert (found.recipe, found.notes) == ("nvfp4", ())
    assert found.parameters == PARAMETERS
    assert found.quantized_parameters == EXPERT_PARAMETERS
    assert found.share_quantized == pytest.approx(EXPERT_PARAMETERS / PARAMETERS)
    manifest = json.loads((nvfp4 / "beamq.json").read_text())
    assert found.bits_per_weight == pytest.approx(manifest["totals"]["bits_per_weight"], abs=1e-4)
    assert found.made_by == f"beamq {manifest['beamq']}"
    assert found.input_scales is not None
    assert "not calibrated" in found.input_scales
    expert = next(share for share in found.roles if share.role == "expert")
    assert (expert.tensors, expert.dtypes) == (4 * 5 * 16 * 3, ("U8",))
    assert json.loads(json.dumps(found.to_dict()))["share_quantized"] == found.share_quantized


def test_an_fp8_checkpoint(beam_nano: Path, tmp_path: Path) -> None:
    quantize(beam_nano, tmp_path / "out", recipe="fp8-experts")
    found = inspect_checkpoint(tmp_path / "out")
    assert (found.format, found.recipe, found.notes) == ("fp8", "fp8-experts", ())
    assert found.quantized_parameters == EXPERT_PARAMETERS


def note(found: Inspection, words: str) -> bool:
    return any(words in line for line in found.notes)


def change_tensors(folder: Path, change: Callable[[safetensors_edit.Tensors], None]) -> None:
    safetensors_edit.edit(shards(folder)[0], change)


def test_odd_sources(nano_copy: Path) -> None:
    def change(tensors: safetensors_edit.Tensors) -> None:
        pack_layer_3(tensors)
        del tensors["model.layers.6.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.5.mlp.gate.weight"] = ("BF16", [16, 128], bytes(4096))
        tensors["mtp.\x1b[31mnorm.weight"] = ("BF16", [2], bytes(4))
        tensors["model.layers.1.self_attn.k_proj.k_scale"] = ("F32", [], bytes(4))

    change_tensors(nano_copy, change)
    (nano_copy / "pytorch_model.bin").touch()
    edit_json(nano_copy / "config.json", lambda d: d.update(quantization_config={
        "quant_method": "compressed-tensors", "format": "float-quantized"}))  # fmt: skip
    found = inspect_checkpoint(nano_copy)
    assert found.format == "bf16"
    assert note(found, "packed")
    assert note(found, "1 router tensor is BF16")
    assert note(found, r"1 tensor that is not Beam's: mtp.\x1b[31mnorm.weight")
    assert note(found, "1 KV-cache scale, which SGLang")
    assert note(found, "pytorch_model.bin")
    assert note(found, "claims compressed-tensors float-quantized, but no tensor is quantized")
    assert note(found, "1 tensor that config.json calls for is missing")
    assert note(found, "experts.3.up_proj")


def test_odd_quantized_checkpoints(nvfp4: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nvfp4, tmp_path / "copy")
    (folder / "beamq.json").unlink()
    (folder / "hf_quant_config.json").unlink()
    edit_json(folder / "config.json", lambda d: d.pop("quantization_config"))
    found = inspect_checkpoint(folder)
    assert (found.format, found.declared) == ("nvfp4", None)
    assert note(found, "no config says so")
    assert note(found, "no beamq.json")

    def mix(tensors: safetensors_edit.Tensors) -> None:
        name = "model.layers.3.mlp.experts.0.up_proj"
        tensors[f"{name}.weight"] = ("BF16", [64, 128], bytes(64 * 128 * 2))
        tensors["lm_head.weight"] = ("F8_E4M3", [2048, 128], bytes(2048 * 128))

    change_tensors(folder, mix)
    found = inspect_checkpoint(folder)
    assert found.format == "mixed"
    assert note(found, "quantized in part: model.layers.3")
    assert note(found, "head or embeddings are quantized: lm_head.weight")


def test_the_tensors_and_the_claim_differ(nvfp4: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nvfp4, tmp_path / "copy")
    edit_json(
        folder / "config.json", lambda d: d["quantization_config"].update(quant_algo="W4A8_AWQ")
    )
    assert note(inspect_checkpoint(folder), "tensors are nvfp4, config claims modelopt W4A8_AWQ")
    edit_json(folder / "config.json", lambda d: d.pop("quantization_config"))
    found = inspect_checkpoint(folder)
    assert found.declared == "modelopt NVFP4 (hf_quant_config.json only)"
    assert found.made_by is not None


def test_broken_files_are_noted(nvfp4: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nvfp4, tmp_path / "copy")
    raw = shards(folder)[0].read_bytes()
    shutil.copy(shards(folder)[0], folder / "other.safetensors")
    found = inspect_checkpoint(folder)
    assert note(found, "does not name: other.safetensors")
    (folder / "other.safetensors").unlink()
    shards(folder)[0].write_bytes(raw[:-10])
    assert note(inspect_checkpoint(folder), "bytes are missing at the end")
    (folder / "model.safetensors.index.json").unlink()
    assert note(inspect_checkpoint(folder), "model.safetensors.index.json")


def test_other_models_are_looked_at_too(nano_copy: Path) -> None:
    edit_json(nano_copy / "config.json", lambda d: d.update(model_type="llama"))
    found = inspect_checkpoint(nano_copy)
    assert (found.model_type, found.layers) == ("llama", None)
    assert note(found, "not a Beam")
    assert found.parameters == PARAMETERS


def test_what_cannot_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        inspect_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError):
        inspect_checkpoint(tmp_path)
