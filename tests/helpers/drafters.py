"""A drafter of beam-nano's sizes, made by hand: two layers, three target layers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from beamq.beam.config import DRAFTER_ARCHITECTURE
from tests.helpers import safetensors_edit as st
from tests.helpers.craft import to_bf16

H, VOCAB, WIDTH, TAPS, GROUP, RANK, LAYERS = 128, 2048, 256, 3, 16, 8, 2


def drafter_config(**changes: Any) -> dict[str, Any]:
    """config.json of `make_drafter`; `changes` replace keys."""
    return {
        "architectures": [DRAFTER_ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": H,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 8192,
        "layer_types": ["sliding_attention"] * LAYERS,
        "is_causal": False,
        "sliding_window": 64,
        "block_size": 8,
        "dflash_config": {
            "target_layer_ids": [1, 4, 6],
            "mask_token_id": 2047,
            "conv_kernel_size": TAPS,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": 4,
            "final_logit_softcapping": 30.0,
        },
    } | changes


def shapes() -> dict[str, list[int]]:
    """Names and shapes, written out from the table of facts and not from beamq."""
    found: dict[str, list[int]] = {}
    for layer in range(LAYERS):
        at, mlp, here = f"layers.{layer}.self_attn", f"layers.{layer}.mlp", f"layers.{layer}"
        found |= {f"{at}.q_proj.weight": [128, H], f"{at}.k_proj.weight": [64, H]}
        found |= {f"{at}.v_proj.weight": [64, H], f"{at}.o_proj.weight": [H, 128]}
        found |= {f"{at}.q_norm.weight": [32], f"{at}.k_norm.weight": [32]}
        found |= {f"{mlp}.gate_proj.weight": [WIDTH, H], f"{mlp}.up_proj.weight": [WIDTH, H]}
        found |= {f"{mlp}.down_proj.weight": [H, WIDTH], f"{here}.input_layernorm.weight": [H]}
        found[f"{here}.post_attention_layernorm.weight"] = [H]
        for conv in ("attention_conv", "mlp_conv"):
            found[f"{here}.{conv}.base_kernel"] = [2, TAPS, H]
            found[f"{here}.{conv}.kernel_projection.weight"] = [2 * TAPS * H // GROUP, H]
    found |= {"fc.weight": [H, 3 * H], "hidden_norm.weight": [H], "norm.weight": [H]}
    found |= {
        f"candidate_selector.{s}_codebook": [VOCAB, RANK] for s in ("predecessor", "successor")
    }
    found["candidate_selector.hidden_projection.weight"] = [RANK, H]
    return found


def make_drafter(folder: Path, **changes: Any) -> Path:
    """Write the folder: config.json and one file of small random values."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(5)
    tensors: st.Tensors = {}
    for name, shape in shapes().items():
        values = random.normal(0, 0.05, math.prod(shape)).astype(np.float32)
        tensors[name] = ("BF16", shape, to_bf16(values))
    st.save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(drafter_config(**changes)))
    return folder
