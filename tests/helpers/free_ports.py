"""Ports for processes that meet: not those that the system gives to connections meanwhile."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _EACH, _WORKERS = 18_000, 200, 60  # below Linux's own range, which begins at 32,768
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_turn = itertools.count(os.getpid())


def free_port() -> str:
    """A port that nobody has now; another worker of this run takes none of the same."""
    for _ in range(_EACH):
        port = _FIRST + _EACH * _worker + next(_turn) % _EACH
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return str(port)
    raise OSError(f"no port is free from {port - _EACH} to {port + _EACH}")
