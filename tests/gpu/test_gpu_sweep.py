"""The sweep kernel against its twin on the CPU: every byte and every count."""

from __future__ import annotations

import pytest
import torch

from beamq.formats import nvfp4

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 16), (3, 48), (160, 96), (320, 2560), (129, 5120)]
GLOBAL_SCALES = [1.0, 0.02 / 2688, 3.7e-6, 2.0**-126, 1.7 * 2.0**-100, 300.0, 2.0**117]


@pytest.fixture(scope="module")
def gpu_sweep():
    from beamq.formats.kernels import gpu_sweep

    return gpu_sweep


def same(gpu_sweep, w: torch.Tensor, scale: float) -> None:
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")
    got = gpu_sweep.nvfp4_sweep(w.cuda(), torch.tensor(scale), counts=counts)
    wanted = nvfp4.quantize(w, scale, scales="sweep")
    scales = got.block_scale.view(torch.uint8).cpu() != wanted.block_scale.view(torch.uint8)
    assert int(scales.sum()) == 0, f"{int(scales.sum())} block scales differ"
    assert torch.equal(got.codes.cpu(), wanted.codes)
    assert int(counts[2]) == int((w.view(-1, 16) == 0).all(dim=1).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_random(gpu_sweep, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    w = (torch.randn(shape) * 0.02 * torch.logspace(-3, 0, shape[0]).unsqueeze(1)).to(dtype)
    same(gpu_sweep, w, nvfp4.global_scale_from_amax(w.abs().amax()).item())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", GLOBAL_SCALES)
def test_every_pattern(gpu_sweep, dtype: torch.dtype, scale: float) -> None:
    if dtype is torch.float32:
        generator = torch.Generator().manual_seed(1)
        bits = torch.randint(-(2**31), 2**31 - 1, (65536,), generator=generator)
        w = bits.to(torch.int32).view(torch.float32)
    else:
        w = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    w = torch.where(w.isfinite(), w, 1.0).view(-1, 64)
    same(gpu_sweep, w, scale)


def test_a_stack_has_its_own_scales(gpu_sweep) -> None:
    w = torch.randn(3, 32, 64).bfloat16()
    scale = torch.tensor([1e-3, 2e-3, 3e-3])
    got = gpu_sweep.nvfp4_sweep(w.cuda(), scale)
    for place in range(3):
        wanted = nvfp4.quantize(w[place], scale[place], scales="sweep")
        assert torch.equal(got.codes[place].cpu(), wanted.codes)


def test_what_does_not_fit_is_refused(gpu_sweep) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        gpu_sweep.nvfp4_sweep(torch.zeros(2, 24, device="cuda"), torch.tensor(1.0))
    with pytest.raises(ValueError, match="expected BF16"):
        gpu_sweep.nvfp4_sweep(torch.zeros(2, 32, device="cuda").double(), torch.tensor(1.0))
    with pytest.raises(ValueError, match="2 global scales"):
        gpu_sweep.nvfp4_sweep(torch.zeros(3, 2, 32, device="cuda"), torch.ones(2))
