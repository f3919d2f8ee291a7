"""Exact weights under served activations: the floor beside a W4A4 or W8A8 figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from beamq.convert.quantize import quantize
from beamq.eval.compare.compare import compare
from beamq.eval.compare.metrics import Estimate
from beamq.eval.compare.records import Candidate
from beamq.eval.compare.side_by_side import ActivationsOnlyGemm, ServedWeight
from beamq.formats import nvfp4
from beamq.model.gemm.backend import DenseWeight, Groups, Nvfp4Weight

TEXT: dict[str, Any] = {"samples": 4, "sequence_length": 128}


def test_exact_weights_meet_quantized_inputs() -> None:
    x_TK, w_NK = torch.randn(5, 32), torch.randn(8, 32)
    scale = torch.tensor(0.002)
    q = nvfp4.quantize(w_NK, 0.001)
    like = Nvfp4Weight(
        codes=q.codes,
        block_scale=q.block_scale,
        global_scale=torch.full((8, 1), 0.001),
        input_scale=scale,
    )
    gemm = ActivationsOnlyGemm()
    served = nvfp4.dequantize(nvfp4.quantize(x_TK, scale), torch.float32)
    weight = ServedWeight(w_NK=w_NK, like=like)
    torch.testing.assert_close(gemm.linear(x_TK, weight), served @ w_NK.t())
    torch.testing.assert_close(gemm.linear(x_TK, DenseWeight(w_NK=w_NK)), x_TK @ w_NK.t())
    experts = ServedWeight(w_NK=torch.stack([w_NK, -w_NK]), like=like)
    rows = torch.tensor([4, 0, 1])
    expected = torch.cat([served[rows[:1]] @ w_NK.t(), served[rows[1:]] @ -w_NK.t()])
    torch.testing.assert_close(gemm.grouped(x_TK, experts, Groups((0, 1, 3), rows)), expected)


def candidates(source: Path, folders: list[Path], **options: Any) -> list[Candidate]:
    return list(compare(source, folders, **TEXT, **options).candidates)


def test_the_floor_is_the_same_for_better_and_worse_weights(
    beam_nano: Path, tmp_path: Path
) -> None:
    """It depends on input scales alone, and lies between exact and all quantized."""
    for recipe in ("nvfp4-max", "nvfp4", "fp8"):
        options = {} if recipe == "fp8" else {"no_calibration": True}
        quantize(beam_nano, tmp_path / recipe, recipe=recipe, **options)  # type: ignore[arg-type]
    worse, better, fp8 = candidates(
        beam_nano, [tmp_path / name for name in ("nvfp4-max", "nvfp4", "fp8")]
    )
    assert worse.activations_only_kld is not None
    assert better.activations_only_kld is not None
    assert fp8.activations_only_kld is not None
    floor = worse.activations_only_kld.value
    assert better.activations_only_kld.value == pytest.approx(floor, rel=1e-9)
    assert 0 < floor < better.divergence.mean_kld.value < worse.divergence.mean_kld.value
    assert 0 < fp8.activations_only_kld.value < fp8.divergence.mean_kld.value
    assert compare(beam_nano, [tmp_path / "fp8"], **TEXT).to_dict()["candidates"][0][
        "activations_only_kld"
    ]["value"] == pytest.approx(fp8.activations_only_kld.value)


def test_candidates_are_held_against_the_first_token_by_token(
    beam_nano: Path, tmp_path: Path
) -> None:
    for recipe in ("nvfp4-max", "nvfp4"):
        quantize(beam_nano, tmp_path / recipe, recipe=recipe, no_calibration=True)
    first, second = candidates(beam_nano, [tmp_path / "nvfp4-max", tmp_path / "nvfp4"])
    assert first.kld_ratio_to_first is None
    assert second.kld_ratio_to_first is not None
    means = second.divergence.mean_kld.value / first.divergence.mean_kld.value
    assert second.kld_ratio_to_first.value == pytest.approx(means)

    def relative(estimate: Estimate) -> float:
        assert estimate.standard_error is not None
        return estimate.standard_error / estimate.value

    # Both stumble over the same tokens, so the ratio is known better than from two texts.
    unpaired = math.hypot(*(relative(each.divergence.mean_kld) for each in (first, second)))
    assert 0 < relative(second.kld_ratio_to_first) < 0.9 * unpaired


def test_where_activations_are_exact_there_is_none(beam_nano: Path, tmp_path: Path) -> None:
    quantize(beam_nano, tmp_path / "q", recipe="nvfp4", no_calibration=True)
    (exact,) = candidates(beam_nano, [tmp_path / "q"], gemm="weights-only")
    assert exact.activations_only_kld is None
    assert candidates(beam_nano, [beam_nano])[0].activations_only_kld is None
