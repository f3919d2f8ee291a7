"""Our GPTQ against llm-compressor's, on the same weights and the same second moments.

llm-compressor takes block scales from an observer before it begins; ours chooses each within the
loop. Its error must not be less than ours, whatever scales and damping it is given.
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

from beamq.formats import gptq, nvfp4

ARGS = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
)


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts' weights, and moments of correlated inputs."""
    generator = torch.Generator().manual_seed(0)
    w_ENK = torch.randn(2, 96, 256, generator=generator) * 0.02
    mix = torch.randn(2, 256, 256, generator=generator) / 16
    x_ESK = torch.randn(2, 600, 256, generator=generator) @ mix
    x_ESK[:, :, ::31] *= 4
    return w_ENK, x_ESK.transpose(1, 2) @ x_ESK / 600


def loss(w_ENK: torch.Tensor, other: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    error = (w_ENK - other).double()
    return ((error @ hessian.double()) * error).sum((1, 2))


@pytest.mark.parametrize("damping", [0.01, 0.1])
@pytest.mark.parametrize("scales", ["max", "sweep"])
def test_the_layer_error_is_no_worse(scales: str, damping: float) -> None:
    w, hessian = problem()
    scale = nvfp4.global_scale_from_amax(w.abs().amax((1, 2)))
    blocks = torch.stack(
        [
            nvfp4.quantize(own, g, scale_rule=scales).block_scale.float()
            for own, g in zip(w, scale, strict=True)
        ]
    )
    theirs, _, fallback = quantize_weight(
        w.clone(),
        hessian.clone(),
        blocks,
        torch.zeros_like(blocks),
        (1 / scale).view(2, 1),
        ARGS,
        percdamp=damping,
    )
    assert not fallback.any()
    rounded = gptq.round_experts(w, gptq.factorize(hessian, damping), scale)
    ours = torch.stack(
        [
            nvfp4.dequantize(
                nvfp4.QuantizedTensor(codes=codes, block_scale=block, global_scale=g),
                torch.float32,
            )
            for codes, block, g in zip(rounded.codes, rounded.block_scale, scale, strict=True)
        ]
    )
    ratio = loss(w, ours, hessian) / loss(w, theirs, hessian)
    plain = loss(w, theirs, hessian) / loss(
        w,
        torch.stack(
            [
                nvfp4.dequantize(nvfp4.quantize(own, g), torch.float32)
                for own, g in zip(w, scale, strict=True)
            ]
        ),
        hessian,
    )
    assert plain.max() < 1, "their error is that of a GPTQ at all"
    assert ratio.max() < 0.95, ratio
