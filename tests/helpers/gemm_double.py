"""Stand-ins for the scaled GEMMs of torch and quack on hardware that is not here.

Same signatures, same arguments, FP32 arithmetic: layouts are undone (packed nibbles, swizzled block
scales, padding of each group), and what the real calls refuse is refused here: dtypes, shapes of
scales, transposed weights, offsets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from beamq.formats.numerics import e2m1_values, unpack_nibbles
from beamq.formats.nvfp4 import COLUMNS, ROWS, round_up

FP4 = torch.float4_e2m1fn_x2


class Fp4Calls:
    """`scaled_mm` and `scaled_grouped_mm` for NVFP4 with two levels of scales."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def scaled_mm(
        self,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        scale_a: list[torch.Tensor],
        scale_recipe_a: list[Any],
        scale_b: list[torch.Tensor],
        scale_recipe_b: list[Any],
        swizzle_a: list[Any] | None = None,
        swizzle_b: list[Any] | None = None,
        bias: torch.Tensor | None = None,
        output_dtype: torch.dtype | None = torch.bfloat16,
        contraction_dim: tuple[int, ...] = (),
        use_fast_accum: bool = False,
    ) -> torch.Tensor:
        self.calls.append("scaled_mm")
        _common(mat_a, mat_b, scale_recipe_a, scale_recipe_b, swizzle_a, swizzle_b)
        m, n = mat_a.shape[0], mat_b.shape[1]
        blocks = mat_a.shape[1] // 8
        columns = round_up(blocks, 4)
        assert scale_a[0].numel() == round_up(m, 128) * columns
        assert scale_b[0].numel() == round_up(n, 128) * columns
        assert scale_a[1].numel() == scale_b[1].numel() == 1
        a = _values(_bytes(mat_a), unswizzle(scale_a[0].reshape(-1), m, blocks))
        b = _values(_bytes(mat_b.t()), unswizzle(scale_b[0].reshape(-1), n, blocks))
        return (a @ b.t() * (scale_a[1] * scale_b[1])).to(output_dtype)

    def scaled_grouped_mm(
        self,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        scale_a: list[torch.Tensor],
        scale_recipe_a: list[Any],
        scale_b: list[torch.Tensor],
        scale_recipe_b: list[Any],
        swizzle_a: list[Any] | None = None,
        swizzle_b: list[Any] | None = None,
        bias: torch.Tensor | None = None,
        offs: torch.Tensor | None = None,
        output_dtype: torch.dtype | None = torch.bfloat16,
        contraction_dim: tuple[int, ...] = (),
        use_fast_accum: bool = False,
    ) -> torch.Tensor:
        self.calls.append("scaled_grouped_mm")
        _common(mat_a, mat_b, scale_recipe_a, scale_recipe_b, swizzle_a, swizzle_b)
        experts, half, n = mat_b.shape
        blocks = half // 8
        columns = round_up(blocks, 4)
        assert offs is not None
        assert offs.dtype == torch.int32
        assert offs.shape == (experts,)
        assert scale_a[0].dim() == 2
        assert scale_a[0].shape[0] >= mat_a.shape[0]
        assert scale_b[0].shape == (experts, round_up(n, 128) * columns)
        combined = scale_a[1].mul(scale_b[1])
        assert combined.shape == (experts,)
        out = torch.full((mat_a.shape[0], n), torch.nan)
        start, padded = 0, 0
        for expert, end in enumerate(offs.tolist()):
            rows = end - start
            tall = round_up(rows, 128)
            some = scale_a[0].reshape(-1)[padded * columns : (padded + tall) * columns]
            if not rows:
                continue
            a = _values(_bytes(mat_a)[start:end], unswizzle(some, rows, blocks))
            b = _values(_bytes(mat_b[expert].t()), unswizzle(scale_b[0][expert], n, blocks))
            out[start:end] = a @ b.t() * combined[expert]
            start, padded = end, padded + tall
        assert scale_a[0].shape == (padded, columns)
        return out.to(output_dtype)


@dataclass(frozen=True)
class BlockScaledOperand:
    """quack's container: [M, K/2] codes, or their transposed view, and scales as tiles."""

    qdata: torch.Tensor
    scale: torch.Tensor
    per_tensor_scale: torch.Tensor
    quant_dim: int = -1

    @classmethod
    def from_parts(
        cls,
        qdata: torch.Tensor,
        scale: torch.Tensor,
        format: str,
        *,
        per_tensor_scale: torch.Tensor | None = None,
        orig_dtype: torch.dtype = torch.bfloat16,
        quant_dim: int = -1,
    ) -> BlockScaledOperand:
        assert format == "nvfp4"
        assert (orig_dtype, quant_dim) == (torch.bfloat16, -1)
        assert qdata.dtype == FP4
        assert qdata.dim() == 2
        assert qdata.stride(1) == 1
        assert scale.dtype == torch.float8_e4m3fn
        assert scale.shape[2:] == (32, 4, 4)
        assert scale.stride()[2:] == (16, 4, 1)
        assert per_tensor_scale is not None
        assert per_tensor_scale.numel() == 1
        assert per_tensor_scale.dtype == torch.float32
        return cls(qdata, scale, per_tensor_scale.reshape(1))

    @property
    def mT(self) -> BlockScaledOperand:
        return replace(self, qdata=self.qdata.transpose(0, 1), quant_dim=-3 - self.quant_dim)


