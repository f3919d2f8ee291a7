"""Each benchmark for CPUs runs from end to end at toy sizes; every module of benchmarks/ is run."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import (
    calibrate_cpu,
    compare_cpu,
    convert,
    forward_cpu,
    merge,
    quality,
    scaling_gpu,
    sensitivity_budget,
    verify_speed,
)
from benchmarks.make_slice import TINY

RUN_BY = {
    "here": {
        "calibrate_cpu", "compare_cpu", "convert", "conversion_table", "forward_cpu",
        "kernels_cpu", "make_slice", "measuring", "merge", "numba_nvfp4", "peer_llmcompressor",
        "peer_peft", "plain_copy", "quality", "scaling_gpu", "scaling_worker",
        "sensitivity_budget", "verify_speed",
    },
    "test_convert_gpu.py": {"convert_gpu", "conversion_stages"},
    "test_gpu_benchmarks.py": {
        "calibrate_gpu", "forward_gpu", "gemm_gpu", "gpu_suite", "gpu_timing", "kernels_gpu",
        "random_layer", "rounding_gpu", "stream_gpu",
    },
    "test_plan_full_size.py": {"make_full_size"},
}  # fmt: skip


def test_every_benchmark_is_run_by_a_test(repo: Path) -> None:
    there = {path.stem for path in (repo / "benchmarks").glob("*.py")}
    assert there == set().union(*RUN_BY.values())


def test_forward(
    beam_nano: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forward_cpu, "SHAPES", ((2, 16),))
    forward_cpu.main([str(beam_nano), "--rounds", "1", "--threads", "1"])
    *_, bf16, fp32 = capsys.readouterr().out.splitlines()
    assert bf16.startswith("bfloat16")
    assert fp32.startswith("float32")
    assert fp32.count("x)") == 2


def test_calibration(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(calibrate_cpu, "TOKENS", (2, 32))
    monkeypatch.setattr(calibrate_cpu, "CASES", [(2, 4, None)])
    monkeypatch.setattr(calibrate_cpu, "WIDTHS", TINY)
    calibrate_cpu.main(["--rounds", "1", "--threads", "1"])
    *_, last = capsys.readouterr().out.splitlines()
    assert last.split()[:3] == ["2", "4", "none"]


def test_comparison(
    beam_nano: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_cpu, "ROWS", 2)
    monkeypatch.setattr(compare_cpu, "LENGTH", 32)
    compare_cpu.main([str(beam_nano), "--rounds", "1", "--threads", "1"])
    text = capsys.readouterr().out
    assert text.count("mean KLD") == 5
    assert text.count("of CPU") == 3


def test_quality(
    beam_nano: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quality, "LENGTH", 32)
    options = ["--rows", "2", "--calibration", "2", "--json", str(tmp_path / "out.json")]
    quality.main([str(beam_nano), "nvfp4-max", "nvfp4", *options])
    assert "| activations only |" in capsys.readouterr().out
    kept = json.loads((tmp_path / "out.json").read_text())["the standard library"]
    assert len(kept["nvfp4"]["W4A4"]) == 2


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--tiny", "--rounds", "1", "--rank", "4", "--work-dir", str(tmp_path)]
    merge.main([*command, "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["ways"]) == set(merge.WAYS)
    assert set(found["peft_steps"]) == {"import_s", "load_s", "merge_s", "save_s"}
    assert "PEFT over ours" in capsys.readouterr().out
    merge.main([*command, "--device", "cpu"])
    assert "nvfp4-max with the adapter over without" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_verify_speed(tmp_path: Path) -> None:
    options = ["--rounds", "1", "--workers", "1", "--json", str(tmp_path / "out.json")]
    verify_speed.main(["--tiny", "--experts", "2", "--work-dir", str(tmp_path), *options])
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["fp8"]) == {"plain read", "quick", "tensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the peer, against plain copies, and its memory; what was measured is not repeated."""
    for folder in ("work", "disk"):
        (tmp_path / folder).mkdir()
    parts = [word for part in ("fp8-2.4", "disk") for word in ("--part", part)]
    command = ["--tiny", *parts, "--rounds", "1", "--json", str(tmp_path / "out.json")]
    command += ["--work-dir", str(tmp_path / "work"), "--disk-dir", str(tmp_path / "disk")]
    assert convert.main([*command, "--budget", "0"]) == 3
    assert convert.main(command) == 0
    text = capsys.readouterr().out
    assert "Against llm-compressor" in text
    assert "on disk, cold, with fsync" in text
    assert convert.main([*command, "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "fp8-2.4/fp8/16/ours/0:" not in text
    assert "| FP8 |" in text
    assert not list((tmp_path / "work").iterdir()) + list((tmp_path / "disk").iterdir())


def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--tiny", "--experts", "4", "--samples", "2"]
    command += ["--sequence-length", "64", "--ranks", "1", "2"]
    scaling_gpu.main([str(tmp_path / "work"), *command, "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["ranks"] for row in rows] == [1, 2]
    assert "the same bytes with every number of processes" in capsys.readouterr().out


def test_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """numba's functions run as plain Python, and have to give the same bytes."""
    numba = ModuleType("numba")
    numba.njit = lambda **options: lambda body: body  # type: ignore[attr-defined]
    numba.__spec__ = ModuleSpec("numba", None)
    monkeypatch.setitem(sys.modules, "numba", numba)
    for name in ("kernels_cpu", "numba_nvfp4"):
        monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    from benchmarks import kernels_cpu

    monkeypatch.setattr(kernels_cpu, "N", 64)
    monkeypatch.setattr(kernels_cpu, "K", 256)
    monkeypatch.setattr(kernels_cpu, "PIECE_ROWS", 24)
    monkeypatch.setattr(kernels_cpu, "START_UP", {"c": kernels_cpu.START_UP["c"]})
    assert kernels_cpu.main(["--rounds", "1", "--threads", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "numba nvfp4_quantize" in found["million_elements_per_second"]
    assert set(found["c_by_level"]) >= {"baseline"}
    assert set(found["start_up_seconds"]) == {"c"}


def test_sensitivity_at_a_budget(
    beam_nano: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.setattr(sensitivity_budget, "BUDGETS", (0.3,))
    sensitivity_budget.main([str(beam_nano), "--rows", "1", "--length", "32"])
    *_, last = capsys.readouterr().out.splitlines()
    budget, worst, worth, programme, three, _, *measured = last.split()
    assert budget == "30%"
    # The programme is the best choice, so no other one with its formats leaves less.
    assert float(three) <= float(programme) <= min(float(worst), float(worth))
    assert all(float(value) > 0 for value in measured)
