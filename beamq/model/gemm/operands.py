"""Operands in the form that tensor cores take: quantized activations, swizzled NVFP4 weights.

In: BF16 activations and weights as loaded. Out: `Fp8Rows` and `Fp4Operand`.

The one idea: each is made by one fused kernel on a GPU (gather, SwiGLU, quantization, swizzle) and
by its plain torch twin on a CPU, with the same bytes up to the exponential in SwiGLU. So everything
before a GEMM of newer hardware can be run and tested anywhere.

Scales of NVFP4 weights are row by row in memory. The swizzled copy is made when a weight is first
used and lives as long as the weight.

`ExpertRows` are offsets of experts' rows that stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from beamq import devices
from beamq.errors import TensorError
from beamq.formats import fp8, nvfp4
from beamq.formats.nvfp4 import padded_rows, round_up, swizzle
from beamq.model.gemm.backend import Fp8Rows, Gated, Groups, Nvfp4Weight, Tokens, static_scale
from beamq.model.gemm.backend import swiglu as plain_swiglu


def take(tokens: Tokens, rows: torch.Tensor | None) -> Tokens:
    """The given rows, in their order; all of them for None."""
    if rows is None or isinstance(tokens, Gated):
        return tokens
    return tokens.take(rows) if isinstance(tokens, Fp8Rows) else tokens.index_select(0, rows)


def fp8_rows(x_TK: torch.Tensor, *, swiglu: bool = False) -> Fp8Rows:
    """Quantize tokens; with `swiglu`, SwiGLU of [gate | up] rows."""
    if devices.serves(x_TK):
        from beamq.formats.kernels import gpu  # Triton

        codes, scale = gpu.fp8_quantize_rows(x_TK, swiglu=swiglu)
    else:
        codes, scale = fp8.quantize_rows(plain_swiglu(x_TK) if swiglu else x_TK)
    return Fp8Rows(codes=codes, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Operand:
    """Packed codes U8 [S, K/2], swizzled E4M3 block scales, FP32 global scale.

    Activations: block scales [padded rows, round_up(K/16, 4)], global scale [1]. Weights of one
    linear: flat, [1]; of a stack: codes [E, N, K/2], scales [E, flat], global scale [E].
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor


def fp4_tokens(
    tokens: Tokens, input_scale: torch.Tensor | None, groups: Groups | None = None
) -> Fp4Operand:
    """Quantize tokens for one linear, or `tokens[groups.rows]` for a stack of experts.

    SwiGLU is applied to `Gated` tokens first. With `groups`, each expert's block scales start at a
    multiple of 128 rows. Raises `TensorError` if `input_scale` is None.
    """
    if isinstance(tokens, Fp8Rows):
        raise TypeError("FP8 tokens given for NVFP4 weights")
    swiglu = isinstance(tokens, Gated)
    x_TK = tokens.gate_up_SN if isinstance(tokens, Gated) else tokens
    input_scale = static_scale(input_scale)
    rows = None if groups is None else groups.rows
    count = x_TK.shape[0] if rows is None else rows.numel()
    placed, padded = None, round_up(count, 128)
    if groups is not None:
        placed, padded = padded_rows(groups.offsets)
        placed = placed.to(x_TK.device)
    if devices.serves(x_TK):
        from beamq.formats.kernels import gpu  # Triton

        codes, scales = gpu.nvfp4_tokens(
            x_TK, input_scale, swiglu=swiglu, rows=rows, scale_rows=placed, padded_rows=padded
        )
    else:
        x_TK = plain_swiglu(x_TK) if swiglu else x_TK
        x_SK = x_TK if rows is None else x_TK.index_select(0, rows)
        q = nvfp4.quantize(x_SK, input_scale, flush=True)
        linear = torch.zeros(padded, q.block_scale.shape[1], dtype=torch.uint8, device=x_TK.device)
        where = torch.arange(count, device=x_TK.device) if placed is None else placed
        linear[where] = q.block_scale.view(torch.uint8)
        codes, scales = q.codes, swizzle(linear).view(torch.float8_e4m3fn)
    return Fp4Operand(
        codes=codes,
        block_scale=scales.view(padded, -1),
        global_scale=input_scale.to(torch.float32).reshape(1),
    )


_swizzled: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def fp4_weight(weight: Nvfp4Weight) -> Fp4Operand:
    """The weight with swizzled block scales and one global scale for each matrix.

    Raises `TensorError` if the parts of a fused linear differ in `weight_scale_2`.
    """
    # Only the copies are kept here: a reference to the codes would keep the weight alive.
    if weight.codes not in _swizzled:
        lead = weight.global_scale.shape[:-2]
        scales = weight.global_scale.reshape(*lead, -1)
        if not torch.equal(scales.amin(-1), scales.amax(-1)):
            raise TensorError(
                "fused linears differ in weight_scale_2, but FP4 tensor cores take one value for"
                " all; quantize the checkpoint with shared scales, or use gemm='reference'"
            )
        one_each = scales[..., 0].contiguous().reshape(-1)
        _swizzled[weight.codes] = (swizzle(weight.block_scale), one_each)
    block_scale, global_scale = _swizzled[weight.codes]
    return Fp4Operand(codes=weight.codes, block_scale=block_scale, global_scale=global_scale)


def fp4_part(weight: Nvfp4Weight, first: int, last: int) -> Nvfp4Weight:
    """Experts first .. last - 1 as views, for which `fp4_weight` returns views too."""
    whole = fp4_weight(weight)
    part = weight.expert(slice(first, last))
    _swizzled[part.codes] = (whole.block_scale[first:last], whole.global_scale[first:last])
    return part


class ExpertRows(Sequence[int]):
    """Offsets of experts' rows on a device: `ends_E` int32 [E], the last of which is `total`.

    Kernels read `ends_E`, so that work after the router is queued while the work before it still
    runs. As a sequence of E + 1 offsets, it knows the first and the last entry; looking at another
    one fetches all of them, which waits for the GPU.
    """

    def __init__(self, ends_E: torch.Tensor, total: int) -> None:
        self.ends_E = ends_E
        self.tables: dict[int, torch.Tensor] = {}
        """Tables that kernels made from the ends, by rows of a tile."""
        self._total = total

    @cached_property
    def host(self) -> tuple[int, ...]:
        """All offsets; waits for the device the first time."""
        return (0, *self.ends_E.tolist())

    def __len__(self) -> int:
        return self.ends_E.numel() + 1

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, int):
            if index in (0, -len(self)):
                return 0
            if index in (-1, len(self) - 1):
                return self._total
        return self.host[index]


def expert_rows(sorted_S: torch.Tensor, num_experts: int) -> Sequence[int]:
    """E + 1 offsets of the experts in `sorted_S`, int64 [S] in ascending order.

    Expert e has rows offsets[e]:offsets[e + 1]. `ExpertRows` on a GPU, a tuple on a CPU.
    """
    experts = torch.arange(num_experts, device=sorted_S.device)
    ends_E = torch.searchsorted(sorted_S, experts, right=True, out_int32=True)
    if sorted_S.is_cuda:
        return ExpertRows(ends_E, sorted_S.numel())
    return (0, *ends_E.tolist())


def part_of(offsets: Sequence[int], first: int, last: int) -> Sequence[int]:
    """Offsets of experts first .. last - 1, counted from 0; the sequence itself for all experts."""
    if first == 0 and last == len(offsets) - 1:
        return offsets
    low = offsets[first]
    return [end - low for end in offsets[first : last + 1]]
