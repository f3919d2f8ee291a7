"""Beam's attention in Triton: head norms and positions in one pass, then windows or causal.

In:  the fused projection [T, (q | k | v | gate) heads, D] in BF16 and a table of the sequences
     packed in it. Out: gated attention [T, heads, D], ready for `o_proj`.

The one idea: the plain path (attention.py) writes every intermediate of q, k and the gate to
memory, in FP32 where positions are applied. Here one kernel norms and rotates (or scales) q and k,
and one computes attention and gates it, so that memory sees each number about once. A tile of
queries meets exactly the keys of its window: blocks that lie wholly inside need no mask, the first
and the last do. All sequences of a batch are one launch, whatever their lengths.

Rounding points are attention.py's: after the head norm, after the position, after the softmax's
product, after gate + bias, after the sigmoid, after their product. Probabilities are rounded to
BF16 before they meet v, as in every flash kernel.

Limits: BF16, D a power of two from 16 to 128, compute capability 9.0 or later.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

_LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize=["tokens"])
def head_kernel(
    fused: tl.tensor,
    out: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_scale: tl.tensor,
    tokens: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    ROTATE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Norm of q and k heads, then RoPE (ROTATE) or the query scale; grid (token tiles, heads)."""
    half: tl.constexpr = D // 2
    head = tl.program_id(1)
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE))[:, None]
    inside = token < tokens
    lane = tl.arange(0, half)[None, :]
    source = fused + token.to(tl.int64) * ((2 * HEADS + 2 * KV) * D) + head * D + lane
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    is_query = head < HEADS
    weight = q_norm if is_query else k_norm
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D
    factor = tl.rsqrt(mean + eps)[:, None]
    first = first * factor * tl.load(weight + lane).to(tl.float32)
    second = second * factor * tl.load(weight + half + lane).to(tl.float32)
    first = first.to(tl.bfloat16).to(tl.float32)
    second = second.to(tl.bfloat16).to(tl.float32)
    position = tl.load(positions + token, mask=inside, other=0)
    if ROTATE:
        c = tl.load(cos + position * half + lane, mask=inside, other=0.0)
        s = tl.load(sin + position * half + lane, mask=inside, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    elif is_query:
        scale = tl.load(query_scale + position, mask=inside, other=0.0)
        first *= scale
        second *= scale
    target = out + token.to(tl.int64) * ((HEADS + KV) * D) + head * D + lane
    tl.store(target, first.to(tl.bfloat16), mask=inside)
    tl.store(target + half, second.to(tl.bfloat16), mask=inside)


@triton.jit
def _step(
    q: tl.tensor,
    heads: tl.tensor,
    fused: tl.tensor,
    sums: tl.tensor,
    norm: tl.tensor,
    peak: tl.tensor,
    start: tl.tensor,
    key: tl.tensor,
    rows: tl.tensor,
    key_column: tl.tensor,
    value_column: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """One block of keys, online softmax in base 2."""
    k = heads.load([start + key, key_column])
    logits = tl.dot(q, k.T) * scale
    if MASKED:
        columns = key + tl.arange(0, KEYS)
        distance = rows[:, None] - columns[None, :]
        seen = distance >= 0
        if WINDOW:
            seen = seen & (distance < WINDOW)
        logits = tl.where(seen, logits, -1e30)
    higher = tl.maximum(peak, tl.max(logits, 1))
    weights = tl.exp2(logits - higher[:, None])
    if MASKED and WINDOW:
        weights = tl.where(logits > -1e29, weights, 0.0)  # rows that see nothing of this block
    shrink = tl.exp2(peak - higher)
    norm = norm * shrink + tl.sum(weights, 1)
    v = fused.load([start + key, value_column])
    sums = tl.dot(weights.to(tl.bfloat16), v, sums * shrink[:, None])
    return sums, norm, higher


@triton.jit
def attention_kernel(
    heads: tl.tensor,
    queries: tl.tensor,
    fused: tl.tensor,
    fused_ptr: tl.tensor,
    gate_bias: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """A tile of queries of one head; `table` int32 [tiles, 3]: sequence start, length, first row.

    `heads` is the normed [T, (q | k) heads * D] by blocks of keys, `queries` its memory, `fused`
    the projection by blocks of values. WINDOW 0 is plain causal.
    """
    entry = table + tl.program_id(1) * 3
    head = tl.program_id(0)
    start = tl.load(entry)
    length = tl.load(entry + 1)
    first_row = tl.load(entry + 2)
    rows = first_row + tl.arange(0, ROWS)
    inside = (rows < length)[:, None]
    lane = tl.arange(0, D)[None, :]
    token = (start + rows).to(tl.int64)[:, None]
    q = tl.load(queries + token * ((HEADS + KV) * D) + head * D + lane, mask=inside, other=0.0)
    kv = head // (HEADS // KV)
    key_column = (HEADS + kv) * D
    value_column = (HEADS + KV + kv) * D

    low = 0
    whole_low = 0
    whole_high = first_row // KEYS * KEYS  # below it, no key is in any row's future
    high = tl.minimum(first_row + ROWS, length)
    if WINDOW:
        low = tl.maximum(0, first_row - WINDOW + 1) // KEYS * KEYS
        # From here on, no key is too old for the tile's last row.
        whole_low = tl.cdiv(tl.maximum(0, first_row + ROWS - WINDOW), KEYS) * KEYS
        whole_low = tl.minimum(whole_low, whole_high)
    sums = tl.zeros((ROWS, D), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), -1e30, tl.float32)
    if WINDOW:
        for key in range(low, whole_low, KEYS):
            sums, norm, peak = _step(
                q, heads, fused, sums, norm, peak, start, key, rows, key_column, value_column,
                scale, WINDOW, True, KEYS,
            )  # fmt: skip
    for key in range(whole_low, whole_high, KEYS):
        sums, norm, peak = _step(
            q, heads, fused, sums, norm, peak, start, key, rows, key_column, value_column,
            scale, WINDOW, False, KEYS,
        )  # fmt: skip
    for key in range(whole_high, high, KEYS):
        sums, norm, peak = _step(
            q, heads, fused, sums, norm, peak, start, key, rows, key_column, value_column,
            scale, WINDOW, True, KEYS,
        )  # fmt: skip
    mixed = (sums / norm[:, None]).to(tl.bfloat16).to(tl.float32)
    gate_place = fused_ptr + token * ((2 * HEADS + 2 * KV) * D) + (HEADS + 2 * KV + head) * D + lane
    gate = tl.load(gate_place, mask=inside, other=0.0).to(tl.float32)
    gate = (gate + tl.load(gate_bias + head).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(out + token * (HEADS * D) + head * D + lane, (gate * mixed).to(tl.bfloat16), inside)


def gated_attention(
    fused_TN: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    gate_bias: torch.Tensor,
    *,
    window: int | None,
    sequences: tuple[int, ...],
    cos_PD: torch.Tensor,
    sin_PD: torch.Tensor,
    query_scale_P: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> torch.Tensor:
    """[T, heads * D] of the fused projection [T, (2 heads + 2 kv_heads) * D]; see the module."""
    tokens, d = fused_TN.shape[0], q_norm.numel()
    device = fused_TN.device
    positions, table, rows, keys = _layout(sequences, d, device)
    normed = torch.empty(tokens, (heads + kv_heads) * d, dtype=torch.bfloat16, device=device)
    tile = 32
    head_kernel[(triton.cdiv(tokens, tile), heads + kv_heads)](
        fused_TN, normed, q_norm, k_norm, positions, cos_PD, sin_PD, query_scale_P, tokens, eps,
        HEADS=heads, KV=kv_heads, D=d, ROTATE=window is not None, TILE=tile, num_warps=4,
    )  # fmt: skip
    out = torch.empty(tokens, heads * d, dtype=torch.bfloat16, device=device)
    attention_kernel[(heads, table.shape[0])](
        _blocks(normed, [keys, d]), normed, _blocks(fused_TN, [keys, d]), fused_TN, gate_bias, out,
        table, d**-0.5 * _LOG2E,
        HEADS=heads, KV=kv_heads, D=d, WINDOW=window or 0, ROWS=rows, KEYS=keys,
        num_warps=8 if rows == 128 else 4, num_stages=3 if d > 64 else 2,
    )  # fmt: skip
    return out


@lru_cache(maxsize=8)
def _layout(
    sequences: tuple[int, ...], d: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Positions [T], tiles of queries, and their size; tiles with most keys first."""
    rows, keys = (128, 128) if max(sequences) > 64 else (64, 64)
    tiles, start = [], 0
    for length in sequences:
        tiles += [(start, length, first) for first in range(0, length, rows)]
        start += length
    tiles.sort(key=lambda tile: -tile[2])
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in sequences])
    table = torch.tensor(tiles, dtype=torch.int32)
    return positions.to(device), table.to(device), rows, keys


def _blocks(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block)
