"""Small Beams for tests of the forward pass: random or quantized, and transformers' answers.

A random Beam from transformers has norms of one and biases of zero, which would hide a norm or a
bias applied in the wrong place; everything is drawn at random here. Quantized folders are written
with the plain-torch formats and safetensors, not with beamq's own converter, so that the forward
pass is judged apart from it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import BeamConfig as HFBeamConfig
from transformers import BeamForCausalLM

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import QUANTIZABLE, Role, classify, fused_group
from beamq.formats import fp8, nvfp4
from beamq.plan.layout import (
    compressed_tensors_ignore,
    layer_units,
    modelopt_ignore,
    quantization_config,
)

SLIDING, FULL, DENSE, SPARSE = "sliding_attention", "full_attention", "dense", "sparse"


def random_beam(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **over: Any
) -> Path:
    """A checkpoint of a random Beam, written by transformers; `over` replaces config keys."""
    config = HFBeamConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "sliding_window": 8,
            "layer_types": [SLIDING, FULL, SLIDING],
            "mlp_layer_types": [DENSE, SPARSE, SPARSE],
            **over,
        }
    )
    torch.manual_seed(seed)
    model = BeamForCausalLM(config)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                value.copy_(1 + 0.2 * torch.randn_like(value))
            elif name.endswith(("gate_bias", "e_score_correction_bias")):
                value.copy_(0.3 * torch.randn_like(value))
            elif name.endswith(("weight", "_proj")):
                value.copy_(torch.randn_like(value) * value.shape[-1] ** -0.5)
    model.to(dtype)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if "mlp.gate." in name:
            value.data = torch.randn_like(value, dtype=torch.float32) * 0.2
    model.save_pretrained(folder)
    return folder


def hf_model(path: Path, dtype: torch.dtype, **options: Any) -> BeamForCausalLM:
    """transformers' model, ready to be asked."""
    return BeamForCausalLM.from_pretrained(path, dtype=dtype, **options).eval()


def hf_logits(
    model: BeamForCausalLM, ids_BT: torch.Tensor, mask_BT: torch.Tensor | None = None
) -> torch.Tensor:
    """transformers' logits in FP32. With a mask, positions count from the first real token."""
    extra = {}
    if mask_BT is not None:
        positions = (mask_BT.cumsum(1) - 1).clamp(min=0)
        extra = {"attention_mask": mask_BT, "position_ids": positions}
    with torch.no_grad():
        return model(ids_BT, use_cache=False, **extra).logits.float()


def token_ids(batch: int, length: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Random ids [B, T]."""
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def text_ids(path: Path, batch: int, length: int) -> torch.Tensor:
    """Ids [B, T] of Python source (a module of the standard library), what the fixtures know."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = tokenizer.encode(inspect.getsource(argparse)).ids
    return torch.tensor(ids[: batch * length]).view(batch, length)


def quantized_copy(
    source: Path,
    target: Path,
    fmt: str,
    *,
    roles: tuple[Role, ...] = QUANTIZABLE,
    input_amax: Callable[[str], float] = lambda group: 8.0,
) -> Path:
    """`source` in FP8 or NVFP4, names and configs as on disk. `input_amax` by fused group."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    amax: dict[str, float] = {}
    for name, tensor in tensors.items():
        role = classify(name)
        if role.role in roles:
            group = fused_group(role)
            amax[group] = max(amax.get(group, 0.0), tensor.float().abs().max().item())
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        role = classify(name)
        if role.role not in roles:
            out[name] = tensor
        elif fmt == "fp8":
            out[name], out[f"{role.module}.weight_scale"] = fp8.quantize_rows(tensor)
        else:
            group = fused_group(role)
            q = nvfp4.quantize(tensor, nvfp4.global_scale_from_amax(amax[group]))
            out[name], out[f"{role.module}.weight_scale"] = q.codes, q.block_scale
            out[f"{role.module}.weight_scale_2"] = q.global_scale
            out[f"{role.module}.input_scale"] = nvfp4.global_scale_from_amax(input_amax(group))
    save_file(out, target / "model.safetensors", metadata={"format": "pt"})
    _declare(target, fmt, roles)
    return target


def _declare(target: Path, fmt: str, roles: tuple[Role, ...]) -> None:
    path = target / "config.json"
    raw = json.loads(path.read_text())
    config = BeamConfig.from_dict(raw)
    units = [unit for unit in layer_units(config) if unit[1] in roles]
    ignore = compressed_tensors_ignore if fmt == "fp8" else modelopt_ignore
    raw["quantization_config"] = quantization_config(fmt, ignore(config, units, ()), "none")
    path.write_text(json.dumps(raw))
