"""The plain torch twin of the CPU kernels: the same functions over raw buffers.

In and out as in `_cpu` (cpu.py chooses between the two and documents both). It is slow and has two
uses: it runs where no compiler was found at install time, and tests compare the C code with it, so
with formats/nvfp4.py and formats/fp8.py.

Limits: sums of squares may differ from the C code's in the last bits, because the order of
addition differs. Everything else is equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from beamq.formats import fp8, numerics, nvfp4
from beamq.formats.numerics import (
    E2M1_MAGNITUDES,
    E4M3_MIN,
    FP32_END,
    NVFP4_BLOCK,
    SCALE_FLOOR,
    e2m1_values,
    unpack_nibbles,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_GLOBAL_SCALE_MAX = 2.0**117


def amax(src: Buffer, dtype: str) -> tuple[float, int, int]:
    values = _source(src, dtype, 1).flatten()
    if values.numel() == 0:
        return 0.0, 0, -1
    finite = values.isfinite()
    return float(torch.where(finite, values, 0.0).abs().amax()), *_count(~finite)


def nvfp4_quantize(
    src: Buffer, dtype: str, k: int, global_scale: float, out_codes: Buffer, out_scales: Buffer
) -> tuple[int, int, int, int]:
    return nvfp4_sweep(src, dtype, k, global_scale, None, out_codes, out_scales, scale_rule="max")


def nvfp4_sweep(
    src: Buffer,
    dtype: str,
    k: int,
    global_scale: float,
    weights: Buffer | None,
    out_codes: Buffer,
    out_scales: Buffer,
    scale_rule: str = "sweep",
) -> tuple[int, int, int, int]:
    _check_nvfp4(k, global_scale)
    w_NK = _source(src, dtype, k)
    n = w_NK.shape[0]
    codes = _sized("out_codes", out_codes, n * k // 2)
    scales = _sized("out_scales", out_scales, n * k // NVFP4_BLOCK)
    weight_K = None if weights is None else _sized("weights", weights, k * 4).view(torch.float32)
    q = nvfp4.quantize(w_NK, global_scale, scale_rule=scale_rule, weight_K=weight_K)
    codes.copy_(q.codes.flatten())
    scales.copy_(q.block_scale.view(torch.uint8).flatten())
    amax_B = w_NK.view(-1, NVFP4_BLOCK).abs().amax(dim=-1)
    ideal_B = amax_B / (6.0 * q.global_scale)
    finite_B = amax_B.isfinite()
    # Beyond 464, and at or below 2^-10, rounding to nearest leaves the range of scales.
    saturated = int(((ideal_B > 464.0) & finite_B).sum())
    underflow = int(((ideal_B <= E4M3_MIN / 2) & (ideal_B > 0)).sum())
    return saturated, underflow, int((amax_B == 0).sum()), int((~finite_B).sum())


def fp8_quantize_rows(
    src: Buffer, dtype: str, k: int, out_codes: Buffer, out_scales: Buffer
) -> tuple[int, int, int]:
    w_NK = _source(src, dtype, k)
    n = w_NK.shape[0]
    codes_out = _sized("out_codes", out_codes, n * k)
    scales_out = _sized("out_scales", out_scales, n * 4)
    codes, scale = fp8.quantize_rows(w_NK)
    codes_out.copy_(codes.view(torch.uint8).flatten())
    scales_out.copy_(scale.flatten().view(torch.uint8))
    finite = w_NK.isfinite()
    zero_rows = int((torch.where(finite, w_NK, 0.0) == 0).all(dim=-1).sum())
    return *_count(~finite), zero_rows


def fp8_quantize_groups(
    src: Buffer, dtype: str, k: int, mx: bool, out_codes: Buffer, out_scales: Buffer
) -> tuple[int, int, int]:
    w_NK = _source(src, dtype, k)
    n = w_NK.shape[0]
    scale_nbytes = _group_scale_nbytes(n, k, mx)
    codes_out = _sized("out_codes", out_codes, n * k)
    scales_out = _sized("out_scales", out_scales, scale_nbytes)
    codes, scale = fp8.quantize_mx(w_NK) if mx else fp8.quantize_blocks(w_NK)
    codes_out.copy_(codes.view(torch.uint8).flatten())
    scales_out.copy_(_bytes(scale))
    finite_NK = w_NK.isfinite()
    values_NK = torch.where(finite_NK, w_NK, 0.0)
    if mx:
        zero = (values_NK.view(-1, fp8.MX_BLOCK) == 0).all(dim=-1)
    else:  # a block of ones keeps its amax under the rule, one of zeros has the least scale
        _, scale = fp8.quantize_blocks((values_NK != 0).float())
        zero = scale < 1.0 / 448.0 / 2
    return *_count(~finite_NK), int(zero.sum())


def fp8_dequantize_groups(
    codes: Buffer, scales: Buffer, k: int, mx: bool, out: Buffer, out_dtype: str
) -> None:
    dtype = _out_dtype(out_dtype)
    codes_NK = _rows("codes", codes, k)
    n = codes_NK.shape[0]
    scale_bytes = _sized("scales", scales, _group_scale_nbytes(n, k, mx))
    target = _sized("out", out, n * k * dtype.itemsize)
    scale_NK = _spread(scale_bytes, n, k, mx)
    values = codes_NK.view(torch.float8_e4m3fn).float() * scale_NK
    target.copy_(_bytes(_cast(values, dtype)))


def _group_scale_nbytes(n: int, k: int, mx: bool) -> int:
    if not mx:
        return 4 * -(-n // fp8.FP8_BLOCK) * -(-k // fp8.FP8_BLOCK)
    if k % fp8.MX_BLOCK:
        raise ValueError(f"k is {k}; MXFP8 needs a positive multiple of {fp8.MX_BLOCK}")
    return n * k // fp8.MX_BLOCK


def _spread(scale_bytes: torch.Tensor, n: int, k: int, mx: bool) -> torch.Tensor:
    """FP32 [n, k]: the scale of each element."""
    if mx:
        scales = fp8.mx_scale_values(scale_bytes.clone()).view(n, -1)
        return scales.repeat_interleave(fp8.MX_BLOCK, dim=-1)
    rows = -(-n // fp8.FP8_BLOCK)
    scale_RC = scale_bytes.clone().view(torch.float32).view(rows, -(-k // fp8.FP8_BLOCK))
    return fp8.spread_blocks(scale_RC, n, k)


def nvfp4_dequantize(
    codes: Buffer, scales: Buffer, k: int, global_scale: float, out: Buffer, out_dtype: str
) -> None:
    _check_nvfp4(k, global_scale)
    dtype = _out_dtype(out_dtype)
    packed = _rows("codes", codes, k // 2)
    n = packed.shape[0]
    block_scale = _sized("scales", scales, n * k // NVFP4_BLOCK)
    target = _sized("out", out, n * k * dtype.itemsize)
    q = nvfp4.QuantizedTensor(
        codes=packed,
        block_scale=block_scale.view(torch.float8_e4m3fn).view(n, k // NVFP4_BLOCK),
        global_scale=torch.tensor(global_scale, dtype=torch.float32),
    )
    target.copy_(_bytes(_cast(nvfp4.dequantize(q, torch.float32), dtype)))


def fp8_dequantize_rows(codes: Buffer, scales: Buffer, k: int, out: Buffer, out_dtype: str) -> None:
    dtype = _out_dtype(out_dtype)
    codes_NK = _rows("codes", codes, k)
    n = codes_NK.shape[0]
    scale_N1 = _sized("scales", scales, n * 4).view(torch.float32).view(n, 1)
    target = _sized("out", out, n * k * dtype.itemsize)
    values = fp8.dequantize_rows(codes_NK.view(torch.float8_e4m3fn), scale_N1, torch.float32)
    target.copy_(_bytes(_cast(values, dtype)))


def convert(src: Buffer, src_dtype: str, out: Buffer, out_dtype: str) -> int:
    values = _source(src, src_dtype, 1).flatten()
    dtype = _out_dtype(out_dtype)
    if src_dtype == out_dtype:
        raise ValueError("source and output have the same dtype; copy the bytes")
    target = _sized("out", out, values.numel() * dtype.itemsize)
    converted = _cast(values, dtype)
    target.copy_(_bytes(converted))
    return int((values.isfinite() & converted.isinf()).sum())


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
    w_NK = _source(src, dtype, k)
    if out_dtype not in ("F32", dtype):
        raise ValueError(f"out_dtype '{out_dtype}' is neither F32 nor src's")
    if not abs(scaling) < FP32_END:
        raise ValueError("scaling must be finite in FP32")
    a_RK = _source(a, "F32", k)
    n, r = w_NK.shape[0], a_RK.shape[0]
    if r == 0:
        raise ValueError("a is empty; the rank is at least 1")
    b_NR = _sized("b", b, n * r * 4).clone().view(torch.float32).view(n, r)
    target = _sized("out", out, n * k * _DTYPES[out_dtype].itemsize)
    target.copy_(_bytes(numerics.add_low_rank(w_NK, a_RK, b_NR, scaling, _DTYPES[out_dtype])))


def nvfp4_compare(
    src: Buffer,
    src_dtype: str,
    codes: Buffer,
    scales: Buffer,
    k: int,
    global_scale: float,
    swept: bool = False,
) -> tuple[float, float, float, int, int]:
    _check_nvfp4(k, global_scale)
    x_B16 = _source(src, src_dtype, k).double().view(-1, NVFP4_BLOCK)
    n = x_B16.numel() // k
    packed = _sized("codes", codes, n * k // 2)
    scale_bytes = _sized("scales", scales, n * k // NVFP4_BLOCK)
    code_B16 = unpack_nibbles(packed).view(-1, NVFP4_BLOCK)
    block_scale_B1 = scale_bytes.view(torch.float8_e4m3fn).double().unsqueeze(-1)
    # Rounded to FP32 first, because that is how a global scale is stored.
    g = torch.tensor(global_scale, dtype=torch.float32).double()
    step_B1 = block_scale_B1 * g
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    low = torch.cat((torch.tensor([-0.25], dtype=torch.float64), midpoints))
    high = torch.cat((midpoints, torch.tensor([torch.nan], dtype=torch.float64)))
    m_B16 = (code_B16 & 7).long()
    top_B1 = 6.0 * (block_scale_B1 + _half_gap_above(scale_bytes).unsqueeze(-1)) * g
    if swept:
        top_B1 = torch.full_like(top_B1, torch.inf)
    high_B16 = torch.where(m_B16 == 7, top_B1, high[m_B16] * step_B1)
    sound_B1 = step_B1 > 0
    if swept:
        sound_B1 = sound_B1 & ~_foreign_scales(x_B16.float(), scale_bytes, g.float()).unsqueeze(-1)
    low_B16 = torch.where(sound_B1, low[m_B16] * step_B1, torch.nan)
    decoded_B16 = e2m1_values(code_B16).double() * step_B1
    return _compare(x_B16, decoded_B16, code_B16 >= 8, low_B16, high_B16)


def _foreign_scales(
    x_B16: torch.Tensor, scale_bytes: torch.Tensor, g: torch.Tensor
) -> torch.Tensor:
    """Blocks whose scale the sweep cannot choose; for all-zero blocks it has no choice."""
    middle_B = nvfp4.max_block_scales(x_B16, g).view(torch.uint8)
    offset_B = scale_bytes.to(torch.int16) - middle_B.to(torch.int16)
    zero_B = (x_B16 == 0).all(dim=-1)
    return (offset_B < -nvfp4.BELOW) | (offset_B > nvfp4.ABOVE) | (zero_B & (offset_B != 0))


def fp8_compare(
    src: Buffer, src_dtype: str, codes: Buffer, scales: Buffer, k: int
) -> tuple[float, float, float, int, int]:
    x_NK = _source(src, src_dtype, k).double()
    n = x_NK.shape[0]
    code_NK = _sized("codes", codes, n * k).view(n, k)
    scale_N1 = _sized("scales", scales, n * 4).view(torch.float32).double().view(n, 1)
    return _compare_e4m3(x_NK, code_NK, scale_N1)


def fp8_compare_groups(
    src: Buffer, src_dtype: str, codes: Buffer, scales: Buffer, k: int, mx: bool, exact: bool
) -> tuple[float, float, float, int, int]:
    w_NK = _source(src, src_dtype, k)
    n = w_NK.shape[0]
    scale_nbytes = _group_scale_nbytes(n, k, mx)
    code_NK = _sized("codes", codes, n * k).view(n, k)
    scale_bytes = _sized("scales", scales, scale_nbytes)
    scale_NK = _spread(scale_bytes, n, k, mx).double()
    foreign_NK = None
    if mx and exact:
        _, wanted = fp8.quantize_mx(w_NK)
        foreign = scale_bytes.view(wanted.shape) != wanted
        foreign_NK = foreign.repeat_interleave(fp8.MX_BLOCK, dim=-1)
    return _compare_e4m3(w_NK.double(), code_NK, scale_NK, foreign_NK)


def _compare_e4m3(
    x_NK: torch.Tensor,
    code_NK: torch.Tensor,
    scale_N1: torch.Tensor,
    foreign_NK: torch.Tensor | None = None,
) -> tuple[float, float, float, int, int]:
    """FP64 values and scales (of rows or elements); those of `foreign_NK` are out of bound."""
    value_NK = code_NK.view(torch.float8_e4m3fn).double()
    above_NK = _half_gap_above(code_NK)
    below_NK = _half_gap_above(torch.where(code_NK & 0x7F == 0, code_NK, code_NK - 1))
    sound = scale_N1 > 0 if foreign_NK is None else (scale_N1 > 0) & ~foreign_NK
    low_NK = torch.where(sound, (value_NK.abs() - below_NK) * scale_N1, torch.nan)
    high_NK = (value_NK.abs() + above_NK) * scale_N1
    return _compare(x_NK, value_NK * scale_N1, code_NK >= 0x80, low_NK, high_NK)


def equal(a: Buffer, b: Buffer) -> int:
    first, second = memoryview(a).cast("B"), memoryview(b).cast("B")
    if len(first) != len(second):
        raise ValueError(f"the second buffer holds {len(second)} bytes, needs {len(first)}")
    if first == second:
        return -1
    return int((_tensor(first) != _tensor(second)).int().argmax())


def scan_e4m3_scales(scales: Buffer) -> tuple[int, int, int, int]:
    codes = _tensor(memoryview(scales).cast("B"))
    magnitude = codes & 0x7F
    nan, zero = magnitude == 0x7F, magnitude == 0
    negative = (codes >= 0x80) & ~nan & ~zero
    _, first = _count(nan | zero | negative)
    return int(nan.sum()), int(zero.sum()), int(negative.sum()), first


def _count(faulty: torch.Tensor) -> tuple[int, int]:
    """How many are true, and the flat index of the first one, or -1."""
    count = int(faulty.sum())
    return count, int(faulty.flatten().int().argmax()) if count else -1


def _compare(
    x: torch.Tensor,
    decoded: torch.Tensor,
    negative: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
) -> tuple[float, float, float, int, int]:
    """All tensors are FP64. Tests low <= x <= high, x taken along the code's sign, with slack for
    FP32 rounding."""
    if x.numel() == 0:
        return 0.0, 0.0, 0.0, 0, -1
    error = x - decoded
    along = torch.where(negative, -x, x)
    slack = x.abs() * 2.0**-22 + 2.0**-146
    outside = ~((low - slack <= along) & (along <= high + slack) & x.isfinite())
    worst = float(torch.nan_to_num(error.abs(), nan=0.0, posinf=torch.inf).amax())
    return float((error * error).sum()), float((x * x).sum()), worst, *_count(outside)


def _half_gap_above(codes: torch.Tensor) -> torch.Tensor:
    """Half the distance from each E4M3 magnitude to the next above; FP64."""
    exponent = ((codes & 0x7F) >> 3).clamp(min=1).double()
    return torch.exp2(exponent - 11.0)


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP32 `values.to(dtype)`, with every NaN of a BF16 result the quiet one of its sign.

    torch's own choice of NaN depends on the length and the machine.
    """
    cast = values.to(dtype)
    if dtype is torch.bfloat16:
        bits = torch.where(values.signbit(), -0x40, 0x7FC0).to(torch.int16)
        cast = torch.where(values.isnan(), bits, cast.view(torch.int16)).view(dtype)
    return cast


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().flatten().view(torch.uint8)


