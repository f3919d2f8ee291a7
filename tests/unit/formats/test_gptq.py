"""GPTQ: its factor, its equivalence to the textbook form, its losses against plain rounding."""

from __future__ import annotations

import pytest
import torch

from beamq.errors import CalibrationError
from beamq.formats import gptq, nvfp4
from beamq.formats.numerics import E2M1_MAGNITUDES, unpack_nibbles


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moments(experts: int, width: int, rows: int = 400, seed: int = 1) -> torch.Tensor:
    """Second moments of correlated inputs with a few large channels."""
    mix = random(experts, width, width, seed=seed) / width**0.5
    x_ESK = random(experts, rows, width, seed=seed + 1) @ mix + 0.3 * random(experts, rows, 1)
    x_ESK[:, :, ::17] *= 5
    return x_ESK.transpose(1, 2) @ x_ESK / rows


def decoded(rounded: nvfp4.QuantizedTensor, scale_E: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [
            nvfp4.dequantize(
                nvfp4.QuantizedTensor(codes=codes, block_scale=blocks, global_scale=scale),
                torch.float32,
            )
            for codes, blocks, scale in zip(
                rounded.codes, rounded.block_scale, scale_E, strict=True
            )
        ]
    )


def loss(w_ENK: torch.Tensor, other_ENK: torch.Tensor, hessian_EKK: torch.Tensor) -> torch.Tensor:
    """Squared error of each expert's product with its inputs."""
    error = (w_ENK - other_ENK).double()
    return ((error @ hessian_EKK.double()) * error).sum((1, 2))


def test_the_factor_is_that_of_the_damped_matrix() -> None:
    hessian = moments(3, 48)
    hessian[1, 5, :] = hessian[1, :, 5] = 0.0  # an input that is always zero
    hessian[2] = 0.0
    found = gptq.factorize(hessian)
    unit, pivot = found.unit_EKK.double(), found.pivot_EK.double()
    again = unit @ torch.diag_embed(pivot) @ unit.transpose(1, 2)
    mean = hessian.diagonal(dim1=1, dim2=2).mean(1)
    mean[2] = 1.0
    damped = hessian.double() + 0.1 * torch.diag_embed(mean[:, None].expand(3, 48)).double()
    torch.testing.assert_close(again, damped, rtol=1e-4, atol=1e-5)
    assert torch.equal(unit, unit.triu())
    assert torch.equal(unit.diagonal(dim1=1, dim2=2), torch.ones(3, 48).double())


def test_few_rows_are_damped_more() -> None:
    rows = torch.tensor([0.0, 3.0, 16.0, 32.0, 640.0, 1e6])
    found = gptq.damping_of(rows, 16)
    torch.testing.assert_close(found, torch.tensor([4.0, 4.0, 4.0, 2.0, 0.1, 0.1]))
    hessian = moments(3, 16)
    each = gptq.factorize(hessian, torch.tensor([0.1, 0.5, 4.0]))
    for expert, damping in enumerate((0.1, 0.5, 4.0)):
        alone = gptq.factorize(hessian[expert : expert + 1], damping)
        torch.testing.assert_close(each.unit_EKK[expert], alone.unit_EKK[0])
        torch.testing.assert_close(each.pivot_EK[expert], alone.pivot_EK[0])
    assert float(each.unit_EKK[2].triu(1).abs().max()) < 0.2, "little is moved where H is noise"


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -1e6])
def test_what_is_no_matrix_of_moments_is_refused(fault: float) -> None:
    hessian = moments(2, 32)
    hessian[1, 3, 3] = fault
    with pytest.raises(CalibrationError, match="not positive definite"):
        gptq.factorize(hessian)


def textbook(
    w_NK: torch.Tensor, hessian_KK: torch.Tensor, step_NK: torch.Tensor, damping: float
) -> torch.Tensor:
    """The published algorithm, one column at a time, in FP64: Cholesky of the inverse."""
    grid = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
    w, h = w_NK.double().clone(), hessian_KK.double().clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    out = torch.empty_like(w)
    for k in range(w.shape[1]):
        size = (w[:, k] / step_NK[:, k]).abs()
        nearest = grid[(size[:, None] - grid).abs().argmin(1)]
        out[:, k] = nearest * w[:, k].sign() * step_NK[:, k]
        error = (w[:, k] - out[:, k]) / upper[k, k]
        w[:, k:] -= error[:, None] * upper[k, k:]
    return out


@pytest.mark.parametrize("width", [16, 48, 144, 272])
def test_codes_are_those_of_the_textbook_form(width: int) -> None:
    w, hessian = random(2, 24, width, seed=3) * 0.02, moments(2, width)
    scale = nvfp4.global_scale_from_amax(w.abs().amax((1, 2)))
    rounded = gptq.round_experts(w, gptq.factorize(hessian), scale)
    ours = decoded(rounded, scale).double()
    for expert in range(2):
        blocks = rounded.block_scale[expert].double().repeat_interleave(16, dim=1)
        step = blocks * scale[expert].double()
        theirs = textbook(w[expert], hessian[expert], step, gptq.DAMPING)
        # A code may differ where FP32 lands on the other side of a tie, and others follow it.
        assert ((ours[expert] - theirs).abs() < 1e-6).double().mean() > 0.98


