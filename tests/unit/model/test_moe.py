"""Router and experts: FP32, ties, slices that change no bit, what observers are shown."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.beam.modeling_beam import BeamMoE, BeamTopKRouter

from beamq.beam.config import BeamConfig
from beamq.model import moe as moe_module
from beamq.model.context import Observer, PassContext, position_table
from beamq.model.gemm.backend import DenseWeight
from beamq.model.gemm.select import select_gemm
from beamq.model.moe import ExpertSlice, RouterWeights, dispatch, finish, moe, route, swiglu


def context(config: BeamConfig, *observers: Observer) -> PassContext:
    table = position_table(config, 1, torch.device("cpu"))
    gemm = select_gemm("reference")
    return PassContext(config=config, table=table, gemm=gemm, observers=observers)


@pytest.fixture
def config() -> BeamConfig:
    return BeamConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_layers=1,
        vocab_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        num_experts=8,
        top_k=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        sliding_window=8,
        rms_norm_eps=1e-6,
        final_logit_softcapping=30.0,
        rope_theta=1e4,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        layer_types=("full_attention",),
        mlp_layer_types=("sparse",),
        dtype="bfloat16",
    )


def weights(
    config: BeamConfig, dtype: torch.dtype = torch.float32
) -> tuple[RouterWeights, ExpertSlice]:
    torch.manual_seed(0)
    e, i, h = config.num_experts, config.moe_intermediate_size, config.hidden_size
    router = RouterWeights(weight_EK=torch.randn(e, h), bias_E=torch.randn(e) * 0.3)
    experts = ExpertSlice(
        first=0,
        count=e,
        gate_up=DenseWeight(w_NK=torch.randn(e, 2 * i, h).to(dtype) * 0.2),
        down=DenseWeight(w_NK=torch.randn(e, h, i).to(dtype) * 0.2),
    )
    return router, experts


def cut(whole: ExpertSlice, size: int) -> list[ExpertSlice]:
    """The same experts in slices."""
    return [
        ExpertSlice(
            first=first,
            count=min(size, whole.count - first),
            gate_up=DenseWeight(w_NK=whole.gate_up.w_NK[first : first + size]),
            down=DenseWeight(w_NK=whole.down.w_NK[first : first + size]),
        )
        for first in range(0, whole.count, size)
    ]


def theirs(x: torch.Tensor, router: RouterWeights, config: BeamConfig) -> tuple[torch.Tensor, ...]:
    """transformers' router on the same input."""

    class Names:
        num_experts_per_tok = config.top_k
        num_experts = config.num_experts
        hidden_size = config.hidden_size
        n_group = config.n_group
        topk_group = config.topk_group
        norm_topk_prob = config.norm_topk_prob

    module = BeamTopKRouter(Names())
    module.weight.data = router.weight_EK
    module.e_score_correction_bias.data = router.bias_E
    with torch.no_grad():
        return module(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"n_group": 1, "topk_group": 1},
        {"top_k": 1},
        {"topk_group": 4},
        {"norm_topk_prob": False},
    ],
)
def test_router_equals_transformers(
    config: BeamConfig, dtype: torch.dtype, change: dict[str, int]
) -> None:
    config = replace(config, **change)
    router, _ = weights(config)
    x = torch.randn(200, config.hidden_size).to(dtype)
    logits, chosen_weights, chosen = theirs(x, router, config)
    ours = route(x, router, config)
    assert ours.logits_TE.dtype == ours.weights_Tk.dtype == torch.float32
    assert torch.equal(ours.logits_TE, logits)
    assert torch.equal(ours.experts_Tk, chosen)
    assert torch.equal(ours.weights_Tk, chosen_weights)


def test_ties_fall_as_topk_lets_them(config: BeamConfig) -> None:
    router = RouterWeights(
        weight_EK=torch.zeros(config.num_experts, config.hidden_size),
        bias_E=torch.zeros(config.num_experts),
    )
    x = torch.randn(50, config.hidden_size)
    assert torch.equal(route(x, router, config).experts_Tk, theirs(x, router, config)[2])


