"""The forward pass on a GPU against the plain path on the CPU, and GEMM back ends against FP64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from beamq.errors import DeviceError
from beamq.formats import fp8
from beamq.model.attention import AttentionWeights, gated_heads
from beamq.model.context import PassContext, SequenceLayout, position_table
from beamq.model.gemm import check
from beamq.model.gemm.backend import DenseWeight, Fp8Weight, Groups
from beamq.model.gemm.select import expert_range, select_gemm
from beamq.model.gemm.triton_gemm import Triton
from beamq.model.layer import LayerWeights, SparseMlp, decoder_layer, residual_add
from beamq.model.loader import copied
from beamq.model.logits import logits
from beamq.model.moe import ExpertSlice, accumulate, dispatch, moe
from benchmarks.random_layer import SMALL, random_layer

CPU = torch.device("cpu")


def context(length: int, device: torch.device, gemm: str = "reference") -> PassContext:
    return PassContext(
        config=SMALL, table=position_table(SMALL, length, device), gemm=select_gemm(gemm)
    )


def on_gpu(weights: LayerWeights, cuda: torch.device) -> LayerWeights:
    return copied(weights, cuda)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.cpu().double() - wanted.cpu().double()).norm() / wanted.double().norm())


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Checks are made afresh, not taken from the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


OFFSETS = [0, 0, 70, 75, 75, 300]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("n", "k"), [(96, 160), (512, 256)])
def test_grouped_bf16_is_exact_to_a_rounding(
    cuda: torch.device, fused: bool, n: int, k: int
) -> None:
    from beamq.model.gemm.triton_grouped import grouped_gemm

    torch.manual_seed(0)
    x, w = torch.randn(300, k).bfloat16(), torch.randn(5, n, k).bfloat16()
    exact = torch.cat(
        [x[a:b].double() @ w[e].double().t() for e, (a, b) in enumerate(pairwise(OFFSETS))]
    )
    got = grouped_gemm(x.to(cuda), w.to(cuda), OFFSETS, swiglu=fused)
    if fused:
        gate, up = exact.bfloat16().double().chunk(2, dim=1)
        exact = gate / (1 + torch.exp(-gate)) * up
    assert relative(got, exact) < 2.5e-3


@pytest.mark.parametrize("name", ["triton", "cutlass", "cublaslt"])
@pytest.mark.parametrize("fast", [False, True])
def test_fp8_experts_against_fp64(cuda: torch.device, name: str, fast: bool) -> None:
    torch.manual_seed(1)
    x, w = torch.randn(300, 512).bfloat16(), torch.randn(5, 256, 512).bfloat16()
    codes, scale = fp8.quantize_rows(w)
    x8, sx = fp8.quantize_rows(x)
    exact = torch.cat(
        [
            (x8[a:b].double() * sx[a:b]) @ (codes[e].double() * scale[e]).t()
            for e, (a, b) in enumerate(pairwise(OFFSETS))
        ]
    )
    weight = Fp8Weight(codes=codes.to(cuda), scale=scale.to(cuda))
    got = select_gemm(name + ("+fast" if fast else "")).grouped(x.to(cuda), weight, Groups(OFFSETS))
    assert relative(got, exact) < (5e-3 if fast else 2e-3)


SEQUENCES = [(70,), (5, 33, 1, 200), (128, 128), (300,)]


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("window", [32, 96, None])
def test_attention(cuda: torch.device, sequences: tuple[int, ...], window: int | None) -> None:
    torch.manual_seed(2)
    heads, kv, d = SMALL.num_heads, SMALL.num_kv_heads, SMALL.head_dim
    layout = SequenceLayout(lengths=sequences)
    fused = torch.randn(layout.tokens, (2 * heads + 2 * kv) * d).bfloat16()
    weights = AttentionWeights(
        window=window,
        qkv_gate=DenseWeight(w_NK=torch.empty(0)),
        o=DenseWeight(w_NK=torch.empty(0)),
        q_norm=(1 + 0.2 * torch.randn(d)).bfloat16(),
        k_norm=(1 + 0.2 * torch.randn(d)).bfloat16(),
        gate_bias=torch.randn(heads).bfloat16(),
    )
    wanted = gated_heads(fused, weights, layout, context(300, CPU))
    on_device = copied(weights, cuda)
    got = gated_heads(fused.to(cuda), on_device, layout, context(300, cuda))
    assert relative(got, wanted) < 4e-3


def test_close_and_sum_round_where_the_plain_path_does(cuda: torch.device) -> None:
    from beamq.model import triton_layer

    torch.manual_seed(3)
    h, x = torch.randn(50, 320).bfloat16().to(cuda), torch.randn(50, 320).bfloat16().to(cuda)
    weight = torch.rand(320).bfloat16().to(cuda)
    got = triton_layer.close_sublayer(h, x, weight, 9, 1e-6)
    wanted = residual_add(h, torch.nn.functional.rms_norm(x, (320,), weight, 1e-6), 9)
    assert (got != wanted).float().mean() < 1e-3
    chosen = torch.rand(50, 16).topk(4)[1]
    plan = dispatch(chosen, torch.rand(50, 4), 16)
    y, sums = torch.randn(200, 320).bfloat16(), torch.zeros(50, 320)
    on_device = copied(plan, cuda)
    device_sums = sums.to(cuda)
    cut = plan.offsets[7]
    for low, high in ((0, cut), (cut, 200)):
        accumulate(sums, y[low:high], plan, low, high)
        accumulate(device_sums, y[low:high].contiguous().to(cuda), on_device, low, high)
    assert torch.allclose(device_sums.cpu(), sums, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize(("kind", "mlp"), [("sliding", "sparse"), ("full", "dense")])
def test_layer_equals_the_cpu(cuda: torch.device, fmt: str, kind: str, mlp: str) -> None:
    """The change a layer makes to the stream agrees with either GEMM: to BF16 rounding, or, where
    activations are quantized, to the steps that a different rounding in front of it can cause."""
    weights = random_layer(SMALL, kind, mlp, fmt, CPU)
    # Each token goes to all experts, or a near tie could choose others.
    config = replace(SMALL, n_group=1, topk_group=1, top_k=16)
    layout = SequenceLayout(lengths=(200, 31))
    torch.manual_seed(4)
    h = torch.randn(231, SMALL.hidden_size).bfloat16()
    plain = replace(context(200, CPU), config=config)
    wanted = decoder_layer(h, weights, layout, plain)
    kept = float((h.double() * wanted).sum() / h.double().pow(2).sum())
    change = wanted.double() - h.double() * kept
    for name in ("reference", "auto"):
        there = replace(context(200, cuda, name), config=config)
        got = decoder_layer(h.to(cuda), on_gpu(weights, cuda), layout, there)
        error = float((got.cpu().double() - wanted.double()).norm() / change.norm())
        bound = {"bf16": 2e-2, "fp8": 6e-2, "nvfp4": 8e-2}[fmt]
        assert error < bound, f"{name}: {error:.1e}"


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_slices_change_no_bit(cuda: torch.device, fmt: str) -> None:
    weights = on_gpu(random_layer(SMALL, "sliding", "sparse", fmt, CPU), cuda)
    assert isinstance(weights.mlp, SparseMlp)
    (whole,) = weights.mlp.experts
    torch.manual_seed(5)
    x = torch.randn(100, SMALL.hidden_size).bfloat16().to(cuda)
    parts = [
        ExpertSlice(
            first=first,
            count=last - first,
            gate_up=expert_range(Triton(), whole.gate_up, first, last),
            down=expert_range(Triton(), whole.down, first, last),
        )
        for first, last in ((0, 5), (5, 6), (6, 16))
    ]
    router = weights.mlp.router
    there = context(1, cuda, "auto")
    one = moe(x, router, (whole,), there, 0)
    assert torch.equal(moe(x, router, parts, there, 0), one)


def test_nano_logits(cuda: torch.device, beam_nano: Path) -> None:
    torch.manual_seed(6)
    ids = torch.randint(0, 2048, (3, 150))
    exact = logits(beam_nano, ids, dtype=torch.float32)
    on_device = logits(beam_nano, ids, dtype=torch.float32, device=cuda)
    assert relative(on_device, exact) < 1e-5
    half = logits(beam_nano, ids, dtype=torch.bfloat16)
    for name in ("reference", "auto"):
        got = logits(beam_nano, ids, dtype=torch.bfloat16, device=cuda, gemm=name).cpu()
        assert (got - exact).abs().mean() < 1.2 * (half - exact).abs().mean(), name


def test_probe_tells_choices_and_reasons(cuda: torch.device) -> None:
    data = check.probe()
    device = data["devices"][0]
    assert device["name"]
    for op in device["ops"]:
        assert op["choice"] != "reference", op
        for tried in op["backends"]:
            assert tried["usable"] or tried["reason"]
            assert tried["error"] is None or tried["error"] < 5e-3
    if torch.cuda.get_device_capability(cuda) == (9, 0):
        with pytest.raises(DeviceError, match="sm_100 and sm_103; this is sm_90"):
            select_gemm("cutlass").linear(
                torch.randn(8, SMALL.q_dim).bfloat16().to(cuda),
                random_layer(SMALL, "full", "dense", "nvfp4", cuda).attention.o,
            )
