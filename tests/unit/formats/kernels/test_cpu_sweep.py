"""The scale sweep: the same bytes in C and torch, and what it promises of each block."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from beamq.formats import nvfp4
from beamq.formats.kernels import cpu, torch_twin
from beamq.formats.numerics import e2m1_codes, e2m1_values, unpack_nibbles
from tests.helpers.kernel_sources import DTYPES, GLOBAL_SCALES, ITEMSIZE, encoded, shifted, sources

BACKENDS: dict[str, tuple[Any, int]] = {"torch": (torch_twin, -1)}
if os.environ.get("BEAMQ_CPU_KERNELS") != "torch":
    from beamq.formats.kernels import _cpu

    levels = ("baseline", "avx2", "avx512")[: _cpu.use_level(-1) + 1]
    BACKENDS |= {name: (_cpu, level) for level, name in enumerate(levels)}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    """Each implementation, the compiled one held to each instruction set."""
    module, level = BACKENDS[request.param]
    if level >= 0:
        assert module.use_level(level) == level
    yield module
    if level >= 0:
        module.use_level(-1)


def gaussian(rows: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def swept(
    module: Any, data: bytes, dtype: str, k: int, g: float, weights: np.ndarray | None = None
) -> tuple[bytearray, bytearray, tuple[int, ...]]:
    n = len(data) // ITEMSIZE[dtype]
    codes, scales = bytearray(n // 2), bytearray(n // 16)
    counts = module.nvfp4_sweep(data, dtype, k, g, weights, codes, scales)
    return codes, scales, counts


@pytest.mark.parametrize("global_scale", [*GLOBAL_SCALES, 1e-20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_implementations_give_the_same_bytes(
    backend: Any, dtype: str, global_scale: float
) -> None:
    rng = np.random.default_rng(3)
    for data in sources(dtype):
        n = len(data) // ITEMSIZE[dtype]
        # The sizes leave a partial tile and a lone block; rows of five blocks shift the weights.
        for count, offset, k in ((n // 80 * 80, 1, 80), (1040, 2, 16), (16, 0, 16)):
            part = data[: count * ITEMSIZE[dtype]]
            for weights in (None, rng.lognormal(size=k).astype(np.float32)):
                got = swept(backend, shifted(part, offset), dtype, k, global_scale, weights)
                assert got == swept(torch_twin, part, dtype, k, global_scale, weights)


def many_blocks(blocks: int, zeros: float, seed: int = 5) -> np.ndarray:
    """FP32 [blocks, 16], as weights are, and worse: small blocks, tiny values, zeros of both signs,
    whole blocks of them, ties, and what is not finite."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((blocks, 16))
    w *= 2.0 ** -np.where(rng.random((blocks, 1)) < 0.2, rng.integers(0, 14, (blocks, 1)), 0)
    w[rng.random(w.shape) < 0.01] *= 2.0 ** -rng.integers(5, 100)
    w[rng.random(w.shape) < zeros] *= 0.0
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    w[7::97] = ties * 2.0 ** rng.integers(-6, 2, (len(w[7::97]), 1))
    w[11::503] = 0.0
    w[13::1009, 3] = np.nan
    w[17::1013, 5] = -np.inf
    w[19::1019] *= 40.0
    return w


@pytest.mark.parametrize("exponent", [-10, 0, 1, 15, 16, 17, -69, -70, -71, -110])
@pytest.mark.parametrize(("blocks", "zeros"), [(2048 + 67, 0.001), (4096, 0.02)])
def test_many_blocks_have_the_bytes_of_few(
    backend: Any, blocks: int, zeros: float, exponent: int
) -> None:
    """Much BF16 without weights goes by a table, where its global scale allows that."""
    g = float(np.float32(5.3 / 2688)) * 2.0**exponent
    data = encoded(many_blocks(blocks, zeros) * 2.0**exponent, "BF16")
    got = swept(backend, shifted(data, 1), "BF16", 16, g)
    assert got == swept(torch_twin, data, "BF16", 16, g)


def test_more_blocks_than_a_table_is_made_for(backend: Any) -> None:
    """Two spans of 32,768 blocks and what is left, against calls too small for a table."""
    g = 5.3 / 2688
    blocks, few = 2 * 32768 + 3000, 1024
    data = encoded(many_blocks(blocks, 0.001), "BF16")
    codes, scales, counts = swept(backend, data, "BF16", 16, g)
    parts = [data[start : start + 32 * few] for start in range(0, len(data), 32 * few)]
    found = [swept(backend, part, "BF16", 16, g) for part in parts]
    assert codes == b"".join(part[0] for part in found)
    assert scales == b"".join(part[1] for part in found)
    assert counts == tuple(map(sum, zip(*(part[2] for part in found), strict=True)))


