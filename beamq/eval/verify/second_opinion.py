"""A sample of the linears, decoded a second time by the libraries whose layouts were written.

In: an opened checkpoint and its quantized linears. Out: findings under `values.second-opinion`.

Everything else in `verify` rests on beamq's own understanding of the format. If that were wrong
(nibbles swapped, a scale inverted), writer and checker would agree with each other and with nobody
else. So rows of a few linears go through NVIDIA Model-Optimizer's NVFP4 and compressed-tensors' FP8
dequantizers. These must give the same values up to the last FP32 bits, which depend on the order of
two multiplications. The check is skipped where the libraries are not installed.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from beamq.eval.verify.against_source import read_rows, read_scales
from beamq.eval.verify.checks import NVFP4, Ledger
from beamq.eval.verify.inventory import LARGEST_GLOBAL, SMALLEST_NORMAL, Linear
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import Checkpoint
from beamq.plan.layout import FP8_BLOCK, WEIGHT_FORMATS

if TYPE_CHECKING:
    import torch

    Decoder = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

SECOND_OPINION = "values.second-opinion"
ROWS = 64  # of each sampled linear
TOLERANCE = 2.0**-21  # relative: two FP32 roundings on their side, one on ours


def choose_sample(linears: Sequence[Linear], count: int) -> list[Linear]:
    """A fixed choice: each kind of projection once while `count` allows, then evenly spread."""
    kinds: dict[tuple[str, str], Linear] = {}
    for linear in linears:
        kinds.setdefault((linear.role.role, linear.role.proj), linear)
    chosen = {linear.module: linear for linear in list(kinds.values())[:count]}
    spread = count - len(chosen)
    evenly = (linears[(2 * i + 1) * len(linears) // (2 * spread)] for i in range(spread))
    chosen.update((linear.module, linear) for linear in evenly)
    return list(chosen.values())


def ask_second_opinion(
    checkpoint: Checkpoint, linears: Sequence[Linear], count: int, ledger: Ledger
) -> None:
    """Decode `ROWS` rows of up to `count` linears of each format twice and compare."""
    if count <= 0:
        ledger.skip("a sample of 0 was requested", SECOND_OPINION)
        return
    if not linears:
        ledger.skip("no quantized linear is complete enough to decode", SECOND_OPINION)
        return
    asked = []
    for fmt in dict.fromkeys(linear.format for linear in linears):
        rounding = WEIGHT_FORMATS[fmt].rounding
        package = "nvidia-modelopt" if rounding in (NVFP4, "mxfp8") else "compressed-tensors"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # these libraries warn about hardware at import
                decode = _decoder(rounding)
        except ImportError as fault:
            ledger.skip(f"{package} cannot be imported ({fault})", SECOND_OPINION)
            continue
        asked.append(f"{package} {metadata.version(package)}")
        own = [linear for linear in linears if linear.format == fmt]
        for linear in choose_sample(own, count):
            ledger.examined(SECOND_OPINION, unit=f"linears, by {' and '.join(asked)}")
            if difference := _compare(checkpoint, linear, decode):
                ledger.fault(SECOND_OPINION, linear.module, f"{package} {difference}")


def _compare(checkpoint: Checkpoint, linear: Linear, decode: Decoder) -> str | None:
    import torch

    from beamq.formats.numerics import tensor_from_bytes

    fmt, parts, (n, k) = WEIGHT_FORMATS[linear.format], linear.parts, linear.shape
    rows = min(n, max(ROWS, fmt.block[0]))
    first = (n - rows) // 2 // fmt.block[0] * fmt.block[0]
    codes = read_rows(checkpoint, parts["weight"], first, rows)
    scales = read_scales(checkpoint, fmt, (n, k), linear.module, (first, rows))
    ours_RK = torch.empty(rows, k, dtype=torch.float32)
    out = ours_RK.numpy().data
    codes_t = tensor_from_bytes(codes, fmt.codes, (rows, -1))
    scales_t = tensor_from_bytes(scales, fmt.scale_dtype, (-(-rows // fmt.block[0]), -1))
    scale = 1.0  # FP8 has no global scale
    if linear.format == NVFP4:
        scale = struct.unpack("<f", checkpoint.read(f"{linear.module}.weight_scale_2"))[0]
        if not SMALLEST_NORMAL <= scale <= LARGEST_GLOBAL:
            return f"cannot decode it, because weight_scale_2 is {scale}"
        cpu.nvfp4_dequantize(codes, scales, k, scale, out, "F32")
    else:
        cpu.fp8_dequantize(fmt.rounding, codes, scales, k, out, "F32")
    theirs_RK = decode(codes_t, scales_t, scale).float()
    close_RK = (theirs_RK - ours_RK).abs() <= TOLERANCE * ours_RK.abs()
    if bool(close_RK.all()):
        return None
    row, column = (int(i) for i in torch.nonzero(~close_RK)[0])
    theirs, ours = theirs_RK[row, column].item(), ours_RK[row, column].item()
    return f"decodes {theirs:.6g} at [{first + row}, {column}], but beamq {ours:.6g}"


def _decoder(rounding: str) -> Decoder:
    """Raises `ImportError` where the library is not installed."""
    if rounding == NVFP4:
        return _modelopt_decoder()
    if rounding == "mxfp8":
        return _modelopt_mx_decoder()
    if rounding == "fp8-block":
        return _compressed_tensors_decoder(blocks=True)
    return _compressed_tensors_decoder()


def _modelopt_mx_decoder() -> Decoder:
    import torch
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    def decode(codes: torch.Tensor, scales: torch.Tensor, _global_scale: float) -> torch.Tensor:
        stored = MXFP8QTensor(codes.shape, torch.float32, codes)
        values: torch.Tensor = stored.dequantize(dtype=torch.float32, scale=scales)
        return values

    return decode


def _modelopt_decoder() -> Decoder:
    import torch
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def decode(codes: torch.Tensor, scales: torch.Tensor, global_scale: float) -> torch.Tensor:
        shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
        values: torch.Tensor = NVFP4QTensor(shape, torch.float32, codes).dequantize(
            dtype=torch.float32,
            scale=scales,
            double_scale=torch.tensor(global_scale, dtype=torch.float32),
            block_sizes={-1: 16},
        )
        return values

    return decode


def _compressed_tensors_decoder(*, blocks: bool = False) -> Decoder:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from torch.nn.functional import pad

    strategy: dict[str, Any] = {"strategy": "channel"}
    if blocks:
        strategy = {"strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **strategy)

    def decode(codes: torch.Tensor, scales: torch.Tensor, _global_scale: float) -> torch.Tensor:
        if not blocks:
            values: torch.Tensor = dequantize(x_q=codes, scale=scales, args=args)
            return values
        n, k = codes.shape  # they decode whole blocks only
        whole = pad(codes.float(), (0, -k % FP8_BLOCK, 0, -n % FP8_BLOCK))
        values = dequantize(x_q=whole.to(codes.dtype), scale=scales, args=args)
        return values[:n, :k]

    return decode
