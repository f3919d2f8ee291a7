"""MXFP8 scales and codes by the exact rule, and where ModelOpt and compressed-tensors differ.

The rule in rational numbers: the least 2^e with 448 * 2^e >= amax. ModelOpt computes the ceiling of
an FP32 logarithm, which differs just above 1.75 * 2^k where the input is FP32, and never for BF16.
compressed-tensors rounds amax to a power of two, and differs at 1.75 * 2^k exactly.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from compressed_tensors.compressors import MXFP8QuantizationCompressor
from compressed_tensors.quantization.quant_scheme import MXFP8, QuantizationScheme
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

from beamq.formats import fp8

ALL_BF16 = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
"""Every positive finite BF16 value."""
SCHEME = QuantizationScheme(targets=["Linear"], **MXFP8)


def exact(amax: float) -> int:
    """The byte e + 127, found by trying in rational numbers."""
    e = max(-127, math.frexp(amax)[1] - 10)
    while Fraction(448) * Fraction(2) ** e < Fraction(amax):
        e += 1
    return e + 127


def edges() -> torch.Tensor:
    """1.75 * 2^k in FP32, and one unit in the last place to either side."""
    at = 1.75 * torch.exp2(torch.arange(-120.0, 127.0))
    return torch.cat([at.nextafter(torch.zeros(())), at, at.nextafter(torch.tensor(math.inf))])


def blocks(amax: torch.Tensor) -> torch.Tensor:
    """A row of 32 for each amax: it, its negative halves and zeros."""
    w = torch.zeros(len(amax), 32)
    w[:, 5], w[:, 9:20] = amax, -amax.unsqueeze(1) / 2
    return w


def test_every_bf16_value_and_every_edge_has_the_least_scale() -> None:
    for values in (ALL_BF16, edges(), torch.tensor([2.0**-149, 2.0**-133, 3.4e38])):
        wanted = [exact(value) for value in values.tolist()]
        assert fp8.mx_scale_bytes(values).tolist() == wanted
        codes, byte = fp8.quantize_mx(blocks(values))
        assert byte.flatten().tolist() == wanted
        assert not codes.float().isnan().any()
        # Nothing saturates: 448 is reached by values that round to it and by no larger ones.
        assert bool((fp8.mx_scale_values(byte).flatten().double() * 448 >= values.double()).all())


def test_modelopt_agrees_on_all_bf16_values_and_not_just_above_an_edge() -> None:
    theirs = MXFP8QTensor.get_weights_scaling_factor(blocks(ALL_BF16))
    assert torch.equal(theirs.flatten(), fp8.mx_scale_bytes(ALL_BF16))
    codes, byte = fp8.quantize_mx(blocks(ALL_BF16))
    their_codes = MXFP8QTensor.quantize_with_scale(blocks(ALL_BF16), byte)
    assert torch.equal(their_codes.view(torch.uint8), codes.view(torch.uint8))
    below, at, above = edges().chunk(3)
    for values in (below, at):
        found = MXFP8QTensor.get_weights_scaling_factor(blocks(values)).flatten()
        assert torch.equal(found, fp8.mx_scale_bytes(values))
    found = MXFP8QTensor.get_weights_scaling_factor(blocks(above)).flatten()
    differ = found != fp8.mx_scale_bytes(above)
    assert 0.5 < float(differ.float().mean()) < 1  # 1 less, so values up to 448.00006 saturate
    assert bool((found[differ] + 1 == fp8.mx_scale_bytes(above)[differ]).all())


def test_compressed_tensors_differs_at_the_edges_alone() -> None:
    # Where the scale's exponent is not clamped and nothing rounds to infinity.
    values = ALL_BF16[(ALL_BF16 >= 2.0**-118) & (ALL_BF16 < 2.0**127)]
    theirs = generate_mx_scales(values.bfloat16(), 8).to(torch.uint8)
    differ = theirs != fp8.mx_scale_bytes(values)
    mantissas = torch.frexp(values).mantissa * 2
    assert torch.equal(differ, mantissas == 1.75)
    assert int(differ.sum()) == 245  # one for each exponent


def test_compressed_tensors_codec_gives_our_codes_and_decodes_them() -> None:
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(40, 96, generator=generator) * torch.logspace(-6, 3, 40).unsqueeze(1)
    w = w.bfloat16()
    codes, byte = fp8.quantize_mx(w)
    scale = fp8.mx_scale_values(byte).bfloat16()
    made = MXFP8QuantizationCompressor.compress({"weight": w, "weight_scale": scale}, SCHEME)
    assert torch.equal(made["weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(made["weight_scale"], byte)
    decoded = MXFP8QuantizationCompressor.decompress(made, SCHEME)["weight"]
    assert torch.equal(decoded, fp8.dequantize_mx(codes, byte))


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_keep_their_signs_and_have_the_least_scale(zero: float) -> None:
    codes, byte = fp8.quantize_mx(torch.full((2, 64), zero))
    assert not byte.any()
    assert torch.equal(fp8.dequantize_mx(codes, byte).signbit(), codes.float().signbit())
    assert bool((codes.float().signbit() == (math.copysign(1, zero) < 0)).all())
    assert torch.equal(MXFP8QTensor.get_weights_scaling_factor(torch.zeros(2, 64)), byte)


def test_decoding_is_exact_in_bf16_but_below_its_normal_numbers() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = every[every.float().isfinite()].repeat(32)[: 32 * 254].view(254, 32)
    byte = torch.arange(254, dtype=torch.uint8).unsqueeze(1)
    exact_values = fp8.dequantize_mx(codes, byte, torch.float32)
    decoded = fp8.dequantize_mx(codes, byte)
    lost = decoded.float() != exact_values
    small = exact_values.abs() < 2.0**-126
    huge = exact_values.isinf() | (exact_values.abs() > 3.38e38)
    assert not bool((lost & ~small & ~huge).any())
    assert bool(lost[small].any())
    assert bool(fp8.mx_scale_values(torch.tensor([255], dtype=torch.uint8)).isnan().all())


def test_k_is_a_multiple_of_32() -> None:
    with pytest.raises(ValueError, match="K is 40; MXFP8 needs a multiple of 32"):
        fp8.quantize_mx(torch.zeros(2, 40))
