"""Low-rank sums: C at every level, torch and exact fractions give the same bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from beamq.formats.kernels import torch_twin
from tests.helpers.kernel_sources import DTYPES, ITEMSIZE, aimed, encoded, patterns, shifted

if os.environ.get("BEAMQ_CPU_KERNELS") == "torch":
    pytest.skip("BEAMQ_CPU_KERNELS=torch: compiled kernels not wanted", allow_module_level=True)

from beamq.formats.kernels import _cpu

Numbers = np.ndarray[Any, np.dtype[np.float32]]
PAIRS = [("BF16", "BF16"), ("BF16", "F32"), ("F16", "F16"), ("F16", "F32"), ("F32", "F32")]
BITS = {"BF16": (8, -126, 128), "F16": (11, -14, 16), "F32": (24, -126, 128)}
"""Significant bits, least exponent of normal numbers, exponent of the first number out of range."""


@pytest.fixture(params=range(_cpu.use_level(-1) + 1))
def compiled(request: pytest.FixtureRequest) -> Any:
    """The extension, held to one instruction set."""
    assert _cpu.use_level(request.param) == request.param
    yield _cpu
    _cpu.use_level(-1)


def rounded(value: Fraction, dtype: str) -> float:
    """The nearest number of `dtype`, ties to even; +0.0 for zero, infinite beyond the range."""
    precision, lowest, end = BITS[dtype]
    if value == 0:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    nearest = round(value / unit) * unit  # Python rounds a fraction's ties to even
    if abs(nearest) >= Fraction(2) ** end:
        return float("inf") if value > 0 else float("-inf")
    return float(nearest)


def expected(w: float, a: Numbers, b: Numbers, scaling: float, dtype: str) -> float:
    """The rule in exact arithmetic; only w + delta and the result may leave their range."""
    total = Fraction(0)
    for x, y in zip(b, a, strict=True):
        total = Fraction(rounded(Fraction(float(x)) * Fraction(float(y)) + total, "F32"))
    delta = Fraction(rounded(total * Fraction(scaling), "F32"))
    merged = rounded(Fraction(w) + delta, "F32")
    return rounded(Fraction(merged), dtype) if np.isfinite(merged) else merged


def decoded(data: bytes, dtype: str) -> Numbers:
    of = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    return torch.frombuffer(bytearray(data), dtype=of).float().numpy()


def run(backend: Any, src: bytes, dtype: str, factors: tuple[Numbers, Numbers], to: str) -> bytes:
    """`add_low_rank` with scaling 0.75."""
    a, b = factors
    out = bytearray(len(src) // ITEMSIZE[dtype] * ITEMSIZE[to])
    backend.add_low_rank(src, dtype, a.shape[1], a.tobytes(), b.tobytes(), 0.75, out, to)
    return bytes(out)


def factors(n: int, r: int, k: int, seed: int = 0) -> tuple[Numbers, Numbers]:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((r, k)) * 0.3
    return a.astype(np.float32), rng.standard_normal((n, r)).astype(np.float32)


# Widths and heights around the tiles' (32 columns; 1, 3 or 8 rows), ranks around a panel's 128.
SHAPES = [(1, 1, 1), (9, 16, 33), (7, 5, 31), (8, 32, 64), (25, 1, 95), (3, 128, 40), (17, 300, 37)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "to"), PAIRS)
def test_equals_the_twin(compiled: Any, dtype: str, to: str, shape: tuple[int, int, int]) -> None:
    n, r, k = shape
    rng = np.random.default_rng(1)
    src = encoded(rng.standard_normal((n, k)), dtype)
    a, b = factors(n, r, k)
    want = bytearray(n * k * ITEMSIZE[to])
    torch_twin.add_low_rank(src, dtype, k, a.tobytes(), b.tobytes(), 0.3, want, to)
    for offset in (0, 1, 2):
        got = shifted(bytes(len(want)), offset)
        parts = (shifted(a.tobytes(), offset), shifted(b.tobytes(), offset))
        compiled.add_low_rank(shifted(src, offset), dtype, k, *parts, 0.3, got, to)
        assert got == want
        if dtype == to:
            place = shifted(src, offset)
            compiled.add_low_rank(place, dtype, k, *parts, 0.3, place, to)
            assert place == want


@pytest.mark.parametrize("backend", [_cpu, torch_twin], ids=["c", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_too_writes_in_place(backend: Any, dtype: str) -> None:
    src = encoded(np.random.default_rng(2).standard_normal((6, 40)), dtype)
    a, b = factors(6, 4, 40)
    place = bytearray(src)
    backend.add_low_rank(place, dtype, 40, a.tobytes(), b.tobytes(), 0.75, place, dtype)
    assert place == run(backend, src, dtype, (a, b), dtype)
    assert place != src


@pytest.mark.parametrize(("dtype", "to"), PAIRS)
def test_any_bits_of_a_source(compiled: Any, dtype: str, to: str) -> None:
    """Also NaN, infinities, subnormal numbers; a NaN becomes the positive quiet one."""
    for src in (patterns(dtype), aimed(dtype)):
        k = 16
        n = len(src) // ITEMSIZE[dtype] // k
        a, b = factors(n, 2, k)
        b *= np.float32(2.0) ** np.random.default_rng(3).integers(-140, 120, (n, 1))
        got = run(compiled, src, dtype, (a, b), to)
        assert got == run(torch_twin, src, dtype, (a, b), to)
    quiet = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000}[to]
    nan = -np.float32(np.nan)
    got = run(compiled, encoded(np.array([nan, 1.0]), dtype), dtype, factors(1, 1, 2), to)
    assert np.frombuffer(got, DTYPES[to])[0] == quiet


def wild(shape: tuple[int, ...], seed: int) -> Numbers:
    """FP32 numbers from subnormal to nearly the largest, some of them zero or powers of two."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-147, 64, shape)
    kind = rng.integers(0, 8, shape)
    values[kind == 0] = 0.0
    values[kind == 1] = 2.0 ** rng.integers(-149, 64, shape)[kind == 1]
    return values.astype(np.float32)


