"""The processes of a run: one, or several started by torchrun, and how they wait for each other.

Work is divided by the plan alone, so ranks need only a barrier and each other's failures. With one
process nothing of torch is imported.

Ranks meet at MASTER_ADDR and MASTER_PORT, as torchrun sets them. torch waits in C++, where no
signal is heard, and for as long as a collective may take; so it waits in a thread, which the main
thread polls. A thread that is given up ends with the process.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from beamq.errors import OURS, EnvironmentFault, Interrupted, UsageError, shown_value
from beamq.limits import usable_cores

LAST_PORT = 65535
MEETING_TIMEOUT = timedelta(hours=12)  # a rank may have a terabyte more to write than another
NOTICE_SECONDS = 15.0  # of waiting before a message
PATIENCE_SECONDS = 600.0  # for the other processes to start
LOST = (
    "another process of this run was lost; start all of them again (quantize, calibrate,"
    " dequantize and merge resume with --resume)"
)
_TURN_SECONDS = 0.2
_LOG = logging.getLogger("beamq")
# In what gloo, NCCL and torch's store say when a peer has gone. gloo has no class of its own.
_BETWEEN_RANKS = re.compile("gloo|nccl|c10d|connection|socket|timed out|process group", re.I)


def enter_group(world: int) -> None:
    """Enter the process group: gloo for what is on the host, NCCL for what is on GPUs.

    Says what it waits for after `NOTICE_SECONDS`. Raises `EnvironmentFault` where the host cannot
    be resolved, where the processes cannot meet, and where one has not come in `PATIENCE_SECONDS`.
    """
    import torch
    import torch.distributed as dist

    host, port = meeting_place()
    where = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
    backend, device = "gloo", None
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device()  # each thread has its own

    def enter() -> None:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as fault:
            raise EnvironmentFault(
                f"MASTER_ADDR {shown_value(host)} cannot be resolved; give the address of the first"
                " process's machine, or a name that resolves on all machines"
            ) from fault
        if device is not None:
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(backend, timeout=MEETING_TIMEOUT)
        except RuntimeError as fault:
            taken = "EADDRINUSE" in str(fault) or "already in use" in str(fault)
            reason = "another process has that port" if taken else "check that both are right"
            raise EnvironmentFault(
                f"the {world} processes of this run cannot meet at {where}: {reason}"
            ) from fault

    _in_thread(enter, f"{world} processes at {where}")


def _in_thread(step: Callable[[], None], awaited: str) -> None:
    """Run `step` in a thread and handle signals meanwhile. Raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            step()
        except BaseException as fault:
            raised.append(fault)

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    begun, noticed = time.monotonic(), False
    thread.start()
    while thread.is_alive():
        thread.join(_TURN_SECONDS)
        waited = time.monotonic() - begun
        if waited > PATIENCE_SECONDS and thread.is_alive():
            raise EnvironmentFault(
                f"waited {PATIENCE_SECONDS / 60:.0f} minutes for {awaited}: some did not arrive;"
                " start all of them, with the same address and port"
            )
        if waited > NOTICE_SECONDS and not noticed and thread.is_alive():
            noticed = True
            _LOG.warning("waiting for %s ...", awaited)
    if raised:
        raise raised[0]


def meeting_place() -> tuple[str, int]:
    """Host and port. Raises `UsageError` where one is missing, or the port is none."""
    host, text = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", text)):
        if not value:
            raise UsageError(f"WORLD_SIZE is above 1 and {name} is not set; torchrun sets both")
    port = int_or_none(text or "")
    if port is None or not 1 <= port <= LAST_PORT:
        raise UsageError(f"MASTER_PORT must be from 1 to {LAST_PORT}, not {shown_value(text, 40)}")
    return host or "", port


def int_or_none(text: str) -> int | None:
    """A whole number as the environment holds it."""
    try:
        return int(text)
    except ValueError:
        return None


