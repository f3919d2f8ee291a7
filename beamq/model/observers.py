"""What a forward pass shows to whoever watches it: inputs of linears and choices of routers.

In: nothing; out: the `Observer` protocol, and `Observers`, several of them behind one.

The one idea: a group of linears that read the same tensor is shown that tensor once, by the
name of the group. Groups are "qkv_gate", "o_proj", "gate_up", "down_proj" for attention and
dense MLPs, and "gate_up", "down_proj" of the routed experts, where rows are sorted by expert.
Tensors are shown as the model computed them, before activations are quantized; they must not be
changed, nor kept beyond the call (a copy may be).

With no observer the forward pass does no work for this file: each place is one `is not None`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Observer(Protocol):
    """A watcher of the forward pass. `layer` is the layer's index in the model.

    With `every_expert` it is also shown what each expert would make of *every* token. What flows
    on is computed apart from that and stays bit for bit the same. Without `expert_inputs`, routed
    inputs are not gathered for it, and the pass is as fast as without an observer.
    """

    every_expert: bool
    expert_inputs: bool

    def linear_input(self, layer: int, group: str, x_TK: torch.Tensor) -> None:
        """Input of an attention or dense-MLP group, all packed tokens of a batch."""

    def expert_input(
        self, layer: int, group: str, x_SK: torch.Tensor, first: int, offsets: Sequence[int]
    ) -> None:
        """Routed input of experts: `first + i` reads rows offsets[i]:offsets[i+1], maybe none."""

    def every_expert_input(self, layer: int, group: str, x_TK: torch.Tensor, expert: int) -> None:
        """Input of one expert over all tokens; called only where `every_expert` is set."""

    def routing(
        self,
        layer: int,
        logits_TE: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
    ) -> None:
        """A router's FP32 logits, its chosen experts (best first) and their FP32 weights."""


class NullObserver:
    """An observer that looks away; a base for those that watch only some of it."""

    every_expert = False
    expert_inputs = True

    def linear_input(self, layer: int, group: str, x_TK: torch.Tensor) -> None:
        """Nothing."""

    def expert_input(
        self, layer: int, group: str, x_SK: torch.Tensor, first: int, offsets: Sequence[int]
    ) -> None:
        """Nothing."""

    def every_expert_input(self, layer: int, group: str, x_TK: torch.Tensor, expert: int) -> None:
        """Nothing."""

    def routing(
        self,
        layer: int,
        logits_TE: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
    ) -> None:
        """Nothing."""


class Observers:
    """Several observers as one, so that consumers share a pass."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._all = tuple(observers)
        self._every = tuple(observer for observer in self._all if observer.every_expert)
        self._routed = tuple(observer for observer in self._all if observer.expert_inputs)
        self.every_expert = bool(self._every)
        self.expert_inputs = bool(self._routed)

    def linear_input(self, layer: int, group: str, x_TK: torch.Tensor) -> None:
        """Pass on to each."""
        for observer in self._all:
            observer.linear_input(layer, group, x_TK)

    def expert_input(
        self, layer: int, group: str, x_SK: torch.Tensor, first: int, offsets: Sequence[int]
    ) -> None:
        """Pass on to those that want it."""
        for observer in self._routed:
            observer.expert_input(layer, group, x_SK, first, offsets)

    def every_expert_input(self, layer: int, group: str, x_TK: torch.Tensor, expert: int) -> None:
        """Pass on to those that asked for it."""
        for observer in self._every:
            observer.every_expert_input(layer, group, x_TK, expert)

    def routing(
        self,
        layer: int,
        logits_TE: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
    ) -> None:
        """Pass on to each."""
        for observer in self._all:
            observer.routing(layer, logits_TE, experts_Tk, weights_Tk)
