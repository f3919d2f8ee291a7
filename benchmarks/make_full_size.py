"""Write a checkpoint with the real Beam's headers and holes for weights: 501B parameters, no disk.

    python -m benchmarks.make_full_size FOLDER

Every file has its full length (a terabyte in all) but only its header occupies the disk, so the
planner can be tested and timed at full size on a laptop. The shapes below are written out by
hand, not taken from beamq, so that a test of beamq against them means something.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, VOCAB = 5120, 52, 151_936
HEADS, KV_HEADS, HEAD_DIM = 48, 8, 128
EXPERTS, EXPERT_WIDTH, DENSE_WIDTH = 256, 2560, 20_480
FIRST_SPARSE = 3
SHARD_BYTES = 5_000_000_000
NBYTES = {"BF16": 2, "F32": 4}

Entry = tuple[str, str, tuple[int, ...]]


def full_size_config() -> dict[str, Any]:
    """config.json of the 501B Beam, as transformers writes it."""
    return {
        "architectures": ["BeamForCausalLM"],
        "model_type": "beam",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE_WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 512,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 1_048_576,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": None,
        },
        "layer_types": [
            "full_attention" if layer % 6 == 5 or layer == LAYERS - 1 else "sliding_attention"
            for layer in range(LAYERS)
        ],
        "mlp_layer_types": ["dense"] * FIRST_SPARSE + ["sparse"] * (LAYERS - FIRST_SPARSE),
    }


def full_size_tensors() -> Iterator[Entry]:
    """(name, dtype, shape) of all 38,366 tensors."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield "model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for proj, rows in (("q", q), ("k", kv), ("v", kv), ("gate", q)):
            yield f"{at}.self_attn.{proj}_proj.weight", "BF16", (rows, HIDDEN)
        yield f"{at}.self_attn.o_proj.weight", "BF16", (HIDDEN, q)
        yield f"{at}.self_attn.q_norm.weight", "BF16", (HEAD_DIM,)
        yield f"{at}.self_attn.k_norm.weight", "BF16", (HEAD_DIM,)
        yield f"{at}.self_attn.gate_bias", "BF16", (HEADS,)
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{at}.{place}_layernorm.weight", "BF16", (HIDDEN,)
        if layer < FIRST_SPARSE:
            yield from _mlp(f"{at}.mlp", DENSE_WIDTH)
            continue
        yield f"{at}.mlp.gate.weight", "F32", (EXPERTS, HIDDEN)
        yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
        for expert in range(EXPERTS):
            yield from _mlp(f"{at}.mlp.experts.{expert}", EXPERT_WIDTH)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (VOCAB, HIDDEN)


def _mlp(at: str, width: int) -> Iterator[Entry]:
    yield f"{at}.gate_proj.weight", "BF16", (width, HIDDEN)
    yield f"{at}.up_proj.weight", "BF16", (width, HIDDEN)
    yield f"{at}.down_proj.weight", "BF16", (HIDDEN, width)


def write_full_size(folder: Path) -> None:
    """Write config, index and shards of holes into `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[tuple[Entry, int]]] = []
    room = -1
    for entry in full_size_tensors():
        nbytes = NBYTES[entry[1]]
        for size in entry[2]:
            nbytes *= size
        if nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append((entry, nbytes))
        room -= nbytes
    weight_map: dict[str, str] = {}
    total = 0
    for number, entries in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _write_shard(folder / name, entries)
        weight_map.update((tensor, name) for (tensor, _, _), _ in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(full_size_config(), indent=2))


def _write_shard(path: Path, entries: list[tuple[Entry, int]]) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for (name, dtype, shape), nbytes in entries:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        os.ftruncate(stream.fileno(), 8 + len(text) + end)
        # beamq refuses a model of zeros: every tensor but the experts' has a value, and each file's
        # last tensor has one at its end.
        begins = [
            header[name]["data_offsets"][0] for (name, *_), _ in entries if "experts" not in name
        ]
        for place in [*begins, end - 2]:
            stream.seek(8 + len(text) + place)
            stream.write(b"\x80\x3f")
    return end


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the 501B Beam's headers over holes.")
    parser.add_argument("folder", type=Path)
    write_full_size(parser.parse_args().folder)
