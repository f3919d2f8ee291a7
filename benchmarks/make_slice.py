"""Write a synthetic Beam checkpoint of real width and few layers, for measuring conversion.

In: a folder and a number of experts. Out: config.json and BF16 shards (router FP32) with the
names, shapes and dtypes of the real model: hidden 5120, attention 48/8 heads of 128, dense MLP
20480, experts 2560. Only the number of layers, experts and tokens is small.

    python -m benchmarks.make_slice FOLDER                    2.4 GB: 1 dense, 1 sparse layer of 16
    python -m benchmarks.make_slice FOLDER --experts 88       8.0 GB

Values follow Student's t (6 degrees of freedom), which has outliers as a trained model has. They
come from one small pool of random numbers that is shifted and scaled for each piece, and threads
write several shards at a time: writing runs at the speed of the disk, and memory stays at a few
pools. The same arguments give the same bytes. The slice serves to measure sizes and times; codes
made from such weights say nothing about quality.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import FP32_ROLES, Role, TensorRole, expected_tensors
from benchmarks.measuring import ROOT

POOL_VALUES = 1 << 22
STANDARD_DEVIATION = 0.02
MARKER = ".slice.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What to write. The defaults are Beam's widths."""

    experts: int = 16
    dense_layers: int = 1
    sparse_layers: int = 1
    hidden: int = 5120
    dense_width: int = 20480
    expert_width: int = 2560
    heads: int = 48
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 2048
    shard_bytes: int = 1_000_000_000
    seed: int = 0


TINY = Slice(
    hidden=64, dense_width=128, expert_width=32, heads=4, kv_heads=2, head_dim=16,
    shard_bytes=100_000,
)  # fmt: skip
"""Widths of a toy, to try a benchmark."""