def block_errors(w_NB16: torch.Tensor, scale_NB: torch.Tensor, g: float) -> torch.Tensor:
    """FP64 squared error of each block rounded with the stored scale."""
    step = (scale_NB.float() * g).unsqueeze(-1)
    decoded = e2m1_values(e2m1_codes(w_NB16 / step)).double() * step.double()
    return (w_NB16.double() - decoded).square().sum(-1)


@pytest.mark.parametrize("seed", range(3))
def test_no_candidate_is_better(seed: int) -> None:
    w_NK = gaussian(32, 64, seed) * torch.logspace(-4, 0, 32).unsqueeze(1)
    g = float(nvfp4.global_scale_from_amax(w_NK.abs().amax()))
    w_NB16 = w_NK.view(32, 4, 16)
    chosen = nvfp4.quantize(w_NK, g, scale_rule="sweep").block_scale
    by_max = nvfp4.quantize(w_NK, g).block_scale
    middle = by_max.view(torch.uint8).int()
    errors = []
    for offset in nvfp4.candidate_offsets():
        code = (middle + offset).clamp(1, 126).to(torch.uint8)
        errors.append(block_errors(w_NB16, code.view(torch.float8_e4m3fn), g))
    best = torch.stack(errors).amin(0)
    found = block_errors(w_NB16, chosen, g)
    # FP32 and the reciprocal move an error by less than this.
    assert (found <= best * (1 + 1e-5)).all()
    assert float(found.sum() / block_errors(w_NB16, by_max, g).sum()) < 0.87


def test_the_choice_clips_and_widens() -> None:
    w_NK = gaussian(64, 256)
    g = float(nvfp4.global_scale_from_amax(w_NK.abs().amax()))
    middle = nvfp4.quantize(w_NK, g).block_scale.view(torch.uint8).int()
    chosen = nvfp4.quantize(w_NK, g, scale_rule="sweep").block_scale.view(torch.uint8).int()
    offset = chosen - middle
    assert int(offset.min()) < 0 < int(offset.max())
    assert int(offset.min()) >= -nvfp4.BELOW
    assert int(offset.max()) <= nvfp4.ABOVE
    assert int(chosen.max()) <= 126  # the block that set the global scale can only go down


