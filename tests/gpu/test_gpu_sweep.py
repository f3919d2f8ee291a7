"""The sweep kernel against its plain torch twin on the CPU: every byte and every count."""

from __future__ import annotations

import pytest
import torch

from beamq.formats import nvfp4
from beamq.formats.numerics import NVFP4_BLOCK
from beamq.formats.nvfp4 import QuantizedTensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 16), (3, 48), (160, 96), (320, 2560), (129, 5120)]
GLOBAL_SCALES = [1.0, 0.02 / 2688, 3.7e-6, 2.0**-126, 1.7 * 2.0**-100, 300.0, 2.0**117]


@pytest.fixture(scope="module")
def gpu():
    from beamq.formats.kernels import gpu

    return gpu


def difference(w: torch.Tensor, got: QuantizedTensor, wanted: QuantizedTensor) -> str | None:
    """How many blocks differ, and all of the first one that does."""
    blocks = w.reshape(-1, NVFP4_BLOCK)
    scales = [q.block_scale.view(torch.uint8).cpu().flatten() for q in (got, wanted)]
    codes = [q.codes.cpu().reshape(-1, NVFP4_BLOCK // 2) for q in (got, wanted)]
    other = scales[0] != scales[1]
    wrong = (other | (codes[0] != codes[1]).any(1)).nonzero().flatten()
    if not len(wrong):
        return None
    first = int(wrong[0])
    values = blocks[first].float()
    return (
        f"{len(wrong)} of {len(blocks)} blocks differ, {int(other.sum())} in their scale; block"
        f" {first}: {values.tolist()} (bits {[f'{b:08x}' for b in bits(values)]}),"
        f" scales {scales[0][first]} and {scales[1][first]},"
        f" codes {bytes(codes[0][first]).hex()} and {bytes(codes[1][first]).hex()}"
    )


def bits(values: torch.Tensor) -> list[int]:
    return [b & 0xFFFFFFFF for b in values.view(torch.int32).tolist()]


def same(gpu, w: torch.Tensor, scale: float) -> QuantizedTensor:
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")
    got = gpu.nvfp4_quantize(w.cuda(), torch.tensor(scale), scale_rule="sweep", counts=counts)
    wanted = nvfp4.quantize(w, scale, scale_rule="sweep")
    found = difference(w, got, wanted)
    assert found is None, found
    assert int(counts[2]) == int((w.view(-1, 16) == 0).all(dim=1).sum())
    return wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_random(gpu, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    w = (torch.randn(shape) * 0.02 * torch.logspace(-3, 0, shape[0]).unsqueeze(1)).to(dtype)
    same(gpu, w, nvfp4.global_scale_from_amax(w.abs().amax()).item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", GLOBAL_SCALES)
def test_every_pattern(gpu, dtype: torch.dtype, scale: float) -> None:
    if dtype is torch.float32:
        generator = torch.Generator().manual_seed(1)
        pattern = torch.randint(-(2**31), 2**31 - 1, (65536,), generator=generator)
        w = pattern.to(torch.int32).view(torch.float32)
    else:
        w = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    w = torch.where(w.isfinite(), w, 1.0).view(-1, 64)
    same(gpu, w, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**-12, 1.0])
def test_ties_between_candidates(gpu, dtype: torch.dtype, scale: float) -> None:
    """Two small whole numbers and zeros make errors equal, a scale above with one below too."""
    torch.manual_seed(2)
    first, second = torch.randint(1, 16, (2, 4096, 1)).float()
    lone = torch.where(torch.arange(NVFP4_BLOCK) == 3, first + second, first)
    mixed = torch.where(torch.rand(4096, NVFP4_BLOCK) < 0.5, first, second)
    mixed *= torch.rand(4096, NVFP4_BLOCK) < torch.rand(4096, 1)
    sign = torch.randn(8192, NVFP4_BLOCK).sign()
    w = torch.cat((lone, mixed)) * 2.0 ** torch.randint(-6, 9, (8192, 1)) * sign * scale
    w = w.view(-1, 64).to(dtype)
    wanted = same(gpu, w, scale).block_scale.view(torch.uint8).int()
    moved = wanted - nvfp4.quantize(w, scale).block_scale.view(torch.uint8).int()
    assert int((moved < 0).sum()) > 500
    assert int((moved > 0).sum()) > 500


def test_a_warp_of_blocks_that_want_different_ends(gpu) -> None:
    """Whether a candidate is passed over depends on all 32 blocks of a warp."""
    torch.manual_seed(3)
    w = torch.randn(64, NVFP4_BLOCK * 32) * 0.02
    blocks = w.view(64, 32, NVFP4_BLOCK)
    blocks[0::2, 5] = 4.2e-2  # amid a gap, beside a value that a lower scale clips
    blocks[0::2, 5, 3] = 6e-2
    blocks[1::4] = 0
    scale = 2e-5
    wanted = same(gpu, w, scale).block_scale.view(torch.uint8).int()
    moved = wanted - nvfp4.quantize(w, scale).block_scale.view(torch.uint8).int()
    assert (moved[0::2, 5] <= -3).all()
    assert int(moved[0::2].max()) >= 6
    assert (moved[1::4] == 0).all()


def test_a_stack_has_its_own_scales(gpu) -> None:
    w = torch.randn(3, 32, 64).bfloat16()
    scale = torch.tensor([1e-3, 2e-3, 3e-3])
    got = gpu.nvfp4_quantize(w.cuda(), scale, scale_rule="sweep")
    for place in range(3):
        wanted = nvfp4.quantize(w[place], scale[place], scale_rule="sweep")
        assert torch.equal(got.codes[place].cpu(), wanted.codes)


def test_what_does_not_fit_is_refused(gpu) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        gpu.nvfp4_quantize(torch.zeros(2, 24, device="cuda"), torch.tensor(1.0), scale_rule="sweep")
    with pytest.raises(ValueError, match="expected BF16"):
        gpu.nvfp4_quantize(
            torch.zeros(2, 32, device="cuda").double(), torch.tensor(1.0), scale_rule="sweep"
        )
    with pytest.raises(ValueError, match="2 global scales"):
        gpu.nvfp4_quantize(torch.zeros(3, 2, 32, device="cuda"), torch.ones(2), scale_rule="sweep")
