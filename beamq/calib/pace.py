"""How much of a layer its batches have passed, for whoever shows progress within layers.

In: the pass, as an observer. Out: calls of `tell(layer, share)`, each time a batch enters a layer,
with the share (0 to 1) of batches that entered before it.
Limits: where experts come in slices or are visited, all batches enter before the first of them is
through; where processes share batches, each sees its own only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from beamq.model.observe import Quiet


class LayerPace(Quiet):
    """Counts `batches` into each layer; no input is copied or looked at."""

    expert_inputs = False

    def __init__(self, batches: int, tell: Callable[[int, float], None]) -> None:
        self._batches = batches
        self._tell = tell
        self._layer = -1
        self._entered = 0

    def linear_input(self, layer: int, group: str, x_TK: torch.Tensor) -> None:
        """The first of a layer's inputs is a batch that enters it."""
        if group != "qkv_gate":
            return
        if layer != self._layer:
            self._layer, self._entered = layer, 0
        self._tell(layer, self._entered / self._batches)
        self._entered += 1