@dataclass(slots=True, kw_only=True)
class Ranks:
    """This process among `world` of them. `broken` once the ranks can no longer meet."""

    rank: int = 0
    world: int = 1
    broken: bool = False

    @property
    def first(self) -> bool:
        """Whether this process prints and finalises."""
        return self.rank == 0

    def meet(self, error: BaseException | None = None) -> None:
        """Wait for all ranks; raise if this or any other rank brings an error."""
        if self.world > 1 and not self.broken:
            try:
                reports = self.gather(None if error is None else _words(error))
            except EnvironmentFault:
                if error is None:
                    raise
                raise error from None
            failed = [f"rank {rank}: {text}" for rank, text in enumerate(reports) if text]
            if error is None and failed:
                raise _reported(EnvironmentFault(f"another rank failed ({failed[0][:300]})"))
            if error is not None and _same_failure(reports[0], error):
                _reported(error)
        if error is not None:
            raise error

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Run a step on all ranks; leave it together, or fail together."""
        try:
            yield
        except BaseException as error:
            self.meet(error)
            raise
        self.meet()

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Run a step in which ranks wait for each other; a failure leaves no rank waiting.

        It tears the process group down, which ends the others' waits: they raise
        `EnvironmentFault`.
        """
        try:
            yield
        except BaseException as error:
            if self.world == 1:
                raise
            self._abandon()
            self.broken = True
            if isinstance(error, RuntimeError) and _BETWEEN_RANKS.search(str(error)):
                raise EnvironmentFault(LOST) from error
            raise

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Run a step in which no rank waits for another, and fail at all ranks if one fails.

        All raise the error of the first rank that failed, if it is one of beamq's own: what only
        one rank has read is reported, and ends the command, as in a run of one process.
        """
        try:
            yield
        except BaseException as error:
            self._agree(error)
            raise
        self._agree(None)

    def _agree(self, error: BaseException | None) -> None:
        """Exchange errors; raise that of the lowest failed rank, unless it is this one's own."""
        if self.world == 1 or self.broken:
            return
        own = error is None or isinstance(error, OURS)
        words = "" if error is None else f"another rank failed (rank {self.rank}: {_words(error)}"
        try:
            found = self.gather(error if own else EnvironmentFault(f"{words[:300]})"))
        except EnvironmentFault:
            if error is None:
                raise
            return
        failed = [rank for rank, each in enumerate(found) if each is not None]
        if not (failed and own):
            return
        if failed[0] != self.rank:
            raise _reported(found[failed[0]]) from None
        _reported(error)

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, in order of rank, at every rank. Items are pickled.

        Raises `EnvironmentFault` where another rank is gone.
        """
        if self.world == 1:
            return [item]
        gathered: list[Any] = [None] * self.world
        try:
            self.join()
            import torch.distributed as dist

            dist.all_gather_object(gathered, item)
        except RuntimeError as fault:
            self.broken = True
            raise EnvironmentFault(LOST) from fault
        return gathered

    def join(self) -> None:
        """Enter the process group. Raises `EnvironmentFault` where the ranks cannot meet."""
        import torch.distributed as dist

        if dist.is_initialized():
            return
        try:
            enter_group(self.world)
        except BaseException:
            self.broken = True  # the failure must not be brought to a second meeting
            raise

    def _abandon(self) -> None:
        """Leave without waiting for collectives that have begun."""
        import torch
        import torch.distributed as dist

        world = dist.group.WORLD
        with suppress(RuntimeError):  # no NCCL part, or the group is gone
            if world is not None:  # without abort, NCCL waits for ranks that may be gone
                world._get_backend(torch.device("cuda")).abort()
        with suppress(RuntimeError):
            self.leave()

    def leave(self) -> None:
        """Leave the process group."""
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


def _words(error: BaseException) -> str:
    """The error as other ranks report it: with its class where it is a defect of beamq's."""
    if isinstance(error, OURS):
        return str(error)
    return "interrupted" if type(error) is KeyboardInterrupt else f"{type(error).__name__}: {error}"


def _same_failure(first: str | None, error: BaseException) -> bool:
    """Whether rank 0 failed as this rank did. A signal reaches ranks at different moments."""
    if isinstance(error, Interrupted):
        return first is not None and first.startswith("interrupted")
    return first == _words(error)


def _reported(error: Any) -> Any:
    """`error`, marked as one that rank 0 reports as well."""
    if isinstance(error, OURS):
        error.reported_by_rank_0 = True
    return error


def current_ranks() -> Ranks:
    """Read RANK and WORLD_SIZE, as torchrun sets them.

    Raises `UsageError` where they contradict each other, or where several processes have no place
    to meet.
    """
    ranks = _numbers()
    if ranks.world > 1:
        meeting_place()
    return ranks


def rank_here() -> int:
    """This process's rank; 0, which prints, where the environment contradicts itself."""
    try:
        return _numbers().rank
    except UsageError:
        return 0


def _numbers() -> Ranks:
    rank, world = os.environ.get("RANK"), int_or_none(os.environ.get("WORLD_SIZE") or "1")
    if world is not None and world > 1 and not rank:
        raise UsageError(f"WORLD_SIZE is {world} and RANK is not set; torchrun sets both")
    number = int_or_none(rank or "0")
    if number is None or world is None:
        raise UsageError("RANK and WORLD_SIZE must be whole numbers, as torchrun sets them")
    if not 0 <= number < world:
        raise UsageError(f"RANK {number} does not fit WORLD_SIZE {world}")
    return Ranks(rank=number, world=world)


def cores_here() -> int:
    """Cores for this process: those it may use, divided by the run's processes on this machine."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not (text.isdecimal() and int(text)):
        raise UsageError(f"LOCAL_WORLD_SIZE must be a whole number above 0, not {text[:40]!r}")
    return max(1, usable_cores() // int(text))


def stretch(sizes: Sequence[int], ranks: Ranks) -> range:
    """Indices this rank works on, where neighbours should stay together.

    An item belongs to the rank in whose equal part of all bytes its middle is, so a rank has at
    most its part and one more item.
    """
    total = sum(sizes) or 1
    first, last, before = 0, 0, 0
    for size in sizes:
        owner = min((2 * before + size) * ranks.world // (2 * total), ranks.world - 1)
        first += owner < ranks.rank
        last += owner <= ranks.rank
        before += size
    return range(first, last)


def share(sizes: Sequence[int], ranks: Ranks) -> frozenset[int]:
    """Indices this rank works on: in order, each to the rank with the least so far."""
    loads = [0] * ranks.world
    mine = set()
    for index, size in enumerate(sizes):
        rank = loads.index(min(loads))
        loads[rank] += size
        if rank == ranks.rank:
            mine.add(index)
    return frozenset(mine)
