"""The scale sweep: a block's scale is the best of 16 candidates, not what its largest value says.

In:  magnitudes in blocks of 16, the block scales of the `max` rule, the global scale.
Out: E4M3 block scales, each at most 7 codes below and 8 above that of the `max` rule.

The one idea: `max` puts the largest of 16 values on the grid's end, 6, and lets the other fifteen
fall where they may. Since codes and scales are all that is stored, every stored scale in the
neighbourhood can simply be tried: the block is rounded with it, and the least squared error wins.
A smaller scale clips the largest value and refines the rest, a larger one moves it from 6 to the
gap's other end, 4. No data is needed; `weight_K` (second moments of the inputs, say) counts some
columns' errors for more. A tie goes to the `max` rule's own scale, then to the smallest.

So that other implementations match every bit, the error is FP32 arithmetic in one order:

    r       = 1 / (s * global_scale)                        s the candidate; two roundings
    q       = |w| * r                                       not |w| / step: a sixth of the time
    d       = q - nearest E2M1 value of min(q, 6)
    error   = (s * s) * sum of (d * d) [* weight]           neighbours first, then pairs, ...

Codes are then made as ever, from the stored scale by IEEE division. Measured effect and what else
was tried: docs/results.md and ADR 8. Method: one of the searches over scales that round-to-nearest
quantizers have long used (OCTAV, arXiv:2206.06501; "Four Over Six", arXiv:2512.02010, tries two
scales for NVFP4); here over all stored scales near.

Limits: with a global scale below 2^-117, `r` may overflow, and the `max` rule's scale stays.
"""

from __future__ import annotations

import torch

from beamq.formats.numerics import E2M1_MAX, e2m1_codes, e2m1_values

BELOW, ABOVE = 7, 8
SMALLEST, LARGEST = 1, 126  # E4M3 codes of 2^-9 and 448


def sweep_scales(
    w_NB16: torch.Tensor,
    max_scale_NB: torch.Tensor,
    global_scale: torch.Tensor,
    weight_B16: torch.Tensor | None = None,
) -> torch.Tensor:
    """E4M3 [N, B] for FP32 `w_NB16`; `max_scale_NB` are the `max` rule's scales, E4M3."""
    magnitude_NB16 = w_NB16.abs()
    middle_NB = max_scale_NB.view(torch.uint8).to(torch.int16)
    best_NB, chosen_NB = torch.zeros_like(middle_NB, dtype=torch.float32), middle_NB
    for offset in candidate_offsets():
        code_NB = (middle_NB + offset).clamp(SMALLEST, LARGEST)
        error_NB = _error(magnitude_NB16, code_NB, global_scale, weight_B16)
        better_NB = error_NB < best_NB if offset else torch.ones_like(best_NB, dtype=torch.bool)
        best_NB = torch.where(better_NB, error_NB, best_NB)
        chosen_NB = torch.where(better_NB, code_NB, chosen_NB)
    return chosen_NB.to(torch.uint8).view(torch.float8_e4m3fn)


def candidate_offsets() -> tuple[int, ...]:
    """Codes from the `max` rule's, in the order in which ties are decided."""
    return (0, *range(-BELOW, 0), *range(1, ABOVE + 1))


def _error(
    magnitude_NB16: torch.Tensor,
    code_NB: torch.Tensor,
    global_scale: torch.Tensor,
    weight_B16: torch.Tensor | None,
) -> torch.Tensor:
    scale_NB = code_NB.to(torch.uint8).view(torch.float8_e4m3fn).float()
    step_NB = scale_NB * global_scale
    q_NB16 = magnitude_NB16 * (torch.ones_like(step_NB) / step_NB).unsqueeze(-1)
    # A NaN stays one: it is never better than the first candidate.
    distance_NB16 = q_NB16 - e2m1_values(e2m1_codes(q_NB16.clamp(max=E2M1_MAX)))
    term = distance_NB16 * distance_NB16
    if weight_B16 is not None:
        term = term * weight_B16
    while term.shape[-1] > 1:
        term = term[..., 0::2] + term[..., 1::2]
    return term.squeeze(-1) * (scale_NB * scale_NB)
