"""A conversion job's kernels on the GPU: launched one after another, nothing waits in between.

In:  addresses of device memory: source bytes of packed rows [n, k] (of an NVFP4 scale group the
     members' rows one below the other), and room for codes, scales and `INFO_BYTES` of zeros.
Out: codes and scales as formats/nvfp4.py and fp8.py have them; in `info` what the caller has to
     know, for one copy to the host (group_info.py).

The global scale of a group is computed where the largest magnitude is, on the device: fetching the
one to compute the other would stop the stream of copies and kernels for each of 25,000 groups. It
is one IEEE division, so its bits are those of `cpu.nvfp4_global_scale`, and the caller compares.

Kernels are launched on bare addresses: a view of a tensor costs a turn at the interpreter, of which
conversion has none to spare (conversion/cuda_driver.py).
Limits: as gpu.py; addresses are multiples of 16. Launches go to the current stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from beamq.formats.kernels import gpu, gpu_fp8, gpu_nvfp4, gpu_sweep
from beamq.formats.kernels.group_info import COUNTS_WORD, SCALE_WORD
from beamq.formats.numerics import NVFP4_BLOCK
from beamq.header import ITEMSIZE
from beamq.torch_dtypes import TORCH_DTYPES

_CODES = {"BF16": 0, "F16": 1, "F32": 2}
_FLOOR = tl.constexpr(2.0**-126)


@dataclass(frozen=True, slots=True)
class Pointer:
    """What Triton takes for a tensor: an address and the dtype of what lies there."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


@triton.jit
def _scale_kernel(info: tl.tensor, SCALE: tl.constexpr) -> None:
    """The global scale behind amax in `info`; FP32 words, one program."""
    amax = tl.load(info)
    one_if_zero = tl.where(amax == 0, 1.0, amax)
    tl.store(info + SCALE, tl.maximum(tl.div_rn(one_if_zero, 2688.0), _FLOOR))


def nvfp4_group(
    source: int, codes: int, scales: int, info: int, *, dtype: str, n: int, k: int, rule: str
) -> None:
    """Codes U8 [n, k/2] and block scales E4M3 [n, k/16] with one global scale for all rows.

    `dtype` is the source's ("BF16", "F16", "F32"); `rule` is "max" or "sweep".
    """
    words, blocks = n * k * ITEMSIZE[dtype] // 4, n * k // NVFP4_BLOCK
    src = Pointer(source, torch.int32)
    gpu_nvfp4.amax_kernel[(triton.cdiv(words, gpu._AMAX_TILE * gpu._AMAX_STEPS), 1)](
        src,
        Pointer(info, torch.int32),
        words,
        DTYPE=_CODES[dtype],
        TILE=gpu._AMAX_TILE,
        STEPS=gpu._AMAX_STEPS,
        num_warps=8,
    )
    _scale_kernel[(1,)](Pointer(info, torch.float32), SCALE=SCALE_WORD)
    sweeps = rule == "sweep"
    kernel = gpu_sweep.sweep_kernel if sweeps else gpu_nvfp4.quantize_kernel
    tile = gpu_sweep._TILE if sweeps else gpu._BLOCKS
    more = {"enable_fp_fusion": False} if sweeps else {}
    kernel[(triton.cdiv(blocks, tile), 1)](
        src,
        Pointer(codes, torch.int32),
        Pointer(scales, torch.int8),
        Pointer(info + 4 * SCALE_WORD, torch.float32),
        Pointer(info + 4 * COUNTS_WORD, torch.int32),
        blocks,
        DTYPE=_CODES[dtype],
        TILE=tile,
        EVEN=blocks % tile == 0,
        num_warps=tile // 32,
        **more,
    )


def fp8_rows(
    source: int, codes: int, scales: int, info: int, *, dtype: str, n: int, k: int
) -> None:
    """Codes E4M3 [n, k] and row scales F32 [n, 1]."""
    chunk = gpu._chunk(k)
    gpu_fp8.quantize_rows_kernel[(n,)](
        Pointer(source, TORCH_DTYPES[dtype]),
        Pointer(codes, torch.float8_e4m3fn),
        Pointer(scales, torch.float32),
        Pointer(info + 4 * COUNTS_WORD, torch.int32),
        stride=k,
        K=k,
        CHUNK=chunk,
        SWIGLU=False,
        num_warps=gpu._warps(chunk),
    )
