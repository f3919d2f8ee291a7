"""GEMMs of every format against exact arithmetic, and activations against the formats' own rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beamq.errors import TensorError, UsageError
from beamq.formats import fp8, nvfp4
from beamq.formats.numerics import E2M1_MAGNITUDES, e2m1_values, unpack_nibbles
from beamq.model.gemm.backend import (
    DenseWeight,
    Fp8Weight,
    GroupFp8Weight,
    Groups,
    LinearWeight,
    Nvfp4Weight,
)
from beamq.model.gemm.operands import fp4_tokens
from beamq.model.gemm.reference import decode, nvfp4_operand, weight_operand
from beamq.model.gemm.select import select_gemm


def fp8_weight(w_NK: torch.Tensor) -> Fp8Weight:
    codes, scale = fp8.quantize_rows(w_NK)
    return Fp8Weight(codes=codes, scale=scale)


def nvfp4_weight(w_NK: torch.Tensor, input_amax: float | None = 4.0) -> Nvfp4Weight:
    q = nvfp4.quantize(w_NK, nvfp4.global_scale_from_amax(w_NK.float().abs().max()))
    input_scale = None if input_amax is None else nvfp4.global_scale_from_amax(input_amax)
    return Nvfp4Weight(
        codes=q.codes,
        block_scale=q.block_scale,
        global_scale=q.global_scale.expand(w_NK.shape[0], 1),
        input_scale=input_scale,
    )


def stack(weights: list[LinearWeight]) -> LinearWeight:
    """Experts' weights with a leading axis."""
    first = weights[0]
    fields = [name for name in first.__dataclass_fields__ if name != "input_scale"]
    built = {name: torch.stack([getattr(w, name) for w in weights]) for name in fields}
    if isinstance(first, Nvfp4Weight):
        built["input_scale"] = first.input_scale
    return type(first)(**built)


MAKERS = {
    "dense": lambda w: DenseWeight(w_NK=w),
    "fp8": fp8_weight,
    "nvfp4": nvfp4_weight,
}


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), spread=st.integers(-12, 12), amax=st.floats(1e-3, 1e3))
def test_activations_are_quantized_by_the_formats_rule(seed: int, spread: int, amax: float) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 64) * 2.0**spread
    x[0, :16] = 0
    x[1] = torch.tensor(E2M1_MAGNITUDES).repeat(8) * 1.25  # ties at the stored scale
    scale = nvfp4.global_scale_from_amax(amax)
    q = nvfp4.quantize(x, scale, flush=True)
    codes = e2m1_values(unpack_nibbles(q.codes)).view(4, -1, 16)
    wanted = (codes * q.block_scale.float().unsqueeze(-1)).flatten(1)
    assert torch.equal(nvfp4_operand(x, scale), wanted)


@pytest.mark.parametrize(("ideal", "kept"), [(2.0**-9, 6), (2.0**-10 * 1.01, 3), (2.0**-10, 0)])
def test_blocks_of_activations_that_engines_flush(ideal: float, kept: float) -> None:
    """A scale that rounds to 0 in E4M3 takes its block with it, as in vLLM and FlashInfer; the
    same block of a weight keeps the smallest scale, as in ModelOpt."""
    x = torch.full((1, 32), 0.1 * ideal)
    x[0, 0], x[0, 16] = -6 * ideal, 6.0
    operand = nvfp4_operand(x, torch.tensor(1.0))
    assert operand[0, 0] == -kept * 2.0**-9
    assert operand[0, 16] == 6
    assert bool(operand[0, :16].any()) == bool(kept)
    codes = fp4_tokens(x, torch.tensor(1.0)).codes
    assert bool(codes[0, :8].any()) == bool(kept)
    assert nvfp4.dequantize(nvfp4.quantize(x, 1.0))[0, 0] != 0


