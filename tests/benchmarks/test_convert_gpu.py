"""benchmarks/convert_gpu.py on a toy and a CPU: it runs, and its figures add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.convert_gpu import main

TINY = ["--device", "cpu", "--tiny", "--experts", "4", "--sparse-layers", "2", "--rounds", "1"]


def test_a_toy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, path = tmp_path / "work", tmp_path / "out.json"
    more = ["--samples", "2", "--sequence-length", "32", "--json", str(path), "--threads", "3"]
    folder.mkdir()
    (folder / "mine").write_text("keep")
    main([str(folder), *TINY, *more])
    found = json.loads(path.read_text())
    assert [row["recipe"] for row in found["conversion"]] == ["fp8", "nvfp4-max", "nvfp4"]
    for row in found["conversion"]:
        assert set(row["stages_s"]) == {"read", "write", "checksum", "by hand"}
        assert all(seconds > 0 for seconds in row["stages_s"].values())
        slowest = max(s for name, s in row["stages_s"].items() if name != "by hand")
        assert row["whole_over_slowest"] == pytest.approx(slowest / row["whole_s"])
        assert row["model_s_at_7_gb_per_s"] >= 1_002.7 / 7 - 0.1
    one = found["one_pass"]
    assert len(one["layer_ends_s"]) == 3
    assert one["model_s"] > 49 * one["sparse_layer_s"]
    assert one["model_s_at_7_gb_per_s"] >= one["model_s_at_28_gb_per_s"] >= one["model_s"] - 1e-9
    assert set(one["stages_s"]) == {
        f"{first}{what}_{kind}"
        for first in ("first_", "")
        for what in ("load", "forward")
        for kind in ("dense", "sparse")
    }
    text = capsys.readouterr().out
    assert "upload, kernels, download: not run" in text
    assert [path.name for path in folder.iterdir()] == ["mine"]  # what was not ours stays
