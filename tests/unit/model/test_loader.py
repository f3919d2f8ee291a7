"""Weights from every form a checkpoint comes in; what is refused; what a tap is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import Role
from beamq.errors import CheckpointError, TensorError
from beamq.formats import fp8, nvfp4
from beamq.io.checkpoint import open_checkpoint
from beamq.io.safetensors_header import TensorSpec
from beamq.model.gemm.backend import DenseWeight, Fp8Weight, Nvfp4Weight
from beamq.model.gemm.reference import decode
from beamq.model.layer import DenseMlp, SparseMlp
from beamq.model.loader import LayerLoader
from beamq.model.logits import logits
from tests.helpers.model_fixtures import quantized_copy, random_beam, token_ids

CPU = torch.device("cpu")
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_beam(tmp_path_factory.mktemp("source"))


def loader(path: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> LayerLoader:
    checkpoint = open_checkpoint(path)
    config = BeamConfig.from_dict(checkpoint.config)
    return LayerLoader(checkpoint, config, dtype=dtype, device=CPU, **options)


def edited(source: Path, target: Path, change: Any) -> Path:
    """A copy whose tensors went through `change(dict)`."""
    target.mkdir(exist_ok=True)
    for file in source.glob("*.json"):
        if "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / FILE)
    change(tensors)
    save_file(tensors, target / FILE, metadata={"format": "pt"})
    return target


def pack_experts(tensors: dict[str, torch.Tensor], suffix: str) -> None:
    """Per-expert tensors become packed 3-D ones."""
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts: dict[str, list[torch.Tensor]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
        for e in range(8):
            for name, into in parts.items():
                into.append(tensors.pop(f"{prefix}.{e}.{name}.weight"))
        gate_up = [
            torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)
        ]
        tensors[f"{prefix}.gate_up_proj{suffix}"] = torch.stack(gate_up)
        tensors[f"{prefix}.down_proj{suffix}"] = torch.stack(parts["down_proj"])


def test_rows_lie_in_their_places(source: Path) -> None:
    tensors = load_file(source / FILE)
    load = loader(source)
    attention = load.layer(0).attention
    names = ("q_proj", "k_proj", "v_proj", "gate_proj")
    wanted = torch.cat([tensors[f"model.layers.0.self_attn.{name}.weight"] for name in names])
    assert isinstance(attention.qkv_gate, DenseWeight)
    assert torch.equal(attention.qkv_gate.w_NK, wanted)
    assert attention.window == 8
    assert load.layer(1).attention.window is None
    dense, sparse = load.layer(0).mlp, load.layer(1).mlp
    assert isinstance(dense, DenseMlp)
    assert isinstance(sparse, SparseMlp)
    (experts,) = sparse.experts
    for e in range(8):
        prefix = f"model.layers.1.mlp.experts.{e}"
        gate_up = torch.cat([tensors[f"{prefix}.{n}.weight"] for n in ("gate_proj", "up_proj")])
        assert torch.equal(decode(experts.gate_up.expert(e), torch.bfloat16), gate_up)
    part = load.experts(1, 3, 2)
    assert torch.equal(part.down.w_NK, experts.down.w_NK[3:5])


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_packed_experts_load_alike(source: Path, tmp_path: Path, suffix: str) -> None:
    packed = edited(source, tmp_path / "packed", lambda t: pack_experts(t, suffix))
    ids = token_ids(2, 20, 96)
    assert torch.equal(logits(packed, ids), logits(source, ids))
    part = loader(packed).experts(2, 5, 3)
    assert torch.equal(part.gate_up.w_NK, loader(source).experts(2, 5, 3).gate_up.w_NK)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_other_source_dtypes_are_cast_once(
    source: Path, tmp_path: Path, stored: torch.dtype
) -> None:
    def cast(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype == torch.bfloat16:
                tensors[name] = tensor.to(stored)

    copy = edited(source, tmp_path / "cast", cast)
    layer = loader(copy).layer(0)
    assert layer.input_norm.dtype == torch.bfloat16
    weight = load_file(copy / FILE)["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(decode(layer.attention.o, torch.bfloat16), weight.bfloat16())


def test_router_stays_fp32(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / FILE)
    name = "model.layers.1.mlp.gate.weight"
    mlp = loader(source).layer(1).mlp
    assert torch.equal(mlp.router.weight_EK, tensors[name])
    careless = edited(source, tmp_path / "bf16", lambda t: t.update({name: t[name].bfloat16()}))
    mlp = loader(careless).layer(1).mlp
    assert mlp.router.weight_EK.dtype == torch.float32
    assert torch.equal(mlp.router.weight_EK, tensors[name].bfloat16().float())


def test_quantized_weights_keep_codes_and_scales(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / FILE)
    q = loader(quantized_copy(source, tmp_path / "fp8", "fp8")).layer(1)
    assert isinstance(q.attention.qkv_gate, Fp8Weight)
    codes, scale = fp8.quantize_rows(tensors["model.layers.1.self_attn.k_proj.weight"])
    assert torch.equal(q.attention.qkv_gate.codes[64:96].float(), codes.float())
    assert torch.equal(q.attention.qkv_gate.scale[64:96], scale)

    def amax(group: str) -> float:
        return 3.0 + int(group.split(".")[5]) if "experts" in group else 7.0

    fp4 = loader(quantized_copy(source, tmp_path / "fp4", "nvfp4", input_amax=amax))
    (experts,) = fp4.layer(1).mlp.experts
    assert isinstance(experts.gate_up, Nvfp4Weight)
    # one input scale for all experts of a layer, the largest, in a slice too
    assert experts.gate_up.input_scale == nvfp4.global_scale_from_amax(10.0)
    assert fp4.experts(1, 0, 2).down.input_scale == nvfp4.global_scale_from_amax(10.0)
    assert experts.gate_up.global_scale.shape == (8, 64, 1)
    up = tensors["model.layers.1.mlp.experts.6.up_proj.weight"].float()
    got = decode(experts.gate_up.expert(6), torch.float32)[32:]
    assert 0.05 < ((got - up).norm() / up.norm()) < 0.12


def test_tied_embeddings(source: Path, tmp_path: Path) -> None:
    tied = edited(source, tmp_path / "tied", lambda t: t.pop("lm_head.weight"))
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    head = loader(tied).head()
    assert torch.equal(head.output_VK, load_file(tied / FILE)["model.embed_tokens.weight"])


def test_tap_is_shown_every_byte_once(source: Path, tmp_path: Path) -> None:
    packed = edited(source, tmp_path / "packed", lambda t: pack_experts(t, ""))
    for path, dtype in (
        (source, torch.bfloat16),
        (source, torch.float32),
        (packed, torch.bfloat16),
    ):
        seen: dict[str, dict[int, torch.Tensor]] = {}

        def tap(spec: TensorSpec, first: int, tensor: torch.Tensor) -> None:
            assert seen.setdefault(spec.name, {}).setdefault(first, tensor.clone()) is not None  # noqa: B023

        load = loader(path, dtype, tap=tap)
        for index in range(3):
            load.layer(index)
        load.embedding()
        load.head()
        for name, tensor in load_file(path / FILE).items():
            shown = torch.cat([seen[name][first] for first in sorted(seen[name])])
            assert shown.dtype == tensor.dtype
            assert torch.equal(shown, tensor)


def faults(source: Path) -> Iterator[tuple[str, Any, str]]:
    q = "model.layers.1.self_attn.q_proj.weight"
    yield "missing", lambda t: t.pop(q), f"{q} is missing"
    yield (
        "shape",
        lambda t: t.update({q: t[q][:10].clone()}),
        r"shape \[10, 64\], expected \[64, 64\]",
    )
    yield "dtype", lambda t: t.update({q: torch.zeros(64, 64, dtype=torch.int64)}), "dtype I64"
    norm = "model.layers.1.input_layernorm.weight"
    yield "norm", lambda t: t.update({norm: torch.zeros(64, dtype=torch.int32)}), "dtype I32"


def test_refusals(source: Path, tmp_path: Path) -> None:
    for name, change, message in faults(source):
        broken = edited(source, tmp_path / name, change)
        with pytest.raises(TensorError, match=message):
            loader(broken).layer(1)


def test_parts_of_a_fused_set_must_agree(source: Path, tmp_path: Path) -> None:
    quantized = quantized_copy(source, tmp_path / "q", "fp8")
    plain = load_file(source / FILE)
    name = "model.layers.1.self_attn.v_proj.weight"
    mixed = edited(quantized, tmp_path / "mixed", lambda t: t.update({name: plain[name]}))
    with pytest.raises(TensorError, match=r"v_proj is dense but .*q_proj is fp8"):
        loader(mixed).layer(1)


def test_config_must_announce_the_format(source: Path, tmp_path: Path) -> None:
    quantized = quantized_copy(source, tmp_path / "q", "nvfp4", roles=(Role.EXPERT,))
    config = json.loads((quantized / "config.json").read_text())
    block = config.pop("quantization_config")
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(TensorError, match="stored as nvfp4, but the config says that nothing"):
        loader(quantized).layer(1)
    nested = {"quantization": {"quant_algo": "NVFP4"}}
    (quantized / "hf_quant_config.json").write_text(json.dumps(nested))
    assert loader(quantized).layer(1).index == 1
    block["quant_method"] = "gptq"
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": block}))
    with pytest.raises(CheckpointError, match="quant_method 'gptq'"):
        loader(quantized)


def test_scales_must_be_positive_and_whole(source: Path, tmp_path: Path) -> None:
    quantized = quantized_copy(source, tmp_path / "q", "nvfp4", roles=(Role.EXPERT,))
    name = "model.layers.2.mlp.experts.4.up_proj.input_scale"
    for value, message in ((0.0, "is 0.0"), (float("nan"), "is nan"), (None, "missing")):

        def change(tensors: dict[str, torch.Tensor]) -> None:
            del tensors[name]
            if value is not None:  # noqa: B023
                tensors[name] = torch.tensor(value)  # noqa: B023

        broken = edited(quantized, tmp_path / str(value), change)
        with pytest.raises(TensorError, match=message):
            loader(broken).experts(2, 0, 1)
