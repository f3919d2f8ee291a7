"""GPU kernels over CUDA tensors: the bytes of formats/nvfp4.py and fp8.py, near memory speed.

In:  contiguous CUDA tensors in BF16, F16 or FP32, one matrix [N, K] or a stack [G, N, K].
Out: tensors on the same device, made here or given; counts of odd blocks and rows, added to int32
     tensors on the device, so that nothing waits for the GPU until the caller looks.

The Triton code is in gpu_nvfp4.py, gpu_fp8.py and gpu_activations.py; this file checks shapes,
chooses block sizes and launches. Each function has a plain twin: `nvfp4_quantize` is
`nvfp4.quantize`, and so on; tests compare every byte.

Non-finite values are never raised here: NVFP4 counts blocks, FP8 rows, and `amax` shows them as
infinity or NaN; which tensor they are in is known to the caller only. A shape or dtype that doesn't
fit raises ValueError before anything is launched: a defect of the caller.

Limits: NVIDIA GPUs of compute capability 8.9 or later (the E4M3 cast), Triton installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from beamq.formats import nvfp4
from beamq.formats.kernels import COUNTS_WORD, SCALE_WORD, triton_fp8, triton_nvfp4, triton_sweep
from beamq.formats.numerics import NVFP4_BLOCK, TORCH_DTYPES
from beamq.formats.nvfp4 import QuantizedTensor, round_up
from beamq.io.safetensors_header import ITEMSIZE

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_WARP = 32
_AMAX_TILE, _AMAX_STEPS = 2048, 8
_BLOCKS = 256  # of a program, one a thread


def amax(w: torch.Tensor) -> torch.Tensor:
    """FP32 [G] (or [] for a matrix): largest magnitude of each; infinity or NaN if it holds one."""
    stack = _stack(w)
    words = stack[0].nbytes // 4
    peaks = torch.zeros(stack.shape[0], dtype=torch.int32, device=w.device)
    if words * 4 != stack[0].nbytes:
        raise ValueError(f"a matrix of {stack[0].nbytes} bytes; expected a multiple of 4")
    if stack.numel():
        grid = (triton.cdiv(words, _AMAX_TILE * _AMAX_STEPS), stack.shape[0])
        triton_nvfp4.amax_kernel[grid](
            _words(stack),
            peaks,
            words,
            DTYPE=_DTYPES[w.dtype],
            TILE=_AMAX_TILE,
            STEPS=_AMAX_STEPS,
            num_warps=8,
        )
    return peaks.view(torch.float32).view(w.shape[:-2])


def nvfp4_quantize(
    w: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    out: QuantizedTensor | None = None,
    counts: torch.Tensor | None = None,
) -> QuantizedTensor:
    """`nvfp4.quantize` of a matrix or a stack; `global_scale` FP32 [] or [G], on the device.

    `counts` int32 [4] is added to: blocks saturated, raised from underflow, zero, not finite (see
    kernels/cpu.py's `Nvfp4Counts`).
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
        counts = torch.zeros(4, dtype=torch.int32, device=w.device)
    blocks = n * k // NVFP4_BLOCK
    if stack.numel():
        triton_nvfp4.quantize_kernel[(triton.cdiv(blocks, _BLOCKS), stack.shape[0])](
            _words(stack),
            _words(out.codes),
            out.block_scale.view(torch.int8),
            scales.expand(stack.shape[0]).contiguous(),
            counts,
            blocks,
            DTYPE=_DTYPES[w.dtype],
            TILE=_BLOCKS,
            EVEN=blocks % _BLOCKS == 0,
            num_warps=_BLOCKS // _WARP,
        )
    return out


def nvfp4_dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`nvfp4.dequantize` to BF16 or FP32; a stack has a global scale for each matrix."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype {dtype}; expected bfloat16 or float32")
    lead, n, half = q.codes.shape[:-2], *q.codes.shape[-2:]
    out = torch.empty(*lead, n, 2 * half, dtype=dtype, device=q.codes.device)
    tensors = q.codes.numel() // max(1, n * half)
    words = n * half // 4
    if out.numel():
        tile = 256
        triton_nvfp4.dequantize_kernel[(triton.cdiv(words, tile), tensors)](
            _words(q.codes),
            q.block_scale.view(torch.int8),
            q.global_scale.to(torch.float32).reshape(-1).expand(tensors).contiguous(),
            out,
            words,
            OUT=_DTYPES[dtype],
            TILE=tile,
            num_warps=tile // _WARP,
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

    With `swiglu` the input is [..., 2K], gate beside up, and their product is what is quantized.
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
        chunk = _chunk(k)
        triton_fp8.quantize_rows_kernel[(rows,)](
            w,
            codes,
            scale,
            counts,
            stride=w.shape[-1],
            K=k,
            CHUNK=chunk,
            SWIGLU=swiglu,
            num_warps=_warps(chunk),
        )
    return codes, scale


def fp8_dequantize_rows(
    codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """`fp8.dequantize_rows`: [..., K] values in `dtype`."""
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    k = codes.shape[-1]
    if out.numel():
        chunk = _chunk(k)
        triton_fp8.dequantize_rows_kernel[(codes.numel() // k,)](
            codes.contiguous(),
            scale.to(torch.float32).contiguous(),
            out,
            K=k,
            CHUNK=chunk,
            num_warps=_warps(chunk),
        )
    return out


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in FP32, rounded once; [S, 2I] -> [S, I]."""
    _check(gate_up)
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    if out.numel():
        chunk = _chunk(width)
        triton_nvfp4.swiglu_kernel[(out.numel() // width,)](
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
    """Length of the pieces a row is held in: a power of two that divides it, if there is one."""
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


# A conversion job's kernels on the GPU: launched one after another, nothing waits in between.
#
# In:  addresses of device memory: source bytes of packed rows [n, k] (of an NVFP4 scale group the
#      members' rows one below the other), and room for codes, scales and `RESULT_NBYTES` of zeros.
# Out: codes and scales as formats/nvfp4.py and fp8.py have them; in `info` what the caller has to
#      know, for one copy to the host (`kernels.KernelResult`).
#
# The global scale of a group is computed where the largest magnitude is, on the device: fetching
# the one to compute the other would stop the stream of copies and kernels for each of 25,000
# groups. It is one IEEE division, so its bits are those of `cpu.nvfp4_global_scale`, and the
# caller compares.
#
# Kernels are launched on bare addresses: a view of a tensor costs a turn at the interpreter, of
# which conversion has none to spare (convert/gpu_queue.py). Limits: as gpu.py; addresses are
# multiples of 16. Launches go to the current stream.

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
    source: int, codes: int, scales: int, info: int, *, dtype: str, n: int, k: int, scale_rule: str
) -> None:
    """Codes U8 [n, k/2] and block scales E4M3 [n, k/16] with one global scale for all rows.

    `dtype` is the source's ("BF16", "F16", "F32"); `scale_rule` is "max" or "sweep".
    """
    words, blocks = n * k * ITEMSIZE[dtype] // 4, n * k // NVFP4_BLOCK
    src = Pointer(source, torch.int32)
    triton_nvfp4.amax_kernel[(triton.cdiv(words, _AMAX_TILE * _AMAX_STEPS), 1)](
        src,
        Pointer(info, torch.int32),
        words,
        DTYPE=_CODES[dtype],
        TILE=_AMAX_TILE,
        STEPS=_AMAX_STEPS,
        num_warps=8,
    )
    _scale_kernel[(1,)](Pointer(info, torch.float32), SCALE=SCALE_WORD)
    sweeps = scale_rule == "sweep"
    kernel = triton_sweep.sweep_kernel if sweeps else triton_nvfp4.quantize_kernel
    tile = triton_sweep._TILE if sweeps else _BLOCKS
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
    chunk = _chunk(k)
    triton_fp8.quantize_rows_kernel[(n,)](
        Pointer(source, TORCH_DTYPES[dtype]),
        Pointer(codes, torch.float8_e4m3fn),
        Pointer(scales, torch.float32),
        Pointer(info + 4 * COUNTS_WORD, torch.int32),
        stride=k,
        K=k,
        CHUNK=chunk,
        SWIGLU=False,
        num_warps=_warps(chunk),
    )
