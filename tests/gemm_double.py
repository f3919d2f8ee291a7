"""Stand-ins for torch's scaled GEMMs on hardware that is not here.

Same signatures, same arguments, FP32 arithmetic: layouts are undone (packed nibbles, swizzled block
scales, padding of each group), and what the real calls refuse is refused here: dtypes, shapes of
scales, transposed weights, offsets.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from beamq.formats.numerics import e2m1_values, unpack_nibbles
from beamq.formats.swizzle import round_up, unswizzle

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
