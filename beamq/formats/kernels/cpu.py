"""CPU kernels over raw buffers, without torch: conversion and verification run on these.

In:  bytes-like buffers (bytes, bytearray, memoryview, mmap, NumPy arrays) at any alignment, with
     the dtype's safetensors name ("BF16", "F16", "F32"). `k` is the length of a row; a buffer holds
     whole rows. Outputs are writable buffers of exactly the right size.
Out: bytes equal to those of formats/nvfp4.py and formats/fp8.py, and small records of counts.

The C extension `_cpu` does the work and releases the GIL, so threads scale over chunks of rows.
Where it could not be built, `torch_twin` computes the same, some fifty times slower. `BACKEND` says
which is in use; BEAMQ_CPU_KERNELS, "torch" or "c", insists on one of them. `LACK` is None, or where
the slow one is in use for want of the other, a sentence with the cause and the remedy.

Every function raises ValueError, before it writes anything, for a size, dtype or k that does not
fit: a defect of the caller. Non-finite values are counted and never raised, since only the caller
knows which tensor they are in.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from beamq.errors import EnvironmentFault

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class AmaxResult:
    """The largest magnitude of a buffer, and what is not finite in it."""

    amax: float
    """Largest magnitude of the finite values (an exact FP32 number); 0.0 if there are none."""
    nonfinite: int
    first_nonfinite: int
    """Index of the first NaN or infinity, -1 if there is none."""


@dataclass(frozen=True, slots=True)
class Nvfp4Counts:
    """Numbers of blocks of 16, by what became of their scale."""

    saturated: int
    """The ideal scale is above what rounds to 448: the global scale is too small, values clip."""
    underflow: int
    """The ideal scale would round to 0 and became 2^-9: small next to the tensor's amax."""
    zero: int
    """All values are zero; the scale is 1.0."""
    nonfinite: int
    """The block holds a NaN or an infinity: its bytes mean nothing, refuse the tensor."""


@dataclass(frozen=True, slots=True)
class Fp8Counts:
    """What is out of the ordinary in FP8 rows."""

    nonfinite: int
    first_nonfinite: int
    """Index in the buffer, -1 if there is none."""
    zero_rows: int
    """Rows, or groups, of zeros; they have the rule's least scale, rows 1/448."""


@dataclass(frozen=True, slots=True)
class BlockComparison:
    """A source and its quantized form, element by element; results of chunks may be added."""

    sum_sq_error: float
    sum_sq_source: float
    max_abs_error: float
    out_of_bound: int
    """Elements that no rounding to nearest would give (see `nvfp4_compare`)."""
    first_out_of_bound: int
    """Index in the buffer, -1 if there is none."""


@dataclass(frozen=True, slots=True)
class ScaleScan:
    """Faulty bytes among stored E4M3 scales, which must be positive numbers."""

    nan: int
    zero: int
    negative: int
    first: int
    """Index of the first of any kind, -1 if there is none."""


def _remedy(missing: bool) -> str:
    """How to get the compiled kernels: in a clone they are built, elsewhere installed."""
    tree = Path(__file__).resolve().parents[3]
    if (tree / "setup.py").is_file() and (tree / "beamq" / "formats").is_dir():
        where = f"in {tree}"
        if missing:
            return f"run `python setup.py build_ext --inplace` {where}, with a C compiler"
        return f"run `python setup.py build_ext --inplace --force` {where}, with a C compiler"
    return "reinstall beamq where there is a C compiler"


def _choose() -> tuple[Any, Literal["c", "torch"], str | None]:
    """The back end, its name, and `LACK`."""
    wanted = os.environ.get("BEAMQ_CPU_KERNELS", "")
    if wanted not in ("", "c", "torch"):
        raise EnvironmentFault(f"BEAMQ_CPU_KERNELS is '{wanted}'; it may be 'c' or 'torch'")
    lack = None
    if wanted != "torch":
        try:
            from beamq.formats.kernels import _cpu  # absent where no compiler was found

            return _cpu, "c", None
        except ImportError as error:
            missing = not list(Path(__file__).parent.glob("_cpu.*.so"))
            why = "are not built" if missing else f"cannot be loaded ({error})"
            remedy = _remedy(missing)
            if wanted == "c":
                raise EnvironmentFault(
                    f"BEAMQ_CPU_KERNELS=c, but the compiled CPU kernels {why}; {remedy}"
                ) from error
            lack = (
                f"the compiled CPU kernels {why}, so conversion on a CPU is about fifty times"
                f" slower; {remedy}"
            )
    from beamq.formats.kernels import torch_twin  # imports torch

    return torch_twin, "torch", lack


