"""benchmarks/make_slice.py: what it writes is a checkpoint that opens, plans and repeats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from beamq.io.checkpoint import open_checkpoint
from beamq.plan.plan import make_plan
from beamq.plan.recipe import load_recipe
from benchmarks.make_slice import TINY, make_slice


def _make(folder: Path, experts: int, *, reuse: bool = False) -> None:
    make_slice(folder, replace(TINY, experts=experts, vocab=64, shard_bytes=40_000), reuse=reuse)


@pytest.mark.parametrize("experts", [4, 16])
def test_slice_opens_and_plans(tmp_path: Path, experts: int) -> None:
    _make(tmp_path / "slice", experts)
    with open_checkpoint(tmp_path / "slice") as checkpoint:
        files = {spec.file for spec in checkpoint.tensors.values()}
        router = checkpoint.tensors["model.layers.1.mlp.gate.weight"]
        plan = make_plan(checkpoint, load_recipe("nvfp4-all"))
        amax = max(abs(float(value)) for value in checkpoint.tensor("lm_head.weight").flatten())
    assert len(files) > 1
    assert (router.dtype, router.shape) == ("F32", (experts, 64))
    groups = 2 * 2 + 2 + 2 * experts  # per layer q,k,v,gate and o; per MLP gate,up and down
    assert sum(job.kind == "nvfp4" for job in plan.jobs) == groups
    assert 0.05 < amax < 1.0


def test_same_arguments_same_bytes_and_reuse(tmp_path: Path) -> None:
    _make(tmp_path / "a", 4)
    _make(tmp_path / "b", 4)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    stamp = (tmp_path / "a" / "config.json").stat().st_mtime_ns
    _make(tmp_path / "a", 4, reuse=True)
    assert (tmp_path / "a" / "config.json").stat().st_mtime_ns == stamp
    _make(tmp_path / "a", 16, reuse=True)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["num_experts"] == 16
