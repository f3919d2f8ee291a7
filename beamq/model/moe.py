"""Beam's mixture of experts: an FP32 router, and experts over tokens grouped by expert.

In: the normed input `x_TK` of packed tokens. Out: the expert sum in the activation dtype, times
`routed_scaling_factor`.

The one idea: choices are sorted by expert once, so that each projection is one grouped GEMM, and
each token's contributions are added in FP32 in ascending order of expert. So a layer whose experts
pass through the device in slices gives the same bits as one held whole.

The router is FP32 throughout (weight, input, logits, sigmoid, bias). `e_score_correction_bias`
enters the choice only; a group's score is the sum of its two best experts; ties are decided by
`torch.topk`; the chosen scores are renormalised.

Limits: no expert parallelism here; see expert_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from beamq import devices
from beamq.beam.config import BeamConfig
from beamq.model.context import Observer, PassContext
from beamq.model.gemm.backend import CHUNK_ELEMENTS, Gemm, Groups, LinearWeight, swiglu
from beamq.model.gemm.operands import expert_rows, part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterWeights:
    """FP32 `weight_EK` and `bias_E` (`e_score_correction_bias`), never cast."""

    weight_EK: torch.Tensor
    bias_E: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlice:
    """Experts from `first` on: gate_up [count, 2I, K] (gate rows first) and down [count, K, I]."""

    first: int
    count: int
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """FP32 `logits_TE`; `experts_Tk` best first; FP32 `weights_Tk`, before the routed scale."""

    logits_TE: torch.Tensor
    experts_Tk: torch.Tensor
    weights_Tk: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Choices sorted by expert: row s belongs to `token_S[s]` with `weight_S[s]`.

    `offsets` has E + 1 entries (on a GPU `ExpertRows`). `row_Tk` lists each token's rows in
    ascending order of expert.
    """

    token_S: torch.Tensor
    weight_S: torch.Tensor
    row_Tk: torch.Tensor
    offsets: Sequence[int]


def route(x_TK: torch.Tensor, router: RouterWeights, config: BeamConfig) -> Routing:
    """Choose `top_k` experts for each token among the best `topk_group` groups."""
    logits_TE = F.linear(x_TK.float(), router.weight_EK)
    scores_TE = logits_TE.sigmoid()
    choice_TE = scores_TE + router.bias_E
    if config.topk_group < config.n_group:
        choice_TGe = choice_TE.view(-1, config.n_group, config.num_experts // config.n_group)
        best_two = choice_TGe.topk(min(2, choice_TGe.shape[2]), dim=-1)[0]
        groups = best_two.sum(-1).topk(config.topk_group, dim=-1)[1]
        kept_TG = torch.zeros_like(choice_TGe[..., 0], dtype=torch.bool).scatter_(1, groups, True)
        choice_TE = choice_TGe.masked_fill(~kept_TG[..., None], float("-inf")).flatten(1)
    experts_Tk = choice_TE.topk(config.top_k, dim=-1)[1]
    weights_Tk = scores_TE.gather(1, experts_Tk)
    if config.norm_topk_prob:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
    return Routing(logits_TE=logits_TE, experts_Tk=experts_Tk, weights_Tk=weights_Tk)


def dispatch(experts_Tk: torch.Tensor, weights_Tk: torch.Tensor, num_experts: int) -> Dispatch:
    """Sort the choices by expert, tokens in order within each expert. Does not wait for a GPU."""
    tokens, k = experts_Tk.shape
    flat = experts_Tk.flatten()
    sorted_S, order = flat.sort(stable=True)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.numel(), device=order.device)
    return Dispatch(
        token_S=order // k,
        weight_S=weights_Tk.flatten()[order],
        row_Tk=row.view(tokens, k).sort(dim=1)[0],
        offsets=expert_rows(sorted_S, num_experts),
    )