_backend, BACKEND, LACK = _choose()


def nvfp4_global_scale(amax: float) -> float:
    """`formats.nvfp4.global_scale_from_amax` without torch: the FP32 number amax / 2688.

    `amax` is an FP32 number, so FP64 division rounded to FP32 is the correctly rounded FP32 one.
    """
    quotient: float = struct.unpack("<f", struct.pack("<f", (amax or 1.0) / 2688.0))[0]
    return max(quotient, 2.0**-126)


def amax(src: Buffer, dtype: str) -> AmaxResult:
    return AmaxResult(*_backend.amax(src, dtype))


def nvfp4_quantize(
    src: Buffer,
    dtype: str,
    k: int,
    global_scale: float,
    out_codes: Buffer,
    out_scales: Buffer,
    *,
    scale_rule: str = "max",
    weights: Buffer | None = None,
) -> Nvfp4Counts:
    """Rows [N, k] -> `out_codes` [N, k/2] and `out_scales` E4M3 [N, k/16]; k a multiple of 16.

    `scale_rule` is "max" or "sweep". The sweep takes `weights`, k FP32 numbers that weigh the
    squared errors of the columns. Counts are those of the `max` rule's scales in both cases.
    """
    if scale_rule == "sweep":
        counts = _backend.nvfp4_sweep(src, dtype, k, global_scale, weights, out_codes, out_scales)
    elif scale_rule == "max" and weights is None:
        counts = _backend.nvfp4_quantize(src, dtype, k, global_scale, out_codes, out_scales)
    else:
        raise ValueError(f"scale_rule '{scale_rule}' is not 'sweep', or 'max' without weights")
    return Nvfp4Counts(*counts)


def fp8_quantize_rows(
    src: Buffer, dtype: str, k: int, out_codes: Buffer, out_scales: Buffer
) -> Fp8Counts:
    """Rows [N, k] -> `out_codes` E4M3 [N, k] and `out_scales` F32 [N]."""
    return Fp8Counts(*_backend.fp8_quantize_rows(src, dtype, k, out_codes, out_scales))


def fp8_quantize(
    rounding: str, src: Buffer, dtype: str, k: int, out_codes: Buffer, out_scales: Buffer
) -> Fp8Counts:
    """Rows [N, k] -> `out_codes` E4M3 [N, k] and the scales of a rule of formats/fp8.py: "fp8" F32
    [N], "fp8-block" F32 [N/128, k/128] (rounded up) or "mxfp8" U8 [N, k/32].

    Blocks begin at the buffer's first row, so all but the last rows come by multiples of 128.
    """
    if rounding == "fp8":
        return fp8_quantize_rows(src, dtype, k, out_codes, out_scales)
    mx = _is_mx(rounding)
    return Fp8Counts(*_backend.fp8_quantize_groups(src, dtype, k, mx, out_codes, out_scales))


def _is_mx(rounding: str) -> bool:
    if rounding not in ("mxfp8", "fp8-block"):
        raise ValueError(f"'{rounding}' is not one of fp8, fp8-block, mxfp8")
    return rounding == "mxfp8"


def nvfp4_dequantize(
    codes: Buffer, scales: Buffer, k: int, global_scale: float, out: Buffer, out_dtype: str
) -> None:
    """FP32((code * block_scale) * global_scale) to `out`, "F32" or rounded once more to "BF16".

    The product in parentheses is exact.
    """
    _backend.nvfp4_dequantize(codes, scales, k, global_scale, out, out_dtype)


