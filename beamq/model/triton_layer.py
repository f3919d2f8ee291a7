"""The parts of a layer between its GEMMs, in Triton: attention, norms, residuals, expert sums.

In: BF16 activations. Out: what attention.py, layer.py and moe.py compute in plain torch, with the
same rounding points, in one pass over memory instead of one for each operation.

`gated_attention` takes the fused projection [T, (q | k | v | gate) heads * D] and returns [T, heads
* D], ready for `o_proj`. One kernel norms q and k and applies positions; a second one computes
attention and gates it. All sequences of a batch share one launch, whatever their lengths. A tile of
queries meets exactly the keys of its window: blocks of keys inside it need no mask, those at its
edges do. Probabilities are rounded to BF16 before the product with v, as in every flash kernel.

`close_sublayer` is a norm, two products and a sum. `add_experts` adds each token's expert outputs
in ascending order of expert, in FP32, so that slices of experts change no bit.

Limits: BF16; D a power of two from 16 to 128; rows of up to 16,384 values (one program each);
compute capability 9.0 or later.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from beamq.model.context import PassContext, SequenceLayout

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
    """Norm of q and k heads, then RoPE (ROTATE) or the query scale; grid (token tiles, heads).

    `fused` [tokens, (q | k | v | gate) heads * D]; `out` [tokens, (q | k) heads * D]. Heads HEADS
    and up are those of k.
    """
    # A program has TILE tokens of one head, in two halves: RoPE turns value i of the first half
    # with value i of the second.
    half: tl.constexpr = D // 2
    head = tl.program_id(1)
    token = (tl.program_id(0) * TILE + tl.arange(0, TILE))[:, None]
    inside = token < tokens
    lane = tl.arange(0, half)[None, :]
    # 64-bit offsets: a packed batch times the projection's width can exceed 2^31 values.
    source = fused + token.to(tl.int64) * ((2 * HEADS + 2 * KV) * D) + head * D + lane
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    is_query = head < HEADS
    weight = q_norm if is_query else k_norm
    # RMSNorm in FP32 over both halves, rounded once to BF16 like the plain path's head norm.
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D
    factor = tl.rsqrt(mean + eps)[:, None]
    first = first * factor * tl.load(weight + lane).to(tl.float32)
    second = second * factor * tl.load(weight + half + lane).to(tl.float32)
    first = first.to(tl.bfloat16).to(tl.float32)
    second = second.to(tl.bfloat16).to(tl.float32)
    # Positions count from 0 in each sequence. Tables and products are FP32; the store rounds once.
    position = tl.load(positions + token, mask=inside, other=0)
    if ROTATE:
        c = tl.load(cos + position * half + lane, mask=inside, other=0.0)
        s = tl.load(sin + position * half + lane, mask=inside, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    elif is_query:  # full layers have no RoPE; their queries are scaled by position, keys are not
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
    """One block of KEYS keys for a tile of queries: online softmax in base 2.

    `sums` [ROWS, D] is the sum of v weighted by 2^(logit - peak), `norm` [ROWS] the sum of the
    weights, `peak` [ROWS] the highest logit so far. `key` counts from the sequence's `start`.
    """
    # Keys beyond the sequence's end are other sequences' (or zeros beyond the batch). They are in
    # the future of every valid row, so the causal mask removes them.
    k = heads.load([start + key, key_column])
    logits = tl.dot(q, k.T) * scale  # `scale` holds log2(e), so that exp2 below is exp
    if MASKED:
        columns = key + tl.arange(0, KEYS)
        distance = rows[:, None] - columns[None, :]
        seen = distance >= 0
        if WINDOW:
            seen = seen & (distance < WINDOW)
        logits = tl.where(seen, logits, -1e30)  # finite: -inf minus -inf would be NaN
    higher = tl.maximum(peak, tl.max(logits, 1))
    weights = tl.exp2(logits - higher[:, None])
    if MASKED and WINDOW:
        # A row that has seen no key yet has peak -1e30, and masked logits would weigh 2^0 = 1.
        weights = tl.where(logits > -1e29, weights, 0.0)
    # Earlier sums were relative to the old peak; bring them to the new one.
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
    """A tile of ROWS queries of one head; grid (heads, tiles). WINDOW 0 is plain causal.

    `table` int32 [tiles, 3]: sequence start, length, first row of the tile in the sequence.
    `heads` is a descriptor of the normed [T, (q | k) heads * D], `queries` a pointer to the same;
    `fused` and `fused_ptr` likewise are the projection, read for v and for the gate. Descriptors
    have blocks [KEYS, D].
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
    kv = head // (HEADS // KV)  # the KV head that this query head shares
    key_column = (HEADS + kv) * D
    value_column = (HEADS + KV + kv) * D

    # Blocks of keys fall in three ranges: [low, whole_low) is partly older than the window,
    # [whole_low, whole_high) is seen by every row and needs no mask, [whole_high, high) is partly
    # in the future.
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
    # Rounded where the plain path rounds: the product with v, gate + bias, the sigmoid, the result.
    mixed = (sums / norm[:, None]).to(tl.bfloat16).to(tl.float32)
    gate_place = fused_ptr + token * ((2 * HEADS + 2 * KV) * D) + (HEADS + 2 * KV + head) * D + lane
    gate = tl.load(gate_place, mask=inside, other=0.0).to(tl.float32)
    gate = (gate + tl.load(gate_bias + head).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(out + token * (HEADS * D) + head * D + lane, (gate * mixed).to(tl.bfloat16), inside)


def gated_attention(
    fused_TN: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    gate_bias: torch.Tensor,
    window: int | None,
    layout: SequenceLayout,
    context: PassContext,
) -> torch.Tensor:
    """[T, heads * D] of the fused projection [T, (2 heads + 2 kv_heads) * D]; see the module.

    `norms` are the weights [D] of the q and the k norm; `gate_bias` [heads]. The tensors are
    contiguous BF16.
    """
    config, table = context.config, context.table
    heads, kv_heads, d = config.num_heads, config.num_kv_heads, config.head_dim
    tokens, device = fused_TN.shape[0], fused_TN.device
    positions, tiles, rows, keys = _tiles(layout.lengths, device)
    normed = torch.empty(tokens, (heads + kv_heads) * d, dtype=torch.bfloat16, device=device)
    tile = 32
    head_kernel[(triton.cdiv(tokens, tile), heads + kv_heads)](
        fused_TN, normed, *norms, positions, table.cos_PD, table.sin_PD, table.query_scale_P,
        tokens, config.rms_norm_eps,
        HEADS=heads, KV=kv_heads, D=d, ROTATE=window is not None, TILE=tile, num_warps=4,
    )  # fmt: skip
    out = torch.empty(tokens, heads * d, dtype=torch.bfloat16, device=device)
    attention_kernel[(heads, tiles.shape[0])](
        _blocks(normed, [keys, d]), normed, _blocks(fused_TN, [keys, d]), fused_TN, gate_bias, out,
        tiles, d**-0.5 * _LOG2E,
        HEADS=heads, KV=kv_heads, D=d, WINDOW=window or 0, ROWS=rows, KEYS=keys,
        num_warps=8 if rows == 128 else 4, num_stages=3 if d > 64 else 2,
    )  # fmt: skip
    return out


@lru_cache(maxsize=8)
def _tiles(
    sequences: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Positions [T], tiles of queries [tiles, 3], and a tile's rows and keys.

    Tiles with the most keys come first, so that the last programs to start are short.
    """
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


@triton.jit
def _normed(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """RMSNorm of FP32 values (0 beyond K), rounded once to BF16."""
    factor = tl.rsqrt(tl.sum(x * x) / K + eps)
    return (x * factor * weight).to(tl.bfloat16)


@triton.jit
def close_kernel(
    x: tl.tensor,
    h: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    keep: tl.tensor,
    add: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out = h * keep + norm(x) * add, every product and the sum rounded to BF16."""
    # One program has a whole row, since the norm needs all of it. Products and the sum are rounded
    # to BF16 one by one, as torch's operations on BF16 tensors round them.
    row = tl.program_id(0).to(tl.int64) * K
    lane = tl.arange(0, BLOCK)
    inside = lane < K
    value = tl.load(x + row + lane, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    new = (_normed(value, w, eps, K).to(tl.float32) * add).to(tl.bfloat16).to(tl.float32)
    old = tl.load(h + row + lane, mask=inside, other=0.0).to(tl.float32)
    old = (old * keep).to(tl.bfloat16).to(tl.float32)
    tl.store(out + row + lane, (old + new).to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["low", "high"])
def add_kernel(
    sums: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    K: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """sums[t] += y[r - low] * weights[r] for t's rows r from `low` to `high`; grid (T, columns).

    `rows` [T, TOP] has each token's rows in ascending order, which is that of experts.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < K
    place = sums + token * K + lane
    total = tl.load(place, mask=inside, other=0.0)
    # Rows of other slices add 0 * 0, which changes no bit. One program has all of a token's rows,
    # so the order of additions is fixed and nothing is added atomically.
    for j in tl.static_range(TOP):
        row = tl.load(rows + token * TOP + j)
        here = (row >= low) & (row < high)
        factor = tl.load(weights + row, mask=here, other=0.0)
        value = tl.load(y + (row - low) * K + lane, mask=inside & here, other=0.0).to(tl.float32)
        total += value * factor
    tl.store(place, total, mask=inside)


def close_sublayer(
    h_TK: torch.Tensor, x_TK: torch.Tensor, weight: torch.Tensor, n: int, eps: float
) -> torch.Tensor:
    """The n-th addition to the stream: h * sqrt((n-1)/n) + norm(x) * sqrt(1/n)."""
    out = torch.empty_like(h_TK)
    k = h_TK.shape[-1]
    block = triton.next_power_of_2(k)
    if h_TK.numel():
        close_kernel[(h_TK.shape[0],)](
            x_TK, h_TK, weight, out, eps, math.sqrt((n - 1) / n), 1.0 / math.sqrt(n),
            K=k, BLOCK=block, num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return out


def add_experts(
    sum_TK: torch.Tensor,
    y_SK: torch.Tensor,
    row_Tk: torch.Tensor,
    weight_S: torch.Tensor,
    low: int,
    high: int,
) -> None:
    """sum[t] += y[r - low] * weight[r] for each token's rows r in low .. high - 1, ascending."""
    tokens, k = sum_TK.shape
    if tokens and high > low:
        block = min(2048, triton.next_power_of_2(k))
        add_kernel[(tokens, triton.cdiv(k, block))](
            sum_TK, y_SK, row_Tk, weight_S, low, high,
            K=k, TOP=row_Tk.shape[1], BLOCK=block, num_warps=8 if block >= 2048 else 4,
        )  # fmt: skip
