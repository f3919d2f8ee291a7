"""`compare` on two GPUs through NCCL: to the bit the figures of one, each rank with its experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from beamq.convert.quantize import quantize
from tests.helpers.free_ports import free_port

# Two batches, so that one is on its way while the other is worked on.
SIZE = ("--samples", "64", "--sequence-length", "512", "--device", "cuda", "--json", "--quiet")


def compared(world: int, command: list[str]) -> dict[str, Any]:
    """The first rank's result, without the time that it took."""
    port = free_port()
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "beamq", *command],
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0, errors[-2000:]
    assert not any(out for out, _ in said[1:])
    found: dict[str, Any] = json.loads(said[0][0])
    assert found.pop("seconds") > 0
    return found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("gemm", ["auto", "reference"])
def test_two_gpus_give_the_figures_of_one(beam_nano: Path, tmp_path: Path, gemm: str) -> None:
    quantize(beam_nano, tmp_path / "nvfp4", recipe="nvfp4", no_calibration=True)
    quantize(beam_nano, tmp_path / "fp8", recipe="fp8")
    folders = [str(tmp_path / name) for name in ("nvfp4", "fp8")]
    command = ["compare", str(beam_nano), *folders, *SIZE, "--gemm", gemm]
    one, two = compared(1, command), compared(2, command)
    assert one["settings"]["gemm"] == gemm
    assert two == one
