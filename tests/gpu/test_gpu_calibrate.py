"""Calibration on a GPU: the same numbers as on the CPU, and the same bytes by every route."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beamq.beam.config import BeamConfig
from beamq.calib.calibrate import calibrate
from beamq.calib.collector import Collector, segment_amax
from beamq.calib.statistics import CalibrationStats, load_stats
from beamq.convert.quantize import quantize
from beamq.io.checkpoint import open_checkpoint
from beamq.model.layer_stream import activation_bytes, layer_bytes
from benchmarks.random_layer import SMALL as LAYER
from tests.helpers.free_ports import free_port

SMALL: dict[str, Any] = {"samples": 6, "sequence_length": 96}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("values", [(), (NAN,), (INF,), (-INF, NAN)])
def test_largest_values_are_those_of_the_cpu(
    cuda: torch.device, dtype: torch.dtype, values: tuple[float, ...]
) -> None:
    x, offsets = torch.randn(3000, 320).to(dtype), (0, 10, 10, 1300, 1301, 3000)
    for place, value in enumerate(values):
        x[12 + 600 * place, 3] = value
    for part, cuts in ((x, offsets), (x[:0], (0, 0, 0))):
        ours, wanted = segment_amax(part.to(cuda), cuts), segment_amax(part, cuts)
        assert torch.equal(ours[0].cpu(), wanted[0])
        assert torch.equal(ours[1].cpu(), wanted[1])


def test_what_is_collected_is_that_of_the_cpu(cuda: torch.device) -> None:
    records = []
    for device in (cuda, torch.device("cpu")):
        collector = Collector(LAYER, device)
        x = torch.randn(500, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        x[7, 7] = NAN
        collector.expert_input(0, "gate_up", x.to(device), 2, (0, 100, 100, 500))
        collector.routing(0, x, torch.tensor([[1, 2], [3, 1]], device=device), x)
        records.append(collector.take(0))
    ours, wanted = (record.inputs["layers.0.experts.gate_up"] for record in records)
    for key, array in wanted.arrays().items():
        assert np.array_equal(ours.arrays()[key], array), key
    assert np.array_equal(records[0].routed_tokens, records[1].routed_tokens)
    assert records[0].suspects == records[1].suspects


@pytest.fixture(scope="module")
def plain(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "stats"
    calibrate(beam_nano, path, device="cuda", **SMALL)
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nano_as_on_the_cpu(beam_nano: Path, tmp_path: Path, dtype: str) -> None:
    found: list[CalibrationStats] = [
        calibrate(beam_nano, tmp_path / device, device=device, dtype=dtype, **SMALL)
        for device in ("cuda", "cpu")
    ]
    tolerance = 1e-4 if dtype == "float32" else 0.15
    for name, entry in found[1].inputs.items():
        ours = found[0].inputs[name]
        if ".experts." in name:  # near ties may fall to another expert
            assert abs(ours.rows - entry.rows).sum() <= 0.02 * entry.rows.sum(), name
            assert ours.amax.max() == pytest.approx(entry.amax.max(), rel=tolerance), name
        else:
            assert ours.amax == pytest.approx(entry.amax, rel=tolerance), name


def test_slices_and_states_on_the_host_change_no_byte(
    beam_nano: Path, plain: Path, tmp_path: Path
) -> None:
    with open_checkpoint(beam_nano) as checkpoint:
        config = BeamConfig.from_dict(checkpoint.config)
        sizes = layer_bytes(checkpoint, config, torch.bfloat16)
    fixed = activation_bytes(config, 576, torch.bfloat16) + 2 * sizes.base
    for name, budget in (
        ("slices", fixed + 6 * sizes.expert),
        ("states", fixed + 33 * sizes.expert),
    ):
        calibrate(beam_nano, tmp_path / name, device="cuda", max_device_memory=budget, **SMALL)
        assert (tmp_path / name).read_bytes() == plain.read_bytes(), name


def test_one_pass_gives_the_bytes_of_two(beam_nano: Path, plain: Path, tmp_path: Path) -> None:
    quantize(beam_nano, tmp_path / "one", device="cuda", recipe="nvfp4-all", **SMALL)
    quantize(beam_nano, tmp_path / "two", device="cuda", recipe="nvfp4-all", calibration=plain)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


RUN = (
    "import sys; from beamq.calib.calibrate import calibrate;"
    "calibrate(sys.argv[1], sys.argv[2], samples=6, sequence_length=96, device='cuda')"
)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_bytes_of_one(beam_nano: Path, plain: Path, tmp_path: Path) -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(beam_nano), str(tmp_path / "stats")],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()[-2000:]
    ours, wanted = load_stats(tmp_path / "stats"), load_stats(plain)
    for name, entry in wanted.inputs.items():
        assert np.array_equal(ours.inputs[name].amax, entry.amax), name
    assert (tmp_path / "stats").read_bytes() == plain.read_bytes()
