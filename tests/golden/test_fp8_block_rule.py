"""FP8 in blocks of 128 x 128, against the rule written out block by block in NumPy.

No library on a CPU has this rule as a function; vLLM's, SkyRL's and DeepSeek-V3's are GPU kernels
or parts of a model. compressed-tensors decodes the result.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize

from beamq.formats import fp8

SHAPES = [(128, 128), (256, 384), (1, 1), (130, 200), (127, 129), (300, 64)]


def by_hand(w: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """FP32 scales [R, C] and quotients [N, K] of FP32 `w`, one block at a time."""
    x = w.float().numpy()
    n, k = x.shape
    scales = np.zeros((-(-n // 128), -(-k // 128)), dtype=np.float32)
    quotients = np.zeros_like(x)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            place = np.s_[r * 128 : (r + 1) * 128, c * 128 : (c + 1) * 128]
            amax = max(np.abs(x[place]).max(), np.float32(1e-10))
            scales[r, c] = np.float32(amax) / np.float32(448)
            quotients[place] = x[place] / scales[r, c]
    return scales, quotients


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_and_codes_by_the_rule(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    w = torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[1])
    w[:1, :1] = 448.0
    w = w.to(dtype)
    codes, scale = fp8.quantize_blocks(w)
    wanted_scale, quotients = by_hand(w)
    assert scale.numpy().tobytes() == wanted_scale.tobytes()
    wanted = torch.from_numpy(quotients).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(
        fp8.dequantize_blocks(codes, scale, torch.float32),
        codes.float() * fp8.spread_blocks(scale, *shape),
    )


def test_compressed_tensors_decodes_whole_blocks_as_we_do() -> None:
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(2)).bfloat16()
    codes, scale = fp8.quantize_blocks(w)
    args = QuantizationArgs(
        num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[128, 128]
    )
    theirs = dequantize(codes, scale, args=args, dtype=torch.float32)
    assert torch.equal(theirs, fp8.dequantize_blocks(codes, scale, torch.float32))


def test_a_block_of_zeros_has_a_scale() -> None:
    w = torch.zeros(200, 256)
    w[150:, 128:] = -3.0
    w[:20, :20] = -0.0
    w[3, 200] = 1e-12
    codes, scale = fp8.quantize_blocks(w)
    least = torch.tensor(1e-10) / torch.tensor(448.0)
    assert scale[0].tolist() == [least.item(), least.item()]
    assert torch.equal(scale[1], torch.stack((least, torch.tensor(3.0) / 448)))
    assert bool((codes[:20, :20].view(torch.uint8) == 0x80).all())
    assert codes[3, 200].item() == 4.5  # 1e-12 / scale is 4.48


def test_a_stack_is_its_matrices() -> None:
    w = torch.randn(3, 140, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scale = fp8.quantize_blocks(w)
    for one, its_codes, its_scale in zip(w, codes, scale, strict=True):
        wanted_codes, wanted_scale = fp8.quantize_blocks(one)
        assert torch.equal(its_codes.view(torch.uint8), wanted_codes.view(torch.uint8))
        assert torch.equal(its_scale, wanted_scale)
