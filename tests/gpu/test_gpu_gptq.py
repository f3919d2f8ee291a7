"""GPTQ on a GPU: the kernels against their twins bit by bit, and a model from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from beamq.calib import expert_rounding
from beamq.convert.quantize import quantize
from beamq.eval.verify.verify import verify
from beamq.formats import gptq
from beamq.formats.nvfp4 import global_scale_from_amax
from tests.helpers import gptq_cases


@pytest.mark.parametrize("global_scale", gptq_cases.GLOBAL_SCALES)
@pytest.mark.parametrize("shape", [*gptq_cases.SHAPES, (4, 1024)])
@pytest.mark.parametrize("seed", range(2))
def test_a_block(
    cuda: torch.device, shape: tuple[int, int], global_scale: float, seed: int
) -> None:
    gptq_cases.compare_block(str(cuda), *shape, global_scale, seed)


@pytest.mark.parametrize("scale", [0.002, 1.0, 2.0**-40])
@pytest.mark.parametrize("width", gptq_cases.WIDTHS)
def test_served_activations(cuda: torch.device, width: int, scale: float) -> None:
    gptq_cases.compare_operand(str(cuda), width, scale)


@pytest.mark.parametrize("shape", [(3, 96, 272), (2, 640, 640)])
def test_all_columns(
    cuda: torch.device, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same products between blocks, so the same bytes."""
    torch.manual_seed(0)
    experts, n, k = shape
    w = (torch.randn(experts, n, k, device=cuda) * 0.02).bfloat16()
    x = torch.randn(experts, 2 * k, k, device=cuda) @ torch.randn(experts, k, k, device=cuda)
    feedback = gptq.factorize(x.transpose(1, 2) @ x)
    scale = global_scale_from_amax(w.abs().amax((1, 2)).float())
    assert gptq.block_rounder(cuda) is not gptq.round_block
    ours = gptq.round_experts(w, feedback, scale)
    monkeypatch.setattr(gptq, "block_rounder", lambda device: gptq.round_block)
    wanted = gptq.round_experts(w, feedback, scale)
    assert torch.equal(ours.codes, wanted.codes)
    assert torch.equal(ours.block_scale.view(torch.uint8), wanted.block_scale.view(torch.uint8))


def test_the_sweep_that_gptq_is_held_against(cuda: torch.device) -> None:
    """Codes, scales and the errors that are scored have the CPU's bits."""
    torch.manual_seed(0)
    w = (torch.randn(3, 96, 256) * 0.02).bfloat16()
    scale = global_scale_from_amax(w.abs().amax((1, 2)).float())
    wanted = expert_rounding._swept(w, scale, None)
    found = expert_rounding._swept(w.to(cuda), scale.to(cuda), None)
    assert torch.equal(found.codes.cpu(), wanted.codes)
    assert torch.equal(
        found.block_scale.view(torch.uint8).cpu(), wanted.block_scale.view(torch.uint8)
    )
    errors = expert_rounding._errors(w.to(cuda), found)
    assert torch.equal(errors.cpu(), expert_rounding._errors(w, wanted))


def test_a_model(beam_nano: Path, tmp_path: Path) -> None:
    quantize(
        beam_nano, tmp_path / "out", recipe="nvfp4-gptq", device="cuda", samples=8,
        sequence_length=128,
    )  # fmt: skip
    report = verify(tmp_path / "out", source=beam_nano, sample=4)
    assert report.ok, report.failures
    manifest = json.loads((tmp_path / "out" / "beamq.json").read_text())
    assert [text["name"] for text in manifest["input_scales"]["held_out"]] == [
        "prose",
        "vocabulary",
    ]
    assert 0 < manifest["counts"]["swept_groups"] < 160


def test_what_does_not_fit_is_refused(cuda: torch.device) -> None:
    from beamq.formats.kernels import triton_gptq, triton_nvfp4

    given = gptq_cases.block(1, 8, 1.0)
    codes = torch.zeros(1, 8, 8, dtype=torch.uint8)
    rest = (given.unit, given.pivot, given.global_scale, codes, codes[:, :, 0])
    with pytest.raises(ValueError, match=r"expected \[E, 16, N\]"):
        triton_gptq.round_block(given.moved[:, :8], given.w[:, :8], *rest)
    with pytest.raises(ValueError, match="expected FP32"):
        triton_gptq.round_block(given.moved.double(), given.w, *rest)
    with pytest.raises(ValueError, match="to be contiguous"):
        triton_gptq.round_block(given.moved, given.w, given.unit, given.pivot.t(), *rest[2:])
    with pytest.raises(ValueError, match="multiple of 16"):
        triton_nvfp4.nvfp4_operand(torch.zeros(2, 24).bfloat16(), torch.tensor(1.0))
    with pytest.raises(ValueError, match="expected contiguous BF16"):
        triton_nvfp4.nvfp4_operand(torch.zeros(2, 32), torch.tensor(1.0))
