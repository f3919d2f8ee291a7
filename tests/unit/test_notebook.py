"""A notebook: a bar where nothing listens, and results that are shown in a line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import beamq


class Bar:
    """A stand-in for tqdm's."""

    made: list[Bar]

    def __init__(self, *, desc: str, total: int, unit: str, unit_scale: bool) -> None:
        self.desc, self.total, self.unit, self.n, self.closed = desc, total, unit, 0, False
        self.made.append(self)

    def update(self, more: int) -> None:
        self.n += more

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    """The bars that are drawn in what looks like a notebook."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.import_module("tqdm.auto"), "tqdm", Bar)
    Bar.made = []
    return Bar.made


def test_calls_draw_a_bar_in_a_notebook(
    beam_nano: Path, tmp_path: Path, bars: list[Bar], monkeypatch: pytest.MonkeyPatch
) -> None:
    size: Any = {"samples": 2, "sequence_length": 48}
    beamq.calibrate(beam_nano, tmp_path / "stats", **size)
    beamq.quantize(beam_nano, tmp_path / "out", calibration=tmp_path / "stats")
    beamq.dequantize(tmp_path / "out", tmp_path / "back")
    beamq.compare(beam_nano, tmp_path / "out", **size)
    beamq.sensitivity(beam_nano, tmp_path / "out", **size)
    beamq.verify(tmp_path / "out")
    names = ["calibrate", "quantize", "dequantize", "compare", "sensitivity", "verify"]
    assert [bar.desc for bar in bars] == names
    assert all(bar.closed and bar.n == bar.total for bar in bars)
    assert {bar.desc for bar in bars if bar.unit == " layers"} == {"sensitivity"}
    beamq.verify(tmp_path / "out", progress=None)  # asked for none
    beamq.verify(tmp_path / "out", progress=lambda done, total: None)
    monkeypatch.delitem(sys.modules, "IPython")
    beamq.verify(tmp_path / "out")
    assert len(bars) == len(names)


def test_results_are_shown_in_a_line(beam_nano: Path, beam_mini: Path, tmp_path: Path) -> None:
    size: Any = {"samples": 2, "sequence_length": 48}
    lengths = []
    for source in (beam_nano, beam_mini):
        output = tmp_path / source.name
        made = beamq.quantize(source, output, **size)
        results = (
            made,
            made.plan,
            made.plan.config,
            made.plan.recipe,
            made.stats,
            beamq.verify(output, level="structure"),
            beamq.inspect_checkpoint(output),
            beamq.compare(beam_nano, tmp_path / "beam-nano", **size),
            beamq.compare(beam_nano, tmp_path / "beam-nano", **size).candidates[0],
            beamq.sensitivity(beam_nano, tmp_path / "beam-nano", **size),
            beamq.open_checkpoint(output),
        )
        lengths.append([len(repr(result)) for result in results])
        assert max(lengths[-1]) < 800, [repr(result) for result in results]
    assert all(abs(a - b) < 40 for a, b in zip(*lengths, strict=True)), "they grow with the model"
