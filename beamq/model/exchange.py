"""Expert sums across processes that share a pass, each with a range of every layer's experts.

In: a batch's FP32 sum at this process. Out: the sum over all experts, at every process.

The one idea: the sum is handed on. Process r adds its experts to what came from r - 1 and passes
it to r + 1; the last one sends the whole to all. So every token's contributions are added in
ascending order of expert, as one process would, and the result has the same bits however many
processes there are. Adding up partial sums instead (all-reduce) would not.

Processes wait for each other within a batch, but work on neighbouring batches at the same time:
with B batches and R processes a layer's experts take (B + R - 1) / (B R) of one process's time.
All else (attention, dense MLPs, routers) every process computes for itself, and gets the same
bits as long as all run the same software on the same kind of device.
"""

from __future__ import annotations

from typing import Protocol

import torch

from beamq.config import BeamConfig
from beamq.ranks import Ranks


class ExpertExchange(Protocol):
    """What a pass calls. All tensors are changed in place, in the same order at every process."""

    experts: range

    def receive(self, sum_TK: torch.Tensor) -> None:
        """Fill with the sum of all experts below `experts`."""

    def send(self, sum_TK: torch.Tensor) -> None:
        """Hand on the sum, now with `experts` in it."""

    def settle(self, sum_TK: torch.Tensor) -> None:
        """Fill with the sum of all experts."""


class Alone:
    """One process with all experts: nothing to exchange."""

    def __init__(self, config: BeamConfig) -> None:
        self.experts = range(config.num_experts)

    def receive(self, sum_TK: torch.Tensor) -> None:
        """Nothing."""

    def send(self, sum_TK: torch.Tensor) -> None:
        """Nothing."""

    def settle(self, sum_TK: torch.Tensor) -> None:
        """Nothing."""


class RankChain:
    """Several processes started by torchrun. The process group must be up (`Ranks.join`)."""

    def __init__(self, ranks: Ranks, config: BeamConfig) -> None:
        self.experts = own_experts(ranks, config)
        self._rank = ranks.rank
        self._last = ranks.world - 1

    def receive(self, sum_TK: torch.Tensor) -> None:
        """From the rank before; the first rank starts from zeros as they are."""
        if self._rank > 0:
            torch.distributed.recv(sum_TK, self._rank - 1)

    def send(self, sum_TK: torch.Tensor) -> None:
        """To the rank behind."""
        if self._rank < self._last:
            torch.distributed.send(sum_TK, self._rank + 1)

    def settle(self, sum_TK: torch.Tensor) -> None:
        """From the last rank."""
        torch.distributed.broadcast(sum_TK, self._last)


def own_experts(ranks: Ranks, config: BeamConfig) -> range:
    """This process's experts of every layer: neighbours, shared out evenly."""
    total = config.num_experts
    return range(total * ranks.rank // ranks.world, total * (ranks.rank + 1) // ranks.world)


def exchange_for(ranks: Ranks, config: BeamConfig) -> ExpertExchange:
    """The exchange of this process; joins the process group where there are several."""
    if ranks.world == 1:
        return Alone(config)
    ranks.join()
    return RankChain(ranks, config)