def test_bias_chooses_but_does_not_weigh(config: BeamConfig) -> None:
    config = replace(config, n_group=1, topk_group=1, top_k=1, norm_topk_prob=False)
    router, _ = weights(config)
    bias = torch.zeros(config.num_experts)
    bias[5] = 100.0
    found = route(torch.randn(9, config.hidden_size), replace(router, bias_E=bias), config)
    assert found.experts_Tk.eq(5).all()
    assert torch.equal(found.weights_Tk[:, 0], found.logits_TE.sigmoid()[:, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_is_the_weighted_sum(config: BeamConfig, dtype: torch.dtype) -> None:
    router, experts = weights(config, dtype)
    x = torch.randn(40, config.hidden_size).to(dtype)
    got = moe(x, router, (experts,), context(config), 0)
    routing = route(x, router, config)
    wanted = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for expert, weight in zip(routing.experts_Tk[t], routing.weights_Tk[t], strict=True):
            gate, up = (experts.gate_up.w_NK[expert].double() @ x[t].double()).chunk(2)
            y = experts.down.w_NK[expert].double() @ (F.silu(gate) * up)
            wanted[t] += weight.double() * y
    wanted *= config.routed_scaling_factor
    error = (got - wanted).abs().max() / wanted.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2)


def test_the_routed_scale_multiplies_the_rounded_sum(config: BeamConfig) -> None:
    """As transformers has it, bit by bit; scaled before rounding, a third of BF16 values differ."""
    sum_TK = torch.randn(50, config.hidden_size, generator=torch.Generator().manual_seed(0))

    class Block(BeamMoE):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.routed_scaling_factor = config.routed_scaling_factor
            self.gate = torch.nn.Identity()
            self.gate.forward = lambda _: (None, None, None)
            self.experts = torch.nn.Identity()
            self.experts.forward = lambda x, *_: sum_TK.to(x.dtype)

    for dtype in (torch.float32, torch.bfloat16):
        wanted = Block()(torch.zeros(1, 50, config.hidden_size, dtype=dtype))[0]
        assert torch.equal(finish(sum_TK, dtype, config), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_slices_change_no_bit(config: BeamConfig, dtype: torch.dtype, size: int) -> None:
    router, experts = weights(config, dtype)
    x = torch.randn(60, config.hidden_size).to(dtype)
    whole = moe(x, router, (experts,), context(config), 0)
    sliced = moe(x, router, cut(experts, size), context(config), 0)
    assert torch.equal(whole, sliced)


def test_chunks_change_no_bit(config: BeamConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    router, experts = weights(config)
    x = torch.randn(60, config.hidden_size)
    whole = moe(x, router, (experts,), context(config), 0)
    monkeypatch.setattr(moe_module, "CHUNK_ELEMENTS", 100)
    assert torch.equal(moe(x, router, (experts,), context(config), 0), whole)


def test_swiglu_is_fp32_and_rounds_once() -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(30, 20) * 4).bfloat16()
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert torch.equal(swiglu(gate_up), (F.silu(gate) * up).bfloat16())


def test_dispatch_sorts_by_expert_then_token(config: BeamConfig) -> None:
    router, _ = weights(config)
    routing = route(torch.randn(30, config.hidden_size), router, config)
    plan = dispatch(routing.experts_Tk, routing.weights_Tk, config.num_experts)
    for e in range(config.num_experts):
        rows = slice(plan.offsets[e], plan.offsets[e + 1])
        wanted = (routing.experts_Tk == e).any(1).nonzero().flatten()
        assert torch.equal(plan.token_S[rows], wanted)
    for t in range(30):
        assert plan.token_S[plan.row_Tk[t]].eq(t).all()
        assert plan.row_Tk[t].diff().gt(0).all()


class Recorder(Observer):
    """Keeps what it is shown."""

    def __init__(self, every_expert: bool = False) -> None:
        self.every_expert = every_expert
        self.routed: dict[tuple[str, int], torch.Tensor] = {}
        self.every: dict[tuple[str, int], torch.Tensor] = {}
        self.routings = 0

    def expert_input(self, layer, group, x_SK, first, offsets) -> None:
        for i in range(len(offsets) - 1):
            self.routed[group, first + i] = x_SK[offsets[i] : offsets[i + 1]].clone()

    def every_expert_input(self, layer, group, x_TK, expert) -> None:
        self.every[group, expert] = x_TK.clone()

    def routing(self, layer, logits_TE, experts_Tk, weights_Tk) -> None:
        self.routings += 1


@pytest.mark.parametrize("size", [2, 8])
def test_observers_see_each_experts_rows_and_change_nothing(config: BeamConfig, size: int) -> None:
    router, experts = weights(config)
    router = replace(router, bias_E=router.bias_E.clone().index_fill_(0, torch.tensor([3]), -100.0))
    x = torch.randn(25, config.hidden_size)
    quiet = moe(x, router, (experts,), context(config), 0)
    routed, every = Recorder(), Recorder(every_expert=True)
    watched = context(config, routed, every)
    seen = moe(x, router, cut(experts, size), watched, 0)
    assert torch.equal(seen, quiet)
    assert routed.routings == every.routings == 1
    assert routed.every == {}
    chosen = route(x, router, config).experts_Tk
    for e in range(config.num_experts):
        mine = (chosen == e).any(1)
        assert torch.equal(routed.routed["gate_up", e], x[mine])
        active = swiglu(x @ experts.gate_up.w_NK[e].t())
        assert torch.allclose(every.every["down_proj", e], active, atol=1e-6)
        assert routed.routed["down_proj", e].shape[0] == mine.sum()
        assert torch.allclose(routed.routed["down_proj", e], active[mine], atol=1e-6)
        assert torch.equal(every.every["gate_up", e], x)
    assert routed.routed["gate_up", 3].shape[0] == 0
