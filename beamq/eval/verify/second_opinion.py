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
from typing import TYPE_CHECKING

from beamq.eval.verify.against_source import read_rows
from beamq.eval.verify.checks import NVFP4, Ledger
from beamq.eval.verify.folder import LARGEST_GLOBAL, SMALLEST_NORMAL, Linear
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import Checkpoint
from beamq.plan.layout import WEIGHT_FORMATS

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
        package = "nvidia-modelopt" if fmt == NVFP4 else "compressed-tensors"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # these libraries warn about hardware at import
                decode = _modelopt_decoder() if fmt == NVFP4 else _compressed_tensors_decoder()
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
    rows = min(n, ROWS)
    first = (n - rows) // 2
    codes = read_rows(checkpoint, parts["weight"], first, rows)
    scales = read_rows(checkpoint, parts[fmt.scale], first, rows)
    ours_RK = torch.empty(rows, k, dtype=torch.float32)
    out = ours_RK.numpy().data
    codes_t = tensor_from_bytes(codes, fmt.codes, (rows, -1))
    scales_t = tensor_from_bytes(scales, fmt.scale_dtype, (rows, -1))
    scale = 1.0  # FP8 has no global scale
    if linear.format == NVFP4:
        scale = struct.unpack("<f", checkpoint.read(f"{linear.module}.weight_scale_2"))[0]
        if not SMALLEST_NORMAL <= scale <= LARGEST_GLOBAL:
            return f"cannot decode it, because weight_scale_2 is {scale}"
        cpu.nvfp4_dequantize(codes, scales, k, scale, out, "F32")
    else:
        cpu.fp8_dequantize_rows(codes, scales, k, out, "F32")
    theirs_RK = decode(codes_t, scales_t, scale).float()
    close_RK = (theirs_RK - ours_RK).abs() <= TOLERANCE * ours_RK.abs()
    if bool(close_RK.all()):
        return None
    row, column = (int(i) for i in torch.nonzero(~close_RK)[0])
    theirs, ours = theirs_RK[row, column].item(), ours_RK[row, column].item()
    return f"decodes {theirs:.6g} at [{first + row}, {column}], but beamq {ours:.6g}"


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


def _compressed_tensors_decoder() -> Decoder:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")

    def decode(codes: torch.Tensor, scales: torch.Tensor, _global_scale: float) -> torch.Tensor:
        values: torch.Tensor = dequantize(x_q=codes, scale=scales, args=args)
        return values

    return decode