def _tensor(view: memoryview) -> torch.Tensor:
    """U8 tensor over a buffer. Empty or read-only buffers, which torch refuses, are copied."""
    if len(view) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def _sized(name: str, buffer: Buffer, nbytes: int) -> torch.Tensor:
    view = memoryview(buffer).cast("B")
    if len(view) != nbytes:
        raise ValueError(f"{name} holds {len(view)} bytes, needs {nbytes}")
    if name.startswith("out") and view.readonly:
        raise TypeError(f"{name} is read-only; a bytearray or a writable memoryview is needed")
    return _tensor(view)


def _rows(name: str, buffer: Buffer, row_nbytes: int) -> torch.Tensor:
    """U8 [N, row_nbytes]."""
    view = memoryview(buffer).cast("B")
    if row_nbytes <= 0 or len(view) % row_nbytes:
        raise ValueError(f"{name}: {len(view)} bytes are not whole rows of {row_nbytes} bytes")
    return _tensor(view).view(-1, row_nbytes)


def _source(src: Buffer, dtype: str, k: int) -> torch.Tensor:
    """FP32 [N, K] copy of a source buffer."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype '{dtype}' is not one of {', '.join(_DTYPES)}")
    if k <= 0:
        raise ValueError(f"k is {k}; a row has at least one value")
    values = _rows("src", src, _DTYPES[dtype].itemsize * k).clone()
    return values.view(_DTYPES[dtype]).float()


def _out_dtype(name: str) -> torch.dtype:
    if name not in ("BF16", "F32"):
        raise ValueError(f"out_dtype '{name}' is not one of BF16, F32")
    return _DTYPES[name]


def _check_nvfp4(k: int, global_scale: float) -> None:
    if k <= 0 or k % NVFP4_BLOCK:
        raise ValueError(f"k is {k}; NVFP4 needs a positive multiple of {NVFP4_BLOCK}")
    if not SCALE_FLOOR <= global_scale <= _GLOBAL_SCALE_MAX:
        raise ValueError("global_scale must be finite, from 2**-126 to 2**117")
