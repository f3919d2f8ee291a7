"""GPU kernels: the bytes of formats/nvfp4.py and fp8.py near memory speed.

In:  contiguous CUDA tensors in BF16, F16 or FP32, one matrix [N, K] or a stack [G, N, K]; for a
     conversion job (`nvfp4_group`, `fp8_rows`) addresses of device memory.
Out: tensors on the same device, made here or given; counts of odd blocks and rows, added to int32
     tensors on the device, so that nothing waits for the GPU until the caller looks.

The Triton code is in triton_*.py; this module checks shapes, chooses block sizes and launches. Each
function has a plain torch twin (`nvfp4_quantize` is `nvfp4.quantize`, and so on), and tests compare
every byte.

Non-finite values never raise here: NVFP4 counts blocks, FP8 counts rows, and `amax` is infinity or
NaN; only the caller knows which tensor they are in. A shape or dtype that does not fit is a defect
of the caller and raises ValueError before a launch.

Limits: NVIDIA GPUs of compute capability 8.9 or later (the E4M3 cast), Triton installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from beamq.formats import nvfp4
from beamq.formats.fp8 import FP8_BLOCK, MX_BLOCK
from beamq.formats.kernels import COUNTS_WORD, SCALE_WORD, triton_fp8, triton_nvfp4, triton_sweep
from beamq.formats.kernels.triton_fp8 import FLOOR
from beamq.formats.numerics import NVFP4_BLOCK, TORCH_DTYPES
from beamq.formats.nvfp4 import QuantizedTensor, round_up

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_WARP = 32
_AMAX_TILE, _AMAX_STEPS = 2048, 8
_MX_TILE = 64  # groups of 32 values of a program
_BLOCK_PART = 32  # rows of a block at a time
_TILE = 256  # blocks, or words of codes, of a program: one a thread


def amax(w: torch.Tensor) -> torch.Tensor:
    """FP32 [G] (or [] for a matrix): largest magnitude of each; infinity or NaN if it holds one."""
    stack = _stack(w)
    peaks = torch.zeros(stack.shape[0], dtype=torch.int32, device=w.device)
    if stack[0].nbytes % 4:
        raise ValueError(f"a matrix of {stack[0].nbytes} bytes; expected a multiple of 4")
    if stack.numel():
        _launch_amax(_words(stack), peaks, stack[0].nbytes // 4, stack.shape[0], w.dtype)
    return peaks.view(torch.float32).view(w.shape[:-2])


def nvfp4_quantize(
    w: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    scale_rule: str = "max",
    out: QuantizedTensor | None = None,
    counts: torch.Tensor | None = None,
) -> QuantizedTensor:
    """`nvfp4.quantize` of a matrix or a stack; `global_scale` FP32 [] or [G].

    `counts` int32 [4] or [G, 4] is added to: blocks saturated, raised from underflow, zero, not
    finite (see `cpu.Nvfp4Counts`).
    """
    stack = _stack(w)
    lead, n, k = w.shape[:-2], *w.shape[-2:]
    if k % NVFP4_BLOCK:
        raise ValueError(f"K is {k}; NVFP4 needs a multiple of {NVFP4_BLOCK}")
    scales = global_scale.to(w.device, torch.float32).reshape(-1)
    if scales.numel() not in (1, stack.shape[0]):
        raise ValueError(f"{scales.numel()} global scales for {stack.shape[0]} tensors")
    if out is None:
        out = QuantizedTensor(
            codes=torch.empty(*lead, n, k // 2, dtype=torch.uint8, device=w.device),
            block_scale=w.new_empty(*lead, n, k // NVFP4_BLOCK, dtype=torch.float8_e4m3fn),
            global_scale=global_scale,
        )
    if counts is None:
        counts = torch.zeros(stack.shape[0], 4, dtype=torch.int32, device=w.device)
    if counts.numel() != 4 * stack.shape[0]:
        raise ValueError(f"{counts.numel()} counts for {stack.shape[0]} tensors, expected 4 each")
    if stack.numel():
        arrays = (
            _words(stack),
            _words(out.codes),
            out.block_scale.view(torch.int8),
            scales.expand(stack.shape[0]).contiguous(),
            counts,
        )
        _launch_quantize(scale_rule, arrays, n * k // NVFP4_BLOCK, stack.shape[0], w.dtype)
    return out


def nvfp4_groups(
    parts: Sequence[torch.Tensor], linears: int, scale_rule: str
) -> tuple[list[QuantizedTensor], torch.Tensor, torch.Tensor]:
    """Stacks [G, n, K]: matrix g of each is one of the parts that share global scale g.

    Returns the parts, quantized; the global scales FP32 [G, linears], one in a row as often as
    there are linears, so that each has memory of its own; and `counts` int32 [parts, G, 4] (see
    `nvfp4_quantize`).
    """
    groups, device = parts[0].shape[0], parts[0].device
    peaks = torch.zeros(groups, dtype=torch.int32, device=device)
    for part in parts:
        stack = _stack(part)
        _launch_amax(_words(stack), peaks, stack[0].nbytes // 4, groups, part.dtype)
    scales = torch.empty(groups, linears, dtype=torch.float32, device=device)
    _scale_kernel[(groups,)](peaks.view(torch.float32), scales, LINEARS=linears)
    counts = torch.zeros(len(parts), groups, 4, dtype=torch.int32, device=device)
    quantized = [
        nvfp4_quantize(part, scales[:, 0], scale_rule=scale_rule, counts=found)
        for part, found in zip(parts, counts, strict=True)
    ]
    return quantized, scales, counts


@triton.jit
def _scale_kernel(peaks: tl.tensor, scales: tl.tensor, LINEARS: tl.constexpr) -> None:
    """`scales` [groups, LINEARS] for the largest magnitudes `peaks` [groups]; a group a program."""
    group = tl.program_id(0)
    amax = tl.load(peaks + group)
    one_if_zero = tl.where(amax == 0, 1.0, amax)
    scale = tl.maximum(tl.div_rn(one_if_zero, 2688.0), FLOOR)
    for linear in tl.static_range(LINEARS):
        tl.store(scales + group * LINEARS + linear, scale)


def _launch_amax(src: Any, peaks: Any, words: int, tensors: int, dtype: torch.dtype) -> None:
    triton_nvfp4.amax_kernel[(triton.cdiv(words, _AMAX_TILE * _AMAX_STEPS), tensors)](
        src, peaks, words, DTYPE=_DTYPES[dtype], TILE=_AMAX_TILE, STEPS=_AMAX_STEPS, num_warps=8
    )


def _launch_quantize(
    scale_rule: str, arrays: tuple[Any, ...], blocks: int, tensors: int, dtype: torch.dtype
) -> None:
    """`arrays`: source words, code words, scales, global scales, counts; `blocks` a tensor."""
    kernel, tile, options = triton_nvfp4.quantize_kernel, _TILE, {}
    if scale_rule == "sweep":
        kernel, tile = triton_sweep.sweep_kernel, triton_sweep.TILE
        options = {"enable_fp_fusion": False}
    kernel[(triton.cdiv(blocks, tile), tensors)](
        *arrays,
        blocks,
        DTYPE=_DTYPES[dtype],
        TILE=tile,
        EVEN=blocks % tile == 0,
        num_warps=tile // _WARP,
        **options,
    )


def nvfp4_dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`nvfp4.dequantize` to BF16 or FP32. A stack has a global scale for each matrix."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype {dtype}; expected bfloat16 or float32")
    lead, n, half = q.codes.shape[:-2], *q.codes.shape[-2:]
    out = torch.empty(*lead, n, 2 * half, dtype=dtype, device=q.codes.device)
    tensors = q.codes.numel() // max(1, n * half)
    words = n * half // 4
    if out.numel():
        triton_nvfp4.dequantize_kernel[(triton.cdiv(words, _TILE), tensors)](
            _words(q.codes),
            q.block_scale.view(torch.int8),
            q.global_scale.to(torch.float32).reshape(-1).expand(tensors).contiguous(),
            out,
            words,
            OUT=_DTYPES[dtype],
            TILE=_TILE,
            num_warps=_TILE // _WARP,
        )
    return out


def fp8_quantize_rows(
    w: torch.Tensor,
    *,
    swiglu: bool = False,
    codes: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8.quantize_rows`: codes E4M3 [..., K] and scale F32 [..., 1] of rows [..., K].

    With `swiglu` the input is [..., 2K], gate then up, and the rows are silu(gate) * up.
    `counts` int32 [2] is added to: rows that are not finite, rows of zeros.
    """
    _check(w)
    k = w.shape[-1] // 2 if swiglu else w.shape[-1]
    rows = w.numel() // max(1, w.shape[-1])
    if codes is None:
        codes = w.new_empty(*w.shape[:-1], k, dtype=torch.float8_e4m3fn)
    if scale is None:
        scale = w.new_empty(*w.shape[:-1], 1, dtype=torch.float32)
    if counts is None:
        counts = torch.zeros(2, dtype=torch.int32, device=w.device)
    if rows and k:
        _launch_fp8((w, codes, scale, counts), rows, k, swiglu=swiglu)
    return codes, scale