def test_wild_factors(compiled: Any) -> None:
    a, b = wild((3, 50), 4), wild((400, 3), 5)
    b[7, 1], a[0, 3] = np.inf, np.nan
    a[:, 9] = 3e38  # sums overflow
    src = wild((400, 50), 6).tobytes()
    got = run(compiled, src, "F32", (a, b), "F32")
    assert got == run(torch_twin, src, "F32", (a, b), "F32")
    assert not np.isfinite(decoded(got, "F32").reshape(400, 50)[:, 9]).all()


def cancelling() -> tuple[Numbers, Numbers, Numbers]:
    """a, b, w [300]: the second product nearly takes the first away, w nearly the whole delta."""
    rng = np.random.default_rng(7)
    a, b = (rng.standard_normal((300, 2)).astype(np.float32) for _ in range(2))
    b[:, 1] = -(a[:, 0] * b[:, 0]) / a[:, 1]
    w = rng.standard_normal(300)
    w[::2] = -0.75 * (a.astype(float) * b).sum(-1)[::2]
    return a, b, w.astype(np.float32)


def tiny() -> tuple[Numbers, Numbers, Numbers]:
    """Products and results among the subnormal numbers."""
    rng = np.random.default_rng(8)
    a, b = ((rng.standard_normal((300, 3)) * 2.0**-70).astype(np.float32) for _ in range(2))
    return a, b * np.float32(2.0**-4), (rng.standard_normal(300) * 2.0**-140).astype(np.float32)


def halfway() -> tuple[Numbers, Numbers, Numbers]:
    """Sums that lie halfway between two numbers of BF16, F16 or FP32, or next to it."""
    rng = np.random.default_rng(9)
    bits = rng.choice([7, 8, 10, 11, 23, 24], 300)
    w = (1 + rng.integers(0, 64, 300) / 64).astype(np.float32)
    a = np.stack([2.0**-bits, rng.choice([0.0, 1.0, -1.0], 300) * 2.0**-40], axis=-1)
    b = np.stack([np.full(300, 4 / 3), np.ones(300)], axis=-1)
    return a.astype(np.float32), b.astype(np.float32), w


def huge() -> tuple[Numbers, Numbers, Numbers]:
    """Results on both sides of BF16's largest number, and of FP32's."""
    rng = np.random.default_rng(10)
    w = (2.0**128 - 2.0**120) * rng.choice([1.0, -1.0, 0.5], 300)
    a = np.stack([np.full(300, 2.0**60), np.full(300, 2.0**64)], axis=-1)
    b = np.stack([rng.standard_normal(300) * 2.0**60, np.full(300, 2.0**55)], axis=-1)
    return a.astype(np.float32), b.astype(np.float32), w.astype(np.float32)


Cases = Callable[[], tuple[Numbers, Numbers, Numbers]]
EXACT = [(cases, *pair) for cases in (cancelling, tiny, halfway) for pair in PAIRS]
EXACT += [(huge, *pair) for pair in PAIRS if pair[0] != "F16"]  # F16 ends at 65504


