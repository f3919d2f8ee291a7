"""`quantize_tensors` on a GPU: experts of the real width, as a share of the copy bandwidth.

    python -m benchmarks.stream_gpu [--experts N] [--json FILE]

One sparse layer's experts, packed and one by one. Time is that of the whole iterator, the host's
part and its one wait included. Bytes are those that must move: weights read once, outputs written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from beamq.beam.config import BeamConfig
from beamq.convert.tensors import quantize_tensors
from benchmarks.gpu_timing import copy_tb_per_s, machine, seconds
from benchmarks.random_layer import REAL

RECIPES = ("nvfp4", "nvfp4-max", "fp8-experts")
REPEATS = 5
BASE = "model.layers.0.mlp.experts"


def experts(config: BeamConfig) -> dict[str, dict[str, torch.Tensor]]:
    """The same weights in both forms."""
    count, wide, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    shapes = {"gate_up_proj": (count, 2 * wide, hidden), "down_proj": (count, hidden, wide)}
    packed = {
        f"{BASE}.{name}": torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)
        for name, shape in shapes.items()
    }
    gate_up, down = packed.values()
    one_by_one = {
        f"{BASE}.{expert}.{part}.weight": rows
        for expert in range(count)
        for part, rows in (
            ("gate_proj", gate_up[expert, :wide]),
            ("up_proj", gate_up[expert, wide:]),
            ("down_proj", down[expert]),
        )
    }
    return {"packed": packed, "one by one": one_by_one}


def measure(named: Mapping[str, torch.Tensor], recipe: str, config: BeamConfig) -> dict[str, float]:
    """Seconds of a stream, and the bytes that it reads and writes."""

    def call() -> int:
        return sum(tensor.nbytes for _, tensor in quantize_tensors(named, recipe, config))

    call()  # kernels are compiled now
    runs = [seconds(call) for _ in range(REPEATS)]
    source = sum(tensor.nbytes for tensor in named.values())
    return {
        "s": median(run[0] for run in runs),
        "source_bytes": source,
        "moved_bytes": source + runs[0][1],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--experts", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    config = replace(REAL, num_experts=options.experts)
    ceiling = copy_tb_per_s()
    result: dict[str, Any] = {**machine(), "copy_tb_per_s": ceiling, "streams": []}
    print(f"copy {ceiling:.2f} TB/s; {options.experts} experts")
    for form, named in experts(config).items():
        for recipe in RECIPES:
            found = measure(named, recipe, config)
            rate = found["moved_bytes"] / found["s"] / 1e12
            entry = {"recipe": recipe, "form": form, **found, "ratio": rate / ceiling}
            result["streams"].append(entry)
            source = found["source_bytes"] / found["s"] / 1e9
            print(
                f"{recipe:12} {form:11} {1e3 * found['s']:8.2f} ms {source:7.0f} GB/s of source"
                f" {rate:5.2f} TB/s {rate / ceiling:.2f} of copy",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
