"""Codes by counted thresholds (kernels/_encode.h): each BF16 magnitude that matters, by each scale.

The random sources of test_cpu.py seldom hit a tie within FP32 rounding. Here each scale
meets all magnitudes of the grid's range in order, so every threshold is crossed one step at a time.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from beamq.formats.kernels import torch_twin

if os.environ.get("BEAMQ_CPU_KERNELS") == "torch":
    pytest.skip("BEAMQ_CPU_KERNELS=torch: compiled kernels not wanted", allow_module_level=True)

from beamq.formats.kernels import _cpu

MANTISSAS = range(128)  # of a BF16 number; its bits are exponent * 128 + mantissa
# From subnormal to the largest; thresholds are used in between only.
FP8_EXPONENTS = (1, 30, 34, 36, 90, 127, 130, 220, 236, 254)
GLOBAL_SCALES = (
    0.02 / 2688,
    1.0 / 2688,  # 3.5 * 1.5 * amax / 6 / 448 meets amax itself: ties everywhere
    3.7e-6,
    2.0**-20,
    1.9999999 * 2.0**-20,
    2.0**-100,
    2.0**7,
)


@pytest.fixture(params=range(_cpu.use_level(-1) + 1))
def compiled(request: pytest.FixtureRequest) -> Any:
    """The extension, held to one instruction set."""
    _cpu.use_level(request.param)
    yield _cpu
    _cpu.use_level(-1)


def signed(magnitudes: np.ndarray) -> bytes:
    """BF16 bits with alternating signs."""
    bits = magnitudes.astype(np.uint16)
    bits[1::2] |= 0x8000
    return bits.tobytes()


@pytest.mark.parametrize("exponent", FP8_EXPONENTS)
def test_fp8_every_magnitude_below_amax(compiled: Any, exponent: int) -> None:
    span = 22 * 128  # E4M3's 18 binades and what rounds to zero
    amax = exponent * 128 + np.arange(128)
    # Rows begin with more and more of amax: the chunks they are worked in begin everywhere.
    below = np.maximum(np.arange(span) - 2 * np.arange(128)[:, None], 0)
    rows = np.maximum(amax[:, None] - below, 0)
    data = signed(rows.reshape(-1))
    got, want = ((bytearray(rows.size), bytearray(4 * len(rows))) for _ in range(2))
    assert compiled.fp8_quantize_rows(data, "BF16", span, *got) == torch_twin.fp8_quantize_rows(
        data, "BF16", span, *want
    )
    assert got == want


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_nvfp4_every_magnitude_below_amax(compiled: Any, global_scale: float) -> None:
    scale = float(np.float32(global_scale))
    # A block's amax of 6 * global * (block scale near 1 and near 300), with every mantissa.
    blocks = []
    for ideal in (1.0, 300.0):
        exponent = int(np.float32(6 * scale * ideal).view(np.uint32)) >> 23
        for mantissa in MANTISSAS:
            amax = exponent * 128 + mantissa
            below = np.maximum(amax - np.arange(1, 46 * 15 + 1), 0).reshape(46, 15)
            blocks.append(np.concatenate([np.full((46, 1), amax), below], axis=1))
    magnitudes = np.concatenate(blocks)
    data = signed(magnitudes.reshape(-1))
    got, want = ((bytearray(magnitudes.size // 2), bytearray(len(magnitudes))) for _ in range(2))
    assert compiled.nvfp4_quantize(data, "BF16", 16, scale, *got) == torch_twin.nvfp4_quantize(
        data, "BF16", 16, scale, *want
    )
    assert got == want