@pytest.mark.parametrize("midpoint", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_activation_ties_go_to_the_even_code(midpoint: float) -> None:
    x = torch.full((1, 16), midpoint)
    x[0, 0] = 6.0  # block scale 1 at global scale 1
    wanted = nvfp4.dequantize(nvfp4.quantize(x, 1.0), torch.float32)
    assert torch.equal(nvfp4_operand(x, torch.tensor(1.0)), wanted)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_operands_are_exact_in_bf16(fmt: str) -> None:
    torch.manual_seed(1)
    weight = MAKERS[fmt](torch.randn(32, 64))
    exact, scale = weight_operand(weight, torch.float32)
    assert torch.equal(weight_operand(weight, torch.bfloat16)[0].float(), exact)
    if fmt == "fp8":
        wanted = fp8.dequantize_rows(weight.codes, weight.scale, torch.float32)
    else:
        q = nvfp4.QuantizedTensor(
            codes=weight.codes, block_scale=weight.block_scale, global_scale=scale[0, 0]
        )
        wanted = nvfp4.dequantize(q, torch.float32)
    assert torch.equal(decode(weight, torch.float32), wanted)


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_equals_exact_arithmetic(fmt: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(20, 128).to(dtype), MAKERS[fmt](torch.randn(48, 128))
    if fmt == "fp8":
        codes, scale = fp8.quantize_rows(x)
        x_exact = codes.double() * scale.double()
        w_exact = weight.codes.double() * weight.scale.double()
    else:
        x_exact = nvfp4_operand(x, weight.input_scale).double() * weight.input_scale.double()
        operand, scale = weight_operand(weight, torch.float32)
        w_exact = operand.double() * scale.double()
    exact = x_exact @ w_exact.t()
    got = select_gemm("reference").linear(x, weight)
    assert got.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 2.0**-8
    error = ((got.double() - exact).abs() / exact.abs().clamp(min=exact.abs().max() * 1e-2)).max()
    assert error <= bound, f"{fmt}: relative error {error:.2e}"


def test_relative_error_of_the_formats_is_what_theory_says() -> None:
    torch.manual_seed(3)
    x, w = torch.randn(256, 512), torch.randn(256, 512)
    exact = x @ w.t()
    for fmt, low, high in (("fp8", 0.03, 0.045), ("nvfp4", 0.12, 0.145)):
        error = (select_gemm("reference").linear(x, MAKERS[fmt](w)) - exact).norm() / exact.norm()
        assert low < error < high, f"{fmt}: {error:.4f}"


@pytest.mark.parametrize("fmt", ["dense", "fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gathered", [True, False])
def test_grouped_equals_expert_by_expert(fmt: str, dtype: torch.dtype, gathered: bool) -> None:
    torch.manual_seed(4)
    experts = [MAKERS[fmt](torch.randn(24, 32).to(dtype)) for _ in range(5)]
    offsets = [0, 0, 3, 10, 10, 16]  # two experts without rows
    x = torch.randn(7 if gathered else 16, 32).to(dtype)
    rows = torch.randint(0, 7, (16,)) if gathered else None
    gemm = select_gemm("reference")
    got = gemm.grouped(x, stack(experts), Groups(offsets, rows))
    x_SK = x if rows is None else x[rows]
    for e, weight in enumerate(experts):
        part = slice(offsets[e], offsets[e + 1])
        wanted = gemm.linear(x_SK[part], weight)
        assert torch.allclose(got[part].float(), wanted.float(), rtol=1e-2, atol=1e-5)
        if dtype == torch.float32:
            assert torch.equal(got[part], wanted)


def test_odd_widths_are_served() -> None:
    torch.manual_seed(5)
    w = torch.randn(3, 5, 6).bfloat16()
    x = torch.randn(4, 6).bfloat16()
    got = select_gemm("reference").grouped(x, DenseWeight(w_NK=w), Groups([0, 1, 1, 4]))
    assert torch.equal(got[1:], x[1:] @ w[2].t())


def test_weights_only_leaves_activations_alone() -> None:
    torch.manual_seed(6)
    x = torch.randn(4, 32)
    for weight in (fp8_weight(torch.randn(8, 32)), nvfp4_weight(torch.randn(8, 32), None)):
        got = select_gemm("weights-only").linear(x, weight)
        assert torch.equal(got, x @ decode(weight, torch.float32).t())


def test_refusals() -> None:
    with pytest.raises(TensorError, match="no input_scale"):
        select_gemm("reference").linear(torch.randn(4, 32), nvfp4_weight(torch.randn(8, 32), None))
    with pytest.raises(UsageError, match="'fast' is unknown, expected one of: auto, cublaslt"):
        select_gemm("fast")


# MXFP8 and blocks: the sums in FP64, group by group


@pytest.mark.parametrize("k", [256, 160])
@pytest.mark.parametrize("kind", ["mxfp8", "fp8-block"])
def test_groups_of_fp8_are_multiplied_as_their_values(kind: str, k: int) -> None:
    torch.manual_seed(3)
    w, x = torch.randn(200, k) * 0.05, torch.randn(7, k) * torch.logspace(-2, 2, k)
    if kind == "mxfp8":
        codes, scale = fp8.quantize_mx(w)
        weight = GroupFp8Weight(codes=codes, scale=scale, group=32)
        served = fp8.dequantize_mx(*fp8.quantize_mx(x), torch.float32)
        decoded = fp8.dequantize_mx(codes, scale, torch.float32)
    else:
        codes, blocks = fp8.quantize_blocks(w)
        rows = blocks.repeat_interleave(128, 0)[:200]
        weight = GroupFp8Weight(codes=codes, scale=rows, group=128)
        x8, sx = fp8.quantize_groups(x)
        served = x8.float() * sx.repeat_interleave(128, 1)[:, :k]
        decoded = fp8.dequantize_blocks(codes, blocks, torch.float32)
    assert torch.equal(decode(weight, torch.float32), decoded)
    exact = served.double() @ decoded.double().t()
    y = select_gemm("reference").linear(x, weight)
    assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
    assert torch.equal(select_gemm("auto").linear(x, weight), y), "no back end takes it"
    experts = replace(weight, codes=weight.codes[None], scale=weight.scale[None])
    grouped = select_gemm("reference").grouped(x, experts, Groups((0, 7)))
    assert torch.equal(grouped, y)
    near = select_gemm("weights-only").linear(x, weight)
    wanted = (x.double() @ decoded.double().t()).float()
    assert torch.allclose(near, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
