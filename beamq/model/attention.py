"""Beam's attention over packed sequences, without a T x T mask anywhere.

In: the layer's normed input `x_TK` and a `SequenceLayout` that says where each sequence begins.
Out: the attention sublayer's output [T, K].

The one idea: padding never enters. A batch is packed tokens plus lengths, so every GEMM works on
real tokens only, and positions count from 0 in each sequence. Two cases are left: plain causal
attention (SDPA's `is_causal`), or a window of W keys, computed in blocks. The first W queries are
plain causal; each further block of W queries meets the block of keys before it and its own, [W, 2W]
with one fixed band mask, so the cost is O(T W) and not O(T^2). There, query heads that share a KV
head are stacked along the query axis, so that K and V are not copied.

Rounding points are those of transformers' Beam; RoPE and the query scale are computed in FP32.

Limits: prefill only; no cache, no dropout, no logit softcap inside attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from beamq import devices
from beamq.model.context import PassContext, PositionTable, SequenceLayout
from beamq.model.gemm.backend import LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """One layer's attention. `window` is None on full layers.

    `qkv_gate` stacks the rows of q, k, v and gate, which read the same input and share scales.
    `q_norm` and `k_norm` [D], `gate_bias` [heads].
    """

    window: int | None
    qkv_gate: LinearWeight
    o: LinearWeight
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    gate_bias: torch.Tensor


def attention(
    x_TK: torch.Tensor,
    weights: AttentionWeights,
    layout: SequenceLayout,
    context: PassContext,
    layer: int,
) -> torch.Tensor:
    """The attention sublayer on packed tokens, up to and including `o_proj`."""
    for observer in context.observers:
        observer.linear_input(layer, "qkv_gate", x_TK)
    fused_TN = context.gemm.linear(x_TK, weights.qkv_gate)
    gated = gated_heads(fused_TN, weights, layout, context)
    del fused_TN
    for observer in context.observers:
        observer.linear_input(layer, "o_proj", gated)
    return context.gemm.linear(gated, weights.o)


def gated_heads(
    fused_TN: torch.Tensor, weights: AttentionWeights, layout: SequenceLayout, context: PassContext
) -> torch.Tensor:
    """Everything between the two projections: [T, (2 heads + 2 kv) D] -> [T, heads D]."""
    config, table = context.config, context.table
    heads, kv, d = config.num_heads, config.num_kv_heads, config.head_dim
    if devices.serves(fused_TN) and d in (16, 32, 64, 128):
        from beamq.model import triton_layer  # Triton may be missing

        norms = (weights.q_norm, weights.k_norm)
        return triton_layer.gated_attention(
            fused_TN, norms, weights.gate_bias, weights.window, layout, context
        )
    fused = fused_TN.view(fused_TN.shape[0], -1, d)
    q, k, v, gate = fused.split_with_sizes((heads, kv, kv, heads), dim=1)
    q = F.rms_norm(q, (d,), weights.q_norm, config.rms_norm_eps)
    k = F.rms_norm(k, (d,), weights.k_norm, config.rms_norm_eps)
    mixed = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for tokens, *batch in layout.runs():
        part = [torch.unflatten(t[tokens], 0, batch) for t in (q, k, v)]
        mixed[tokens] = _attend(part, weights.window, table).flatten(0, 1)
    return (gate + weights.gate_bias[:, None]).sigmoid_().mul_(mixed).flatten(1)


def _attend(qkv: Iterable[torch.Tensor], window: int | None, table: PositionTable) -> torch.Tensor:
    """Equal-length sequences: q, k, v [B, T, heads, D] -> [B, T, heads, D]."""
    q, k, v = qkv
    length = q.shape[1]
    if window is None:
        scale = table.query_scale_P[:length, None, None]
        return _causal((q * scale).to(q.dtype), k, v)
    cos, sin = table.cos_PD[:length, None], table.sin_PD[:length, None]
    return sliding_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, window)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE in FP32 over halves of the head, rounded once to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = out.chunk(2, dim=-1)
    half[0].copy_(first * cos - second * sin)
    half[1].copy_(second * cos + first * sin)
    return out


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain causal attention; [B, T, heads, D] in and out."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2)


def sliding_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int
) -> torch.Tensor:
    """Each query sees itself and the `window - 1` keys before it; [B, T, heads, D] in and out.

    The first `window` queries are causal, then come whole blocks, then the rest.
    """
    length = q.shape[1]
    if length <= window:
        return _causal(q, k, v)
    whole = length // window * window
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[:, :window] = _causal(q[:, :window], k[:, :window], v[:, :window])
    # [W, 2W]: query i of a block sees keys i+1 .. i+W of (previous block, own block).
    query, key = (torch.arange(n, device=q.device) for n in (window, 2 * window))
    band = (key > query[:, None]) & (key <= query[:, None] + window)
    if whole > window:
        keys, values = (
            t[:, :whole].unfold(1, 2 * window, window).transpose(-1, -2) for t in (k, v)
        )
        queries = torch.unflatten(q[:, window:whole], 1, (-1, window))
        out[:, window:whole] = _banded(queries, keys, values, band).flatten(1, 2)
    if whole < length:
        rest = length - whole
        keys, values = (t[:, None, whole - window :].transpose(2, 3) for t in (k, v))
        mask = band[:rest, : window + rest]
        out[:, whole:] = _banded(q[:, None, whole:], keys, values, mask).squeeze(1)
    return out


def _banded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Blocks of queries on their keys: q [B, n, w, heads, D], k and v [B, n, kv, m, D]."""
    batch, blocks, width, heads, d = q.shape
    kv = k.shape[2]
    group = heads // kv
    stacked = torch.unflatten(q, 3, (kv, group)).permute(0, 1, 3, 4, 2, 5)
    mixed = F.scaled_dot_product_attention(
        stacked.reshape(batch * blocks, kv, group * width, d),
        k.flatten(0, 1),
        v.flatten(0, 1),
        attn_mask=mask.repeat(group, 1),
    )
    split = mixed.view(batch, blocks, kv, group, width, d)
    return split.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)
