"""The error of every stored linear against the source's, on weights loaded for a forward pass.

In: the `LayerWeights` of one layer, of the source and of a candidate. Out: a `WeightError` for each
linear, and the names of unquantized tensors that differ.

The one idea: nothing is read for it; the forward pass has both layers in memory. Each linear is cut
out of its buffer and reduced by itself, so its figures do not depend, to the bit, on which other
experts a process holds.

    saturated     beyond the largest magnitude that the element's scale can express: clipped
    underflowed   not zero in the source and decoded to zero

A few percent of NVFP4 elements underflow in any tensor (small values in a block with a large one),
and the largest value of some blocks is clipped, where the E4M3 block scale was rounded down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from beamq.beam.config import BeamConfig
from beamq.eval.compare.metrics import power, sqnr_db
from beamq.formats.numerics import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK
from beamq.model.gemm.backend import (
    DenseWeight,
    Fp8Weight,
    GroupFp8Weight,
    LinearWeight,
    Nvfp4Weight,
    stored,
)
from beamq.model.gemm.reference import decode, group_scales
from beamq.model.layer import DenseMlp, LayerWeights, SparseMlp

CHUNK_ELEMENTS = 1 << 22
ROUNDING = 1 + 2.0**-20  # a value that FP32 rounding alone puts past the end is not clipped
_FORMATS: dict[type, str] = {DenseWeight: "dense", Fp8Weight: "fp8", Nvfp4Weight: "nvfp4"}


def _format(weight: LinearWeight) -> str:
    if isinstance(weight, GroupFp8Weight):
        return "mxfp8" if weight.scale.dtype == torch.uint8 else "fp8-block"
    return _FORMATS[type(weight)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightError:
    """One linear, decoded, against the source. `relative_rms` is the RMS of the error over the RMS
    of the source; `sqnr_db` the same in decibels, None where nothing differs."""

    module: str
    layer: int
    format: str
    elements: int
    relative_rms: float
    sqnr_db: float | None
    max_abs_error: float
    saturated_share: float
    underflowed_share: float


_Linear = tuple[str, LinearWeight, LinearWeight]
"""The name of a linear [N, K], and the weights of both models."""


def weight_errors(base: LayerWeights, other: LayerWeights, config: BeamConfig) -> list[WeightError]:
    """The linears of one layer, which must be loaded with the same experts, and not in slices.

    Linears that are unquantized in both and equal are left out.
    """
    with torch.inference_mode():
        found = [
            (linear, sums_NF)
            for linear in _linears(base, other, config)
            if (sums_NF := _row_sums(*linear[1:])) is not None
        ]
        if not found:
            return []
        # One copy to the CPU for all: each copy waits for the GPU.
        sums_RF = torch.cat([sums_NF for _, sums_NF in found]).cpu()
        rows = sums_RF.split_with_sizes([sums_NF.shape[0] for _, sums_NF in found])
        return [
            _error(linear, own_NF, base.index)
            for (linear, _), own_NF in zip(found, rows, strict=True)
        ]


_UNQUANTIZED = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "pre_feedforward_layernorm.weight": "pre_mlp_norm",
    "post_feedforward_layernorm.weight": "post_mlp_norm",
    "self_attn.q_norm.weight": "attention.q_norm",
    "self_attn.k_norm.weight": "attention.k_norm",
    "self_attn.gate_bias": "attention.gate_bias",
    "mlp.gate.weight": "mlp.router.weight_EK",
    "mlp.gate.e_score_correction_bias": "mlp.router.bias_E",
}
"""A layer's tensors that no recipe quantizes, by stored name, and where `LayerWeights` has them."""


def changed_tensors(base: LayerWeights, other: LayerWeights) -> list[str]:
    """Stored names of a layer's norms, biases and routers that are not the source's."""
    sparse = isinstance(base.mlp, SparseMlp) and isinstance(other.mlp, SparseMlp)
    found = []
    for name, place in _UNQUANTIZED.items():
        tensor = attrgetter(place)
        if (sparse or "router" not in place) and not torch.equal(tensor(base), tensor(other)):
            found.append(f"model.layers.{base.index}.{name}")
    return found


