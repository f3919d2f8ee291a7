"""GPTQ for NVFP4: round so that the *product* with the inputs changes least, scales included.

In:  FP32 weights [E, N, K] of some experts, the second moments H [E, K, K] of their inputs as
     served, a global scale for each expert.
Out: packed codes and E4M3 block scales, of the same form as plain rounding gives.

The one idea (GPTQ, arXiv:2210.17323, in the equivalent form of LDLQ, arXiv:2307.13304): columns are
rounded in order, and each is first moved by what the errors of those before it cost, as far as it
can make up for that. With H = (I + U) D (I + U)^T, U strictly upper and D diagonal,

    x_k = w_k + sum over j < k of (w_j - rounded_j) * U_jk        what is rounded in place of w_k
    trace of (error H error^T) = sum over k of D_k * (x_k - rounded_k)^2

so the layer's squared error is a plain sum over columns, and a block's share of it is known once
the block is rounded. The scale of a block of 16 is therefore chosen by doing it: the block is
rounded with each of the sweep's 16 candidates around the moved values' own `max` scale, with
feedback inside the block, and the least sum wins.

H is damped by a tenth of its mean diagonal. Columns keep their natural order, which the file's
blocks need (and ordering by size of H did not help). One factorisation and no inverse is needed.

Cost for each expert: K^3/3 for the factor, N K^2 for the feedback, and 256 roundings a weight.
Limits: results depend on the order of FP32 sums, so on the device and its libraries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from beamq.errors import CalibrationError
from beamq.formats.numerics import E2M1_MAX, NVFP4_BLOCK, e2m1_codes, e2m1_values, pack_nibbles
from beamq.formats.nvfp4 import max_block_scales
from beamq.formats.sweep import LARGEST, SMALLEST, candidate_offsets

DAMPING = 0.1
LOOKAHEAD = 128  # columns whose feedback from all earlier ones is one GEMM


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """`unit_EKK`: I + U; `pivot_EK`: the diagonal of D."""

    unit_EKK: torch.Tensor
    pivot_EK: torch.Tensor


def factorize(hessian_EKK: torch.Tensor, damping: float = DAMPING) -> Feedback:
    """Factor the damped H. An input that is always zero is damped like the others.

    Raises `CalibrationError` if H is no matrix of second moments (not finite, not symmetric).
    """
    mean_E1 = hessian_EKK.diagonal(dim1=1, dim2=2).mean(dim=1, keepdim=True)
    mean_E1 = torch.where(mean_E1 > 0, mean_E1, 1.0)
    # Cholesky's factor is lower; that of the reversed matrix, reversed back, is upper.
    reversed_EKK = hessian_EKK.flip(1, 2)
    reversed_EKK.diagonal(dim1=1, dim2=2).add_(damping * mean_E1)
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
    """Means of second moments, drawn to the layer's where an expert has fewer rows than inputs.

    With n rows for K inputs the expert's own has weight min(1, n / K). `pool_KK` may be None where
    no expert has fewer. Works alike on diagonals [E, K] and [K].
    """
    width = sum_EKK.shape[-1]
    rows = rows_E.view(-1, *(1,) * (sum_EKK.dim() - 1))
    mean = sum_EKK / rows.clamp(min=1.0)
    if pool_KK is None or pool_rows == 0:
        return mean
    share = (rows / width).clamp(max=1.0)
    return mean * share + (pool_KK / pool_rows) * (1 - share)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedExperts:
    """`codes` U8 [E, N, K/2] and `block_scale` E4M3 [E, N, K/16]."""

    codes: torch.Tensor
    block_scale: torch.Tensor


def round_experts(
    w_ENK: torch.Tensor, feedback: Feedback, global_scale_E: torch.Tensor
) -> RoundedExperts:
    """GPTQ over all columns. `w_ENK` is FP32; K a multiple of 16."""
    experts, n, k = w_ENK.shape
    codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=w_ENK.device)
    scales = torch.empty(experts, n, k // NVFP4_BLOCK, dtype=torch.uint8, device=w_ENK.device)
    error_ENK = torch.zeros_like(w_ENK)
    for start in range(0, k, LOOKAHEAD):
        end = min(start + LOOKAHEAD, k)
        moved_ENW = w_ENK[:, :, start:end].clone()
        if start:
            moved_ENW.baddbmm_(error_ENK[:, :, :start], feedback.unit_EKK[:, :start, start:end])
        for first in range(start, end, NVFP4_BLOCK):
            here = slice(first, first + NVFP4_BLOCK)
            moved_EN16 = moved_ENW[:, :, first - start : first - start + NVFP4_BLOCK]
            if first > start:
                moved_EN16 = torch.baddbmm(
                    moved_EN16,
                    error_ENK[:, :, start:first],
                    feedback.unit_EKK[:, start:first, here],
                )
            code_EN16, scale_EN, error_EN16 = round_block(
                moved_EN16,
                w_ENK[:, :, here],
                feedback.unit_EKK[:, here, here],
                feedback.pivot_EK[:, here],
                global_scale_E,
            )
            error_ENK[:, :, here] = error_EN16
            codes[:, :, first // 2 : first // 2 + NVFP4_BLOCK // 2] = pack_nibbles(code_EN16)
            scales[:, :, first // NVFP4_BLOCK] = scale_EN
    return RoundedExperts(codes=codes, block_scale=scales.view(torch.float8_e4m3fn))


def round_block(
    moved_EN16: torch.Tensor,
    w_EN16: torch.Tensor,
    unit_E16: torch.Tensor,
    pivot_E16: torch.Tensor,
    global_scale_E: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale codes and w - rounded of one block, by the best of the candidates."""
    g_E1 = global_scale_E.view(-1, 1)
    middle_EN = max_block_scales(moved_EN16, g_E1).view(torch.uint8).to(torch.int16)
    offsets = torch.tensor(candidate_offsets(), dtype=torch.int16, device=w_EN16.device)
    code_CEN = (middle_EN + offsets.view(-1, 1, 1)).clamp_(SMALLEST, LARGEST).to(torch.uint8)
    step_CEN = code_CEN.view(torch.float8_e4m3fn).float().mul_(g_E1)
    loss_CEN, _ = _in_order(moved_EN16, w_EN16, unit_E16, pivot_E16, step_CEN)
    best_1EN = loss_CEN.argmin(dim=0, keepdim=True)  # the first of equals: `max` rule's own
    step_1EN = step_CEN.gather(0, best_1EN)
    _, x = _in_order(moved_EN16, w_EN16, unit_E16, pivot_E16, step_1EN)
    code_EN16 = e2m1_codes(torch.stack(x, dim=-1).squeeze(0) / step_1EN.squeeze(0).unsqueeze(-1))
    rounded_EN16 = e2m1_values(code_EN16).mul_(step_1EN.squeeze(0).unsqueeze(-1))
    return code_EN16, code_CEN.gather(0, best_1EN).squeeze(0), w_EN16 - rounded_EN16