def _launch_fp8(arrays: tuple[Any, ...], rows: int, k: int, *, swiglu: bool) -> None:
    """`arrays`: source, codes, scales, counts."""
    chunk = _chunk(k)
    triton_fp8.quantize_rows_kernel[(rows,)](
        *arrays,
        stride=2 * k if swiglu else k,
        K=k,
        CHUNK=chunk,
        SWIGLU=swiglu,
        num_warps=_warps(chunk),
    )


def fp8_quantize(
    rounding: str, w: torch.Tensor, *, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes E4M3 and scales of a matrix or a stack [G, N, K] by a rule of formats/fp8.py: "fp8"
    (`quantize_rows`), "fp8-block" (`quantize_blocks`) or "mxfp8" (`quantize_mx`).

    `counts` int32 [2] is added to: rows or groups that are not finite, those of zeros.
    """
    if rounding == "fp8":
        return fp8_quantize_rows(w, counts=counts)
    stack = _stack(w)
    lead, n, k = w.shape[:-2], *w.shape[-2:]
    dtype, shape = torch.float32, (*lead, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
    if rounding == "mxfp8":
        if k % MX_BLOCK:
            raise ValueError(f"K is {k}; MXFP8 needs a multiple of {MX_BLOCK}")
        dtype, shape = torch.uint8, (*lead, n, k // MX_BLOCK)
    codes = w.new_empty(w.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(shape, dtype=dtype, device=w.device)
    if counts is None:
        counts = torch.zeros(2, dtype=torch.int32, device=w.device)
    if w.numel():
        _launch_groups(rounding, (w, codes, scale, counts), stack.shape[0], n, k)
    return codes, scale


def _launch_groups(rounding: str, arrays: tuple[Any, ...], matrices: int, n: int, k: int) -> None:
    """`arrays`: source, codes, scales, counts."""
    if rounding == "mxfp8":
        groups = matrices * n * k // MX_BLOCK
        triton_fp8.quantize_mx_kernel[(triton.cdiv(groups, _MX_TILE),)](
            *arrays, groups, TILE=_MX_TILE, num_warps=4
        )
        return
    grid = (triton.cdiv(k, FP8_BLOCK), triton.cdiv(n, FP8_BLOCK), matrices)
    triton_fp8.quantize_blocks_kernel[grid](*arrays, n, K=k, PART=_BLOCK_PART, num_warps=8)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in FP32, rounded once; [S, 2I] -> [S, I]."""
    _check(gate_up)
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    if out.numel():
        chunk = _chunk(width)
        triton_fp8.swiglu_kernel[(out.numel() // width,)](
            gate_up, out, WIDTH=width, CHUNK=chunk, num_warps=_warps(chunk)
        )
    return out


def nvfp4_tokens(
    x: torch.Tensor,
    input_scale: torch.Tensor,
    *,
    swiglu: bool = False,
    rows: torch.Tensor | None = None,
    scale_rows: torch.Tensor | None = None,
    padded_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 tokens as NVFP4 operands: codes U8 [S, K/2] and swizzled block scales E4M3, flat.

    Row s reads token `rows[s]` (int32 or int64 on the device; default s) and its scales go to row
    `scale_rows[s]` (default s) of a buffer for `padded_rows` rows, a multiple of 128.
    """
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        raise ValueError(f"tokens {list(x.shape)} {x.dtype}; expected BF16 [T, K]")
    _check(x)
    k = x.shape[1] // 2 if swiglu else x.shape[1]
    if k % NVFP4_BLOCK:
        raise ValueError(f"K is {k}; NVFP4 needs a multiple of {NVFP4_BLOCK}")
    count = x.shape[0] if rows is None else rows.numel()
    padded = round_up(count, nvfp4.ROWS) if padded_rows is None else padded_rows
    codes = torch.empty(count, k // 2, dtype=torch.uint8, device=x.device)
    per_row = k // NVFP4_BLOCK
    columns = round_up(per_row, nvfp4.COLUMNS)
    scales = torch.zeros(padded * columns, dtype=torch.uint8, device=x.device)
    if count:
        tile = 128
        triton_nvfp4.quantize_tokens_kernel[(triton.cdiv(count * per_row, tile),)](
            _words(x),
            x if rows is None else rows,
            x if scale_rows is None else scale_rows,
            _words(codes),
            scales.view(torch.int8),
            input_scale.to(torch.float32).reshape(1),
            count * per_row,
            PER_ROW=per_row,
            GATHER=rows is not None,
            PLACED=scale_rows is not None,
            SWIGLU=swiglu,
            TILE=tile,
            num_warps=4,
        )
    return codes, scales.view(torch.float8_e4m3fn)


def _chunk(k: int) -> int:
    """Length of a row's chunks: a power of two up to 2,048 that divides the row, if one does."""
    divisor = k & -k
    return min(2048, divisor if divisor >= 256 else max(16, triton.next_power_of_2(min(k, 1024))))


def _warps(chunk: int) -> int:
    return max(1, min(8, chunk // (8 * _WARP)))  # eight values, 16 bytes, a thread


def _stack(w: torch.Tensor) -> torch.Tensor:
    _check(w)
    if w.dim() not in (2, 3):
        raise ValueError(f"shape {list(w.shape)}; expected [N, K] or [G, N, K]")
    return w.unsqueeze(0) if w.dim() == 2 else w


def _check(w: torch.Tensor) -> None:
    if w.dtype not in _DTYPES:
        raise ValueError(f"dtype {w.dtype}; expected BF16, F16 or FP32")
    if w.device.type != "cuda":
        raise ValueError(f"device {w.device}; expected a CUDA device")
    if not w.is_contiguous() or w.data_ptr() % 16:
        raise ValueError("expected a contiguous tensor that starts at a multiple of 16 bytes")


def _words(t: torch.Tensor) -> torch.Tensor:
    """The same memory as int32."""
    return t.view(-1).view(torch.int32)


# The kernels of one conversion job, launched one after another with no wait in between.
#
# In:  addresses of device memory, multiples of 16: the source bytes of packed rows [n, k] (for an
#      NVFP4 scale group the rows of all members, one after another), and room for codes, scales and
#      `RESULT_NBYTES` zeros.
# Out: codes and scales; in `info` a `KernelResult`, for one copy to the host.
#
# The global scale of a group is computed on the device: computing it on the host would stop the
# stream of copies and kernels for each of 25,000 groups. It is one IEEE division, so its bits are
# those of `cpu.nvfp4_global_scale`, which the caller compares.
#
# Kernels get bare addresses, because making a view of a tensor needs the interpreter, of which
# conversion has no time to spare (convert/gpu_queue.py). They run in the current stream.


@dataclass(frozen=True, slots=True)
class Pointer:
    """What Triton accepts for a tensor: an address and the dtype of what lies there."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def nvfp4_group(
    source: int, codes: int, scales: int, info: int, *, dtype: str, n: int, k: int, scale_rule: str
) -> None:
    """Codes U8 [n, k/2] and block scales E4M3 [n, k/16] with one global scale for all rows.

    `dtype` is the source's ("BF16", "F16", "F32"); `scale_rule` is "max" or "sweep".
    """
    of = TORCH_DTYPES[dtype]
    src = Pointer(source, torch.int32)
    _launch_amax(src, Pointer(info, torch.int32), n * k * of.itemsize // 4, 1, of)
    scale = Pointer(info + 4 * SCALE_WORD, torch.float32)
    _scale_kernel[(1,)](Pointer(info, torch.float32), scale, LINEARS=1)
    arrays = (
        src,
        Pointer(codes, torch.int32),
        Pointer(scales, torch.int8),
        scale,
        Pointer(info + 4 * COUNTS_WORD, torch.int32),
    )
    _launch_quantize(scale_rule, arrays, n * k // NVFP4_BLOCK, 1, of)


def fp8_rows(
    source: int,
    codes: int,
    scales: int,
    info: int,
    *,
    rounding: str,
    dtype: str,
    n: int,
    k: int,
) -> None:
    """Codes E4M3 [n, k] and the scales of `fp8_quantize`."""
    arrays = (
        Pointer(source, TORCH_DTYPES[dtype]),
        Pointer(codes, torch.float8_e4m3fn),
        Pointer(scales, torch.uint8 if rounding == "mxfp8" else torch.float32),
        Pointer(info + 4 * COUNTS_WORD, torch.int32),
    )
    if rounding == "fp8":
        _launch_fp8(arrays, n, k, swiglu=False)
    else:
        _launch_groups(rounding, arrays, 1, n, k)