def fp8_dequantize_rows(codes: Buffer, scales: Buffer, k: int, out: Buffer, out_dtype: str) -> None:
    """FP32(code * scale) to `out`, "F32" or rounded once more to "BF16"."""
    _backend.fp8_dequantize_rows(codes, scales, k, out, out_dtype)


def fp8_dequantize(
    rounding: str, codes: Buffer, scales: Buffer, k: int, out: Buffer, out_dtype: str
) -> None:
    """FP32(code * scale) to `out`, "F32" or rounded once more to "BF16"; scales as those of
    `fp8_quantize`."""
    if rounding == "fp8":
        fp8_dequantize_rows(codes, scales, k, out, out_dtype)
    else:
        _backend.fp8_dequantize_groups(codes, scales, k, _is_mx(rounding), out, out_dtype)


def convert(src: Buffer, src_dtype: str, out: Buffer, out_dtype: str) -> int:
    """F32 or F16 to "BF16" (nearest even), BF16 or F16 to "F32" (exact).

    Returns how many finite values became infinite (FP32 beyond BF16's range). NaN stays NaN.
    """
    overflowed: int = _backend.convert(src, src_dtype, out, out_dtype)
    return overflowed


def add_low_rank(
    src: Buffer,
    dtype: str,
    k: int,
    a: Buffer,
    b: Buffer,
    scaling: float,
    out: Buffer,
    out_dtype: str,
) -> None:
    """`numerics.add_low_rank`: src [N, k] + (b a) * scaling, to `out` [N, k].

    `a` is FP32 [r, k] and `b` FP32 [N, r], with r at least 1. `out_dtype` is "F32" or src's own;
    then `out` may be `src` itself. No other overlap is allowed, and it is not looked for.
    """
    _backend.add_low_rank(src, dtype, k, a, b, scaling, out, out_dtype)


def nvfp4_compare(
    src: Buffer,
    src_dtype: str,
    codes: Buffer,
    scales: Buffer,
    k: int,
    global_scale: float,
    *,
    swept: bool = False,
) -> BlockComparison:
    """Decode and compare with the source rows that the codes were made from.

    With s = block_scale * global_scale, an element is in bound if |x| lies, in the direction of its
    code's sign, between the midpoints to the neighbouring E2M1 magnitudes times s. For the code 6
    the upper end is 6 * global_scale * (block_scale + half the E4M3 gap above it): as far as values
    reach beyond the grid when the block scale was rounded down to nearest. Deliberate clipping is
    thus out of bound. Both ends are widened by what FP32 rounding may move them (2^-22 of x). A
    scale that is NaN, zero or negative puts its whole block out of bound.

    With `swept`, values beyond the grid may be clipped to 6, and a block scale that is not among
    the sweep's candidates for the block puts the whole block out of bound.
    """
    return BlockComparison(
        *_backend.nvfp4_compare(src, src_dtype, codes, scales, k, global_scale, swept)
    )


def fp8_compare(
    src: Buffer,
    src_dtype: str,
    codes: Buffer,
    scales: Buffer,
    k: int,
    *,
    rounding: str = "fp8",
    exact: bool = False,
) -> BlockComparison:
    """Like `nvfp4_compare`, on the E4M3 grid times the scale; 448 reaches up to 464. Scales as
    those of `fp8_quantize`.

    With `exact`, a byte of MXFP8 that is not the rule's puts its 32 values out of bound.
    """
    if rounding == "fp8":
        return BlockComparison(*_backend.fp8_compare(src, src_dtype, codes, scales, k))
    mx = _is_mx(rounding)
    return BlockComparison(
        *_backend.fp8_compare_groups(src, src_dtype, codes, scales, k, mx, exact)
    )


def equal(a: Buffer, b: Buffer) -> int:
    """Index of the first byte in which two buffers of one size differ, or -1."""
    first: int = _backend.equal(a, b)
    return first


def scan_e4m3_scales(scales: Buffer) -> ScaleScan:
    return ScaleScan(*_backend.scan_e4m3_scales(scales))
