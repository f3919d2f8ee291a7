"""The compiled CPU kernels against their torch twins: equal bytes and counts, at every x86 level.

Sources are every bit pattern of the 16-bit dtypes, random FP32 bit patterns, and values aimed at
ties, saturation, zeros and denormals. Without the compiled module these tests fail, unless the
twin was asked for with BEAMQ_CPU_KERNELS=torch: a broken build must not pass unseen.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beamq.formats import nvfp4
from beamq.formats.kernels import cpu, torch_twin
from tests.helpers.kernel_sources import (
    DTYPES,
    GLOBAL_SCALES,
    ITEMSIZE,
    aimed,
    encoded,
    patterns,
    shifted,
    sources,
)

if os.environ.get("BEAMQ_CPU_KERNELS") == "torch":
    pytest.skip("BEAMQ_CPU_KERNELS=torch: compiled kernels not wanted", allow_module_level=True)

from beamq.formats.kernels import _cpu

LEVELS = range(_cpu.use_level(-1) + 1)


@pytest.fixture(params=LEVELS, ids=lambda level: ("baseline", "avx2", "avx512")[level])
def compiled(request: pytest.FixtureRequest) -> Any:
    """The extension, held to one instruction set."""
    assert _cpu.use_level(request.param) == request.param
    yield _cpu
    _cpu.use_level(-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(compiled: Any, dtype: str) -> None:
    finite = aimed(dtype)
    for data in [*sources(dtype), finite[: ITEMSIZE[dtype]], b""]:
        for offset in (0, 1, 2):
            assert compiled.amax(shifted(data, offset), dtype) == torch_twin.amax(data, dtype)
    assert compiled.amax(finite, dtype)[1:] == (0, -1)


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_quantize(compiled: Any, dtype: str, global_scale: float) -> None:
    for data in sources(dtype):
        n = len(data) // ITEMSIZE[dtype]
        # The last sizes leave a partial tile and a lone block.
        for count, offset in ((n, 0), (n - 16, 1), (1040, 2), (16, 2)):
            part = data[: count * ITEMSIZE[dtype]]
            got = bytearray(count // 2), bytearray(count // 16)
            want = bytearray(count // 2), bytearray(count // 16)
            counts = compiled.nvfp4_quantize(shifted(part, offset), dtype, 16, global_scale, *got)
            assert counts == torch_twin.nvfp4_quantize(part, dtype, 16, global_scale, *want)
            assert got == want


@pytest.mark.parametrize("k", [1, 7, 16, 33, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_quantize_rows(compiled: Any, dtype: str, k: int) -> None:
    for data, offset in zip(sources(dtype), (1, 2), strict=True):
        rows = min(len(data) // ITEMSIZE[dtype] // k, 700)
        part = data[: rows * k * ITEMSIZE[dtype]]
        got = bytearray(rows * k), bytearray(rows * 4)
        want = bytearray(rows * k), bytearray(rows * 4)
        counts = compiled.fp8_quantize_rows(shifted(part, offset), dtype, k, *got)
        assert counts == torch_twin.fp8_quantize_rows(part, dtype, k, *want)
        assert got == want


@pytest.mark.parametrize("out_dtype", ["BF16", "F32"])
def test_dequantize_every_code_at_every_scale(compiled: Any, out_dtype: str) -> None:
    size = ITEMSIZE[out_dtype]
    codes = bytes(range(256)) * 256  # rows of one code byte each, against each scale byte
    nvfp4_codes = b"".join(bytes([c]) * 8 for c in range(256)) * 256
    nvfp4_scales = b"".join(bytes([s]) * 256 for s in range(256))
    for global_scale in GLOBAL_SCALES:
        got, want = bytearray(2**20 * size), bytearray(2**20 * size)
        args = (nvfp4_codes, nvfp4_scales, 16, global_scale)
        compiled.nvfp4_dequantize(*args, got, out_dtype)
        torch_twin.nvfp4_dequantize(*args, want, out_dtype)
        assert_same_numbers(got, want, out_dtype)
    scales = np.geomspace(1e-38, 1e34, 256, dtype=np.float32).tobytes()
    got, want = bytearray(65536 * size), bytearray(65536 * size)
    compiled.fp8_dequantize_rows(shifted(codes, 1), scales, 256, got, out_dtype)
    torch_twin.fp8_dequantize_rows(codes, scales, 256, want, out_dtype)
    assert_same_numbers(got, want, out_dtype)


def assert_same_numbers(got: bytes, want: bytes, dtype: str) -> None:
    """Equal bytes, except that one NaN is as good as another (a product's NaN has any sign)."""
    a, b = (np.frombuffer(x, DTYPES[dtype]) for x in (got, want))
    mask, infinity = (0x7FFF, 0x7F80) if dtype == "BF16" else (0x7FFFFFFF, 0x7F800000)
    both_nan = ((a & mask) > infinity) & ((b & mask) > infinity)
    assert np.array_equal(a[~both_nan], b[~both_nan])


@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize(
    ("source", "target"), [("F32", "BF16"), ("F16", "BF16"), ("BF16", "F32"), ("F16", "F32")]
)
def test_convert(compiled: Any, source: str, target: str, offset: int) -> None:
    edges = struct.pack(
        "<6I", 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x3F808000, 0x3F818000, 0x7F800001
    )
    data = patterns(source, seed=2) + (edges if source == "F32" else b"")
    n = len(data) // ITEMSIZE[source]
    got, want = bytearray(n * ITEMSIZE[target]), bytearray(n * ITEMSIZE[target])
    overflowed = compiled.convert(shifted(data, offset), source, got, target)
    assert overflowed == torch_twin.convert(data, source, want, target)
    assert got == want
    assert (overflowed > 0) == (source == "F32")


def test_half_precision_survives_flushed_denormals(compiled: Any) -> None:
    """Some libraries make a process flush denormals; every F16 value is a normal FP32 one."""
    data = patterns("F16")
    got, want = bytearray(65536 * 4), bytearray(65536 * 4)
    compiled.convert(data, "F16", want, "F32")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        compiled.convert(data, "F16", got, "F32")
    finally:
        torch.set_flush_denormal(False)
    assert got == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_compare_accepts_own_codes(compiled: Any, dtype: str) -> None:
    data = aimed(dtype)
    n = len(data) // ITEMSIZE[dtype]
    codes, scales = bytearray(n // 2), bytearray(n // 16)
    g = cpu.nvfp4_global_scale(compiled.amax(data, dtype)[0])
    assert compiled.nvfp4_quantize(data, dtype, 16, g, codes, scales)[0] == 0
    got = compiled.nvfp4_compare(shifted(data, 1), dtype, codes, scales, 16, g)
    assert_same_comparison(got, torch_twin.nvfp4_compare(data, dtype, codes, scales, 16, g))
    assert got[3:] == (0, -1)
    k = n // 4
    codes, scales = bytearray(n), bytearray(16)
    compiled.fp8_quantize_rows(data, dtype, k, codes, scales)
    got = compiled.fp8_compare(shifted(data, 1), dtype, codes, scales, k)
    assert_same_comparison(got, torch_twin.fp8_compare(data, dtype, codes, scales, k))
    assert got[3:] == (0, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compare_judges_any_bytes_as_the_twin_does(compiled: Any, dtype: str) -> None:
    rng = np.random.default_rng(3)
    for data in sources(dtype):
        n = len(data) // ITEMSIZE[dtype]
        for g in GLOBAL_SCALES:
            codes, scales = rng.bytes(n // 2), rng.bytes(n // 16)
            got = compiled.nvfp4_compare(data, dtype, codes, scales, 16, g)
            assert_same_comparison(got, torch_twin.nvfp4_compare(data, dtype, codes, scales, 16, g))
            mine = bytearray(n // 2), bytearray(n // 16)
            compiled.nvfp4_quantize(data, dtype, 16, g, *mine)
            got = compiled.nvfp4_compare(data, dtype, *mine, 16, g)
            assert_same_comparison(got, torch_twin.nvfp4_compare(data, dtype, *mine, 16, g))
        codes, scales = rng.bytes(n), rng.bytes(n // 4)
        got = compiled.fp8_compare(data, dtype, codes, scales, 16)
        assert_same_comparison(got, torch_twin.fp8_compare(data, dtype, codes, scales, 16))


def assert_same_comparison(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    assert got[:2] == pytest.approx(want[:2], rel=1e-12, nan_ok=True)
    assert got[2:] == want[2:]


def test_compare_finds_each_fault() -> None:
    values = np.random.default_rng(4).standard_normal((8, 32)) * 0.02
    data = encoded(values, "BF16")
    g = cpu.nvfp4_global_scale(cpu.amax(data, "BF16").amax)
    codes, scales = bytearray(128), bytearray(16)
    cpu.nvfp4_quantize(data, "BF16", 32, g, codes, scales)
    assert cpu.nvfp4_compare(data, "BF16", codes, scales, 32, g).out_of_bound == 0

    wrong = bytearray(codes)
    wrong[70] ^= 0x40  # one bit of the code of element 141
    found = cpu.nvfp4_compare(data, "BF16", wrong, scales, 32, g)
    assert (found.out_of_bound, found.first_out_of_bound) == (1, 141)
    for byte in (0x00, 0x7F, 0xFF, scales[3] | 0x80):
        wrong = bytearray(scales)
        wrong[3] = byte
        found = cpu.nvfp4_compare(data, "BF16", codes, wrong, 32, g)
        assert (found.out_of_bound, found.first_out_of_bound) == (16, 48)
    # A global scale half as large clips what it must: that isn't rounding to nearest.
    clipped = cpu.nvfp4_quantize(data, "BF16", 32, g / 2, codes, scales)
    assert clipped.saturated > 0
    assert cpu.nvfp4_compare(data, "BF16", codes, scales, 32, g / 2).out_of_bound > 0

    codes, scales = bytearray(256), bytearray(32)
    cpu.fp8_quantize_rows(data, "BF16", 32, codes, scales)
    assert cpu.fp8_compare(data, "BF16", codes, scales, 32).out_of_bound == 0
    codes[100] ^= 1
    found = cpu.fp8_compare(data, "BF16", codes, scales, 32)
    assert (found.out_of_bound, found.first_out_of_bound) == (1, 100)
    codes[7] = 0x7F
    assert cpu.fp8_compare(data, "BF16", codes, scales, 32).first_out_of_bound == 7


@pytest.mark.parametrize(("ideal", "faults"), [(463.9, 0), (464.2, 1)])
def test_bound_at_the_end_of_the_grid(ideal: float, faults: int) -> None:
    """Up to 464 a scale or a code of 448 is the nearest; beyond, it would be clipping."""
    values = np.zeros(32)
    values[20] = ideal * 6
    data = encoded(values, "F32")
    codes, scales = bytearray(16), bytearray(2)
    counts = cpu.nvfp4_quantize(data, "F32", 32, 1.0, codes, scales)
    found = cpu.nvfp4_compare(data, "F32", codes, scales, 32, 1.0)
    assert (counts.saturated, found.out_of_bound) == (faults, faults)
    values[20] = ideal
    data, codes = encoded(values, "F32"), bytearray(32)
    codes[20] = 0x7E
    one = struct.pack("<f", 1.0)
    assert cpu.fp8_compare(data, "F32", codes, one, 32).out_of_bound == faults


def test_sums_are_the_same_at_every_level() -> None:
    data = encoded(np.random.default_rng(5).standard_normal(5000 * 16), "BF16")
    codes, scales = bytearray(40000), bytearray(5000)
    cpu.nvfp4_quantize(data, "BF16", 16, 0.002, codes, scales)
    results = set()
    for level in LEVELS:
        _cpu.use_level(level)
        results.add(_cpu.nvfp4_compare(data, "BF16", codes, scales, 16, 0.002))
    _cpu.use_level(-1)
    assert len(results) == 1


def test_known_blocks() -> None:
    """The cases of public bug reports, with the bytes they should give."""
    block = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    tiny = [1e-6, -1e-6] * 8
    data = encoded(np.array(block + [0.0] * 16 + tiny), "F32")
    codes, scales = bytearray(24), bytearray(3)
    counts = cpu.nvfp4_quantize(data, "F32", 48, 1 / 448, codes, scales)
    # -0.0 becomes +0, a zero block has scale 1.0, a block far below amax the smallest scale.
    assert codes[:8] == bytes([0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE])
    assert scales == bytes([0x7E, 0x38, 0x01])
    assert codes[8:16] == bytes(8)
    assert (counts.zero, counts.underflow, counts.saturated, counts.nonfinite) == (1, 1, 0, 0)

    row = encoded(np.array([1.7568, -0.3, 0.0, -0.0] + [0.0] * 4), "F32")
    codes, scales = bytearray(8), bytearray(8)
    result = cpu.fp8_quantize_rows(row, "F32", 4, codes, scales)
    assert struct.unpack("<2f", scales) == (
        np.float32(1.7568) / np.float32(448),
        np.float32(1 / 448),
    )
    assert codes == bytes([0x7E, 0xEA, 0x00, 0x80, 0, 0, 0, 0])
    assert result.zero_rows == 1


def test_nonfinite_values_are_counted() -> None:
    values = np.ones(64, np.float32)
    values[[37, 50]] = np.nan, -np.inf
    for dtype in DTYPES:
        data = encoded(values, dtype)
        found = cpu.amax(data, dtype)
        assert (found.amax, found.nonfinite, found.first_nonfinite) == (1.0, 2, 37)
        rows = cpu.fp8_quantize_rows(data, dtype, 16, bytearray(64), bytearray(16))
        assert (rows.nonfinite, rows.first_nonfinite) == (2, 37)
        scales = bytearray(4)
        assert cpu.nvfp4_quantize(data, dtype, 16, 1.0, bytearray(32), scales).nonfinite == 2
        assert cpu.scan_e4m3_scales(scales).nan == 0


def test_global_scale_is_the_twins() -> None:
    rng = random.Random(6)
    amaxes = [
        struct.unpack("<f", struct.pack("<I", rng.randrange(0x7F800000)))[0] for _ in range(999)
    ]
    for value in [0.0, 1e-45, 1e-36, 3.4028234663852886e38, *amaxes]:
        scale = cpu.nvfp4_global_scale(value)
        assert scale == float(nvfp4.global_scale_from_amax(value))
        assert 2.0**-126 <= scale <= 2.0**117


@pytest.mark.parametrize("backend", [_cpu, torch_twin], ids=["c", "torch"])
def test_equal_and_scale_scan(backend: Any) -> None:
    a = random.Random(7).randbytes(10_000)
    assert backend.equal(a, bytearray(a)) == -1
    assert backend.equal(b"", b"") == -1
    for position in (0, 4095, 4096, 9_999):
        b = bytearray(a)
        b[position] ^= 4
        assert backend.equal(a, b) == position
    good = bytes(range(0x01, 0x7F)) * 100
    assert backend.scan_e4m3_scales(good) == (0, 0, 0, -1)
    bad = bytearray(good)
    bad[9000], bad[9001], bad[9005], bad[9006], bad[9007] = 0x80, 0x00, 0x7F, 0xFF, 0x81
    assert backend.scan_e4m3_scales(bad) == (2, 2, 1, 9000)
    assert backend.scan_e4m3_scales(b"") == (0, 0, 0, -1)


SRC, BLOCKS = bytes(128), bytes(4)  # 64 BF16 zeros; their NVFP4 scales
WRONG_CALLS = {
    "amax dtype": lambda b: b.amax(SRC, "F64"),
    "amax length": lambda b: b.amax(SRC[:3], "BF16"),
    "quantize k": lambda b: b.nvfp4_quantize(SRC, "BF16", 24, 1.0, bytearray(32), bytearray(4)),
    "quantize zero k": lambda b: b.nvfp4_quantize(SRC, "BF16", 0, 1.0, bytearray(32), bytearray(4)),
    "quantize rows": lambda b: b.nvfp4_quantize(SRC, "BF16", 48, 1.0, bytearray(32), bytearray(4)),
    "codes": lambda b: b.nvfp4_quantize(SRC, "BF16", 64, 1.0, bytearray(31), bytearray(4)),
    "scales": lambda b: b.nvfp4_quantize(SRC, "BF16", 64, 1.0, bytearray(32), bytearray(5)),
    "global 0": lambda b: b.nvfp4_quantize(SRC, "BF16", 64, 0.0, bytearray(32), bytearray(4)),
    "global nan": lambda b: b.nvfp4_dequantize(
        bytes(32), BLOCKS, 64, float("nan"), bytearray(128), "BF16"
    ),
    "global inf": lambda b: b.nvfp4_compare(SRC, "BF16", bytes(32), BLOCKS, 64, float("inf")),
    "fp8 k": lambda b: b.fp8_quantize_rows(SRC, "BF16", 3, bytearray(64), bytearray(4)),
    "fp8 negative k": lambda b: b.fp8_quantize_rows(SRC, "BF16", -8, bytearray(64), bytearray(32)),
    "fp8 codes": lambda b: b.fp8_quantize_rows(SRC, "BF16", 64, bytearray(65), bytearray(4)),
    "fp8 scales": lambda b: b.fp8_quantize_rows(SRC, "BF16", 32, bytearray(64), bytearray(4)),
    "out dtype": lambda b: b.nvfp4_dequantize(bytes(32), BLOCKS, 64, 1.0, bytearray(128), "F16"),
    "out": lambda b: b.nvfp4_dequantize(bytes(32), BLOCKS, 64, 1.0, bytearray(127), "BF16"),
    "in scales": lambda b: b.nvfp4_dequantize(bytes(32), bytes(3), 64, 1.0, bytearray(128), "BF16"),
    "fp8 out": lambda b: b.fp8_dequantize_rows(bytes(64), bytes(4), 64, bytearray(64), "BF16"),
    "fp8 rows": lambda b: b.fp8_dequantize_rows(bytes(64), bytes(8), 64, bytearray(128), "BF16"),
    "convert same": lambda b: b.convert(SRC, "BF16", bytearray(128), "BF16"),
    "convert to F16": lambda b: b.convert(SRC, "F32", bytearray(64), "F16"),
    "convert out": lambda b: b.convert(SRC, "BF16", bytearray(128), "F32"),
    "compare codes": lambda b: b.nvfp4_compare(SRC, "BF16", bytes(33), BLOCKS, 64, 1.0),
    "compare scales": lambda b: b.nvfp4_compare(SRC, "BF16", bytes(32), bytes(3), 64, 1.0),
    "fp8 compare": lambda b: b.fp8_compare(SRC, "BF16", bytes(64), bytes(8), 64),
    "equal": lambda b: b.equal(b"ab", b"abc"),
}


@pytest.mark.parametrize("backend", [_cpu, torch_twin], ids=["c", "torch"])
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_sizes_raise(backend: Any, name: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        WRONG_CALLS[name](backend)


@pytest.mark.parametrize("backend", [_cpu, torch_twin], ids=["c", "torch"])
def test_read_only_outputs_raise(backend: Any) -> None:
    with pytest.raises(TypeError):
        backend.convert(SRC, "BF16", bytes(256), "F32")


def test_threads_share_a_source() -> None:
    data = encoded(np.random.default_rng(8).standard_normal((64, 2560)), "BF16")
    row = 2560 * 2

    def rows(start: int) -> bytes:
        codes, scales = bytearray(8 * 1280), bytearray(8 * 160)
        view = memoryview(data)[start * row : (start + 8) * row]
        cpu.nvfp4_quantize(view, "BF16", 2560, 0.002, codes, scales)
        return bytes(codes)

    with ThreadPoolExecutor(4) as pool:
        together = b"".join(pool.map(rows, range(0, 64, 8)))
    codes, scales = bytearray(64 * 1280), bytearray(64 * 160)
    cpu.nvfp4_quantize(data, "BF16", 2560, 0.002, codes, scales)
    assert together == codes


def test_choice_of_backend() -> None:
    program = (
        "import sys; from beamq.formats.kernels import cpu; "
        "print(cpu.BACKEND, 'torch' in sys.modules)"
    )

    def chosen(value: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"BEAMQ_CPU_KERNELS": value}
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )

    assert chosen("").stdout.split() == ["c", "False"]
    assert chosen("torch").stdout.split() == ["torch", "True"]
    refused = chosen("cuda")
    assert refused.returncode != 0
    assert "BEAMQ_CPU_KERNELS is 'cuda'" in refused.stderr


def test_what_to_do_where_the_compiled_kernels_are_missing(tmp_path: Path) -> None:
    """In a clone they are built; an installed package is installed again."""
    package = Path(cpu.__file__).parents[2]
    program = "from beamq.formats.kernels import cpu; print(cpu.BACKEND, cpu.LACK)"

    def lack(tree: Path, value: str = "") -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(tree), "BEAMQ_CPU_KERNELS": value}
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True,
            cwd=tmp_path,
        )  # fmt: skip

    tree = tmp_path / "tree"
    shutil.copytree(package, tree / "beamq", ignore=shutil.ignore_patterns("_cpu.*.so", "*.pyc"))
    said = lack(tree).stdout
    assert said.startswith("torch the compiled CPU kernels are not built, so conversion on a CPU")
    assert said.endswith("fifty times slower; reinstall beamq where there is a C compiler\n")
    (tree / "setup.py").touch()
    build = f"run `python setup.py build_ext --inplace` in {tree}"
    assert build in lack(tree).stdout
    assert build in lack(tree, "c").stderr
    assert lack(tree, "torch").stdout == "torch None\n"  # what was asked for
    (tree / "beamq" / "formats" / "kernels" / "_cpu.abi3.so").write_bytes(b"of another machine")
    said = lack(tree).stdout
    assert "kernels cannot be loaded (" in said
    assert "build_ext --inplace --force` in" in said
