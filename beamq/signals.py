"""SIGINT and SIGTERM as a wish to stop, for work that can be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on the first SIGINT or SIGTERM; a second one acts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, previous[signal.Signals(number)])

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