class QuackCalls:
    """`gemm` of quack.gemm_interface 0.6.5 for NVFP4, dense and without varlen.

    `operands` are the two sides of each call as FP32 code * block scale, [M, K] and [N, K], with
    their global scales.
    """

    BlockScaledOperand = BlockScaledOperand

    def __init__(self) -> None:
        self.operands: list[tuple[tuple[torch.Tensor, torch.Tensor], ...]] = []

    def gemm(
        self,
        A: BlockScaledOperand,
        B: BlockScaledOperand,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        alpha: float | torch.Tensor = 1.0,
        out_dtype: Any = None,
        out_quant_dim: int = -1,
        out_transposed: bool = False,
        out_per_tensor_scale: Any = None,
        cu_seqlens_m: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        A_idx: torch.Tensor | None = None,
        batch_idx_permute: torch.Tensor | None = None,
        dynamic_scheduler: bool = False,
        tuned: bool = True,
        rounding_mode: int = 0,
        sr_seed: int | torch.Tensor = 0,
        concat_layout: tuple[str, ...] | None = None,
        split_k: int | None = 1,
        split_k_mode: int = 0,
    ) -> torch.Tensor:
        assert not tuned, "every number of rows would be tuned anew"
        assert (A.quant_dim, B.quant_dim) == (-1, -2)
        (m, half), n = A.qdata.shape, B.qdata.shape[1]
        assert B.qdata.shape[0] == half
        assert half % 16 == 0, "rows of whole 16 bytes"
        assert n % 8 == 0
        assert m > 0
        assert out is not None
        assert out.shape == (m, n)
        assert out.dtype == torch.bfloat16
        assert out.stride(1) == 1
        for t in (A.qdata, A.scale, B.qdata, B.scale, out):
            assert t.data_ptr() % 16 == 0
        sides = []
        for codes, operand in ((A.qdata, A), (B.qdata.t(), B)):
            rows, blocks = codes.shape[0], half // 8
            assert operand.scale.shape[:2] == (-(-rows // 128), -(-blocks // 4))
            r, c = torch.arange(rows).unsqueeze(1), torch.arange(blocks)
            scale = operand.scale.view(torch.uint8)
            scale = scale[r // 128, c // 4, r % 32, r % 128 // 32, c % 4].view(torch.float8_e4m3fn)
            sides.append((_values(_bytes(codes), scale), operand.per_tensor_scale))
        self.operands.append(tuple(sides))
        (a, scale_a), (b, scale_b) = sides
        return out.copy_(a @ b.t() * (scale_a * scale_b))


def unswizzle(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse of `nvfp4.swizzle`, without the padding: [..., R * C] -> [..., rows, columns]."""
    lead = flat.shape[:-1]
    r, c = round_up(rows, ROWS), round_up(columns, COLUMNS)
    tiles = flat.view(torch.uint8).view(*lead, r // ROWS, c // COLUMNS, 32, 4, COLUMNS)
    order = (*range(len(lead)), *(len(lead) + axis for axis in (0, 3, 2, 1, 4)))
    padded = tiles.permute(order).reshape(*lead, r, c)
    return padded[..., :rows, :columns].contiguous().view(flat.dtype)


def _common(
    a: torch.Tensor,
    b: torch.Tensor,
    recipe_a: list[Any],
    recipe_b: list[Any],
    order_a: list[Any] | None,
    order_b: list[Any] | None,
) -> None:
    two_levels = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    assert recipe_a == recipe_b == two_levels
    order = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    assert order_a == order_b == order
    assert a.dtype == b.dtype == FP4
    assert a.is_contiguous()
    assert b.stride(-2) == 1, "the weight must be a transposed view"
    assert a.shape[-1] == b.shape[-2]
    assert a.shape[-1] % 16 == 0
    assert b.shape[-1] % 16 == 0


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def _values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP32 code * block scale."""
    codes = e2m1_values(unpack_nibbles(packed)).view(packed.shape[0], -1, 16)
    return (codes * scales.float().unsqueeze(-1)).flatten(1)
