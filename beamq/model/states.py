"""Hidden states of all batches of a pass: where they lie, and who knows them.

In: batches, a `Shelf`, an `ExpertExchange`. Out: states by batch number, on the device.

The one idea: a batch is worked on where it is at home (`exchange.mine`), and told to the other
processes only when they need it. `told` in between: alone, or undivided, everybody knows all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from beamq.model.attention import SequenceLayout
from beamq.model.exchange import ExpertExchange
from beamq.model.shelf import Shelf

TRANSFERS = 4
"""Batches whose states may be on their way between processes at once."""

Work = Callable[[int, torch.Tensor], torch.Tensor]
"""From a batch's number and states [T, K] to its new states."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """Hidden states of some packed sequences; `run_layers` moves them from layer to layer."""

    h_TK: torch.Tensor
    layout: SequenceLayout


class HiddenStates:
    """Holds the states of `batches` on `shelf`, under their numbers, until `hand_over`."""

    def __init__(self, batches: Sequence[Batch], shelf: Shelf, exchange: ExpertExchange) -> None:
        self._batches = batches
        self._shelf = shelf
        self._exchange = exchange
        self._told = True
        self.take_back()

    def get(self, number: int) -> torch.Tensor:
        """States [T, K] of one batch, on the device; not to be changed."""
        return self._shelf.get(number)

    def hand_over(self) -> None:
        """Give the batches their states, wherever those are."""
        for number, batch in enumerate(self._batches):
            batch.h_TK = self._shelf.peek(number)

    def take_back(self) -> None:
        """Take states from the batches again, which are empty until then."""
        for number, batch in enumerate(self._batches):
            self._shelf.put(number, batch.h_TK)
            batch.h_TK = batch.h_TK.new_empty(0)

    def update(self, work: Work) -> None:
        """New states of the batches that are at home; the others do not learn of them yet."""
        for number in filter(self._exchange.mine, range(len(self._batches))):
            self._shelf.put(number, work(number, self._shelf.get(number)))
        self._told = not self._exchange.divided

    def update_all(self, work: Work) -> None:
        """New states of the batches that are at home, told to every process.

        Transfers run beside the next batches' work.
        """
        told: deque[tuple[int, torch.Tensor, Callable[[], None]]] = deque()

        def keep() -> None:
            number, h_TK, wait = told.popleft()
            wait()
            self._shelf.put(number, h_TK)

        for number in range(len(self._batches)):
            h_TK = self._shelf.get(number)
            if self._exchange.mine(number):
                h_TK = work(number, h_TK)
            told.append((number, h_TK, self._exchange.spread(number, h_TK)))
            if len(told) > (TRANSFERS if self._exchange.divided else 0):
                keep()
        while told:
            keep()
        self._told = True

    def tell(self) -> None:
        """Tell every process what it does not know yet."""
        if not self._told:
            self.update_all(lambda number, h_TK: h_TK)
