"""NVFP4 bytes equal those of NVIDIA ModelOpt's `NVFP4QTensor.quantize` for the same global scale.

ModelOpt takes the block amax in the weight's own dtype and divides in FP32 (its block step is FP32
and has dimensions, so promotion is to FP32): for BF16, F16 and FP32 sources alike that is our rule,
FP32 arithmetic from the values as stored. Where the two are meant to differ, the last tests say so.
"""

from __future__ import annotations

import pytest
import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from beamq.formats import nvfp4
from beamq.formats.kernels import cpu

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
K = 64
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def gaussian(seed: int, rows: int = 32) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))


def ties() -> torch.Tensor:
    """Every tie and grid point, both signs, in blocks whose scale E4M3 holds exactly."""
    row = torch.tensor([*TIES, 6.0, *GRID]).repeat(K // 16)
    row[1::2] *= -1
    scales = torch.tensor([0.5, 1.0, 1.125, 14.0, 208.0, 448.0]).unsqueeze(1)
    return row * scales


def with_zero_blocks() -> torch.Tensor:
    w = gaussian(1) * 0.01
    w[3, 16:32] = 0.0
    w[5, :] = 0.0
    w[7, 0:16] = -0.0
    w[8, ::3] = -0.0
    return w


def with_tiny_and_large_blocks() -> torch.Tensor:
    return gaussian(2) * torch.logspace(-7, 3, 32).unsqueeze(1)


CASES = {
    "normal": gaussian(0) * 0.02,
    "wide": with_tiny_and_large_blocks(),
    "ties": ties(),
    "zero blocks and -0.0": with_zero_blocks(),
    "underflowing block": torch.cat((torch.ones(1, K), torch.full((1, K), -1e-6))),
    "subnormal elements": gaussian(3) * torch.logspace(-45, -30, 32).unsqueeze(1),
    "huge": gaussian(4) * 1e4,
}


def modelopt_bytes(w: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, block_scale, _ = NVFP4QTensor.quantize(w.clone(), 16, None, scale)
    return quantized._quantized_data, block_scale.view(torch.uint8)


def check_equal(w: torch.Tensor, dtype: str, scale: torch.Tensor) -> None:
    codes, block_scale = modelopt_bytes(w, scale)
    ours = nvfp4.quantize(w, scale)
    assert torch.equal(ours.codes, codes)
    assert torch.equal(ours.block_scale.view(torch.uint8), block_scale)
    fast_codes, fast_scales = bytearray(codes.numel()), bytearray(block_scale.numel())
    source = w.view(torch.uint8).numpy()
    cpu.nvfp4_quantize(source, dtype, K, scale.item(), fast_codes, fast_scales)
    assert fast_codes == codes.numpy().tobytes()
    assert fast_scales == block_scale.numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_equal_bytes_at_the_tensors_own_scale(name: str, dtype: str) -> None:
    w = CASES[name].to(DTYPES[dtype])
    scale = nvfp4.global_scale_from_amax(w.abs().amax())
    if name != "subnormal elements":
        assert torch.equal(scale, NVFP4QTensor.get_weights_scaling_factor_2(w))
    check_equal(w, dtype, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.01, 0.6, 1.5, 4.0, 1000.0])
def test_equal_bytes_at_a_shared_or_foreign_scale(factor: float, dtype: str) -> None:
    """A larger partner's scale leaves room, a smaller scale saturates blocks and codes."""
    w = with_zero_blocks().to(DTYPES[dtype])
    check_equal(w, dtype, nvfp4.global_scale_from_amax(w.abs().amax()) * factor)


def test_equal_bytes_for_every_finite_bf16_value() -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    w = torch.where(values.isfinite(), values, torch.zeros_like(values)).view(-1, K)
    shuffled = w.flatten()[torch.randperm(65536, generator=torch.Generator().manual_seed(5))]
    for scale in (2.0**-126, 1e-20, 3e-6, 0.7, 1e20, 1.2e35):
        check_equal(w, "BF16", torch.tensor(scale))
        check_equal(shuffled.view(-1, K), "BF16", torch.tensor(scale))


def test_decodes_as_modelopt_does_up_to_rounding() -> None:
    """ModelOpt multiplies the scales first and rounds twice; ours rounds once (see nvfp4.py)."""
    w = (gaussian(6) * 0.02).bfloat16()
    scale = nvfp4.global_scale_from_amax(w.abs().amax())
    quantized, block_scale, _ = NVFP4QTensor.quantize(w.clone(), 16, None, scale)
    theirs = quantized.dequantize(
        torch.float32, scale=block_scale, double_scale=scale, block_sizes={-1: 16}
    )
    ours = nvfp4.dequantize(nvfp4.quantize(w, scale), torch.float32)
    assert torch.equal(ours == 0, theirs == 0)
    assert ((ours - theirs).abs() <= theirs.abs() * 2.0**-22).all()


def test_difference_all_zero_tensor() -> None:
    """ModelOpt's own global scale is then zero; ours takes amax as 1.0, and every code is zero."""
    w = torch.zeros(2, K)
    assert NVFP4QTensor.get_weights_scaling_factor_2(w) == 0
    scale = nvfp4.global_scale_from_amax(w.abs().amax())
    assert scale == torch.tensor(1.0) / 2688
    check_equal(w, "F32", scale)


def test_difference_denormal_scale() -> None:
    """ModelOpt's global scale may be denormal; ours stops at the smallest normal number."""
    w = torch.full((1, K), 1e-37)
    assert 0 < NVFP4QTensor.get_weights_scaling_factor_2(w) < 2.0**-126
    assert nvfp4.global_scale_from_amax(w.abs().amax()) == 2.0**-126
