"""`beamq plan` on the real thing: 501B parameters, 38,366 tensors, 1 TB of holes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from beamq.io.checkpoint import open_checkpoint
from beamq.plan.plan import Plan, make_plan
from beamq.plan.serving import model_weights
from beamq.report.model_card import ENGINES, commands
from benchmarks.make_full_size import write_full_size

GB = 1e9
LOOSE_SECONDS = 30  # the goal, 5 s, is measured in a benchmark; a busy machine may be slow


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full-size")
    write_full_size(folder)
    used = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert used < 100_000_000, "this file system does not leave holes"
    return folder


@pytest.fixture(scope="module")
def plans(full_size: Path) -> dict[str, Plan]:
    with open_checkpoint(full_size) as checkpoint:
        assert len(checkpoint.tensors) == 38_366
        return {name: make_plan(checkpoint, name) for name in ("nvfp4", "nvfp4-fp8", "fp8")}


def test_the_docs_show_the_commands_of_the_card(repo: Path, plans: dict[str, Plan]) -> None:
    commands_told = (repo / "docs" / "serving.md").read_text().partition("## What was run")[0]
    blocks = commands_told.split("```sh\n")[1:]
    lines = [line for block in blocks for line in block.partition("```")[0].splitlines()]
    told = {tuple(re.split(" +# ", line)) for line in lines}
    made = set()
    for name, plan in plans.items():
        for engine in ENGINES[name]:
            given = [line.replace("$MODEL", f"my-beam-{name}") for line in commands(plan, engine)]
            made |= {(line, gpus.removeprefix("# ")) for gpus, line in pairwise(given)}
    assert told == {(line, gpus) for line, gpus in made if " x " in gpus}


@pytest.mark.parametrize(
    ("recipe", "gigabytes", "tensors", "share"),
    # 4 tensors for each NVFP4 linear, 2 for each FP8 one.
    [
        ("nvfp4", 293.6, 151_262, 0.984),
        ("nvfp4-fp8", 287.2, 151_531, 0.997),
        ("fp8", 503.5, 76_267, 0.997),
    ],
)
def test_plan_of_the_full_size_model(
    plans: dict[str, Plan], recipe: str, gigabytes: float, tensors: int, share: float
) -> None:
    plan = plans[recipe]
    assert round(plan.source_nbytes / GB, 1) == 1002.7
    assert round(plan.total_parameters / GB, 2) == 501.27
    assert round(plan.tensor_nbytes / GB, 1) == gigabytes
    assert sum(len(shard.tensors) for shard in plan.shards) == tensors
    assert round(plan.quantized_parameters / plan.total_parameters, 3) == share
    assert plan.tensor_nbytes == model_weights(plan.config, plan.formats).nbytes
    assert all(shard.nbytes < 5.1e9 for shard in plan.shards)


def test_parameters_by_role(plans: dict[str, Plan]) -> None:
    counts = {role: round(count / GB, 3) for role, count in plans["nvfp4"].parameters.items()}
    assert counts["expert"] == 493.25
    assert counts["attention"] == 5.453
    assert counts["dense-mlp"] == 0.944
    assert counts["router"] == 0.064
    assert round(counts["embedding"] + counts["head"], 3) == 1.556


def test_the_same_plan_twice(plans: dict[str, Plan], full_size: Path) -> None:
    again = make_plan(full_size, "nvfp4")
    assert again.digest() == plans["nvfp4"].digest()
    assert again == plans["nvfp4"]


def test_plan_command(full_size: Path, repo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "beamq", "plan", str(full_size), "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=repo,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = time.perf_counter() - begun
    with capsys.disabled():
        print(f"\nbeamq plan, 501B parameters: {seconds:.2f} s, start-up included")
    assert done.returncode == 0, done.stderr
    assert seconds < LOOSE_SECONDS
    data = json.loads(done.stdout)
    assert data["parameters"]["total"] == 501_267_612_352
    assert data["tensors"] == {"source": 38_366, "output": 151_262}
    serving = data["serving"]
    per_gpu = serving["weights_per_gpu"]
    assert per_gpu["output"]["tensor"]["1"] == data["bytes"]["tensors"]
    assert round(per_gpu["source"]["expert"]["16"] / GB) == 78
    assert serving["context"] == 131_072
    assert round(serving["kv_cache"]["bytes"] / 2**30, 1) == 4.6
    fewest = {gpu["gpu"]: gpu["smallest_count"] for gpu in serving["gpus"]}
    assert fewest == {"h100": 8, "h200": 4, "b200": 2, "b300": 2, "rtx-pro-6000": 4}
    b300 = next(gpu for gpu in serving["gpus"] if gpu["gpu"] == "b300")
    assert [fit["fits"] for fit in b300["fits"] if fit["count"] == 1] == [False]
