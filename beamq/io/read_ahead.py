"""Read-ahead: the next unit of work is loaded while the present one is computed.

In: callables, each of which loads one unit (a layer, a slice of its experts) and returns it.
Out: their results, in order.

One background thread loads; at most `depth` units exist besides the one in use, so memory is set by
the size of a unit, not by their number. A unit may spread its own reads over more threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Unit = TypeVar("Unit")


def read_ahead(loads: Iterable[Callable[[], Unit]], *, depth: int = 1) -> Iterator[Unit]:
    """Yield each load's result in order, up to `depth` of them loaded ahead (0: none, no thread).

    Raises what a load raises, when its turn comes. A consumer that stops early stops the loads.
    """
    if depth < 1:
        for load in loads:
            yield load()
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="beamq-read-ahead")
    ahead: deque[Future[Unit]] = deque()
    try:
        for load in loads:
            ahead.append(pool.submit(load))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
