"""Each benchmark for GPUs runs from end to end on a double of one, at toy widths."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from beamq.io.checkpoint import open_checkpoint
from beamq.model.gemm.select import select_gemm
from beamq.plan.plan import make_plan
from tests.helpers.cuda_double import cuda_double

NEEDING_TRITON = (
    "beamq.formats.kernels.gpu", "beamq.formats.kernels.triton_", "beamq.model.triton_",
    "beamq.model.gemm.triton_grouped", "benchmarks.",
)  # fmt: skip
TOYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "kernels_gpu": ({"SHAPES": ((32, 64), (64, 32)), "TOTAL_BYTES": 1 << 16}, []),
    "gemm_gpu": (
        {
            "DENSE": ((32, 64),),
            "EXPERTS": (("gate_up", 32, 64),),
            "NUM_EXPERTS": 16,
            "DENSE_TOKENS": 32,
            "EXPERT_TOKENS": (32,),
        },
        [],
    ),
    "calibrate_gpu": ({"LENGTH": 32}, ["--tokens", "64"]),
    "forward_gpu": (
        {"GEMMS": dict.fromkeys(("bf16", "fp8", "nvfp4"), ("auto",))},
        ["--tokens", "16", "32"],
    ),
    "stream_gpu": ({}, ["--experts", "8"]),
    "rounding_gpu": (
        {"BATCH_TOKENS": 64, "SWEPT_SHAPE": (2, 32, 64)},
        ["--experts", "2", "--rows-per-input", "1"],
    ),
}
"""Constants to replace, and options."""


@pytest.fixture(scope="module")
def double() -> Iterator[None]:
    with cuda_double(NEEDING_TRITON):
        yield


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TOYS)
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    constants, options = TOYS[name]
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    timing = importlib.import_module("benchmarks.gpu_timing")
    monkeypatch.setattr(timing, "COPIED_NBYTES", 64)
    monkeypatch.setattr(timing, "SQUARE", 8)
    if hasattr(module, "REAL"):
        layers = importlib.import_module("benchmarks.random_layer")
        monkeypatch.setattr(module, "REAL", layers.SMALL)
    if name == "stream_gpu":  # tensors on this double are on the CPU, and would not be launched for
        gpu = importlib.import_module("beamq.formats.kernels.gpu")
        monkeypatch.setattr("beamq.convert.tensors._kernels", lambda device: gpu)
    if name != "calibrate_gpu":
        options = [*options, "--json", str(tmp_path / "out.json")]
    module.main(options)
    assert capsys.readouterr().out
    if name != "calibrate_gpu":
        assert json.loads((tmp_path / "out.json").read_text())["device"] == "double"


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "nvfp4-max"])
def test_stages_of_a_conversion(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversion_stages = importlib.import_module("benchmarks.conversion_stages")
    make_slice = importlib.import_module("benchmarks.make_slice")
    monkeypatch.setattr(conversion_stages, "CHUNK_BYTES", 4096)
    make_slice.make_slice(tmp_path / "source", replace(make_slice.TINY, experts=2))
    (tmp_path / "work").mkdir()
    with open_checkpoint(tmp_path / "source") as checkpoint:
        plan = make_plan(checkpoint, recipe)
        stages = conversion_stages.Stages(checkpoint, plan, tmp_path / "work", threads=2, cuda=True)
        found = stages.measure()
    assert list(found) == [
        "read", "upload", "kernels", "download", "write", "checksum", "by hand"
    ]  # fmt: skip
    assert all(seconds > 0 for seconds in found.values())
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.usefixtures("double")
def test_the_layer_of_transformers() -> None:
    forward_gpu = importlib.import_module("benchmarks.forward_gpu")
    widths = {
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2,
    }  # fmt: skip
    (row,) = forward_gpu.transformers_ms("sliding", [16], device="cpu", **widths)
    assert row["tokens"] == 16


class ParsedError(Exception):
    """A command line was accepted."""


@pytest.mark.usefixtures("double")
def test_the_suite_gives_options_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_suite = importlib.import_module("benchmarks.gpu_suite")
    accepted: list[str] = []
    genuine = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *args: Any) -> None:
        genuine(parser, *args)
        raise ParsedError

    def run(command: list[str], path: str, log: IO[str]) -> int:
        if "-u" in command:
            _, _, _, module, *options = command
            with pytest.raises(ParsedError):
                importlib.import_module(module).main(options)
            accepted.append(module)
        elif "-c" in command:
            compile(command[command.index("-c") + 1], "doctor", "exec")
        return int("pytest" in command)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(gpu_suite, "_run", run)
    assert gpu_suite.main([str(tmp_path / "out")]) == 1
    assert len(accepted) == 5
    assert "== tests: exit 1" in capsys.readouterr().out


@pytest.mark.usefixtures("double")
def test_gemms_that_are_asked_for_exist() -> None:
    forward_gpu = importlib.import_module("benchmarks.forward_gpu")
    for names in forward_gpu.GEMMS.values():
        for name in names:
            select_gemm(name)
