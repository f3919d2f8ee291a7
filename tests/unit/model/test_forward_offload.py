"""An offload buffer keeps tensors on the device up to a budget, and frees dropped ones."""

from __future__ import annotations

import torch

from beamq.model.forward import OffloadBuffer

CPU = torch.device("cpu")


def spilled(buffer: OffloadBuffer, key: int, tensor: torch.Tensor) -> bool:
    """Spilled tensors are copies: what was put in stays the caller's."""
    buffer.put(key, tensor)
    return buffer.peek(key) is not tensor


def test_what_is_beyond_the_budget_is_copied_to_the_host() -> None:
    buffer = OffloadBuffer(CPU, budget=80)
    first, second, third = (torch.full((10,), float(n)) for n in range(3))
    assert not spilled(buffer, 0, first)
    assert not spilled(buffer, 1, second)
    assert spilled(buffer, 2, third)
    assert torch.equal(buffer.get(2), third)
    buffer.put(2, torch.full((10,), 7.0))
    assert buffer.get(2).tolist() == [7.0] * 10
    buffer.put(0, torch.full((10,), 9.0))  # keeps its place
    assert spilled(buffer, 3, third)


def test_what_is_dropped_leaves_room() -> None:
    buffer = OffloadBuffer(CPU, budget=40)
    one = torch.zeros(10)
    assert not spilled(buffer, 0, one)
    assert spilled(buffer, 1, one)
    buffer.drop(1)
    assert spilled(buffer, 1, one)
    buffer.drop(0)
    assert not spilled(buffer, 2, one)
    assert spilled(buffer, 0, one)
