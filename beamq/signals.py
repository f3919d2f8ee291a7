"""Signals and thread switching, for work that can be resumed and for GPUs that must not wait.

`stop_on_signals` turns SIGINT and SIGTERM into a request to stop. Under torchrun Ctrl-C arrives
twice, from the terminal and from torchrun; so a signal within `SAME_REQUEST_SECONDS` of the first
one counts as the same request.

`short_turns` lets threads take the interpreter from each other sooner. CPython lets a thread wait
5 ms before it takes it from another. A GPU's kernels last less than that, so a thread that launches
them loses whole layers to a dozen reader threads: on two H200s and 32 cores a sparse layer took
0.82 s with 5 ms and 0.69 s with half a millisecond, a conversion 6.1 and 5.0 s (docs/results.md).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SAME_REQUEST_SECONDS = 5.0
SHORT_SECONDS = 0.0005
_lock = threading.Lock()
_before: list[float] = []
"""The interval before each block that has begun; the first is the process's own."""


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on the first SIGINT or SIGTERM; a second one acts as usual."""
    patience = SAME_REQUEST_SECONDS if "LOCAL_RANK" in os.environ else 0.0
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
            if patience:  # not the signal that set `stop`
                signal.raise_signal(number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def interrupted(raised: BaseException | None) -> bool:
    """Whether Ctrl-C was raised, or something from it: Python up to 3.11 wraps what is raised while
    a class is made, as happens in imports."""
    while raised is not None and not isinstance(raised, KeyboardInterrupt):
        raised = raised.__cause__
    return raised is not None


@contextmanager
def short_turns(wanted: bool) -> Iterator[None]:
    """Within, threads of this process take turns at least every `SHORT_SECONDS`, if `wanted`.

    It is a setting of the whole process. The previous value returns when the last such block ends,
    in whatever order they end.
    """
    if not wanted:
        yield
        return
    with _lock:
        _before.append(_before[0] if _before else sys.getswitchinterval())
        sys.setswitchinterval(min(_before[0], SHORT_SECONDS))
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                sys.setswitchinterval(before)
