"""y = x w^T of unquantized operands, not by torch's BF16 product where a CPU has none to speak of.

x86 before AVX-512 multiplies BF16 in torch 6 to 14 times slower than FP32. There the operands are
widened to FP32, which loses nothing, and sums are rounded once: what a BF16 product is, up to the
order of its FP32 sums. Only few rows by a large weight are left to torch: widening it costs more.

FP32 products sum a last one to three rows (of a thread's part) in another order than the others, so
rows are filled up to whole `GRAIN`s: what a token gives does not hang on how many are beside it.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
import torch.nn.functional as F

GRAIN = 16
MANY_ROWS = 32
LARGE_WEIGHT = 1 << 22  # values
BLOCK_VALUES = 1 << 24  # of either operand widened at a time: 64 MiB


def product(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """y [T, N] in the dtype that both have."""
    rows = x_TK.shape[0]
    if not widens(x_TK) or (rows < MANY_ROWS and w_NK.numel() > LARGE_WEIGHT):
        return F.linear(x_TK, w_NK)
    y_TN = x_TK.new_empty(rows, w_NK.shape[0])
    step = max(1, BLOCK_VALUES // w_NK.shape[1] // GRAIN) * GRAIN
    for n in range(0, w_NK.shape[0], step):
        w32_KN = w_NK[n : n + step].float().t()
        for t in range(0, rows, step):
            y_TN[t : t + step, n : n + step] = _widened(x_TK[t : t + step], w32_KN)
    return y_TN


def _widened(x_TK: torch.Tensor, w32_KN: torch.Tensor) -> torch.Tensor:
    """FP32 [T, N]."""
    rows = x_TK.shape[0]
    x32_TK = x_TK.new_zeros(-(-rows // GRAIN) * GRAIN, x_TK.shape[1], dtype=torch.float32)
    x32_TK[:rows] = x_TK
    return (x32_TK @ w32_KN)[:rows]


def widens(x: torch.Tensor) -> bool:
    """Whether products of `x` are taken in FP32: BF16 on a CPU that lacks it."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and cpu_lacks_bf16()


@cache
def cpu_lacks_bf16() -> bool:
    """Whether torch has no fast BF16 product on this CPU: x86 without AVX-512."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and torch.backends.cpu.get_cpu_capability() != "AVX512"