def test_ties_keep_the_max_rule(backend: Any) -> None:
    """What `max` represents exactly, and blocks of zeros, keep their bytes."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2) * np.array([1, -1] * 8)
    values = np.concatenate([grid * 0.75, np.zeros(16), grid * 208])
    data = encoded(values, "F32")
    codes, scales, counts = swept(backend, data, "F32", 48, 1.0)
    assert scales == bytes([0x34, 0x38, 0x75])
    plain = bytearray(24), bytearray(3)
    assert counts == backend.nvfp4_quantize(data, "F32", 48, 1.0, *plain)
    assert (codes, scales) == plain


@pytest.mark.parametrize("global_scale", [2.0**-12, 1.0])
def test_ties_between_candidates(backend: Any, global_scale: float) -> None:
    """Two small whole numbers and zeros make errors equal, a scale above with one below too."""
    rng = np.random.default_rng(5)
    first, second = rng.integers(1, 16, (2, 1024, 1)).astype(np.float64)
    lone = np.where(np.arange(16) == 3, first + second, first)
    mixed = np.where(rng.random((1024, 16)) < 0.5, first, second)
    mixed *= rng.random((1024, 16)) < rng.random((1024, 1))
    size = 2.0 ** rng.integers(-6, 9, (2048, 1)) * global_scale
    values = np.concatenate((lone, mixed)) * size * rng.choice([-1, 1], (2048, 16))
    data = encoded(values.reshape(-1), "BF16")
    got = swept(backend, data, "BF16", 64, global_scale)
    assert got == swept(torch_twin, data, "BF16", 64, global_scale)
    by_max = bytearray(2048)
    torch_twin.nvfp4_quantize(data, "BF16", 64, global_scale, bytearray(16384), by_max)
    moved = np.frombuffer(got[1], np.uint8).astype(int) - np.frombuffer(by_max, np.uint8)
    assert (moved < 0).sum() > 100
    assert (moved > 0).sum() > 100


def test_known_blocks(backend: Any) -> None:
    """A lone large value among equal ones: the scale that suits the fifteen clips the one."""
    values = np.array([0.95] * 15 + [7.0])
    codes, scales, _ = swept(backend, encoded(values, "F32"), "F32", 16, 1.0)
    scale = float(torch.tensor(list(scales), dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    decoded = e2m1_values(unpack_nibbles(torch.frombuffer(codes, dtype=torch.uint8))) * scale
    errors = {}
    for code in range(0x3A - 7, 0x3A + 9):  # around 7 / 6 = 1.125
        step = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        near = e2m1_values(e2m1_codes(torch.tensor(values, dtype=torch.float32) / step)) * step
        errors[code] = float((near - torch.tensor(values)).square().sum())
    assert scales[0] == min(errors, key=lambda code: errors[code])
    assert float((decoded - torch.tensor(values)).square().sum()) == pytest.approx(
        min(errors.values())
    )


def test_weights_move_the_error_to_where_it_counts_less() -> None:
    w_NK = gaussian(256, 32)
    g = nvfp4.global_scale_from_amax(w_NK.abs().amax())
    weight_K = torch.tensor([1.0, 100.0] * 16)
    plain = nvfp4.dequantize(nvfp4.quantize(w_NK, g, scale_rule="sweep"), torch.float32)
    q = nvfp4.quantize(w_NK, g, scale_rule="sweep", weight_K=weight_K)
    weighted = nvfp4.dequantize(q, torch.float32)
    before, after = ((w_NK - x).square().sum(0) for x in (plain, weighted))
    assert (weight_K * after).sum() < 0.95 * (weight_K * before).sum()
    assert after[0::2].sum() > before[0::2].sum()
    ones = nvfp4.quantize(w_NK, g, scale_rule="sweep", weight_K=torch.ones(32))
    assert torch.equal(ones.codes, nvfp4.quantize(w_NK, g, scale_rule="sweep").codes)


def source_and_swept() -> tuple[bytes, float, bytearray, bytearray]:
    data = encoded(gaussian(64, 64).numpy(), "BF16")
    g = cpu.nvfp4_global_scale(cpu.amax(data, "BF16").amax)
    codes, scales = bytearray(2048), bytearray(256)
    counts = cpu.nvfp4_quantize(data, "BF16", 64, g, codes, scales, scale_rule="sweep")
    assert (counts.saturated, counts.nonfinite) == (0, 0)
    return data, g, codes, scales


def test_comparison_with_swept_scales(backend: Any) -> None:
    data, g, codes, scales = source_and_swept()

    def outside(codes: bytes, scales: bytes, *, swept: bool = True) -> tuple[int, int]:
        found = backend.nvfp4_compare(data, "BF16", codes, scales, 64, g, swept)
        assert found == pytest.approx(
            torch_twin.nvfp4_compare(data, "BF16", codes, scales, 64, g, swept),
            rel=1e-12,
            nan_ok=True,
        )
        return found[3:]

    assert outside(codes, scales) == (0, -1)
    assert outside(codes, scales, swept=False)[0] > 0  # it clips, which `max` never does
    wrong = bytearray(codes)
    wrong[70] ^= 0x70
    assert outside(wrong, scales) == (1, 141)
    middle = bytearray(2048), bytearray(256)
    backend.nvfp4_quantize(data, "BF16", 64, g, *middle)
    assert outside(*middle) == (0, -1)
    # A scale of the block's window, but not the one the codes were made with; one beyond it; none.
    for scale, least in ((scales[3] - 2, 1), (middle[1][3] + 9, 16), (0x7F, 16), (0, 16)):
        wrong = bytearray(scales)
        wrong[3] = scale
        count, first = outside(codes, wrong)
        assert least <= count <= 16
        assert 48 <= first < 64
    other = encoded(gaussian(64, 64, seed=9).numpy(), "BF16")
    found = backend.nvfp4_compare(other, "BF16", codes, scales, 64, g, True)
    assert found[3] > 2000


def test_a_block_of_zeros_has_scale_one(backend: Any) -> None:
    data, codes = bytes(64), bytes(16)
    assert backend.nvfp4_compare(data, "BF16", codes, b"\x38\x38", 32, 1.0, True)[3] == 0
    assert backend.nvfp4_compare(data, "BF16", codes, b"\x38\x37", 32, 1.0, True)[3:] == (16, 16)


def attempt(**changes: Any) -> Callable[[Any], object]:
    """A call of `nvfp4_sweep` that is sound but for `changes`."""
    given = {"src": bytes(64), "dtype": "BF16", "k": 32, "g": 1.0, "weights": None, **changes}
    out = {"codes": bytearray(16), "scales": bytearray(2)} | changes
    return lambda backend: backend.nvfp4_sweep(
        *(given[key] for key in ("src", "dtype", "k", "g", "weights")), out["codes"], out["scales"]
    )


WRONG = {
    "codes": attempt(codes=bytearray(15)),
    "scales": attempt(scales=bytearray(3)),
    "k": attempt(k=24),
    "rows": attempt(src=bytes(62)),
    "dtype": attempt(dtype="F64"),
    "global": attempt(g=0.0),
    "weights": attempt(weights=bytes(124)),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_sizes_that_do_not_fit_are_refused(backend: Any, call: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=r"holds|is|not|must"):
        call(backend)
    with pytest.raises(ValueError, match="scale_rule 'best'"):
        cpu.nvfp4_quantize(b"", "BF16", 16, 1.0, bytearray(), bytearray(), scale_rule="best")
    with pytest.raises(ValueError, match="without weights"):
        cpu.nvfp4_quantize(b"", "BF16", 16, 1.0, bytearray(), bytearray(), weights=bytes(64))
