"""The compiled kernels of block FP8 and MXFP8 against their torch twins, at every x86 level."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from beamq.formats.kernels import cpu, torch_twin
from tests.helpers.kernel_sources import DTYPES, ITEMSIZE, aimed, shifted, sources

if os.environ.get("BEAMQ_CPU_KERNELS") == "torch":
    pytest.skip("BEAMQ_CPU_KERNELS=torch: compiled kernels not wanted", allow_module_level=True)

from beamq.formats.kernels import _cpu

LEVELS = range(_cpu.use_level(-1) + 1)
WIDTHS = [(False, 1), (False, 100), (False, 128), (False, 300), (True, 32), (True, 352)]


@pytest.fixture(params=LEVELS, ids=lambda level: ("baseline", "avx2", "avx512")[level])
def compiled(request: pytest.FixtureRequest) -> Any:
    """The extension, held to one instruction set."""
    assert _cpu.use_level(request.param) == request.param
    yield _cpu
    _cpu.use_level(-1)


def scale_nbytes(rows: int, k: int, mx: bool) -> int:
    return rows * k // 32 if mx else 4 * -(-rows // 128) * -(-k // 128)


@pytest.mark.parametrize(("mx", "k"), WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_and_compare(compiled: Any, dtype: str, mx: bool, k: int) -> None:
    for data in (*sources(dtype), aimed(dtype)):
        rows = min(len(data) // ITEMSIZE[dtype] // k, 300)
        part = data[: rows * k * ITEMSIZE[dtype]]
        size = scale_nbytes(rows, k, mx)
        got, want = ((bytearray(rows * k), bytearray(size)) for _ in range(2))
        counts = compiled.fp8_quantize_groups(shifted(part, 1), dtype, k, mx, *got)
        assert counts == torch_twin.fp8_quantize_groups(part, dtype, k, mx, *want)
        assert got == want
        got[1][0] ^= 1  # a scale that is not the rule's
        for exact in (False, True):
            given = (part, dtype, *got, k, mx, exact)
            ours, theirs = (
                compiled.fp8_compare_groups(*given),
                torch_twin.fp8_compare_groups(*given),
            )
            assert ours[3:] == theirs[3:]
            assert ours[:2] == pytest.approx(theirs[:2], rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("rounding", ["mxfp8", "fp8-block"])
def test_the_rules_own_bytes_are_in_bound_and_no_others(rounding: str) -> None:
    w = np.linspace(-3, 3, 64 * 96, dtype="<f4").tobytes()
    codes, scales = bytearray(64 * 96), bytearray(scale_nbytes(64, 96, rounding == "mxfp8"))
    cpu.fp8_quantize(rounding, w, "F32", 96, codes, scales)

    def outside(exact: bool, scales: bytes) -> int:
        return cpu.fp8_compare(
            w, "F32", codes, scales, 96, rounding=rounding, exact=exact
        ).out_of_bound

    assert outside(True, scales) == outside(False, scales) == 0
    codes[5] += 1
    assert outside(True, scales) == outside(False, scales) == 1
    codes[5] -= 1
    if rounding == "mxfp8":
        assert outside(True, bytes([scales[0] + 1, *scales[1:]])) == 32
        assert outside(False, bytes([255, *scales[1:]])) == 32


@pytest.mark.parametrize("out_dtype", ["BF16", "F32"])
def test_dequantize_every_code_at_every_byte(compiled: Any, out_dtype: str) -> None:
    codes = bytes(code for code in range(256) for _ in range(32)) * 256
    scales = bytes(byte for byte in range(256) for _ in range(256))
    got, want = (bytearray(len(codes) * ITEMSIZE[out_dtype]) for _ in range(2))
    compiled.fp8_dequantize_groups(codes, scales, 32, True, got, out_dtype)
    torch_twin.fp8_dequantize_groups(codes, scales, 32, True, want, out_dtype)
    kind = "<u2" if out_dtype == "BF16" else "<u4"
    ours, theirs = (np.frombuffer(each, kind) for each in (got, want))
    infinity = 0x7F80 if out_dtype == "BF16" else 0x7F800000
    magnitude = [bits & (0x7FFF if out_dtype == "BF16" else 0x7FFFFFFF) for bits in (ours, theirs)]
    nans = [each > infinity for each in magnitude]
    assert np.array_equal(nans[0], nans[1])
    assert np.array_equal(ours[~nans[0]], theirs[~nans[1]])
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 126, 300 * 200, dtype=np.uint8).tobytes()
    blocks = np.geomspace(1e-38, 1e34, 6, dtype=np.float32).tobytes()
    got, want = (bytearray(len(codes) * ITEMSIZE[out_dtype]) for _ in range(2))
    compiled.fp8_dequantize_groups(shifted(codes, 1), blocks, 200, False, got, out_dtype)
    torch_twin.fp8_dequantize_groups(codes, blocks, 200, False, want, out_dtype)
    assert got == want


SRC = bytes(128)  # 64 BF16 zeros
WRONG_CALLS = {
    "k": lambda b: b.fp8_quantize_groups(SRC, "BF16", 16, True, bytearray(64), bytearray(4)),
    "codes": lambda b: b.fp8_quantize_groups(SRC, "BF16", 64, True, bytearray(63), bytearray(2)),
    "bytes": lambda b: b.fp8_quantize_groups(SRC, "BF16", 64, True, bytearray(64), bytearray(4)),
    "blocks": lambda b: b.fp8_quantize_groups(SRC, "BF16", 64, False, bytearray(64), bytearray(2)),
    "dtype": lambda b: b.fp8_quantize_groups(SRC, "F64", 64, True, bytearray(64), bytearray(2)),
    "out": lambda b: b.fp8_dequantize_groups(
        bytes(64), bytes(2), 64, True, bytearray(64), "BF16"
    ),
    "scales": lambda b: b.fp8_dequantize_groups(
        bytes(64), bytes(3), 64, True, bytearray(128), "BF16"
    ),
    "compare": lambda b: b.fp8_compare_groups(SRC, "BF16", bytes(64), bytes(3), 64, True, False),
}  # fmt: skip


@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_sizes_are_checked(call: Any) -> None:
    for backend in (_cpu, torch_twin):
        with pytest.raises(ValueError, match=r"holds|multiple of 32|not one of"):
            call(backend)


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="is not one of fp8, fp8-block, mxfp8"):
        cpu.fp8_quantize("mxfp4", SRC, "BF16", 64, bytearray(64), bytearray(2))
