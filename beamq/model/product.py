"""x w^T on whatever the tensors lie on; in FP32 pieces where a CPU has no BF16.

In: activations [T, K] and weights [N, K] of one dtype. Out: [T, N] in that dtype.

torch multiplies BF16 on every CPU, but on one without BF16 instructions (x86 before AVX-512) at a
fiftieth of the speed of FP32. There, pieces of both sides are widened, which is exact, multiplied
in FP32 and rounded once, as the instructions do; only the order of the FP32 sum may differ, as it
does between any two processors.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

ROWS = 1024
WEIGHT_BYTES = 16 << 20  # of widened weights at a time


def product(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """[T, N]."""
    if x_TK.dtype != torch.bfloat16 or x_TK.device.type != "cpu" or has_bf16():
        return F.linear(x_TK, w_NK)
    return widened_product(x_TK, w_NK)


def widened_product(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """[T, N], rounded once from FP32."""
    (n, k), rows = w_NK.shape, x_TK.shape[0]
    out_TN = torch.empty(rows, n, dtype=x_TK.dtype)
    step = max(1, WEIGHT_BYTES // (4 * k))
    for row in range(0, rows, ROWS):
        wide_RK = x_TK[row : row + ROWS].float()
        for first in range(0, n, step):
            part = F.linear(wide_RK, w_NK[first : first + step].float())
            out_TN[row : row + ROWS, first : first + step] = part
    return out_TN


@cache
def has_bf16() -> bool:
    """Whether torch has fast BF16 products on this CPU."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())
