"""Processes that share a pass: each has a range of every layer's experts and some of the batches.

In: a batch's FP32 sum at this process. Out: the sum over all experts, at the batch's home process.

The one idea: a pipelined reduce. Process r adds its experts to the sum from r - 1 and passes it on
to r + 1; the last one sends the result to those that need it. So every token's contributions are
added in ascending order of expert, as one process would, and the result has the same bits whatever
the number of processes. An all-reduce of partial sums would not.

Processes work on neighbouring batches at the same time: with B batches and R processes a layer's
experts take (B + R - 1) / (B R) of one process's time. Everything else (attention, dense MLPs,
routers) is computed at the batch's home, process n modulo R for batch n, and broadcast to the
others before their experts. Bits are those of one process if all devices are of one kind. With
`divided=False` each process computes everything else for all batches, for observers whose findings
cannot be combined exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from beamq.beam.config import BeamConfig
from beamq.ranks import Ranks

SENDS = 2
"""Sums that may be on their way to the next rank, so that ranks need not keep step."""


class ExpertExchange:
    """What a pass calls. This class is the single process, which has nothing to exchange.

    All tensors are changed in place, and all processes make the same calls in the same order.
    `experts` are this process's. `shared`: there are other processes. `divided`: each batch is
    computed at its home only.
    """

    def __init__(self, config: BeamConfig) -> None:
        self.experts = range(config.num_experts)
        self.shared = False
        self.divided = False

    def mine(self, batch: int) -> bool:
        """Whether this process computes the part of the batch that is not experts."""
        return True

    def spread(self, batch: int, *tensors: torch.Tensor) -> Callable[[], None]:
        """Fill the tensors with those of the batch's home.

        The result waits for the transfer, which overlaps with what is computed until it is called.
        """
        return lambda: None

    def bring_home(self, batch: int, sum_TK: torch.Tensor) -> None:
        """Fill with the sum of all experts, where the batch is `mine`."""

    def receive(self, sum_TK: torch.Tensor) -> None:
        """Fill with the sum of all experts below `experts`."""

    def send(self, sum_TK: torch.Tensor) -> None:
        """Pass the sum on, now including `experts`.

        It may still be in transfer on return; do not change it until `bring_home` or `settle`.
        """

    def settle(self, sum_TK: torch.Tensor) -> None:
        """Fill with the sum of all experts, at every process."""


class PipelinedReduce(ExpertExchange):
    """Several processes started by torchrun. The process group must be up (`Ranks.join`)."""

    def __init__(self, ranks: Ranks, config: BeamConfig, *, divided: bool = True) -> None:
        super().__init__(config)
        self.experts = own_experts(ranks, config)
        self.shared = True
        self.divided = divided
        self._rank = ranks.rank
        self._last = ranks.world - 1
        self._sent: deque[tuple[torch.distributed.Work, torch.Tensor]] = deque()

    def mine(self, batch: int) -> bool:
        """See `ExpertExchange`. Batches are dealt out in turn."""
        return not self.divided or self._home(batch) == self._rank

    def spread(self, batch: int, *tensors: torch.Tensor) -> Callable[[], None]:
        """Broadcast from the batch's home."""
        if not self.divided:
            return lambda: None
        home = self._home(batch)
        works = [torch.distributed.broadcast(each, home, async_op=True) for each in tensors]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def bring_home(self, batch: int, sum_TK: torch.Tensor) -> None:
        """From the last rank to the batch's home."""
        self._wait_for_sent(0)
        home = self._home(batch)
        if not self.divided:
            self.settle(sum_TK)
        elif self._rank == self._last != home:
            torch.distributed.send(sum_TK, home)
        elif self._rank == home != self._last:
            torch.distributed.recv(sum_TK, self._last)

    def receive(self, sum_TK: torch.Tensor) -> None:
        """From the previous rank; the first rank starts with the zeros it has."""
        if self._rank > 0:
            torch.distributed.recv(sum_TK, self._rank - 1)

    def send(self, sum_TK: torch.Tensor) -> None:
        """To the next rank, overlapping with the next batches' work."""
        if self._rank < self._last:
            work = torch.distributed.isend(sum_TK, self._rank + 1)
            if work is not None:
                self._sent.append((work, sum_TK))
            self._wait_for_sent(SENDS)

    def settle(self, sum_TK: torch.Tensor) -> None:
        """Broadcast from the last rank."""
        self._wait_for_sent(0)
        torch.distributed.broadcast(sum_TK, self._last)

    def _wait_for_sent(self, left: int) -> None:
        """Wait until at most `left` sums are on their way to the next rank."""
        while len(self._sent) > left:
            work, _ = self._sent.popleft()
            work.wait()

    def _home(self, batch: int) -> int:
        return batch % (self._last + 1)


def own_experts(ranks: Ranks, config: BeamConfig) -> range:
    """This process's experts of every layer: neighbours, divided evenly."""
    total = config.num_experts
    return range(total * ranks.rank // ranks.world, total * (ranks.rank + 1) // ranks.world)


def exchange_for(ranks: Ranks, config: BeamConfig, *, divided: bool = True) -> ExpertExchange:
    """The exchange of this process; joins the process group if there are several."""
    if ranks.world == 1:
        return ExpertExchange(config)
    ranks.join()
    return PipelinedReduce(ranks, config, divided=divided)
