"""FP8 (E4M3) with one FP32 scale per output row, in plain torch.

In:  a weight [N, K] in BF16, F16 or FP32.
Out: codes F8_E4M3 [N, K] and scale F32 [N, 1], value = code * scale, by the rule

    scale = amax_row / 448        code = E4M3(w / scale)

in FP32 from the values and the scale as stored: the per-channel rule of NVIDIA ModelOpt with an
FP32 scale. llm-compressor's FP8_DYNAMIC rounds the scale to BF16, which costs a little accuracy and
gains nothing, because the engines read FP32.

The amax of a row of zeros counts as 1.0, so its scale is 1/448 and its codes are zeros with their
signs. A scale is never below the smallest normal FP32 value. Values must be finite: NaN and
infinities saturate here and do not count towards a row's amax; the kernels count them and callers
refuse the tensor.
"""

from __future__ import annotations

import torch

from beamq.formats.numerics import E4M3_MAX, scale_from_amax, to_e4m3


def quantize_rows(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes F8_E4M3 [N, K] and scale F32 [N, 1] of `w_NK` [N, K]."""
    w = w_NK.float()
    magnitude = torch.where(w.isfinite(), w.abs(), 0.0)
    scale_N1 = scale_from_amax(magnitude.amax(dim=-1, keepdim=True), E4M3_MAX)
    return to_e4m3(w / scale_N1), scale_N1


def dequantize_rows(
    codes_NK: torch.Tensor, scale_N1: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[N, K] values in `dtype`: the FP32 product, rounded once more to `dtype`."""
    return (codes_NK.float() * scale_N1.float()).to(dtype)
