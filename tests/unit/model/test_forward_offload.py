"""A shelf holds tensors on the device as far as its budget goes, and gives room back."""

from __future__ import annotations

import torch

from beamq.model.forward import OffloadBuffer

CPU = torch.device("cpu")


def spilled(shelf: OffloadBuffer, key: int, tensor: torch.Tensor) -> bool:
    """Spilled tensors are copies: what was put in stays the caller's."""
    shelf.put(key, tensor)
    return shelf.peek(key) is not tensor


def test_what_is_beyond_the_budget_is_copied_to_the_host() -> None:
    shelf = OffloadBuffer(CPU, budget=80)
    first, second, third = (torch.full((10,), float(n)) for n in range(3))
    assert not spilled(shelf, 0, first)
    assert not spilled(shelf, 1, second)
    assert spilled(shelf, 2, third)
    assert torch.equal(shelf.get(2), third)
    shelf.put(2, torch.full((10,), 7.0))
    assert shelf.get(2).tolist() == [7.0] * 10
    shelf.put(0, torch.full((10,), 9.0))  # keeps its place
    assert spilled(shelf, 3, third)


def test_what_is_dropped_leaves_room() -> None:
    shelf = OffloadBuffer(CPU, budget=40)
    one = torch.zeros(10)
    assert not spilled(shelf, 0, one)
    assert spilled(shelf, 1, one)
    shelf.drop(1)
    assert spilled(shelf, 1, one)
    shelf.drop(0)
    assert not spilled(shelf, 2, one)
    assert spilled(shelf, 0, one)
