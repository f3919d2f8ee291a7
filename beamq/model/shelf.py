"""Tensors that wait for their turn: on the device as far as a budget goes, on the host beyond.

In and out: tensors by number. Spilled ones lie in page-locked memory, since copies from pageable
memory would take longer than a layer does.
"""

from __future__ import annotations

import math

import torch


class Shelf:
    """Tensors by number, on the device until `budget` bytes are taken, on the host beyond."""

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = device
        self._left = math.inf if budget is None else budget
        self._held: dict[int, torch.Tensor] = {}
        self._spilled: set[int] = set()

    def put(self, key: int, tensor: torch.Tensor) -> None:
        """Store or replace a tensor; its place is chosen the first time."""
        if tensor is self._held.get(key):
            return
        if key in self._spilled:
            self._held[key].copy_(tensor)
        elif key in self._held or tensor.nbytes <= self._left:
            self._left -= 0 if key in self._held else tensor.nbytes
            self._held[key] = tensor.to(self._device)
        else:
            # Pinned, since pageable memory would cost more time than the layer takes.
            pin = self._device.type == "cuda"
            spill = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            self._held[key] = spill.copy_(tensor)
            self._spilled.add(key)

    def drop(self, key: int) -> None:
        """Forget a tensor; its place is free."""
        held = self._held.pop(key)
        if key not in self._spilled:
            self._left += held.nbytes
        self._spilled.discard(key)

    def get(self, key: int) -> torch.Tensor:
        """The tensor, on the device."""
        return self._held[key].to(self._device)

    def peek(self, key: int) -> torch.Tensor:
        """The tensor, wherever it is."""
        return self._held[key]
