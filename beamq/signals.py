"""SIGINT and SIGTERM as a wish to stop, for work that can be resumed.

Under torchrun Ctrl-C comes twice, from the terminal and from torchrun: there, what follows the
first signal within `SAME_WISH_SECONDS` is no second wish.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAME_WISH_SECONDS = 5.0


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on the first SIGINT or SIGTERM; a second one acts as usual."""
    patience = SAME_WISH_SECONDS if "LOCAL_RANK" in os.environ else 0.0
    first: float | None = None
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, _: object) -> None:
        nonlocal first
        now = time.monotonic()
        first = now if first is None else first
        stop.set()
        if now - first >= patience:
            signal.signal(number, previous[signal.Signals(number)])
            if patience:  # this is the second wish, not the one before it
                signal.raise_signal(number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
