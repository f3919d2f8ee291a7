"""Adapters with one thing wrong or in another form, made from those of the fixtures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from beamq.adapter.merged import merge_adapter
from beamq.adapter.open import open_adapter
from beamq.io.checkpoint import Checkpoint, open_checkpoint

Tensors = dict[str, torch.Tensor]
Change = Callable[[dict[str, Any], Tensors], None]
PREFIX = "base_model.model."


def changed(adapter: Path, folder: Path, change: Change) -> Path:
    """A copy of an adapter in `folder`, with its config and tensors changed."""
    folder.mkdir(parents=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def made(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """An adapter of these tensors, whose names lack PEFT's prefix, and rank 2 and alpha 4."""
    folder.mkdir(parents=True)
    said = {"peft_type": "LORA", "peft_version": "0.21.2", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    named = {PREFIX + name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def pair(module: str, n: int, k: int, rank: int = 2, seed: int = 0) -> Tensors:
    """lora_A and lora_B of a linear [n, k]."""
    random = torch.Generator().manual_seed(seed)
    return {
        f"{module}.lora_A.weight": torch.randn(rank, k, generator=random) / 16,
        f"{module}.lora_B.weight": torch.randn(n, rank, generator=random) / 16,
    }


def merged(source: Path, adapter: Path, **how: Any) -> Checkpoint:
    """The source with the adapter merged in."""
    return merge_adapter(open_checkpoint(source), open_adapter(adapter), **how)


def with_packed_experts(source: Path, folder: Path) -> Path:
    """The same model with the experts of each layer in two 3-D tensors."""
    tensors = load_file(source / "model.safetensors")
    experts = 1 + max(int(name.split(".")[5]) for name in tensors if ".mlp.experts." in name)
    layers = sorted({name.split(".")[2] for name in tensors if ".mlp.experts." in name})
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts"

        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{e}.{proj}.weight") for e in range(experts)])
            for proj in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{prefix}.down_proj"] = down
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