def _linears(base: LayerWeights, other: LayerWeights, config: BeamConfig) -> Iterator[_Linear]:
    prefix = f"model.layers.{base.index}"
    q, kv, hidden = config.q_dim, config.kv_dim, config.hidden_size
    mine, theirs, name = base.attention, other.attention, f"{prefix}.self_attn"
    parts = (("q_proj", q), ("k_proj", kv), ("v_proj", kv), ("gate_proj", q))
    yield from _each(mine.qkv_gate, theirs.qkv_gate, [(f"{name}.{proj}", n) for proj, n in parts])
    yield from _each(mine.o, theirs.o, [(f"{name}.o_proj", hidden)])
    if isinstance(base.mlp, DenseMlp):
        if not isinstance(other.mlp, DenseMlp):
            raise TypeError("a dense layer cannot be compared with a sparse one")
        width = config.intermediate_size
        gate_up = [(f"{prefix}.mlp.{proj}", width) for proj in ("gate_proj", "up_proj")]
        yield from _each(base.mlp.gate_up, other.mlp.gate_up, gate_up)
        yield from _each(base.mlp.down, other.mlp.down, [(f"{prefix}.mlp.down_proj", hidden)])
        return
    if isinstance(other.mlp, DenseMlp):
        raise TypeError("a sparse layer cannot be compared with a dense one")
    width = config.moe_intermediate_size
    for ours, same in zip(base.mlp.experts, other.mlp.experts, strict=True):
        names = [f"{prefix}.mlp.experts.{ours.first + n}" for n in range(ours.count)]
        both = [(f"{n}.{proj}", width) for n in names for proj in ("gate_proj", "up_proj")]
        yield from _each(ours.gate_up, same.gate_up, both)
        yield from _each(ours.down, same.down, [(f"{n}.down_proj", hidden) for n in names])


def _each(
    base: LinearWeight, other: LinearWeight, rows: Sequence[tuple[str, int]]
) -> Iterator[_Linear]:
    """The linears that lie one below the other in a weight: their names and rows, in that order."""
    base, other = _flat(base), _flat(other)
    start = 0
    for module, count in rows:
        own = slice(start, start + count)
        yield module, _rows(base, own), _rows(other, own)
        start += count


def _flat(weight: LinearWeight) -> LinearWeight:
    """The same weight with experts one below the other: [E, N, K] as [E N, K]."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(w_NK=weight.w_NK.flatten(0, -2))
    if isinstance(weight, (Fp8Weight, GroupFp8Weight)):
        codes, scale = weight.codes.flatten(0, -2), weight.scale.flatten(0, -2)
        return replace(weight, codes=codes, scale=scale)
    return replace(
        weight,
        codes=weight.codes.flatten(0, -2),
        block_scale=weight.block_scale.flatten(0, -2),
        global_scale=weight.global_scale.flatten(0, -2),
    )


def _rows(weight: LinearWeight, rows: slice) -> LinearWeight:
    return weight.expert(rows)  # of a flat weight, whose leading axis is rows


def _row_sums(base: LinearWeight, other: LinearWeight) -> torch.Tensor | None:
    """FP64 [R, 5]: squared error, squared source, largest error, saturated, underflowed.

    None for weights that were stored unquantized on both sides and are equal.
    """
    if (
        isinstance(base, DenseWeight)
        and isinstance(other, DenseWeight)
        and torch.equal(base.w_NK, other.w_NK)
    ):
        return None
    rows, width = _shape(base)
    step = max(1, CHUNK_ELEMENTS // width)
    found = []
    for start in range(0, rows, step):
        some = slice(start, start + step)
        part = _rows(other, some)
        base_RK, other_RK = decode(_rows(base, some), torch.float32), decode(part, torch.float32)
        size_RK, error_RK = base_RK.abs(), other_RK - base_RK
        columns = (
            power(error_RK),
            power(base_RK),
            error_RK.abs_().amax(1),
            _beyond(size_RK, part),
            ((other_RK == 0) & (size_RK > 0)).sum(1),
        )
        found.append(torch.stack([column.double() for column in columns], dim=1))
    return torch.cat(found)


def _shape(weight: LinearWeight) -> tuple[int, int]:
    """(rows, inputs) of a flat weight."""
    rows, width = stored(weight).shape
    return rows, 2 * width if isinstance(weight, Nvfp4Weight) else width


def _beyond(size_RK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """How many magnitudes of each row are beyond what their scale can express."""
    if isinstance(weight, DenseWeight):
        return torch.zeros(size_RK.shape[0], dtype=torch.int64, device=size_RK.device)
    if isinstance(weight, Fp8Weight):
        return (size_RK > weight.scale * (E4M3_MAX * ROUNDING)).sum(1)
    if isinstance(weight, GroupFp8Weight):
        limit_RC = group_scales(weight) * (E4M3_MAX * ROUNDING)
        limit_RK = limit_RC.repeat_interleave(weight.group, 1)[:, : size_RK.shape[1]]
        return (size_RK > limit_RK).sum(1)
    limit_RB = weight.block_scale.float() * weight.global_scale * (E2M1_MAX * ROUNDING)
    size_RB16 = size_RK.view(*limit_RB.shape, NVFP4_BLOCK)
    return (size_RB16 > limit_RB[:, :, None]).sum((1, 2))


def _error(linear: _Linear, sums_NF: torch.Tensor, layer: int) -> WeightError:
    error, source, _, saturated, underflowed = sums_NF.sum(0).tolist()
    square = error / source if source else (math.inf if error else 0.0)
    module, base, other = linear
    elements = math.prod(_shape(base))
    return WeightError(
        module=module,
        layer=layer,
        format=_format(other),
        elements=elements,
        relative_rms=math.sqrt(square),
        sqnr_db=sqnr_db(square),
        max_abs_error=float(sums_NF[:, 2].max()),
        saturated_share=saturated / elements,
        underflowed_share=underflowed / elements,
    )
