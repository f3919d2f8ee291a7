"""Beam's attention over packed sequences, without a T x T mask anywhere.

In: the layer's normed input `x_TK`, all sequences of a batch one after another, and a
`SequenceLayout` that says where each begins. Out: the attention sublayer's output `[T, K]`.

The one idea: padding never enters. A batch is packed tokens plus lengths, so no mask is needed
to keep samples apart, every GEMM works on real tokens only, and positions simply count from 0
in each sequence. What is left is one of two shapes: causal (SDPA's own `is_causal`), or a window
of W keys. The window is computed by blocks: the first W queries are plain causal; each further
block of W queries meets the block of keys before it and its own, [W, 2W] with one fixed band
mask, so the cost is O(T W) and not O(T^2). Query heads that share a KV head are stacked along
the query axis there, which is grouped-query attention without copies of K and V.

Rounding points are those of transformers' Beam in the activation dtype: after each projection,
after the head norm, after RoPE or the query scale (both computed in FP32), after the softmax's
product, after gate + bias, after the sigmoid, after their product.

Limits: prefill only; no cache, no dropout, no logit softcap inside attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from beamq import devices
from beamq.beam.config import BeamConfig
from beamq.errors import UsageError
from beamq.model.gemm.backend import Gemm, LinearWeight
from beamq.model.observers import Observer

QUERY_SCALE_SPAN = 2048  # scalable softmax of the full layers: (1 + (p + 1) / 2048) ** 0.1
QUERY_SCALE_POWER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` neighbouring sequences of one length, starting at packed token `start`."""

    start: int
    count: int
    length: int

    @property
    def tokens(self) -> slice:
        """The packed tokens of the run."""
        return slice(self.start, self.start + self.count * self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Lengths of the sequences packed along the token axis, in order. No token sees another's."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.lengths):
            raise UsageError(f"sequence lengths {self.lengths[:8]} hold a zero; drop empty rows")

    @property
    def tokens(self) -> int:
        """Packed tokens in all."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Length of the longest sequence (0 for an empty layout)."""
        return max(self.lengths, default=0)

    def runs(self) -> Iterator[Run]:
        """Neighbours of equal length, to be computed as one batch."""
        start = 0
        for length, group in itertools.groupby(self.lengths):
            count = sum(1 for _ in group)
            yield Run(start=start, count=count, length=length)
            start += count * length

    @classmethod
    def rectangle(cls, batch: int, length: int) -> SequenceLayout:
        """`batch` whole rows of `length` tokens."""
        return cls(lengths=(length,) * batch)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int] | torch.Tensor) -> SequenceLayout:
        """From cumulative ends with a leading 0, as packed trainers pass them."""
        ends = [int(end) for end in cu_seqlens]
        if not ends or ends[0] != 0:
            raise UsageError("cu_seqlens must start with 0")
        return cls(lengths=tuple(b - a for a, b in itertools.pairwise(ends)))

    @classmethod
    def from_segments(cls, segment_BT: torch.Tensor) -> SequenceLayout:
        """From segment ids [B, T]: each stretch of equal ids in a row is a sequence."""
        lengths: list[int] = []
        for row in segment_BT.tolist():
            lengths += [sum(1 for _ in group) for _, group in itertools.groupby(row)]
        return cls(lengths=tuple(lengths))

    @classmethod
    def from_mask(cls, mask_BT: torch.Tensor) -> SequenceLayout:
        """From an attention mask [B, T] of 0 and 1: one stretch of ones a row, left or right.

        Rows of zeros only give no sequence. Raises `UsageError` for a row with a hole.
        """
        mask = mask_BT.to(torch.bool)
        starts = mask & ~F.pad(mask, (1, 0))[:, :-1]
        broken = (starts.sum(1) > 1).nonzero().flatten().tolist()
        if broken:
            raise UsageError(
                f"attention_mask row {broken[0]} has a hole; expected ones in one stretch,"
                " padding to its left or right"
            )
        return cls(lengths=tuple(n for n in mask.sum(1).tolist() if n))


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """FP32 tables by position: RoPE's `cos_PD`, `sin_PD` (half the head) and `query_scale_P`."""

    cos_PD: torch.Tensor
    sin_PD: torch.Tensor
    query_scale_P: torch.Tensor


