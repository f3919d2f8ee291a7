"""How many experts of a layer fit a memory budget beside everything else.

In: a checkpoint's headers, the activation dtype, bytes allowed, tokens of the largest batch.
Out: experts to a slice, or None where whole layers fit.

The one idea: count what is alive at once. Two units of weights (one in use, one read ahead), and
the temporaries of one batch at the widest point of a layer, taking the worst case in which every
choice of every token falls into one slice. Estimates are upper bounds of tensors, not of what an
allocator reserves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from beamq.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.config import BeamConfig
from beamq.errors import MemoryBudgetError
from beamq.header import TensorSpec
from beamq.model.activation import CHUNK_ELEMENTS
from beamq.roles import PRECISE_FP32, Role, classify
from beamq.sizes import show_bytes

_UNITS = 2  # one in use, one read ahead
_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Loaded sizes: of the largest layer without its experts, of one expert, of the head."""

    base: int
    expert: int
    head: int


def layer_bytes(checkpoint: Checkpoint, config: BeamConfig, dtype: torch.dtype) -> LayerBytes:
    """Sizes after loading: unquantized tensors in `dtype`, quantized ones as stored."""
    base: dict[int, int] = {}
    experts: dict[int, int] = {}
    for spec in checkpoint.tensors.values():
        role = classify(spec.name)
        if role.layer is None:
            continue
        # Scale tensors have names of their own, of no role; their layer is still theirs.
        expert = role.role is Role.EXPERT or ".mlp.experts." in spec.name
        sizes = experts if expert else base
        size = _loaded(spec, torch.float32 if role.role in PRECISE_FP32 else dtype)
        sizes[role.layer] = sizes.get(role.layer, 0) + size
    return LayerBytes(
        base=max(base.values(), default=0),
        expert=-(-max(experts.values(), default=0) // config.num_experts),
        head=config.vocab_size * config.hidden_size * dtype.itemsize + CHUNK_ELEMENTS * 2 * _FP32,
    )


def activation_bytes(config: BeamConfig, tokens: int, dtype: torch.dtype) -> int:
    """Upper bound of a layer's temporaries for one batch."""
    item = dtype.itemsize
    q, kv, hidden = config.q_dim, config.kv_dim, config.hidden_size
    attention = tokens * (item * (3 * hidden + 5 * q + 4 * kv) + _FP32 * 3 * q)
    rows, width = tokens * config.top_k, config.moe_intermediate_size
    sparse = tokens * (2 * item + 2 * _FP32) * hidden + rows * item * (2 * hidden + 3 * width)
    dense = tokens * item * (3 * hidden + 3 * config.intermediate_size)
    return max(attention, sparse, dense) + 3 * CHUNK_ELEMENTS * _FP32


def experts_per_slice(
    checkpoint: Checkpoint, config: BeamConfig, dtype: torch.dtype, budget: int, tokens: int
) -> int | None:
    """Experts to a slice under `budget` bytes, or None if whole layers fit.

    Raises `MemoryBudgetError` if not even one expert at a time does.
    """
    sizes = layer_bytes(checkpoint, config, dtype)
    room = budget - activation_bytes(config, tokens, dtype) - _UNITS * sizes.base
    if room >= _UNITS * sizes.expert * config.num_experts:
        return None
    count = room // max(1, _UNITS * sizes.expert)
    if count < 1 or sizes.head > budget:
        least = max(budget - room + _UNITS * sizes.expert, sizes.head)
        raise MemoryBudgetError(
            f"{show_bytes(budget)} of device memory for batches of {tokens} tokens: at least"
            f" {show_bytes(least)} are needed; allow more, or shorten the batches"
        )
    return int(count)


def _loaded(spec: TensorSpec, dtype: torch.dtype) -> int:
    return spec.numel * dtype.itemsize if spec.dtype in FLOAT_SOURCES else spec.nbytes
