"""A conversion job's kernels on the GPU: launched one after another, nothing waits in between.

In:  flat uint8 tensors on the device: source bytes of packed rows [n, k] (of an NVFP4 scale group
     the members' rows one below the other), and room for codes, scales and `INFO_BYTES` of info.
Out: codes and scales as formats/nvfp4.py and fp8.py have them; in `info` what the caller has to
     know, for one copy to the host (group_info.py).

The global scale of a group is computed where the largest magnitude is, on the device: fetching the
one to compute the other would stop the stream of copies and kernels for each of 25,000 groups. It
is one IEEE division, so its bits are those of `cpu.nvfp4_global_scale`, and the caller compares.

Limits: as gpu.py. Launches go to the current stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from beamq.formats.kernels import gpu, gpu_sweep
from beamq.formats.kernels.group_info import COUNTS_WORD, SCALE_WORD
from beamq.formats.numerics import NVFP4_BLOCK
from beamq.formats.nvfp4 import QuantizedTensor
from beamq.torch_dtypes import TORCH_DTYPES

_FLOOR = tl.constexpr(2.0**-126)


@triton.jit
def _scale_kernel(peak: tl.tensor, info: tl.tensor, SCALE: tl.constexpr) -> None:
    """amax and global scale into `info`; FP32 words, one program."""
    amax = tl.load(peak)
    one_if_zero = tl.where(amax == 0, 1.0, amax)
    scale = tl.maximum(tl.div_rn(one_if_zero, 2688.0), _FLOOR)
    tl.store(info, amax)
    tl.store(info + SCALE, scale)


def nvfp4_group(
    source: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    info: torch.Tensor,
    *,
    dtype: str,
    n: int,
    k: int,
    rule: str,
) -> None:
    """Codes U8 [n, k/2] and block scales E4M3 [n, k/16] with one global scale for all rows.

    `dtype` is the source's ("BF16", "F16", "F32"); `rule` is "max" or "sweep".
    """
    w = source.view(TORCH_DTYPES[dtype]).view(n, k)
    words = info.view(torch.int32)
    words.zero_()
    _scale_kernel[(1,)](gpu.amax(w), words.view(torch.float32), SCALE=SCALE_WORD)
    scale = words.view(torch.float32)[SCALE_WORD : SCALE_WORD + 1]
    out = QuantizedTensor(
        codes=codes.view(n, k // 2),
        block_scale=scales.view(torch.float8_e4m3fn).view(n, k // NVFP4_BLOCK),
        global_scale=scale,
    )
    quantize = gpu_sweep.nvfp4_sweep if rule == "sweep" else gpu.nvfp4_quantize
    quantize(w, scale, out=out, counts=words[COUNTS_WORD : COUNTS_WORD + 4])


def fp8_rows(
    source: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    info: torch.Tensor,
    *,
    dtype: str,
    n: int,
    k: int,
) -> None:
    """Codes E4M3 [n, k] and row scales F32 [n, 1]."""
    words = info.view(torch.int32)
    words.zero_()
    gpu.fp8_quantize_rows(
        source.view(TORCH_DTYPES[dtype]).view(n, k),
        codes=codes.view(torch.float8_e4m3fn).view(n, k),
        scale=scales.view(torch.float32).view(n, 1),
        counts=words[COUNTS_WORD : COUNTS_WORD + 2],
    )
