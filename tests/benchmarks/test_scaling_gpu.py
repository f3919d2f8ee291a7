"""benchmarks/scaling_gpu.py: it notices other bytes and failed commands, and divides right."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from beamq.eval.verify.verify import verify
from benchmarks import scaling_gpu
from benchmarks.make_slice import TINY, make_slice


def folder(parent: Path, name: str, content: bytes) -> Path:
    made = parent / name
    made.mkdir()
    (made / "model-00001-of-00001.safetensors").write_bytes(content)
    (made / "model.safetensors.index.json").write_text("{}")
    return made


def test_outputs_that_differ_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_gpu, "PIECE", 4)
    one = folder(tmp_path, "one", b"0123456789")
    scaling_gpu.check_same(one, folder(tmp_path, "two", b"0123456789"))
    for name, content in (("other", b"0123456780"), ("short", b"012345678")):
        with pytest.raises(RuntimeError, match="differ"):
            scaling_gpu.check_same(one, folder(tmp_path, name, content))
    (one / "more.safetensors").write_bytes(b"")
    with pytest.raises(RuntimeError, match="other files"):
        scaling_gpu.check_same(one, tmp_path / "two")


def test_a_command_that_fails_is_told() -> None:
    arguments = ["quantize", "/nowhere", "/tmp/out", "--json"]
    with pytest.raises(RuntimeError, match=r"exit 3(.|\n)*no such folder"):
        scaling_gpu.follow(scaling_gpu.start(1, "beamq", arguments))


def test_a_conversion_is_timed_beside_its_floor(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "out"
    make_slice(source, replace(TINY, experts=2))
    options = argparse.Namespace(recipe="nvfp4", device="cpu")
    found = scaling_gpu.convert(source, output, 1, options)
    assert set(found) == {"convert_s", "first_convert_s", "floor_s"}
    assert all(seconds > 0 for seconds in found.values())
    assert verify(output, source=source).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moments.0", "out", "source"]


def test_efficiency_is_against_one_process() -> None:
    keys = ("layer_s", "sparse_s", "convert_s", "floor_s")
    one, two = dict.fromkeys(keys, 8.0), dict.fromkeys(keys, 5.0)
    text = scaling_gpu.table([one | {"ranks": 1.0}, two | {"ranks": 2.0}], 40_000_000_000)
    assert text.splitlines()[-1] == "| 2 |" + 4 * " 5.00 (0.80) |" + " 8.0 |"
