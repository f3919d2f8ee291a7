"""Who has the interpreter: reader threads beside the one thread that a GPU waits for.

CPython lets a thread that wants the interpreter wait 5 ms before it takes it from another. A GPU's
kernels last less than that, so a thread that launches them loses whole layers to a dozen readers:
measured on H200s, a sparse layer took 0.83 s with 5 ms and 0.69 s with half a millisecond, and a
conversion 6.1 and 5.0 s (docs/results.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

SHORT_SECONDS = 0.0005


@contextmanager
def short_turns(wanted: bool) -> Iterator[None]:
    """Within, threads of this process take turns at least every `SHORT_SECONDS`, if `wanted`.

    A setting of the whole process; what it was before comes back at the end.
    """
    before = sys.getswitchinterval()
    if wanted:
        sys.setswitchinterval(min(before, SHORT_SECONDS))
    try:
        yield
    finally:
        if wanted:
            sys.setswitchinterval(before)
