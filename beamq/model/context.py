"""What every layer of a pass is given: sequences, positions, the GEMM and the observers.

A batch is packed: the tokens of all its sequences one after another, without padding.
`SequenceLayout` has their lengths, `PositionTable` the values that depend on a token's position.
`PassContext` bundles what is the same for all layers and batches.

Observers: a group of linears that read the same tensor shows that tensor once, under the group's
name: "qkv_gate", "o_proj", "gate_up", "down_proj" for attention and dense MLPs, and "gate_up",
"down_proj" for the routed experts, whose rows are sorted by expert. Tensors are shown as the model
computed them, before activations are quantized. They must not be changed, nor kept beyond the call
(a copy may be). Without observers the pass does no work for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from beamq.beam.config import BeamConfig
from beamq.errors import UsageError
from beamq.model.gemm.backend import Gemm

QUERY_SCALE_SPAN = 2048  # scalable softmax of the full layers: (1 + (p + 1) / 2048) ** 0.1
QUERY_SCALE_POWER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Lengths of the sequences packed along the token axis, in order.

    No token sees another sequence's tokens. Raises `UsageError` for a length below 1.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(length < 1 for length in self.lengths):
            raise UsageError(f"sequence lengths {self.lengths[:8]} hold a zero; drop empty rows")

    @property
    def tokens(self) -> int:
        """Number of packed tokens."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Length of the longest sequence (0 for an empty layout)."""
        return max(self.lengths, default=0)

    def runs(self) -> Iterator[tuple[slice, int, int]]:
        """(packed tokens, count, length) of neighbours of equal length, computed as one batch."""
        start = 0
        for length, group in itertools.groupby(self.lengths):
            count = sum(1 for _ in group)
            yield slice(start, start + count * length), count, length
            start += count * length

    @classmethod
    def rectangle(cls, batch: int, length: int) -> SequenceLayout:
        """`batch` rows of `length` tokens each."""
        return cls(lengths=(length,) * batch)

    @classmethod
    def from_mask(cls, mask_BT: torch.Tensor) -> SequenceLayout:
        """From an attention mask [B, T] of 0 and 1, padded on either side.

        Rows of zeros give no sequence. Raises `UsageError` for a row whose ones have a gap.
        """
        mask = mask_BT.to(torch.bool)
        starts = mask & ~F.pad(mask, (1, 0))[:, :-1]
        broken = (starts.sum(1) > 1).nonzero().flatten().tolist()
        if broken:
            raise UsageError(
                f"attention_mask row {broken[0]} has a hole; expected ones in one stretch,"
                " padding to its left or right"
            )
        return cls(lengths=tuple(n for n in mask.sum(1).tolist() if n))


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionTable:
    """FP32 tables by position P: RoPE's `cos_PD` and `sin_PD` (D = half the head's width), and
    `query_scale_P`."""

    cos_PD: torch.Tensor
    sin_PD: torch.Tensor
    query_scale_P: torch.Tensor


def position_table(config: BeamConfig, length: int, device: torch.device) -> PositionTable:
    """Tables for positions 0 .. length - 1."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    inverse = (1.0 / (config.rope_theta ** (pairs / config.head_dim))).to(device)
    position = torch.arange(length, device=device).float()
    angle_PD = position[:, None] * inverse
    scale = torch.exp(QUERY_SCALE_POWER * torch.log1p((position + 1) / QUERY_SCALE_SPAN))
    return PositionTable(cos_PD=angle_PD.cos(), sin_PD=angle_PD.sin(), query_scale_P=scale)


class Observer:
    """Base of what watches a forward pass. It ignores everything; override what is to be seen.

    `layer` is the layer's index in the model. With `every_expert`, the observer is also shown what
    each expert would make of *every* token. That is computed separately; the pass's own results
    stay the same to the bit. Without `expert_inputs`, routed inputs are not gathered for it, and
    the pass is as fast as without an observer.
    """

    every_expert: bool = False
    expert_inputs: bool = True

    def linear_input(self, layer: int, group: str, x_TK: torch.Tensor) -> None:
        """Input of an attention or dense-MLP group, all packed tokens of a batch."""

    def expert_input(
        self, layer: int, group: str, x_SK: torch.Tensor, first: int, offsets: Sequence[int]
    ) -> None:
        """Routed input: expert `first + i` reads rows offsets[i]:offsets[i+1], possibly none."""

    def every_expert_input(self, layer: int, group: str, x_TK: torch.Tensor, expert: int) -> None:
        """Input of one expert over all tokens; called only with `every_expert`."""

    def routing(
        self,
        layer: int,
        logits_TE: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
    ) -> None:
        """A router's FP32 logits, its chosen experts (best first) and their FP32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What all layers and batches of a pass share. `table` covers the longest sequence."""

    config: BeamConfig
    table: PositionTable
    gemm: Gemm
    observers: tuple[Observer, ...] = ()