def _in_order(
    moved_EN16: torch.Tensor,
    w_EN16: torch.Tensor,
    unit_E16: torch.Tensor,
    pivot_E16: torch.Tensor,
    step_CEN: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The block's share of the loss for each candidate, and what was rounded in each column."""
    x = [moved_EN16[..., j].expand_as(step_CEN) for j in range(NVFP4_BLOCK)]
    loss_CEN = torch.zeros_like(step_CEN)
    for j in range(NVFP4_BLOCK):
        rounded_CEN = _nearest(x[j] / step_CEN).mul_(step_CEN)
        missed_CEN = x[j] - rounded_CEN
        loss_CEN.addcmul_(missed_CEN.square_(), pivot_E16[:, j : j + 1])
        error_CEN = w_EN16[..., j] - rounded_CEN
        for k in range(j + 1, NVFP4_BLOCK):
            x[k] = torch.addcmul(x[k], error_CEN, unit_E16[:, j, k].view(-1, 1))
    return loss_CEN, x


def _nearest(q: torch.Tensor) -> torch.Tensor:
    """The E2M1 value nearest to FP32 `q`; ties are to the even code, as everywhere."""
    q = q.clamp(-E2M1_MAX, E2M1_MAX)
    size = q.abs()
    fine = torch.where(size < 2, q.mul(2).round_().mul_(0.5), q.round())
    return torch.where(size < 4, fine, q.mul(0.5).round_().mul_(2))
