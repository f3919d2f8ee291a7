"""GPU kernels against their plain twins on the CPU: every byte and every count."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from beamq.formats import fp8, nvfp4
from beamq.formats.numerics import E2M1_MAGNITUDES, NVFP4_BLOCK
from beamq.formats.nvfp4 import QuantizedTensor
from beamq.model.gemm.operands import fp4_tokens

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 16), (3, 48), (160, 96), (96, 160), (320, 2560), (129, 5120)]
# Ordinary ones, and ones beyond which the fast arithmetic must not be used.
GLOBAL_SCALES = [1.0, 0.02 / 2688, 3.7e-6, 2.0**-126, 1.7 * 2.0**-100, 300.0, 2.0**117]


@pytest.fixture(scope="module")
def gpu():
    from beamq.formats.kernels import gpu

    return gpu


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8).cpu()


def every_16_bit_pattern(dtype: torch.dtype) -> torch.Tensor:
    """[4096, 16] of all finite values, blocks of neighbours."""
    w = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.where(w.isfinite(), w, 1.0).view(-1, NVFP4_BLOCK)


def hard(dtype: torch.dtype, scale: float, n: int = 64, k: int = 512) -> torch.Tensor:
    """Ties at many block scales, zeros of both signs, denormals, saturated and tiny blocks."""
    torch.manual_seed(7)
    grid = torch.tensor([*E2M1_MAGNITUDES, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0])
    w = grid[torch.randint(0, 16, (n, k))] * torch.randn(n, k).sign()
    w *= (2.0 ** torch.randint(-12, 12, (n, 1))) * scale
    w[0] = 0
    w[1] = -0.0
    w[2, ::3] = -0.0
    w[3] = torch.randn(k) * 1e4 * scale
    w[4] = torch.randn(k) * 1e-7 * scale
    w[5] = torch.randn(k) * 2.0**-130
    w[6:20] = torch.randn(14, k) * scale
    finite = torch.finfo(dtype).max
    return w.clamp(-finite, finite).to(dtype)


def nvfp4_counts(w: torch.Tensor, scale: float) -> list[int]:
    amax = w.float().view(-1, NVFP4_BLOCK).abs().amax(-1)
    ideal = amax / (6.0 * torch.tensor(scale))
    finite = amax.isfinite()
    return [
        int(((ideal > 464) & finite).sum()),
        int(((ideal <= 2.0**-10) & (ideal > 0)).sum()),
        int((amax == 0).sum()),
        int((~finite).sum()),
    ]


def same_nvfp4(gpu, w: torch.Tensor, scale: float) -> None:
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")
    got = gpu.nvfp4_quantize(w.cuda(), torch.tensor(scale), counts=counts)
    wanted = nvfp4.quantize(w, scale)
    wrong = int((bits(got.block_scale) != bits(wanted.block_scale)).sum())
    assert wrong == 0, f"{wrong} block scales differ"
    different = (bits(got.codes) != wanted.codes).nonzero()
    assert different.numel() == 0, (
        f"{len(different)} bytes of codes differ, first at {different[0]}"
    )
    assert counts.tolist() == nvfp4_counts(w, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_random(gpu, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    w = (torch.randn(shape) * 0.02).to(dtype)
    same_nvfp4(gpu, w, float(nvfp4.global_scale_from_amax(w.abs().max().float())))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", GLOBAL_SCALES)
def test_nvfp4_hard_values(gpu, dtype: torch.dtype, scale: float) -> None:
    same_nvfp4(gpu, hard(dtype, min(scale, 1e30)), scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", GLOBAL_SCALES)
def test_nvfp4_every_16_bit_value(gpu, dtype: torch.dtype, scale: float) -> None:
    w = every_16_bit_pattern(dtype)
    same_nvfp4(gpu, w, scale)
    torch.manual_seed(2)
    same_nvfp4(gpu, w.flatten()[torch.randperm(65536)].view(256, 256), scale)


@pytest.mark.parametrize("scale", GLOBAL_SCALES)
def test_nvfp4_any_32_bits(gpu, scale: float) -> None:
    """FP32 of every size: where a quotient overflows, the code is the largest with its sign."""
    generator = torch.Generator().manual_seed(1)
    pattern = torch.randint(-(2**31), 2**31 - 1, (65536,), generator=generator)
    w = pattern.to(torch.int32).view(torch.float32)
    same_nvfp4(gpu, torch.where(w.isfinite(), w, 1.0).view(-1, 64), scale)


@pytest.mark.parametrize("scale", [0.002, 1.0, 2.0**-40])
def test_nvfp4_of_activations(gpu, scale: float) -> None:
    """Codes and swizzled scales for tensor cores; blocks too small for a scale become zeros."""
    x = hard(torch.bfloat16, scale)
    x[4] = 0.003 * scale
    ours, plain = (fp4_tokens(t, torch.tensor(scale, device=t.device)) for t in (x.cuda(), x))
    assert torch.equal(ours.codes.cpu(), plain.codes)
    assert torch.equal(bits(ours.block_scale), bits(plain.block_scale))
    assert not plain.codes[4].any()
    assert nvfp4.quantize(x, scale).codes[4].all()


def test_nvfp4_near_ties(gpu) -> None:
    """FP32 values at, and a unit on either side of, every midpoint times every scale."""
    scale = torch.tensor(1.234e-3)
    blocks = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    product = (blocks * scale)[:, None] * middle
    w = torch.zeros(126, 3, NVFP4_BLOCK)
    w[:, 0, :7], w[:, 1, :7], w[:, 2, :7] = product, product, product
    w[:, 1] = torch.nextafter(w[:, 1], torch.tensor(torch.inf))
    w[:, 2] = torch.nextafter(w[:, 2], torch.tensor(0.0))
    w[..., 15] = (6 * blocks * scale)[:, None]
    same_nvfp4(gpu, w.view(126, 48).contiguous(), float(scale))
    same_nvfp4(gpu, w.view(126, 48).bfloat16(), float(scale))


def test_nvfp4_stack_has_a_scale_for_each(gpu) -> None:
    torch.manual_seed(3)
    w = (
        torch.randn(5, 48, 64).bfloat16()
        * torch.tensor([1.0, 2, 3, 4, 5])[:, None, None].bfloat16()
    )
    scale = nvfp4.global_scale_from_amax(w.float().abs().amax((1, 2)))
    got = gpu.nvfp4_quantize(w.cuda(), scale.cuda())
    for i in range(5):
        wanted = nvfp4.quantize(w[i], scale[i])
        assert torch.equal(got.codes[i].cpu(), wanted.codes)
        assert torch.equal(bits(got.block_scale[i]), bits(wanted.block_scale))
    decoded = gpu.nvfp4_dequantize(got, torch.float32)
    one = QuantizedTensor(
        codes=got.codes[3].cpu(), block_scale=got.block_scale[3].cpu(), global_scale=scale[3]
    )
    assert torch.equal(decoded[3].cpu(), nvfp4.dequantize(one, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_blocks_are_counted(gpu, dtype: torch.dtype) -> None:
    w = torch.randn(4, 64).to(dtype)
    w[0, 3], w[1, 20], w[3, 63] = torch.nan, torch.inf, -torch.inf
    counts = torch.zeros(4, dtype=torch.int32, device="cuda")
    gpu.nvfp4_quantize(w.cuda(), torch.tensor(1e-3), counts=counts)
    assert counts[3] == 3
    rows = torch.zeros(2, dtype=torch.int32, device="cuda")
    w[2] = 0
    gpu.fp8_quantize_rows(w.cuda(), counts=rows)
    assert rows.tolist() == [3, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(gpu, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    w = torch.randn(7, 130, 96).to(dtype)
    w[2, 5, 1] = -9.0
    w[3] = 0
    assert torch.equal(gpu.amax(w.cuda()).cpu(), w.float().abs().amax((1, 2)))
    assert gpu.amax(w[2].contiguous().cuda()).item() == 9.0
    w[4, 0, 0] = torch.inf
    w[5, 129, 95] = torch.nan
    found = gpu.amax(w.cuda())
    assert found[4].isinf()
    assert found[5].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (17, 20480), (5, 100), (3, 6144)])
def test_fp8_rows(gpu, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(5)
    w = torch.randn(shape) * 0.02
    w[0, ::2] = -0.0
    codes, scale = gpu.fp8_quantize_rows(w.to(dtype).cuda())
    wanted_codes, wanted_scale = fp8.quantize_rows(w.to(dtype))
    assert torch.equal(scale.cpu(), wanted_scale)
    assert torch.equal(bits(codes), bits(wanted_codes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_hard_rows(gpu, dtype: torch.dtype) -> None:
    w = torch.cat([hard(dtype, scale) for scale in (1.0, 1e-30, 2.0**-120)])
    if dtype != torch.float32:
        w = torch.cat([w, every_16_bit_pattern(dtype).view(-1, 512)])
    codes, scale = gpu.fp8_quantize_rows(w.cuda())
    wanted_codes, wanted_scale = fp8.quantize_rows(w)
    assert torch.equal(scale.cpu(), wanted_scale)
    assert torch.equal(bits(codes), bits(wanted_codes))


GROUPED = {"mxfp8": fp8.quantize_mx, "fp8-block": fp8.quantize_blocks}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (3, 130, 192), (2560, 5120), (64, 32), (2, 64, 160)])
@pytest.mark.parametrize("rounding", GROUPED)
def test_fp8_groups(gpu, dtype: torch.dtype, shape: tuple[int, ...], rounding: str) -> None:
    torch.manual_seed(6)
    w = (torch.randn(shape) * torch.logspace(-6, 1, shape[-2]).unsqueeze(1)).to(dtype)
    w[..., 0, :32] = -0.0
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    codes, scale = gpu.fp8_quantize(rounding, w.cuda(), counts=counts)
    wanted_codes, wanted_scale = GROUPED[rounding](w)
    assert torch.equal(scale.cpu(), wanted_scale)
    assert torch.equal(bits(codes), bits(wanted_codes))
    assert counts[0] == 0
    assert rounding != "mxfp8" or counts[1] >= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", GROUPED)
def test_fp8_hard_groups(gpu, dtype: torch.dtype, rounding: str) -> None:
    w = torch.cat([hard(dtype, scale) for scale in (1.0, 1e-30, 2.0**-120)])
    if dtype != torch.float32:
        w = torch.cat([w, every_16_bit_pattern(dtype).view(-1, 512)])
    w = w[:, : w.shape[1] // 32 * 32].contiguous()
    codes, scale = gpu.fp8_quantize(rounding, w.cuda())
    wanted_codes, wanted_scale = GROUPED[rounding](w)
    assert torch.equal(scale.cpu(), wanted_scale)
    assert torch.equal(bits(codes), bits(wanted_codes))


def test_mx_edges(gpu) -> None:
    """1.75 * 2^k in FP32, and its neighbours: the exact rule."""
    at = 1.75 * torch.exp2(torch.arange(-120.0, 127.0))
    amax = torch.cat([at.nextafter(torch.zeros(())), at, at.nextafter(torch.tensor(torch.inf))])
    w = amax.unsqueeze(1).repeat(1, 32)
    codes, scale = gpu.fp8_quantize("mxfp8", w.cuda())
    assert torch.equal(scale.cpu().flatten(), fp8.mx_scale_bytes(amax))
    assert torch.equal(bits(codes), bits(fp8.quantize_mx(w)[0]))


@pytest.mark.parametrize("rounding", GROUPED)
def test_odd_groups_are_counted(gpu, rounding: str) -> None:
    w = torch.randn(256, 256)
    w[0, 3], w[200, 130] = torch.nan, torch.inf
    w[128:, :128] = 0
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    gpu.fp8_quantize(rounding, w.cuda(), counts=counts)
    assert counts.tolist() == ([2, 512] if rounding == "mxfp8" else [2, 1])


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 3e-4, 2.0**-126, 2.0**100])
def test_nvfp4_dequantize_every_code_and_scale(gpu, out: torch.dtype, scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    block_scale = torch.arange(0, 127, dtype=torch.uint8)[:, None].repeat(1, 32)
    q = QuantizedTensor(
        codes=codes,
        block_scale=block_scale.contiguous().view(torch.float8_e4m3fn),
        global_scale=torch.tensor(scale),
    )
    on_gpu = QuantizedTensor(
        codes=q.codes.cuda(), block_scale=q.block_scale.cuda(), global_scale=q.global_scale.cuda()
    )
    assert torch.equal(bits(gpu.nvfp4_dequantize(on_gpu, out)), bits(nvfp4.dequantize(q, out)))


def test_swiglu(gpu) -> None:
    torch.manual_seed(6)
    gate_up = (torch.randn(300, 512) * 3).bfloat16().cuda()
    gate, up = gate_up.float().chunk(2, dim=-1)
    wanted = (F.silu(gate) * up).bfloat16()
    got = gpu.swiglu(gate_up)
    # exp differs in its last bits, which now and then moves a rounding to BF16.
    assert (got != wanted).float().mean() < 2e-3
    assert torch.allclose(got.float(), wanted.float(), rtol=2**-7, atol=0)
    codes, scale = gpu.fp8_quantize_rows(gate_up, swiglu=True)
    again = gpu.fp8_quantize_rows(got)
    assert torch.equal(bits(codes), bits(again[0]))
    assert torch.equal(scale, again[1])


def test_bad_arguments_are_refused(gpu) -> None:
    scale = torch.tensor(1.0)
    with pytest.raises(ValueError, match="multiple of 16"):
        gpu.nvfp4_quantize(torch.zeros(2, 24, device="cuda"), scale)
    with pytest.raises(ValueError, match="CUDA"):
        gpu.nvfp4_quantize(torch.zeros(2, 32), scale)
    with pytest.raises(ValueError, match="contiguous"):
        gpu.fp8_quantize_rows(torch.zeros(32, 32, device="cuda").t()[:, :16])
    with pytest.raises(ValueError, match="global scales"):
        gpu.nvfp4_quantize(torch.zeros(3, 2, 32, device="cuda"), torch.ones(2))
    with pytest.raises(ValueError, match="expected BF16"):
        gpu.amax(torch.zeros(2, 32, dtype=torch.float64, device="cuda"))
