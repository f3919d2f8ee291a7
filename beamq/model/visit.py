"""A second look at a layer's experts, once all batches have passed them.

In: nothing; out: the `ExpertVisitor` protocol that `run.LayerPass` calls.

The one idea: when the last batch has left a layer's experts, all that is to be known of their
inputs is known, and their weights are still at hand (or, where they come in slices, are read once
more). Whoever needs both at once looks here, and the pass goes on as if nothing had been.

Where processes share a pass each one shows its own experts, and all of them visit the same layers:
a visitor may exchange what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from beamq.model.exchange import ExpertExchange
from beamq.model.moe import Dispatch, ExpertSlice

Parts = Callable[[], Iterable[ExpertSlice]]
"""This process's experts of the layer in ascending order, whole or in slices; anew at each call."""

Inputs = Callable[[], Iterator[tuple[torch.Tensor, Dispatch]]]
"""Each batch's input of the experts, [T, K], and which expert reads what; anew at every call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitedLayer:
    """`rows_E`: how many rows each of the layer's experts reads, whoever has it.

    `exchange` reaches the other processes in the order of experts.
    """

    layer: int
    parts: Parts
    inputs: Inputs
    rows_E: tuple[int, ...]
    exchange: ExpertExchange
    device: torch.device


class ExpertVisitor(Protocol):
    """Called for a sparse layer between its experts and the end of its sublayer."""

    def wants(self, layer: int) -> bool:
        """Whether to be called for this layer; every process answers alike."""

    def visit(self, seen: VisitedLayer) -> None:
        """Look; nothing may be changed."""
