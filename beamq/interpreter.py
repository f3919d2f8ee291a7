"""Who has the interpreter: reader threads beside the one thread that a GPU waits for.

CPython lets a thread that wants the interpreter wait 5 ms before it takes it from another. A GPU's
kernels last less than that, so a thread that launches them loses whole layers to a dozen readers:
on two H200s and 32 cores a sparse layer took 0.82 s with 5 ms and 0.69 s with half a millisecond, a
conversion 6.1 and 5.0 s (docs/results.md, Many GPUs and Conversion).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHORT_SECONDS = 0.0005

_lock = threading.Lock()
_before: list[float] = []
"""What the interval was before each block that is under way; the first is the process's own."""


@contextmanager
def short_turns(wanted: bool) -> Iterator[None]:
    """Within, threads of this process take turns at least every `SHORT_SECONDS`, if `wanted`.

    A setting of the whole process; what it was comes back at the end of the last such block, in
    whatever order they end.
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