@pytest.mark.parametrize(("cases", "dtype", "to"), EXACT)
def test_exact_arithmetic(compiled: Any, cases: Cases, dtype: str, to: str) -> None:
    a, b, w = cases()
    src = encoded(w, dtype)
    for at, value in enumerate(decoded(src, dtype)):
        one = src[at * ITEMSIZE[dtype] :][: ITEMSIZE[dtype]]
        pair = a[at, :, None], b[at, None, :]
        want = expected(float(value), a[at], b[at], 0.75, to)
        for backend in (compiled, torch_twin):
            assert decoded(run(backend, one, dtype, pair, to), to) == [want]


def test_one_rounding_a_step_not_two() -> None:
    """(1 + e)(1 - e) - 1 = -e^2 is lost when the product is rounded before the sum."""
    e = 2.0**-20
    a = np.array([[-1.0], [1 - e]], np.float32)
    b = np.array([[1.0, 1 + e]], np.float32)
    got = decoded(run(_cpu, bytes(4), "F32", (a, b), "F32"), "F32")
    assert got == [-(e**2) * 0.75]


def test_sums_next_to_a_tie(compiled: Any) -> None:
    """FP64 rounds them onto the tie; rounding that to FP32 would take the wrong side."""
    e = 2.0**-23
    for x in (e / 2 * (1 + e), -e / 2 * (1 + e)):  # times 1 - e: half a unit, but for 2^-70
        for sign in (1.0, -1.0):
            a = np.array([[1.0], [1 - e]], np.float32)
            b = np.array([[sign * (1 + e), sign * x]], np.float32)
            exact = torch.from_numpy(a[:, 0] * b[0].astype(float)).sum()
            assert exact.float() != sign * (1 + e)
            want = [np.float32(0.75 * sign * (1 + e))]
            for backend in (compiled, torch_twin):
                assert decoded(run(backend, bytes(4), "F32", (a, b), "F32"), "F32") == want


ONE = struct.pack("<f", 1.0)
SRC, A, B = bytes(2 * 8), ONE * 3 * 4, ONE * 2 * 3  # BF16 [2, 4], r = 3
WRONG: dict[str, tuple[Any, ...]] = {
    "dtype": (SRC, "F64", 4, A, B, 1.0, 16, "BF16"),
    "out dtype": (SRC, "BF16", 4, A, B, 1.0, 16, "F16"),
    "out dtype unknown": (SRC, "BF16", 4, A, B, 1.0, 16, "F64"),
    "narrower": (bytes(32), "F32", 4, A, B, 1.0, 16, "BF16"),
    "k": (SRC, "BF16", 0, A, B, 1.0, 16, "BF16"),
    "negative k": (SRC, "BF16", -4, A, B, 1.0, 16, "BF16"),
    "rows": (SRC[2:], "BF16", 4, A, B, 1.0, 14, "BF16"),
    "a": (SRC, "BF16", 4, A[4:], B, 1.0, 16, "BF16"),
    "zero rank": (SRC, "BF16", 4, b"", b"", 1.0, 16, "BF16"),
    "b for another rank": (SRC, "BF16", 4, A, ONE * 2 * 4, 1.0, 16, "BF16"),
    "b with half a number": (SRC, "BF16", 4, A, B + b"\0\0", 1.0, 16, "BF16"),
    "out too short": (SRC, "BF16", 4, A, B, 1.0, 15, "BF16"),
    "out too long": (SRC, "BF16", 4, A, B, 1.0, 33, "F32"),
    "scaling nan": (SRC, "BF16", 4, A, B, float("nan"), 16, "BF16"),
    "scaling beyond FP32": (SRC, "BF16", 4, A, B, 2.0**128 - 2.0**103, 16, "BF16"),
}


@pytest.mark.parametrize("backend", [_cpu, torch_twin], ids=["c", "torch"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_write_nothing(backend: Any, name: str) -> None:
    *before, nbytes, to = WRONG[name]
    out = bytearray(b"\xaa" * nbytes)
    with pytest.raises(ValueError, match=r"\w"):
        backend.add_low_rank(*before, out, to)
    assert out == b"\xaa" * nbytes


@pytest.mark.parametrize("backend", [_cpu, torch_twin], ids=["c", "torch"])
def test_the_ends_of_what_is_allowed(backend: Any) -> None:
    backend.add_low_rank(b"", "BF16", 4, A, b"", 1.0, bytearray(), "BF16")  # no rows
    out = bytearray(16)
    backend.add_low_rank(SRC, "BF16", 4, A, B, 2.0**128 - 2.0**104, out, "BF16")
    assert np.isinf(decoded(bytes(out), "BF16")).all()
    with pytest.raises(TypeError):
        backend.add_low_rank(SRC, "BF16", 4, A, B, 1.0, bytes(16), "BF16")
