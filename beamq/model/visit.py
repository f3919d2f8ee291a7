"""A second look at a layer's experts, once all batches have passed them.

In: nothing; out: the `ExpertVisitor` protocol that `run.LayerPass` calls.

The one idea: when the last batch has left a layer's experts, all that is to be known of their
inputs is known, and their weights are still at hand (or, where they come in slices, are read once
more). Whoever needs both at once looks here, and the pass goes on as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from beamq.model.moe import Dispatch, ExpertSlice

Parts = Callable[[], Iterable[ExpertSlice]]
"""The layer's experts in ascending order, whole or in slices; anew at every call."""

Inputs = Callable[[], Iterator[tuple[torch.Tensor, Dispatch]]]
"""Each batch's input of the experts, [T, K], and which expert reads what; anew at every call."""


class ExpertVisitor(Protocol):
    """Called for a sparse layer between its experts and the end of its sublayer."""

    def wants(self, layer: int) -> bool:
        """Whether to be called for this layer."""

    def visit(self, layer: int, parts: Parts, inputs: Inputs) -> None:
        """Look; nothing may be changed."""
