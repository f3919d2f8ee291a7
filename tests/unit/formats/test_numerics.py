"""The grids, rounding and packing, against definitions written out independently in Python."""

from __future__ import annotations

import itertools
import math
import random
import struct

import pytest
import torch

from beamq.formats import fp8, nvfp4
from beamq.formats.numerics import (
    E2M1_MAGNITUDES,
    SCALE_FLOOR,
    e2m1_codes,
    e2m1_values,
    pack_nibbles,
    scale_from_amax,
    to_e4m3,
    unpack_nibbles,
)


def e4m3(code: int) -> float:
    """The value of a magnitude byte, from the format's definition: 4 exponent bits, bias 7."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return mantissa / 8 * 2.0**-6
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def nearest(grid: list[float], x: float) -> int:
    """Index of the nearest magnitude; a tie goes to the even index; beyond the end is the end."""
    distances = [abs(value - abs(x)) for value in grid]
    best = min(distances)
    winners = [i for i, distance in enumerate(distances) if distance == best]
    return next((i for i in winners if i % 2 == 0), winners[0])


def float_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def samples(grid: list[float], seed: int) -> list[float]:
    """Grid points, midpoints, the floats on both sides of each, and others up to twice the end."""
    rng = random.Random(seed)
    points = [*grid, *((a + b) / 2 for a, b in itertools.pairwise(grid))]
    beside = []
    for point in points:
        bits = struct.unpack("<I", struct.pack("<f", point))[0]
        beside += [float_bits(max(bits - 1, 0)), float_bits(bits + 1)]
    others = [rng.uniform(0, 2 * grid[-1]) for _ in range(500)]
    return [struct.unpack("<f", struct.pack("<f", x))[0] for x in points + beside + others]


def test_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    grid = list(E2M1_MAGNITUDES)
    values = samples(grid, 0)
    want = [nearest(grid, x) for x in values]
    assert e2m1_codes(torch.tensor(values)).tolist() == want
    negative = [code | 8 if x > 0 else 0 for code, x in zip(want, values, strict=True)]
    assert e2m1_codes(-torch.tensor(values)).tolist() == negative
    special = torch.tensor([math.inf, -math.inf, math.nan, 1e30, 0.0, -0.0, -1e-40])
    assert e2m1_codes(special).tolist() == [7, 15, 7, 7, 0, 0, 8]


def test_e2m1_values_invert_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1_values(codes)
    assert values.tolist() == [*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)]
    assert e2m1_codes(values).tolist() == [*range(8), 0, *range(9, 16)]


def test_e4m3_rounds_to_nearest_even_and_saturates() -> None:
    grid = [e4m3(code) for code in range(0x7F)]
    assert grid[-1] == 448.0
    values = samples(grid, 1)
    want = [nearest(grid, x) for x in values]
    assert to_e4m3(torch.tensor(values)).view(torch.uint8).tolist() == want
    negated = to_e4m3(-torch.tensor(values)).view(torch.uint8).tolist()
    assert negated == [code | 0x80 for code in want]
    special = torch.tensor([math.inf, -math.inf, math.nan, 464.0, 465.0, 1e38])
    codes = to_e4m3(special).view(torch.uint8).tolist()
    assert codes == [0x7E, 0xFE, 0x7E, 0x7E, 0x7E, 0x7E]


def test_low_nibble_is_the_even_k() -> None:
    codes = torch.tensor([[1, 2, 3, 4], [15, 0, 0, 15]], dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x43], [0x0F, 0xF0]]
    assert torch.equal(unpack_nibbles(packed), codes)
    all_bytes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(all_bytes)), all_bytes)


@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-38, 1e-36, 0.01, 1.0, 3.0e38])
def test_scales_are_never_zero_or_denormal(amax: float) -> None:
    by_row = scale_from_amax(torch.tensor([amax]), 448.0)
    for scale in (nvfp4.global_scale_from_amax(amax), by_row):
        assert scale.dtype == torch.float32
        assert bool((scale >= SCALE_FLOOR).all())
        assert bool((1 / scale).isfinite().all())
    if amax >= 0.01:
        assert nvfp4.global_scale_from_amax(amax) == torch.tensor(amax) / 2688


def test_nvfp4_shapes_types_and_expected_error() -> None:
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = nvfp4.quantize(w, nvfp4.global_scale_from_amax(w.abs().amax()))
    assert (q.codes.dtype, tuple(q.codes.shape)) == (torch.uint8, (64, 128))
    assert (q.block_scale.dtype, tuple(q.block_scale.shape)) == (torch.float8_e4m3fn, (64, 16))
    assert (q.global_scale.dtype, tuple(q.global_scale.shape)) == (torch.float32, ())
    decoded = nvfp4.dequantize(q, torch.float32)
    relative = ((decoded - w.float()).norm() / w.float().norm()).item()
    assert 0.09 < relative < 0.105  # 0.095 is what theory gives for a Gaussian
    assert nvfp4.dequantize(q).dtype == torch.bfloat16


def test_fp8_shapes_types_and_expected_error() -> None:
    w = torch.randn(64, 250, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, scale = fp8.quantize_rows(w)
    assert (codes.dtype, tuple(codes.shape)) == (torch.float8_e4m3fn, (64, 250))
    assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (64, 1))
    decoded = fp8.dequantize_rows(codes, scale, torch.float32)
    relative = ((decoded - w.float()).norm() / w.float().norm()).item()
    assert 0.023 < relative < 0.029


def test_zero_tensors_decode_to_zero() -> None:
    w = torch.zeros(3, 32)
    q = nvfp4.quantize(w, nvfp4.global_scale_from_amax(0.0))
    assert not q.codes.any()
    assert (q.block_scale.float() == 1.0).all()
    assert not nvfp4.dequantize(q).any()
    codes, scale = fp8.quantize_rows(w)
    assert not codes.view(torch.uint8).any()
    assert (scale == torch.tensor(1.0) / 448).all()


def test_nvfp4_refuses_a_broken_block() -> None:
    with pytest.raises(ValueError, match="K is 40; NVFP4 needs a multiple of 16"):
        nvfp4.quantize(torch.zeros(2, 40), 1.0)
