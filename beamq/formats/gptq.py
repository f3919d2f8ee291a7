"""GPTQ for NVFP4: round so that the *product* with the inputs changes least, scales included.

In:  weights [E, N, K] of some experts, the second moments H [E, K, K] of their inputs as served, a
     global scale for each expert.
Out: packed codes and E4M3 block scales, as plain rounding gives them.

The one idea (GPTQ, arXiv:2210.17323, in the equivalent form of LDLQ, arXiv:2307.13304): columns are
rounded in order, and each is first moved to make up for the errors of those before it. With
H = (I + U) D (I + U)^T, U strictly upper and D diagonal,

    x_k = w_k + sum over j < k of (w_j - rounded_j) * U_jk        what is rounded in place of w_k
    trace of (error H error^T) = sum over k of D_k * (x_k - rounded_k)^2

so the layer's squared error is a plain sum over columns, and a block's share is known once the
block is rounded. The scale of a block of 16 is therefore chosen by trial: the block is rounded with
each of the sweep's 16 candidates around the moved values' own `max` scale, and the least sum wins.

H is damped by a share of its mean diagonal: a tenth, or 4 K / n with n rows for K inputs, because
feedback along directions that H has by chance costs more than it saves. Columns keep their natural
order, which the blocks in the file need (ordering by size of H did not help).

Inside a block the order of operations is fixed (`round_block`; formats/kernels/triton_gptq.py gives
the same bits on GPUs). All is FP32, and each product and sum is rounded by itself:

    r       = 1 / step                          step = s * global scale, s a candidate
    q       = x_j * r;  rounded = e2m1(q) * step
    loss   += ((x_j - rounded) * (x_j - rounded)) * D_j          j = 0 .. 15
    x_k    += (w_j - rounded) * U_jk                             for every k > j

Feedback between blocks is a GEMM: of 16 columns inside a window of 128, and of 128 from all columns
before it. Limits: results depend on the order of FP32 sums in GEMMs, so on device and libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from beamq import devices
from beamq.errors import CalibrationError
from beamq.formats.numerics import E2M1_MAX, NVFP4_BLOCK, e2m1_codes, e2m1_values, pack_nibbles
from beamq.formats.nvfp4 import (
    LARGEST,
    SMALLEST,
    QuantizedTensor,
    candidate_offsets,
    max_block_scales,
)

LARGEST_FP32 = 3.4028234663852886e38  # a step near 2^-127 has no reciprocal
PIECE_ELEMENTS = {"cpu": 1 << 16}
"""Trials made at once, in elements of one column: on a CPU they should stay in a cache."""


def round_block(
    moved_E16N: torch.Tensor,
    w_E16N: torch.Tensor,
    unit_E1616: torch.Tensor,
    pivot_E16: torch.Tensor,
    global_scale_E: torch.Tensor,
    codes_EN8: torch.Tensor,
    scale_EN: torch.Tensor,
) -> None:
    """Round a block of every row into `codes_EN8` and `scale_EN` (E4M3 bits), both U8; the rest is
    FP32. `w_E16N` becomes w - rounded. All may be views.
    """
    experts, _, n = w_E16N.shape
    offsets = torch.tensor(candidate_offsets(), dtype=torch.int16, device=w_E16N.device)
    step = max(1, PIECE_ELEMENTS.get(w_E16N.device.type, 1 << 24) // (experts * len(offsets)))
    global_scale_E1 = global_scale_E.view(-1, 1)
    for rows in (slice(start, start + step) for start in range(0, n, step)):
        moved, w = moved_E16N[:, :, rows], w_E16N[:, :, rows]
        middle_EN = max_block_scales(moved.transpose(1, 2), global_scale_E1)
        code_CEN = middle_EN.view(torch.uint8).to(torch.int16) + offsets.view(-1, 1, 1)
        code_CEN = code_CEN.clamp_(SMALLEST, LARGEST).to(torch.uint8)
        step_CEN = code_CEN.view(torch.float8_e4m3fn).float().mul_(global_scale_E1)
        loss_CEN, _ = _in_order(moved, w, unit_E1616, pivot_E16, step_CEN)
        best_1EN = loss_CEN.argmin(dim=0, keepdim=True)  # the first of equals: the `max` rule's
        step_1EN = step_CEN.gather(0, best_1EN)
        _, q = _in_order(moved, w, unit_E1616, pivot_E16, step_1EN)
        code_E16N = e2m1_codes(torch.cat(q).transpose(0, 1))
        codes_EN8[:, rows] = pack_nibbles(code_E16N.transpose(1, 2))
        scale_EN[:, rows] = code_CEN.gather(0, best_1EN).squeeze(0)
        w.sub_(e2m1_values(code_E16N).mul_(step_1EN.transpose(0, 1)))


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
    """The E2M1 value nearest to FP32 `q`, ties to the even code.

    Adding and subtracting 1.5 * 2^n rounds to a multiple of 2^(n - 23): 1/2 below 2, 1 below 4, 2
    up to 6.
    """
    q = q.clamp(-E2M1_MAX, E2M1_MAX)
    size = q.abs()
    high = torch.where(size < 4, 1.5 * 2.0**23, 1.5 * 2.0**24)
    magic = torch.where(size < 2, 1.5 * 2.0**22, high)
    return q.add_(magic).sub_(magic)


DAMPING = 0.1  # at least
NOISE = 4.0  # times K / n; how it was chosen: ADR 11
LOOKAHEAD = 128  # columns whose feedback from all earlier ones is one GEMM


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """`unit_EKK`: I + U; `pivot_EK`: the diagonal of D."""

    unit_EKK: torch.Tensor
    pivot_EK: torch.Tensor


def damping_of(rows_E: torch.Tensor, width: int) -> torch.Tensor:
    """Damping of H as shares [E] of its mean diagonal, for `width` inputs and `rows_E` rows.

    Fewer rows than inputs count as that many, because the layer's moments fill in.
    """
    return (NOISE * width / rows_E.clamp(min=width)).clamp(min=DAMPING)


def factorize(hessian_EKK: torch.Tensor, damping: torch.Tensor | float = DAMPING) -> Feedback:
    """Factor H, damped by one share for all or by shares [E].

    Raises `CalibrationError` if the damped H is not finite or not positive definite.
    """
    mean_E1 = hessian_EKK.diagonal(dim1=1, dim2=2).mean(dim=1, keepdim=True)
    mean_E1 = torch.where(mean_E1 > 0, mean_E1, 1.0)
    share = damping.view(-1, 1) if isinstance(damping, torch.Tensor) else damping
    # Cholesky's factor is lower; that of the reversed matrix, reversed back, is upper.
    reversed_EKK = hessian_EKK.flip(1, 2)
    reversed_EKK.diagonal(dim1=1, dim2=2).add_(share * mean_E1)
    lower_EKK, info_E = torch.linalg.cholesky_ex(reversed_EKK)
    del reversed_EKK
    if bool(info_E.any()) or not bool(lower_EKK.diagonal(dim1=1, dim2=2).isfinite().all()):
        raise CalibrationError(
            "GPTQ: second moments of inputs are not positive definite, even damped; the model's"
            " activations are not finite or overflow, so use the recipe nvfp4"
        )
    unit_EKK = lower_EKK.flip(1, 2)
    del lower_EKK
    root_EK = unit_EKK.diagonal(dim1=1, dim2=2).clone()
    return Feedback(unit_EKK=unit_EKK.div_(root_EK.unsqueeze(1)), pivot_EK=root_EK.square())


def shrunk(
    sum_EKK: torch.Tensor, rows_E: torch.Tensor, pool_KK: torch.Tensor | None, pool_rows: float
) -> torch.Tensor:
    """Mean second moments, drawn to the layer's where an expert has fewer rows than inputs.

    With n rows for K inputs, the expert's own mean has weight min(1, n / K). `pool_KK` may be None
    if no expert has fewer. Takes diagonals [E, K] and [K] in the same way.
    """
    width = sum_EKK.shape[-1]
    rows = rows_E.view(-1, *(1,) * (sum_EKK.dim() - 1))
    mean = sum_EKK / rows.clamp(min=1.0)
    if pool_KK is None or pool_rows == 0:
        return mean
    share = (rows / width).clamp(max=1.0)
    return mean * share + (pool_KK / pool_rows) * (1 - share)


def round_experts(
    w_ENK: torch.Tensor, feedback: Feedback, global_scale_E: torch.Tensor
) -> QuantizedTensor:
    """GPTQ over all columns of a stack. `w_ENK` in any float dtype; K a multiple of 16."""
    experts, n, k = w_ENK.shape
    device, round_block = w_ENK.device, block_rounder(w_ENK.device)
    codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, n, k // NVFP4_BLOCK, dtype=torch.uint8, device=device)
    # Weights of columns to come, and w - rounded of those that are done.
    error_EKN = torch.empty(experts, k, n, dtype=torch.float32, device=device)
    error_EKN.copy_(w_ENK.transpose(1, 2))
    for start in range(0, k, LOOKAHEAD):
        end = min(start + LOOKAHEAD, k)
        moved_EWN = _moved(error_EKN[:, start:end], error_EKN, feedback, 0, start, end)
        for first in range(start, end, NVFP4_BLOCK):
            last = first + NVFP4_BLOCK
            moved_E16N = moved_EWN[:, first - start : last - start]
            round_block(
                _moved(moved_E16N, error_EKN, feedback, start, first, last),
                error_EKN[:, first:last],
                feedback.unit_EKK[:, first:last, first:last],
                feedback.pivot_EK[:, first:last],
                global_scale_E,
                codes[:, :, first // 2 : last // 2],
                scales[:, :, first // NVFP4_BLOCK],
            )
    block_scale = scales.view(torch.float8_e4m3fn)
    return QuantizedTensor(codes=codes, block_scale=block_scale, global_scale=global_scale_E)


def _moved(
    base_EWN: torch.Tensor,
    error_EKN: torch.Tensor,
    feedback: Feedback,
    begin: int,
    first: int,
    last: int,
) -> torch.Tensor:
    """Columns first .. last in `base`, moved by the errors of columns begin .. first."""
    if begin == first:
        return base_EWN
    unit_EWB = feedback.unit_EKK[:, begin:first, first:last].transpose(1, 2)
    return torch.baddbmm(base_EWN, unit_EWB, error_EKN[:, begin:first])


def block_rounder(device: torch.device) -> Callable[..., None]:
    """`round_block`, or on GPUs the kernel that gives the same bits."""
    if devices.refusal(device) is not None:
        return round_block
    from beamq.formats.kernels import triton_gptq  # Triton

    return triton_gptq.round_block
