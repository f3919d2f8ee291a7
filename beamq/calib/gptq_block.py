"""One block of GPTQ in plain torch: 16 columns rounded in order, by the best of 16 scales.

In:  the moved values of a block's columns, [E, 16, N] (a row of the weight is a column here, so
     that a column's values lie side by side), its weights, its part of I + U and of D.
Out: codes, the scale's code, and w - rounded in place of the weights.

`formats/kernels/gpu_gptq.py` is the same on GPUs. So that both give the same bits, all of it is
FP32 in one order, and products and sums are rounded one by one:

    r       = 1 / step                          step = s * global scale, s a candidate
    q       = x_j * r;  rounded = e2m1(q) * step
    loss   += ((x_j - rounded) * (x_j - rounded)) * D_j          j = 0 .. 15
    x_k    += (w_j - rounded) * U_jk                             for every k > j

Candidates come in the sweep's order and the first of the least losses wins. Codes are those of the
winner's q, not of another division.
"""

from __future__ import annotations

import torch

from beamq.formats.numerics import E2M1_MAX, NVFP4_BLOCK, e2m1_codes, e2m1_values, pack_nibbles
from beamq.formats.nvfp4 import max_block_scales
from beamq.formats.sweep import LARGEST, SMALLEST, candidate_offsets

LARGEST_FP32 = 3.4028234663852886e38  # a step near 2^-127 has no reciprocal
PIECE_ELEMENTS = {"cpu": 1 << 16}
"""Trials that are made at once, in elements of one column: on a CPU they should stay in a cache."""


def round_block(
    moved_E16N: torch.Tensor,
    w_E16N: torch.Tensor,
    unit_E1616: torch.Tensor,
    pivot_E16: torch.Tensor,
    global_scale_E: torch.Tensor,
    codes_EN8: torch.Tensor,
    scale_EN: torch.Tensor,
) -> None:
    """Round a block of every row. FP32 but for `codes_EN8` and `scale_EN` (E4M3 bits), both U8.

    Those two are written, and `w_E16N` becomes w - rounded. All may be views.
    """
    experts, _, n = w_E16N.shape
    most = PIECE_ELEMENTS.get(w_E16N.device.type, 1 << 24)
    step = max(1, most // (experts * len(candidate_offsets())))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        _round_rows(
            moved_E16N[:, :, rows],
            w_E16N[:, :, rows],
            unit_E1616,
            pivot_E16,
            global_scale_E.view(-1, 1),
            codes_EN8[:, rows],
            scale_EN[:, rows],
        )


def _round_rows(
    moved_E16N: torch.Tensor,
    w_E16N: torch.Tensor,
    unit_E1616: torch.Tensor,
    pivot_E16: torch.Tensor,
    global_scale_E1: torch.Tensor,
    codes_EN8: torch.Tensor,
    scale_EN: torch.Tensor,
) -> None:
    middle_EN = max_block_scales(moved_E16N.transpose(1, 2), global_scale_E1)
    offset_C11 = torch.tensor(candidate_offsets(), dtype=torch.int16).view(-1, 1, 1)
    code_CEN = middle_EN.view(torch.uint8).to(torch.int16) + offset_C11.to(w_E16N.device)
    code_CEN = code_CEN.clamp_(SMALLEST, LARGEST).to(torch.uint8)
    step_CEN = code_CEN.view(torch.float8_e4m3fn).float().mul_(global_scale_E1)
    loss_CEN, _ = _in_order(moved_E16N, w_E16N, unit_E1616, pivot_E16, step_CEN)
    best_1EN = loss_CEN.argmin(dim=0, keepdim=True)  # the first of equals: `max` rule's own
    step_1EN = step_CEN.gather(0, best_1EN)
    _, q = _in_order(moved_E16N, w_E16N, unit_E1616, pivot_E16, step_1EN)
    code_E16N = e2m1_codes(torch.cat(q).transpose(0, 1))
    codes_EN8.copy_(pack_nibbles(code_E16N.transpose(1, 2)))
    scale_EN.copy_(code_CEN.gather(0, best_1EN).squeeze(0))
    w_E16N.sub_(e2m1_values(code_E16N).mul_(step_1EN.transpose(0, 1)))


def _in_order(
    moved_E16N: torch.Tensor,
    w_E16N: torch.Tensor,
    unit_E1616: torch.Tensor,
    pivot_E16: torch.Tensor,
    step_CEN: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The block's share of the loss for each candidate, and what is rounded in each column."""
    x_16CEN = moved_E16N.transpose(0, 1).unsqueeze(1).repeat(1, step_CEN.shape[0], 1, 1)
    per_step_CEN = (torch.ones_like(step_CEN) / step_CEN).clamp_(max=LARGEST_FP32)
    loss_CEN = torch.zeros_like(step_CEN)
    q = []
    for j in range(NVFP4_BLOCK):
        q.append(x_16CEN[j] * per_step_CEN)
        rounded_CEN = _nearest(q[j]).mul_(step_CEN)
        missed_CEN = x_16CEN[j] - rounded_CEN
        loss_CEN += missed_CEN.square_().mul_(pivot_E16[:, j : j + 1])
        error_CEN = w_E16N[:, j] - rounded_CEN
        later_k1E1 = unit_E1616[:, j, j + 1 :].t()[:, None, :, None]
        x_16CEN[j + 1 :] += error_CEN * later_k1E1
    return loss_CEN, q


def _nearest(q: torch.Tensor) -> torch.Tensor:
    """The E2M1 value nearest to FP32 `q`; ties are to the even code, as everywhere.

    Adding 1.5 * 2^n and taking it away again rounds to a multiple of 2^(n - 23): to halves below
    2, to wholes below 4, to twos up to 6.
    """
    q = q.clamp(-E2M1_MAX, E2M1_MAX)
    size = q.abs()
    high = torch.where(size < 4, 1.5 * 2.0**23, 1.5 * 2.0**24)
    magic = torch.where(size < 2, 1.5 * 2.0**22, high)
    return q.add_(magic).sub_(magic)
