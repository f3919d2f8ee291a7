"""Keep a long pass on a CPU from growing: what libraries hold on to, layer after layer.

Two things grow that no tensor of ours accounts for. oneDNN, which runs torch's BF16 products,
keeps a compiled kernel for every shape it has met, and each expert's row count is a new shape:
some 10 MB a layer, up to 1,024 kernels. And glibc keeps what is freed between what is not: sizes
differ from layer to layer, so the holes do not fit. Both are process-wide settings, harmless to
others: kernels are compiled again in microseconds, free memory is taken again as it is needed.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

KEPT_KERNELS = "64"
TRIM_SECONDS = 1.0


def cap_kernel_caches() -> None:
    """Before the first product of the process; later it has no effect. The user's own wins."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, KEPT_KERNELS)


class HeapTrim:
    """Hands unused heap back to the system now and then, where the C library can (glibc).

    Not after every small layer: what is handed back and needed again costs page faults.
    """

    def __init__(self) -> None:
        try:
            self._trim: Callable[[int], int] | None = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):
            self._trim = None
        self._next = 0.0

    def between_layers(self) -> None:
        """Trim if it is time."""
        if self._trim is not None and time.monotonic() >= self._next:
            self._trim(0)
            self._next = time.monotonic() + TRIM_SECONDS
