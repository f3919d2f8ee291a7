"""Exact weights, activations as served: the part of a loss that no better weights can win back.

In: a layer of the source and the same layer of a candidate. Out: a layer with the source's weights
whose inputs are quantized as the candidate's are, and the GEMM that does so.

The one idea: a weight says how its input is quantized (FP8 by token, NVFP4 by `input_scale`), so
an exact weight that carries a quantized one beside it is all that a forward pass needs. The KL of
such a pass is the floor beside every W4A4 figure: what is above it is due to weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from beamq.model.activation import swiglu
from beamq.model.beam import DenseMlp, LayerWeights, SparseMlp
from beamq.model.linear import (
    DenseWeight,
    LinearWeight,
    ReferenceGemm,
    quantize_input,
)
from beamq.model.moe import ExpertSlice
from beamq.model.product import product


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeight(DenseWeight):
    """An exact weight, read through activations that are quantized as in front of `like`."""

    like: LinearWeight


_EXACT = ReferenceGemm()


class ActivationsOnlyGemm:
    """A `Gemm` that quantizes the inputs of `ServedWeight`s and nothing else."""

    def linear(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """See `Gemm.linear`."""
        if isinstance(weight, ServedWeight):
            return product(_served(x_TK, weight), weight.w_NK)
        return _EXACT.linear(x_TK, weight)

    def grouped(
        self,
        x_TK: torch.Tensor,
        rows: torch.Tensor | None,
        weight: LinearWeight,
        offsets: Sequence[int],
    ) -> torch.Tensor:
        """See `Gemm.grouped`."""
        if isinstance(weight, ServedWeight):
            x_TK = _served(x_TK, weight)
        return _EXACT.grouped(x_TK, rows, weight, offsets)

    def experts(
        self,
        x_TK: torch.Tensor,
        rows: torch.Tensor | None,
        gate_up: LinearWeight,
        down: LinearWeight,
        offsets: Sequence[int],
    ) -> torch.Tensor:
        """See `Gemm.experts`."""
        active_SI = swiglu(self.grouped(x_TK, rows, gate_up, offsets))
        return self.grouped(active_SI, None, down, offsets)


def with_served_inputs(base: LayerWeights, candidate: LayerWeights) -> LayerWeights:
    """`base` with the inputs of what `candidate` has quantized served as there.

    Both must be whole layers (no slices), `base` unquantized.
    """
    attention = replace(
        base.attention,
        qkv_gate=_pair(base.attention.qkv_gate, candidate.attention.qkv_gate),
        o=_pair(base.attention.o, candidate.attention.o),
    )
    mlp: DenseMlp | SparseMlp
    if isinstance(base.mlp, DenseMlp) and isinstance(candidate.mlp, DenseMlp):
        mlp = DenseMlp(
            gate_up=_pair(base.mlp.gate_up, candidate.mlp.gate_up),
            down=_pair(base.mlp.down, candidate.mlp.down),
        )
    elif isinstance(base.mlp, SparseMlp) and isinstance(candidate.mlp, SparseMlp):
        parts = zip(tuple(base.mlp.experts), tuple(candidate.mlp.experts), strict=True)
        mlp = replace(base.mlp, experts=tuple(_pair_experts(*pair) for pair in parts))
    else:
        raise TypeError("layers of two kinds cannot be paired")
    return replace(base, attention=attention, mlp=mlp)


def _pair_experts(base: ExpertSlice, candidate: ExpertSlice) -> ExpertSlice:
    return replace(
        base,
        gate_up=_pair(base.gate_up, candidate.gate_up),
        down=_pair(base.down, candidate.down),
    )


def _pair(exact: LinearWeight, like: LinearWeight) -> LinearWeight:
    if isinstance(like, DenseWeight):
        return exact
    if not isinstance(exact, DenseWeight):
        raise TypeError("the source's weights are quantized")
    return ServedWeight(w_NK=exact.w_NK, like=like)


def _served(x_TK: torch.Tensor, weight: ServedWeight) -> torch.Tensor:
    if isinstance(weight.like, DenseWeight):
        return x_TK
    quantized = quantize_input(x_TK, weight.like)
    return quantized.operand_TK.float().mul_(quantized.scale).to(x_TK.dtype)
