"""Progress in notebooks: a bar where a call of the library is given nothing to report to."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

LEAST_BYTES = 10_000  # totals below this count layers


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@contextmanager
def notebook_bar(doing: str) -> Iterator[Callable[..., None]]:
    """Yields what to call with (done, total), or with a record of `done_nbytes` and `total_nbytes`,
    from any thread. The bar is drawn from the first call on."""
    bars: list[Any] = []
    lock = threading.Lock()

    def advance(*seen: Any) -> None:
        done, total = seen if len(seen) == 2 else (seen[0].done_nbytes, seen[0].total_nbytes)
        with lock:
            if not bars:
                counts = {"unit": " layers"} if total < LEAST_BYTES else {"unit": "B"}
                draw = import_module("tqdm.auto").tqdm  # comes with huggingface_hub
                bars.append(draw(desc=doing, total=total, unit_scale=True, **counts))
            bars[0].total = total
            bars[0].update(done - bars[0].n)

    try:
        yield advance
    finally:
        for bar in bars:
            bar.close()
