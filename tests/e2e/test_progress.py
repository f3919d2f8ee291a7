"""What a conversion tells on its way: often enough for a small model, and in step with a
calibration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from beamq.calib.run import LayerDone
from beamq.cli import app
from beamq.convert.quantize import quantize
from beamq.convert.run import REPORT_STEP_BYTES, Progress, _Meter
from beamq.report import console

BATCHES = 3
CALIBRATION: dict[str, Any] = {"samples": 8 * BATCHES, "sequence_length": 512}  # 8 in a batch


def test_a_small_conversion_tells_its_hundredths(beam_nano: Path, tmp_path: Path) -> None:
    told: list[Progress] = []
    quantize(beam_nano, tmp_path / "out", no_calibration=True, workers=1, on_progress=told.append)
    done, total = [each.done_nbytes for each in told], told[0].total_nbytes
    assert total < REPORT_STEP_BYTES
    assert 20 < len(done) <= 101
    assert done == sorted(done)
    assert done[-1] == total


def test_a_large_conversion_tells_every_32_mib() -> None:
    told: list[Progress] = []
    meter = _Meter(told.append, 1000 * REPORT_STEP_BYTES)
    for _ in range(40):
        meter.advance(REPORT_STEP_BYTES // 4)
    assert [each.done_nbytes // REPORT_STEP_BYTES for each in told] == list(range(1, 11))


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-gptq"])
def test_a_calibrating_conversion_is_as_far_as_its_layers(
    beam_nano: Path, tmp_path: Path, recipe: str
) -> None:
    """Layer by layer and batch by batch, though layers are read ahead; the rest is the head."""
    last, total = [0], [0]
    ends: list[float] = []
    steps = [0] * 9

    def moved(progress: Progress) -> None:
        last[0], total[0] = max(last[0], progress.done_nbytes), progress.total_nbytes
        steps[len(ends)] += 1

    def layer(done: LayerDone) -> None:
        ends.append(last[0] / total[0])
        layers = done.done_nbytes / done.total_nbytes
        # Embedding and head are 7% each, a layer 7% to 13%: one read ahead would be seen.
        assert ends[-1] == pytest.approx(0.07 + 0.86 * layers, abs=0.03), done.layer

    quantize(
        beam_nano,
        tmp_path / "out",
        recipe=recipe,
        device="cpu",
        on_progress=moved,
        on_layer=layer,
        **CALIBRATION,
    )
    assert len(ends) == 8
    assert all(told >= BATCHES for told in steps[:8])
    assert last == total


def test_a_log_of_a_calibrating_conversion_has_lines(
    beam_nano: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    with pytest.raises(SystemExit) as left:
        app(
            ["quantize", str(beam_nano), str(tmp_path / "out"), "--device", "cpu", "--samples", "6",
             "--sequence-length", "96"],
            prog_name="beamq",
        )  # fmt: skip
    assert left.value.code == 0
    percents = [int(each) for each in re.findall(r"converting: (\d+)%", capsys.readouterr().err)]
    assert len(percents) >= 9
    assert max(percents) == 100