def add_tokenizer(folder: Path) -> None:
    """Give a slice the small Beam's tokenizer, whose ids fit the slice's vocabulary."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "beam-nano" / name, folder / name)


def beam_config(what: Slice) -> dict[str, Any]:
    """A config.json for the slice; layers alternate between sliding and full attention."""
    layers = what.dense_layers + what.sparse_layers
    groups = max(1, min(8, what.experts // 2))
    while what.experts % groups:
        groups -= 1
    kept = max(1, groups // 2)
    return {
        "architectures": ["BeamForCausalLM"],
        "model_type": "beam",
        "dtype": "bfloat16",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": what.head_dim,
        "hidden_act": "silu",
        "hidden_size": what.hidden,
        "initializer_range": STANDARD_DEVIATION,
        "intermediate_size": what.dense_width,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "max_position_embeddings": 8192,
        "mlp_layer_types": ["dense"] * what.dense_layers + ["sparse"] * what.sparse_layers,
        "moe_intermediate_size": what.expert_width,
        "n_group": groups,
        "norm_topk_prob": True,
        "num_attention_heads": what.heads,
        "num_experts": what.experts,
        "num_experts_per_tok": min(8, kept * what.experts // groups),
        "num_hidden_layers": layers,
        "num_key_value_heads": what.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "routed_scaling_factor": 2.5,
        "sliding_window": 512,
        "tie_word_embeddings": False,
        "topk_group": kept,
        "use_cache": True,
        "vocab_size": what.vocab,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    role: TensorRole
    number: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return "F32" if self.role.role in FP32_ROLES else "BF16"

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.numel * (4 if self.dtype == "F32" else 2)


def make_slice(folder: Path, what: Slice, *, reuse: bool = False) -> int:
    """Write the checkpoint and return the bytes of its tensors.

    An existing folder is replaced; with `reuse` it is kept if the same arguments made it.
    """
    marker = folder / MARKER
    recorded = json.dumps(asdict(what), sort_keys=True)
    config = beam_config(what)
    tensors = [
        _Tensor(role=role, number=number, shape=shape)
        for number, (role, shape) in enumerate(expected_tensors(BeamConfig.from_dict(config)))
    ]
    total = sum(tensor.nbytes for tensor in tensors)
    if reuse and marker.exists() and marker.read_text() == recorded:
        return total
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    values = _Values(what.seed)
    shards = list(_shards(tensors, what.shard_bytes))
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        written = []
        for number, members in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            written.append(pool.submit(_write_shard, folder / name, members, values))
            weight_map |= {tensor.role.name: name for tensor in members}
        for shard in written:
            shard.result()
    index = {
        "metadata": {
            "total_parameters": sum(tensor.numel for tensor in tensors),
            "total_size": total,
        },
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    marker.write_text(recorded)  # last: a folder with it is whole
    return total


def _shards(tensors: Iterable[_Tensor], limit: int) -> Iterator[list[_Tensor]]:
    """Fill shards in order. A tensor is never split, so a larger one has a shard of its own."""
    members: list[_Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if members and nbytes + tensor.nbytes > limit:
            yield members
            members, nbytes = [], 0
        members.append(tensor)
        nbytes += tensor.nbytes
    yield members


def _write_shard(path: Path, members: list[_Tensor], values: _Values) -> None:
    members = sorted(members, key=lambda tensor: tensor.dtype != "F32")  # keeps FP32 aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in members:
        header[tensor.role.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.nbytes],
        }
        begin += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write(descriptor, memoryview(len(text).to_bytes(8, "little") + text))
        for tensor in members:
            for piece in values.of(tensor):
                _write(descriptor, piece.view(np.uint8).data)
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < data.nbytes:
        done += os.write(descriptor, data[done:])


class _Values:
    """Pieces of tensors, cut from one pool of random numbers. Shared by threads."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        heavy = np.random.default_rng(seed).standard_t(6, POOL_VALUES)
        scaled = heavy * (STANDARD_DEVIATION * (4 / 6) ** 0.5)
        self._pool = bf16_bits(scaled.astype(np.float32))
        # One more in the exponent doubles a value: linears differ in amax, as real ones do.
        self._doubled = self._pool + np.uint16(1 << 7)

    def of(self, tensor: _Tensor) -> Iterator[np.ndarray[Any, Any]]:
        """The tensor's values in order, as BF16 bits or FP32."""
        rng = np.random.default_rng((self._seed, tensor.number))
        if tensor.dtype == "F32":
            yield rng.normal(0.0, STANDARD_DEVIATION, tensor.numel).astype(np.float32)
        elif len(tensor.shape) == 1:
            middle = 0.0 if tensor.role.name.endswith("gate_bias") else 1.0
            yield bf16_bits(rng.normal(middle, 0.1, tensor.numel).astype(np.float32))
        else:
            doubled = tensor.role.role is not Role.EMBEDDING and bool(rng.integers(2))
            pool = self._doubled if doubled else self._pool
            left = tensor.numel
            while left:
                start = int(rng.integers(POOL_VALUES // 2))
                piece = pool[start : start + left]
                yield piece
                left -= len(piece)


def bf16_bits(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, Any]:
    """Round FP32 to the nearest BF16, ties to even; the bits as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a real-width slice of a synthetic Beam.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--dense-layers", type=int, default=1)
    parser.add_argument("--sparse-layers", type=int, default=1)
    parser.add_argument("--shard-bytes", type=int, help="default: 1 GB, of a toy 100 KB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="widths of a toy, for a try")
    parser.add_argument("--reuse", action="store_true", help="keep a folder made the same way")
    options = parser.parse_args(arguments)
    widths = TINY if options.tiny else Slice()
    what = replace(
        widths,
        experts=options.experts,
        dense_layers=options.dense_layers,
        sparse_layers=options.sparse_layers,
        shard_bytes=options.shard_bytes or widths.shard_bytes,
        seed=options.seed,
    )
    begun = time.monotonic()
    nbytes = make_slice(options.folder, what, reuse=options.reuse)
    print(f"{options.folder}: {nbytes / 1e9:.2f} GB in {time.monotonic() - begun:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
