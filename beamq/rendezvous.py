"""Where the processes of a run meet, and how they wait for each other there.

The place is MASTER_ADDR and MASTER_PORT, as torchrun sets them. torch waits in C++, where no signal
is heard, and for as long as the group's collectives may take; so it does that in a thread, and the
main thread waits for the thread in short turns. A thread that is given up ends with the process.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from beamq.errors import EnvironmentFault, UsageError, shown_value

LAST_PORT = 65535
MEETING_TIMEOUT = timedelta(hours=12)  # a rank may have a terabyte more to write than another
TOLD_SECONDS, PATIENCE_SECONDS = 15.0, 600.0  # a silent wait; all of the wait for a start
_TURN_SECONDS = 0.2
_LOG = logging.getLogger("beamq")


def enter_group(world: int) -> None:
    """Enter the process group: gloo for what lies on the host, NCCL for what lies on GPUs.

    Says what it waits for after `TOLD_SECONDS`. Raises `EnvironmentFault` where the host is not
    known, where the processes cannot meet, and where one has not come in `PATIENCE_SECONDS`.
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
        _resolve(host)
        if device is not None:
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(backend, timeout=MEETING_TIMEOUT)
        except RuntimeError as fault:
            taken = "EADDRINUSE" in str(fault) or "already in use" in str(fault)
            reason = "another process has that port" if taken else "see that both are right"
            raise EnvironmentFault(
                f"the {world} processes of this run cannot meet at {where}: {reason}"
            ) from fault

    _in_turns(enter, f"{world} processes at {where}")


def _in_turns(step: Callable[[], None], awaited: str) -> None:
    """Run `step` in a thread; meanwhile hear signals. Raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            step()
        except BaseException as fault:
            raised.append(fault)

    thread = threading.Thread(target=run, name="rendezvous", daemon=True)
    begun, told = time.monotonic(), False
    thread.start()
    while thread.is_alive():
        thread.join(_TURN_SECONDS)
        waited = time.monotonic() - begun
        if waited > PATIENCE_SECONDS and thread.is_alive():
            raise EnvironmentFault(
                f"waited {PATIENCE_SECONDS / 60:.0f} minutes for {awaited}: not all came; start"
                " them all, with the same address and port"
            )
        if waited > TOLD_SECONDS and not told and thread.is_alive():
            told = True
            _LOG.warning("waiting for %s ...", awaited)
    if raised:
        raise raised[0]


def _resolve(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as fault:
        raise EnvironmentFault(
            f"MASTER_ADDR {shown_value(host)} is no host that this machine knows; give the first"
            " process's machine by a name that resolves, or by its address"
        ) from fault


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
