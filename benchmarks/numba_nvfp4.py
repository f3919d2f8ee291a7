"""The NVFP4 rule as a numba loop: the alternative that kernels_cpu.py measures."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

f32, u32 = np.float32, np.uint32
Bits = NDArray[np.uint16]
Bytes = NDArray[np.uint8]


@numba.njit(inline="always")
def _e4m3(x: Any) -> Any:  # FP32, 2^-9 <= x <= 448
    if x < f32(2.0**-6):
        return u32(round(x * f32(512.0)))  # nearest even
    bits = f32(x).view(u32)
    return u32((bits + u32(0x7FFFF) + ((bits >> u32(20)) & u32(1))) >> u32(20)) - u32(960)


@numba.njit(inline="always")
def _e4m3_value(code: Any) -> Any:
    if code < u32(8):
        return f32(code) * f32(2.0**-9)
    return u32((code << u32(20)) + u32(120 << 23)).view(f32)


@numba.njit(nogil=True, error_model="numpy", boundscheck=False)
def quantize(src: Bits, global_scale: np.float32, codes: Bytes, scales: Bytes) -> None:
    """Quantize `src`, the bits of BF16 values in whole blocks of 16, into `codes` and `scales`."""
    nibbles = np.empty(16, np.uint8)
    for block in range(src.size // 16):
        base = block * 16
        top = np.uint16(0)
        for j in range(16):
            top = max(top, src[base + j] & np.uint16(0x7FFF))
        ideal = u32(u32(top) << u32(16)).view(f32) / (f32(6.0) * global_scale)
        if ideal == f32(0.0):
            ideal = f32(1.0)
        code = _e4m3(min(max(ideal, f32(2.0**-9)), f32(448.0)))
        scales[block] = code
        step = _e4m3_value(code) * global_scale
        for j in range(16):
            bits = u32(src[base + j])
            q = u32((bits & u32(0x7FFF)) << u32(16)).view(f32) / step
            c = np.uint8(q > f32(0.25)) + np.uint8(q >= f32(0.75)) + np.uint8(q > f32(1.25))
            c += np.uint8(q >= f32(1.75)) + np.uint8(q > f32(2.5)) + np.uint8(q >= f32(3.5))
            c += np.uint8(q > f32(5.0))
            sign = np.uint8((bits >> u32(12)) & u32(8)) if q > f32(0.0) else np.uint8(0)
            nibbles[j] = c | sign
        for j in range(8):
            codes[base // 2 + j] = nibbles[2 * j] | (nibbles[2 * j + 1] << np.uint8(4))
