"""FP8: E4M3 codes with a scale per row, per block of 128 x 128 or per 32 values, in plain torch.

In:  a weight [N, K] in BF16, F16 or FP32, or a stack of them [..., N, K].
Out: codes F8_E4M3 [..., N, K] and scales, value = code * scale, by one of three rules, each in FP32
     from the values and the scale as stored:

    rows     F32 [N, 1]               scale = amax_row / 448
    blocks   F32 [N / 128, K / 128]   scale = max(amax_block, 1e-10) / 448     (rounded up, ragged)
    MXFP8    U8 [N, K / 32]           scale = 2^(byte - 127), the least with 448 * scale >= amax
    all                               code  = E4M3(w / scale)

Rows are the per-channel rule of NVIDIA ModelOpt with an FP32 scale. llm-compressor's FP8_DYNAMIC
rounds the scale to BF16, which costs a little accuracy and gains nothing, because the engines read
FP32. Blocks are DeepSeek-V3's rule, as vLLM and SkyRL compute it: the division is a division, where
others multiply by the reciprocal. MXFP8 is the OCP microscaling format with the scale rounded up,
as in ModelOpt, vLLM and Transformer Engine; OCP's own rule rounds it down and saturates.

Zeros: the amax of a row of zeros counts as 1.0; a block of zeros has the scale 1e-10 / 448; 32
zeros have the byte 0, that is 2^-127. Their codes are zeros with their signs. A row's scale is
never below the smallest normal FP32 value. Values must be finite: NaN and infinities saturate here
and do not count towards an amax; the kernels count them and callers refuse the tensor.
"""

from __future__ import annotations

import torch

from beamq.formats.numerics import E4M3_MAX, scale_from_amax, to_e4m3

FP8_BLOCK = 128
"""Rows and columns of a block that shares an FP32 scale."""
BLOCK_AMAX_FLOOR = 1e-10
"""A block's amax counts as at least this, so that a block of zeros has a scale."""
MX_BLOCK = 32
"""Values of a row that share a power of two."""


def quantize_rows(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes F8_E4M3 [N, K] and scale F32 [N, 1] of `w_NK` [N, K]."""
    w = w_NK.float()
    scale_N1 = scale_from_amax(_magnitudes(w).amax(dim=-1, keepdim=True), E4M3_MAX)
    return to_e4m3(w / scale_N1), scale_N1


def dequantize_rows(
    codes_NK: torch.Tensor, scale_N1: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[N, K] values in `dtype`: the FP32 product, rounded once more to `dtype`."""
    return (codes_NK.float() * scale_N1.float()).to(dtype)


def quantize_blocks(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes F8_E4M3 [..., N, K] and scale F32 [..., ceil(N/128), ceil(K/128)] of `w_NK`.

    The blocks at the end of an N or K that is no multiple of 128 are smaller.
    """
    w, amax_RC = w_NK.float(), block_amax(w_NK)
    scale_RC = amax_RC / torch.full_like(amax_RC, E4M3_MAX)
    return to_e4m3(w / spread_blocks(scale_RC, *w.shape[-2:])), scale_RC


def block_amax(w_NK: torch.Tensor) -> torch.Tensor:
    """F32 [..., ceil(N/128), ceil(K/128)]: the largest magnitude of each block, at least 1e-10."""
    n, k = w_NK.shape[-2:]
    padded = torch.nn.functional.pad(
        _magnitudes(w_NK.float()), (0, -k % FP8_BLOCK, 0, -n % FP8_BLOCK)
    )
    rows, columns = padded.shape[-2] // FP8_BLOCK, padded.shape[-1] // FP8_BLOCK
    blocks = padded.reshape(*w_NK.shape[:-2], rows, FP8_BLOCK, columns, FP8_BLOCK)
    return blocks.amax(dim=(-3, -1)).clamp(min=BLOCK_AMAX_FLOOR)


def quantize_groups(x_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes F8_E4M3 [..., K] and scale F32 [..., ceil(K/128)] of activations for weights in blocks:
    the blocks' rule for 128 values of a row."""
    k = x_TK.shape[-1]
    x = torch.nn.functional.pad(x_TK.float(), (0, -k % FP8_BLOCK))
    x_C128 = x.reshape(*x_TK.shape[:-1], -1, FP8_BLOCK)
    amax_C = _magnitudes(x_C128).amax(dim=-1).clamp(min=BLOCK_AMAX_FLOOR)
    scale_C = amax_C / torch.full_like(amax_C, E4M3_MAX)
    return to_e4m3(x_C128 / scale_C.unsqueeze(-1)).flatten(-2)[..., :k], scale_C


def dequantize_blocks(
    codes_NK: torch.Tensor, scale_RC: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[..., N, K] values in `dtype`: the FP32 product, rounded once more to `dtype`."""
    scale_NK = spread_blocks(scale_RC.float(), *codes_NK.shape[-2:])
    return (codes_NK.float() * scale_NK).to(dtype)


def spread_blocks(scale_RC: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """[..., n, k]: the scale of each element, from one for each block of 128 x 128."""
    rows = scale_RC.repeat_interleave(FP8_BLOCK, dim=-2)[..., :n, :]
    return rows.repeat_interleave(FP8_BLOCK, dim=-1)[..., :k]


def quantize_mx(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8: codes F8_E4M3 [..., K] and scale bytes U8 [..., K/32]; K a multiple of 32."""
    k = w_NK.shape[-1]
    if k % MX_BLOCK:
        raise ValueError(f"K is {k}; MXFP8 needs a multiple of {MX_BLOCK}")
    w_B32 = w_NK.float().reshape(*w_NK.shape[:-1], k // MX_BLOCK, MX_BLOCK)
    byte_B = mx_scale_bytes(_magnitudes(w_B32).amax(dim=-1))
    # A power of two: the product is the quotient.
    reciprocal_B1 = mx_scale_values(254 - byte_B).unsqueeze(-1)
    return to_e4m3(w_B32 * reciprocal_B1).flatten(-2), byte_B


def mx_scale_bytes(amax: torch.Tensor) -> torch.Tensor:
    """U8 bytes e + 127 of the least 2^e with 448 * 2^e >= `amax` (finite FP32, not negative).

    448 is 1.75 * 2^8. With amax = m * 2^k and 1 <= m < 2, e is k - 8 where m <= 1.75 and k - 7
    otherwise. It is read off the bits, because FP32's log2(amax / 448) rounds down to an integer
    just above 1.75 * 2^k. Below 2^-127 the scale stays there.
    """
    bits = amax.contiguous().view(torch.int32)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    return (exponent - 8 + (fraction > 0x600000)).clamp(min=0).to(torch.uint8)


def mx_scale_values(byte: torch.Tensor) -> torch.Tensor:
    """FP32 2^(byte - 127) of U8 scale bytes; of 255 NaN."""
    return byte.view(torch.float8_e8m0fnu).float()


def dequantize_mx(
    codes_NK: torch.Tensor, byte_NB: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """[..., K] values in `dtype`, exact in FP32, and in BF16 but where they are below 2^-126."""
    codes_B32 = codes_NK.float().reshape(*byte_NB.shape, MX_BLOCK)
    return (codes_B32 * mx_scale_values(byte_NB).unsqueeze(-1)).flatten(-2).to(dtype)


def _magnitudes(w: torch.Tensor) -> torch.Tensor:
    return torch.where(w.isfinite(), w.abs(), 0.0)
