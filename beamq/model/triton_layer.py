"""The parts of a layer between its GEMMs, in Triton: norms, residuals, sums over experts.

In:  BF16 activations. Out: what beam.py and moe.py compute in plain torch, with the same rounding
     points, in one pass over memory instead of one for each operation.

`close_sublayer` is norm, two products and a sum. `add_experts` adds each token's expert outputs in
ascending order of expert, in FP32, as moe.py does, so that slices of experts change no bit.

Limits: BF16; rows of up to 16,384 values (one program each).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl


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
    """sums[t] += y[r - low] * weights[r] for t's rows r from `low` to `high`; grid (T, columns)."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < K
    place = sums + token * K + lane
    total = tl.load(place, mask=inside, other=0.0)
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
    if h_TK.numel():
        close_kernel[(h_TK.shape[0],)](
            x_TK,
            h_TK,
            weight,
            out,
            eps,
            math.sqrt((n - 1) / n),
            1.0 / math.sqrt(n),
            K=k,
            BLOCK=triton.next_power_of_2(k),
            num_warps=_warps(k),
        )
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
            sum_TK,
            y_SK,
            row_Tk,
            weight_S,
            low,
            high,
            K=k,
            TOP=row_Tk.shape[1],
            BLOCK=block,
            num_warps=8 if block >= 2048 else 4,
        )


def _warps(k: int) -> int:
    count: int = triton.next_power_of_2(k) // 512
    return max(1, min(16, count))
