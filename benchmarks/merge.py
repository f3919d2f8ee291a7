"""What merging an adapter costs: `beamq merge` against PEFT, and `quantize` with and without it.

    python -m benchmarks.merge [--rank 16] [--rounds 3] [--experts 16] [--json out.json]
    python -m benchmarks.merge --device cuda --experts 256 --rank 32

Contenders run in turn, whole processes on the same files in memory (--work-dir, /dev/shm by
default); figures are medians. The model is a slice of real width (2.4 GB), and the adapter changes
every attention projection, and all experts in PEFT's packed layout, in FP32. PEFT's dense MLPs and
attention gates are left out, as its target names leave them out. PEFT needs the model, its deltas
and what it saves in memory; ours reads, merges and writes a few megabytes at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.make_slice import TINY, Slice, make_slice
from benchmarks.measuring import Cost, in_turns, machine, median_s, run

WAYS = ("merge", "peft", "fp8", "fp8 with the adapter", "nvfp4-max", "nvfp4-max with the adapter")


def make_adapter(folder: Path, what: Slice, rank: int) -> None:
    """q, k, v, o as modules and the packed experts, seeded, as PEFT 0.21 saves them."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(0)
    q, kv, hidden = what.heads * what.head_dim, what.kv_heads * what.head_dim, what.hidden
    shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    tensors: dict[str, torch.Tensor] = {}

    def add(module: str, n: int, k: int, count: int) -> None:
        a = torch.randn(rank * count, k, generator=random) / k**0.5
        b = torch.randn(n, rank * count, generator=random) / 100
        name = f"base_model.model.{module}"
        tensors.update({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})

    for layer in range(what.dense_layers + what.sparse_layers):
        prefix = f"model.layers.{layer}"
        for proj, (n, k) in {**shapes, "o_proj": (hidden, q)}.items():
            add(f"{prefix}.self_attn.{proj}", n, k, 1)
        if layer >= what.dense_layers:
            width, experts = what.expert_width, f"{prefix}.mlp.experts"
            add(f"{experts}.base_layer", 2 * width, hidden, what.experts)
            add(experts, hidden, width, what.experts)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "peft_version": "0.21.2",
        "base_model_name_or_path": "slice", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def command(way: str, source: Path, adapter: Path, output: Path) -> list[str]:
    ours = [sys.executable, "-m", "beamq"]
    if way == "merge":
        return [*ours, "merge", str(source), str(adapter), str(output), "--quiet"]
    if way == "peft":
        return [sys.executable, "-m", "benchmarks.peer_peft", *map(str, (source, adapter, output))]
    recipe, _, with_adapter = way.partition(" ")
    more = ["--no-calibration"] * recipe.startswith("nvfp4")
    more += ["--adapter", str(adapter)] * bool(with_adapter)
    return [*ours, "quantize", str(source), str(output), "-r", recipe, "--quiet", *more]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--device", help="only ours, in this process, on this device")
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the benchmark")
    parser.add_argument("--work-dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    what = TINY if given.tiny else Slice(experts=given.experts)
    with tempfile.TemporaryDirectory(prefix="beamq-merge-", dir=given.work_dir) as work:
        if given.device is None:
            found = measure(Path(work), what, given.rank, given.rounds)
            show(found)
        else:
            found = measure_device(Path(work), what, given.rank, given.rounds, given.device)
            show_device(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(work: Path, what: Slice, rank: int, rounds: int) -> dict[str, Any]:
    source, adapter, output = work / "source", work / "adapter", work / "output"
    nbytes = make_slice(source, what)
    make_adapter(adapter, what, rank)
    costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            costs[way].append(run(command(way, source, adapter, output)))
            shutil.rmtree(output)
    peer = [json.loads(cost.output.splitlines()[-1]) for cost in costs["peft"]]
    return {
        "machine": machine(),
        "source_bytes": nbytes,
        "rank": rank,
        "rounds": rounds,
        "ways": {
            way: {
                "wall_s": statistics.median(cost.wall_s for cost in each),
                "cpu_s": statistics.median(cost.user_s + cost.system_s for cost in each),
                "peak_bytes": max(cost.peak_nbytes for cost in each),
                "others": max(cost.others for cost in each),
            }
            for way, each in costs.items()
        },
        "peft_steps": {key: statistics.median(each[key] for each in peer) for key in peer[0]},
    }


def measure_device(work: Path, what: Slice, rank: int, rounds: int, device: str) -> dict[str, Any]:
    """Conversions in this process, warm, in turn: with the adapter and without."""
    import beamq

    source, adapter, output = work / "source", work / "adapter", work / "output"
    nbytes = make_slice(source, what)
    make_adapter(adapter, what, rank)

    def convert(recipe: str, given: Path | None) -> None:
        plain = recipe == "fp8"
        beamq.quantize(
            source, output, recipe=recipe, adapter=given, device=device, no_calibration=not plain
        )

    calls = {
        f"{recipe}{' with the adapter' * (given is not None)}": partial(convert, recipe, given)
        for recipe in ("fp8", "nvfp4-max")
        for given in (None, adapter)
    }
    turns = in_turns(calls, rounds, after=partial(shutil.rmtree, output))
    return {
        "machine": machine(), "device": device, "source_bytes": nbytes, "rank": rank,
        "rounds": rounds, "wall_s": {way: median_s(each) for way, each in turns.items()},
    }  # fmt: skip


def show_device(found: dict[str, Any]) -> None:
    for way, seconds in found["wall_s"].items():
        print(f"{way:28} {seconds:7.2f} s  {found['source_bytes'] / seconds / 1e9:6.2f} GB/s")
    for recipe in ("fp8", "nvfp4-max"):
        ratio = found["wall_s"][f"{recipe} with the adapter"] / found["wall_s"][recipe]
        print(f"{recipe} with the adapter over without: {ratio:.2f}")


def show(found: dict[str, Any]) -> None:
    ways = found["ways"]
    for way, each in ways.items():
        print(
            f"{way:28} {each['wall_s']:7.2f} s  {each['cpu_s']:7.2f} s of CPU"
            f"  {each['peak_bytes'] / 1e9:5.2f} GB at most  others {each['others']:.0%}"
        )
    whole = ways["peft"]["wall_s"]
    alone = whole - found["peft_steps"]["import_s"]
    ours = ways["merge"]["wall_s"]
    print(f"PEFT over ours: {whole / ours:.1f}; without its imports {alone / ours:.1f}")
    for recipe in ("fp8", "nvfp4-max"):
        ratio = ways[f"{recipe} with the adapter"]["wall_s"] / ways[recipe]["wall_s"]
        print(f"{recipe} with the adapter over without: {ratio:.2f}")


if __name__ == "__main__":
    main()