def test_the_scale_of_a_block_is_the_candidate_of_least_loss() -> None:
    """By the error of the product in FP64, where columns count very differently."""
    w, hessian = random(1, 40, 16, seed=11) * 0.02, moments(1, 16)
    size = torch.logspace(-1.5, 1.5, 16)[torch.randperm(16, generator=torch.manual_seed(3))]
    hessian *= size[:, None] * size
    scale = nvfp4.global_scale_from_amax(w.abs().amax((1, 2)))
    rounded = gptq.round_experts(w, gptq.factorize(hessian), scale)
    damped = hessian[0].double()
    damped.diagonal().add_(gptq.DAMPING * damped.diagonal().mean())

    def loss_N(scale_N: torch.Tensor) -> torch.Tensor:
        step_NK = (scale_N.float() * scale[0]).double()[:, None].expand(40, 16)
        error = w[0].double() - textbook(w[0], hessian[0], step_NK, gptq.DAMPING)
        return ((error @ damped) * error).sum(1)

    middle_N1 = nvfp4.max_block_scales(w[0].view(40, 1, 16), scale)
    middle_N = middle_N1.view(torch.uint8)[:, 0].to(torch.int16)
    codes = [(middle_N + offset).clamp(1, 126) for offset in nvfp4.candidate_offsets()]
    tried = [code.to(torch.uint8).view(torch.float8_e4m3fn) for code in codes]
    least_N = torch.stack([loss_N(scale_N) for scale_N in tried]).amin(0)
    ratio_N = loss_N(rounded.block_scale[0, :, 0]) / least_N
    assert (ratio_N < 1 + 1e-4).double().mean() > 0.9  # ties may fall on either side in FP32


def test_the_loss_is_far_below_that_of_plain_rounding() -> None:
    w, hessian = random(4, 64, 128, seed=5) * 0.02, moments(4, 128)
    scale = nvfp4.global_scale_from_amax(w.abs().amax((1, 2)))
    rounded = gptq.round_experts(w, gptq.factorize(hessian), scale)
    swept = torch.stack(
        [
            nvfp4.dequantize(nvfp4.quantize(own, s, scale_rule="sweep"), torch.float32)
            for own, s in zip(w, scale, strict=True)
        ]
    )
    ratio = loss(w, decoded(rounded, scale), hessian) / loss(w, swept, hessian)
    assert ratio.max() < 0.7, ratio
    codes = rounded.block_scale.view(torch.uint8)
    assert 1 <= int(codes.min()) <= int(codes.max()) <= 126


def test_without_correlations_it_is_the_sweep() -> None:
    """Nothing to make up for: the same scales and codes, but for sums in another order."""
    w = random(2, 32, 64, seed=7) * 0.02
    scale = nvfp4.global_scale_from_amax(w.abs().amax((1, 2)))
    rounded = gptq.round_experts(w, gptq.factorize(torch.eye(64).repeat(2, 1, 1)), scale)
    for expert in range(2):
        plain = nvfp4.quantize(w[expert], scale[expert], scale_rule="sweep")
        same = rounded.block_scale[expert].view(torch.uint8) == plain.block_scale.view(torch.uint8)
        assert same.double().mean() > 0.99
        codes = unpack_nibbles(rounded.codes[expert]) == unpack_nibbles(plain.codes)
        assert codes.double().mean() > 0.99


def test_zeros_stay_zeros() -> None:
    w = torch.zeros(1, 4, 32)
    rounded = gptq.round_experts(w, gptq.factorize(moments(1, 32)), torch.ones(1))
    assert not rounded.codes.any()
    assert (rounded.block_scale.float() == 1.0).all()


def test_few_rows_are_drawn_to_the_pool() -> None:
    total = torch.stack([torch.zeros(4, 4), 2 * torch.eye(4), 8 * torch.eye(4)])
    pool = 30 * torch.ones(4, 4)
    found = gptq.shrunk(total, torch.tensor([0.0, 2.0, 8.0]), pool, 10)
    expected = [3 * torch.ones(4, 4), 0.5 * torch.eye(4) + 1.5 * torch.ones(4, 4), torch.eye(4)]
    torch.testing.assert_close(found, torch.stack(expected))
    alone = gptq.shrunk(total[2:], torch.tensor([8.0]), None, 0)
    torch.testing.assert_close(alone[0], torch.eye(4))
    diagonal = gptq.shrunk(torch.ones(1, 4), torch.tensor([1.0]), torch.full((4,), 2.0), 1.0)
    torch.testing.assert_close(diagonal, torch.full((1, 4), 0.25 + 0.75 * 2))


@pytest.mark.parametrize("size", [1e-37, 1e30])
def test_weights_near_the_ends_of_fp32(size: float) -> None:
    """Where squares or a reciprocal leave the range, codes are still those of the weights."""
    w = random(2, 8, 48) * size
    scale = nvfp4.global_scale_from_amax(w.abs().amax((1, 2)))
    rounded = gptq.round_experts(w, gptq.factorize(moments(2, 48)), scale)
    error = decoded(rounded, scale).div(size).sub(w / size).double()
    assert float(error.square().mean().sqrt()) < 0.25


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w, feedback = random(3, 40, 64) * 0.02, gptq.factorize(moments(3, 64))
    scale = nvfp4.global_scale_from_amax(w.abs().amax((1, 2)))
    whole = gptq.round_experts(w, feedback, scale)
    monkeypatch.setitem(gptq.PIECE_ELEMENTS, "cpu", 3 * 16 * 7)  # seven rows
    again = gptq.round_experts(w, feedback, scale)
    assert torch.equal(whole.codes, again.codes)
    assert torch.equal(whole.block_scale.view(torch.uint8), again.block_scale.view(torch.uint8))
