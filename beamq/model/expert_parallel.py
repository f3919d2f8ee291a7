"""Processes that share a pass: each has a range of every layer's experts, and some of the batches.

In: a batch's FP32 sum at this process. Out: the sum over all experts, where the batch is at home.

The one idea: the sum is handed on. Process r adds its experts to what came from r - 1 and passes
it to r + 1; the last one sends the whole to all. So every token's contributions are added in
ascending order of expert, as one process would, and the result has the same bits however many
processes there are. Adding up partial sums instead (all-reduce) would not.

Processes wait for sums of each batch, but work on neighbouring batches at the same time:
with B batches and R processes a layer's experts take (B + R - 1) / (B R) of one process's time.
All else (attention, dense MLPs, routers) is computed where the batch is at home, batch n at process
n modulo R, and its states and choices are told to the others, which need them in front of their
experts. Bits are those of one process as long as all are the same kind of device.

Undivided, each process computes everything else for itself: for `compare`, whose scores cannot be
put together exactly from those of several processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from beamq.beam.config import BeamConfig
from beamq.ranks import Ranks

SENDS = 2
"""Sums on their way to the rank behind at once, so that ranks need not keep step."""


class ExpertExchange(Protocol):
    """What a pass calls. All tensors are changed in place, in the same order at every process."""

    experts: range
    divided: bool
    """Whether batches have a home, or every process has all."""

    def mine(self, batch: int) -> bool:
        """Whether this process computes what is not experts of that batch."""

    def spread(self, batch: int, *tensors: torch.Tensor) -> Callable[[], None]:
        """Fill with what the process has at which the batch is at home, once the result is called:
        what is computed in between runs beside the transfer."""

    def bring_home(self, batch: int, sum_TK: torch.Tensor) -> None:
        """Fill with the sum of all experts, where `mine`."""

    def receive(self, sum_TK: torch.Tensor) -> None:
        """Fill with the sum of all experts below `experts`."""

    def send(self, sum_TK: torch.Tensor) -> None:
        """Hand on the sum, now with `experts` in it. It may still be on its way on return: not to
        be changed until `bring_home` or `settle`."""

    def settle(self, sum_TK: torch.Tensor) -> None:
        """Fill with the sum of all experts."""


class SingleProcess:
    """One process with all experts: nothing to exchange."""

    def __init__(self, config: BeamConfig) -> None:
        self.experts = range(config.num_experts)
        self.divided = False

    def mine(self, batch: int) -> bool:
        """All are."""
        return True

    def spread(self, batch: int, *tensors: torch.Tensor) -> Callable[[], None]:
        """Nothing."""
        return _no_wait

    def bring_home(self, batch: int, sum_TK: torch.Tensor) -> None:
        """Nothing."""

    def receive(self, sum_TK: torch.Tensor) -> None:
        """Nothing."""

    def send(self, sum_TK: torch.Tensor) -> None:
        """Nothing."""

    def settle(self, sum_TK: torch.Tensor) -> None:
        """Nothing."""


class PipelinedReduce:
    """Several processes started by torchrun. The process group must be up (`Ranks.join`)."""

    def __init__(self, ranks: Ranks, config: BeamConfig, *, divided: bool = True) -> None:
        self.experts = own_experts(ranks, config)
        self.divided = divided
        self._rank = ranks.rank
        self._last = ranks.world - 1
        self._sent: deque[tuple[torch.distributed.Work, torch.Tensor]] = deque()

    def mine(self, batch: int) -> bool:
        """Batches go round."""
        return not self.divided or self._home(batch) == self._rank

    def spread(self, batch: int, *tensors: torch.Tensor) -> Callable[[], None]:
        """From the batch's home to all."""
        if not self.divided:
            return _no_wait
        home = self._home(batch)
        works = [torch.distributed.broadcast(each, home, async_op=True) for each in tensors]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def bring_home(self, batch: int, sum_TK: torch.Tensor) -> None:
        """From the last rank to where the batch is at home."""
        self._wait_for_sent(0)
        home = self._home(batch)
        if not self.divided:
            self.settle(sum_TK)
        elif self._rank == self._last != home:
            torch.distributed.send(sum_TK, home)
        elif self._rank == home != self._last:
            torch.distributed.recv(sum_TK, self._last)

    def receive(self, sum_TK: torch.Tensor) -> None:
        """From the rank before; the first rank starts from zeros as they are."""
        if self._rank > 0:
            torch.distributed.recv(sum_TK, self._rank - 1)

    def send(self, sum_TK: torch.Tensor) -> None:
        """To the rank behind, beside the next batches' work."""
        if self._rank < self._last:
            work = torch.distributed.isend(sum_TK, self._rank + 1)
            if work is not None:
                self._sent.append((work, sum_TK))
            self._wait_for_sent(SENDS)

    def settle(self, sum_TK: torch.Tensor) -> None:
        """From the last rank."""
        self._wait_for_sent(0)
        torch.distributed.broadcast(sum_TK, self._last)

    def _wait_for_sent(self, left: int) -> None:
        """Until at most so many sums are on their way to the rank behind."""
        while len(self._sent) > left:
            work, _ = self._sent.popleft()
            work.wait()

    def _home(self, batch: int) -> int:
        return batch % (self._last + 1)


def _no_wait() -> None:
    """All is here already."""


def own_experts(ranks: Ranks, config: BeamConfig) -> range:
    """This process's experts of every layer: neighbours, shared out evenly."""
    total = config.num_experts
    return range(total * ranks.rank // ranks.world, total * (ranks.rank + 1) // ranks.world)


def exchange_for(ranks: Ranks, config: BeamConfig, *, divided: bool = True) -> ExpertExchange:
    """The exchange of this process; joins the process group where there are several."""
    if ranks.world == 1:
        return SingleProcess(config)
    ranks.join()
    return PipelinedReduce(ranks, config, divided=divided)