def position_table(config: BeamConfig, length: int, device: torch.device) -> PositionTable:
    """Tables for positions 0 .. length-1."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    inverse = (1.0 / (config.rope_theta ** (pairs / config.head_dim))).to(device)
    position = torch.arange(length, device=device).float()
    angle_PD = position[:, None] * inverse
    scale = torch.exp(QUERY_SCALE_POWER * torch.log1p((position + 1) / QUERY_SCALE_SPAN))
    return PositionTable(cos_PD=angle_PD.cos(), sin_PD=angle_PD.sin(), query_scale_P=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """One layer's attention. `window` is None on full layers.

    `qkv_gate` stacks the rows of q, k, v and gate: they read the same input and share scales.
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
    config: BeamConfig,
    layout: SequenceLayout,
    table: PositionTable,
    *,
    gemm: Gemm,
    layer: int,
    observer: Observer | None = None,
) -> torch.Tensor:
    """The attention sublayer on packed tokens, up to and including `o_proj`."""
    if observer is not None:
        observer.linear_input(layer, "qkv_gate", x_TK)
    fused_TN = gemm.linear(x_TK, weights.qkv_gate)
    gated = _gated(fused_TN, weights, config, layout, table)
    del fused_TN
    if observer is not None:
        observer.linear_input(layer, "o_proj", gated)
    return gemm.linear(gated, weights.o)


def _gated(
    fused_TN: torch.Tensor,
    weights: AttentionWeights,
    config: BeamConfig,
    layout: SequenceLayout,
    table: PositionTable,
) -> torch.Tensor:
    """Everything between the two projections: [T, (2 heads + 2 kv) D] -> [T, heads D]."""
    heads, kv, d = config.num_heads, config.num_kv_heads, config.head_dim
    if devices.serves(fused_TN) and d in (16, 32, 64, 128):
        from beamq.model import triton_attention  # Triton

        return triton_attention.gated_attention(
            fused_TN,
            weights.q_norm,
            weights.k_norm,
            weights.gate_bias,
            window=weights.window,
            sequences=layout.lengths,
            cos_PD=table.cos_PD,
            sin_PD=table.sin_PD,
            query_scale_P=table.query_scale_P,
            heads=heads,
            kv_heads=kv,
            eps=config.rms_norm_eps,
        )
    fused = fused_TN.view(fused_TN.shape[0], -1, d)
    q, k, v, gate = fused.split_with_sizes((heads, kv, kv, heads), dim=1)
    q = F.rms_norm(q, (d,), weights.q_norm, config.rms_norm_eps)
    k = F.rms_norm(k, (d,), weights.k_norm, config.rms_norm_eps)
    mixed = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for run in layout.runs():
        batch = (run.count, run.length)
        part = [torch.unflatten(t[run.tokens], 0, batch) for t in (q, k, v)]
        mixed[run.tokens] = _attend(part, weights.window, table).flatten(0, 1)
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

    The head of the sequence is causal, then whole blocks, then what is left over.
    """
    length = q.shape[1]
    if length <= window:
        return _causal(q, k, v)
    whole = length // window * window
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    out[:, :window] = _causal(q[:, :window], k[:, :window], v[:, :window])
    band = _band(window, q.device)
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


def _band(window: int, device: torch.device) -> torch.Tensor:
    """[W, 2W]: query i of a block sees keys i+1 .. i+W of (previous block, own block)."""
    query = torch.arange(window, device=device)[:, None]
    key = torch.arange(2 * window, device=device)[None]
    return (key > query) & (key <= query + window)


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