def moe(
    x_TK: torch.Tensor,
    router: RouterWeights,
    experts: Iterable[ExpertSlice],
    context: PassContext,
    layer: int,
) -> torch.Tensor:
    """The whole sublayer for one batch, its experts in one slice or several."""
    routing = choose(x_TK, router, context, layer)
    plan = dispatch(routing.experts_Tk, routing.weights_Tk, context.config.num_experts)
    sum_TK = torch.zeros(x_TK.shape, dtype=torch.float32, device=x_TK.device)
    for part in experts:
        add_slice(sum_TK, x_TK, plan, part, context, layer)
    return finish(sum_TK, x_TK.dtype, context.config)


def choose(x_TK: torch.Tensor, router: RouterWeights, context: PassContext, layer: int) -> Routing:
    """Route a batch and show the choices to the observer."""
    routing = route(x_TK, router, context.config)
    for observer in context.observers:
        observer.routing(layer, routing.logits_TE, routing.experts_Tk, routing.weights_Tk)
    return routing


def add_slice(
    sum_TK: torch.Tensor,
    x_TK: torch.Tensor,
    plan: Dispatch,
    part: ExpertSlice,
    context: PassContext,
    layer: int,
) -> None:
    """Add a slice's weighted outputs to the FP32 sum. Slices must come in ascending order."""
    gemm, observers = context.gemm, context.observers
    _show_every_expert([each for each in observers if each.every_expert], x_TK, part, gemm, layer)
    routed = [each for each in observers if each.expert_inputs]
    low, high = plan.offsets[part.first], plan.offsets[part.first + part.count]
    offsets = part_of(plan.offsets, part.first, part.first + part.count)
    rows = plan.token_S[low:high]
    if not routed:
        y_SK = gemm.experts(x_TK, part.gate_up, part.down, Groups(offsets, rows))
    else:
        x_SK = x_TK.index_select(0, rows)
        for observer in routed:
            observer.expert_input(layer, "gate_up", x_SK, part.first, offsets)
        active_SI = swiglu(gemm.grouped(x_SK, part.gate_up, Groups(offsets)))
        del x_SK
        for observer in routed:
            observer.expert_input(layer, "down_proj", active_SI, part.first, offsets)
        y_SK = gemm.grouped(active_SI, part.down, Groups(offsets))
    accumulate(sum_TK, y_SK, plan, low, high)


def finish(sum_TK: torch.Tensor, dtype: torch.dtype, config: BeamConfig) -> torch.Tensor:
    """Round the expert sum to the activation dtype, then apply the routed scale."""
    return sum_TK.to(dtype).mul_(config.routed_scaling_factor)


def accumulate(
    sum_TK: torch.Tensor, y_SK: torch.Tensor, plan: Dispatch, low: int, high: int
) -> None:
    """sum[t] += y[s] * weight[s] for rows low .. high - 1, each token's rows in ascending order.

    Column j of `row_Tk` has one row of every token, so a step never adds to a token twice.
    """
    if devices.serves(y_SK):
        from beamq.model import triton_layer  # Triton

        triton_layer.add_experts(sum_TK, y_SK, plan.row_Tk, plan.weight_S, low, high)
        return
    whole = high - low == plan.row_Tk.numel()
    step = max(1, CHUNK_ELEMENTS // y_SK.shape[1])
    for column_T in plan.row_Tk.unbind(1):
        if whole:
            tokens, rows = None, column_T
        else:
            tokens = ((column_T >= low) & (column_T < high)).nonzero().flatten()
            rows = column_T[tokens]
        for start in range(0, rows.numel(), step):
            some = rows[start : start + step]
            part = y_SK.index_select(0, some - low) * plan.weight_S[some, None]
            if tokens is None:
                sum_TK[start : start + step] += part
            else:
                sum_TK.index_add_(0, tokens[start : start + step], part)


def _show_every_expert(
    observers: Sequence[Observer], x_TK: torch.Tensor, part: ExpertSlice, gemm: Gemm, layer: int
) -> None:
    """Show observers all tokens through each expert; the pass does not use the results."""
    for expert in range(part.first, part.first + part.count) if observers else ():
        for observer in observers:
            observer.every_expert_input(layer, "gate_up", x_TK, expert)
        active = swiglu(gemm.linear(x_TK, part.gate_up.expert(expert - part.first)))
        for observer in observers:
            observer.every_expert_input(layer, "down_proj", active, expert)
