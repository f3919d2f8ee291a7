"""The two small floating-point grids, rounding onto them, and low-rank sums, in plain torch.

E2M1 (FP4) has a sign and the magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6; a code is sign * 8 + index into
them. E4M3 (FP8, the "fn" kind) has no infinity, one NaN per sign and a largest value of 448.
Both are rounded to nearest, ties to the even code, and saturate: a value beyond the grid becomes
its end, never NaN.

Hardware and torch back ends disagree on what an E4M3 cast does above 448 (saturate, or NaN), so
values are clamped before the cast. And a value that rounds to zero keeps its sign in E2M1 unless it
was a zero itself (-0.0 becomes +0, -0.1 becomes -0), as in NVIDIA ModelOpt.
"""

from __future__ import annotations

from typing import Any

import torch

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
"""The smallest positive E4M3 value; a block scale is never less."""
SCALE_FLOOR = 2.0**-126
"""The smallest normal FP32 value; scales are at least this, so reciprocals are finite."""
FP32_END = 2.0**128 - 2.0**103
"""From here on FP32 rounds to infinity."""
NVFP4_BLOCK = 16
NVFP4_RANGE = E2M1_MAX * E4M3_MAX
"""Largest magnitude at global scale 1: 6 * 448 = 2688."""

# Midpoints between neighbouring magnitudes. A tie goes to the even code: down at a midpoint with an
# even lower neighbour, up at the others.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """U8 codes 0..15 of the nearest E2M1 values of FP32 `x`, any shape; NaN saturates."""
    magnitude = torch.nan_to_num(x.abs(), nan=E4M3_MAX)
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint in _TIES_DOWN:
        code += magnitude > midpoint
    for midpoint in _TIES_UP:
        code += magnitude >= midpoint
    return code | ((x < 0).to(torch.uint8) << 3)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """FP32 values of U8 codes 0..15, any shape."""
    signed = E2M1_MAGNITUDES + tuple(-m for m in E2M1_MAGNITUDES)
    table = torch.tensor(signed, dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack_nibbles(codes_NK: torch.Tensor) -> torch.Tensor:
    """[..., K] codes -> [..., K/2] bytes; the low nibble holds the even k."""
    return codes_NK[..., 0::2] | (codes_NK[..., 1::2] << 4)


def unpack_nibbles(packed_NH: torch.Tensor) -> torch.Tensor:
    """[..., K/2] bytes -> [..., K] codes, the inverse of `pack_nibbles`."""
    return torch.stack((packed_NH & 0x0F, packed_NH >> 4), dim=-1).flatten(-2)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """`x` (FP32) as E4M3: nearest even, saturating at +-448; NaN becomes +448 or -448."""
    # copysign: a NaN keeps its sign bit here, as in the kernels.
    top = torch.copysign(torch.full_like(x, E4M3_MAX), x)
    return torch.where(x.isnan(), top, x.clamp(-E4M3_MAX, E4M3_MAX)).to(torch.float8_e4m3fn)


def scale_from_amax(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """FP32 amax / `largest`, elementwise: finite and positive for any finite FP32 amax.

    An amax of zero counts as 1.0; a tiny one gives the smallest normal FP32 value.
    """
    # A tensor divisor: with a Python number CUDA multiplies by the reciprocal instead.
    scale = torch.where(amax == 0, 1.0, amax) / torch.full_like(amax, largest)
    return scale.clamp(min=SCALE_FLOOR)


def fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """FP32 x * y + z, rounded once; shapes broadcast.

    The FP64 product is exact. The FP64 sum is rounded to odd: an inexact one whose last bit is even
    moves to the neighbour on the exact sum's side. This has enough bits for the last rounding to be
    that of the exact sum, also to FP32's subnormal numbers.
    """
    product, addend = x.double() * y.double(), z.double()
    total = product + addend
    back = total - product
    rest = (product - (total - back)) + (addend - back)  # exactly what the sum lost
    bits = total.view(torch.int64)
    inexact = (rest > 0) | (rest < 0)  # NaN, where the sum is infinite: neither
    away = torch.where(rest.signbit() == total.signbit(), 1, -1)
    return torch.where(inexact & (bits & 1 == 0), bits + away, bits).view(torch.float64).float()


def add_low_rank(
    w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """`w` [..., N, K] + (b a) * scaling as `dtype`: how a LoRA adapter is merged into a weight.

    `w` is BF16, F16 or FP32; `a` FP32 [..., r, K]; `b` FP32 [..., N, r]. Each element takes the
    same FP32 operations in the same order on every device: sum = 0, then sum = fma(b_j, a_j, sum)
    for each j in order; sum * scaling (an FP32 number); w + that; one rounding to `dtype`. A value
    beyond `dtype`'s range becomes infinite, and a NaN the positive quiet one.
    """
    total = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
    for j in range(a.shape[-2]):
        total = fma(b[..., :, j : j + 1], a[..., j : j + 1, :], total)
    factor = torch.tensor(scaling, dtype=torch.float32, device=w.device)
    merged = w.float() + total * factor
    bits, nan = _NAN_BITS[dtype]
    nans = torch.full_like(merged, nan, dtype=bits)
    return torch.where(merged.isnan(), nans, merged.to(dtype).view(bits)).view(dtype)


_NAN_BITS = {
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
    torch.float32: (torch.int32, 0x7FC00000),
}

TORCH_DTYPES: dict[str, torch.dtype] = {  # by safetensors name
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def tensor_from_bytes(data: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over a writable buffer, shared, not copied. `dtype` is a safetensors name."""
    if 0 in shape:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(data, dtype=torch.uint8).view(TORCH_DTYPES[dtype]).reshape(shape)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
