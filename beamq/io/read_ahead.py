"""Read-ahead: the next unit of work is loaded while the present one is computed.

In: callables, each of which loads one unit (a layer, a slice of its experts) and returns it.
Out: their results, in order.

The one idea: a single background thread and a count of permits. A load begins only when a
permit is free, and a permit comes back when the consumer asks for the next unit, so at most
`depth` units exist besides the one in use; memory is set by the unit, never by how many there
are. A unit may spread its own reads over more threads; order and bound stay with this one.

A load that fails raises in the consumer, at the place of its unit. A consumer that stops early
stops the thread: nothing is loaded that nobody will take.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Unit = TypeVar("Unit")


class _End:
    """Marks the end of the loads."""


class _Reader(Generic[Unit]):
    """The thread's side: takes permits, loads, hands over."""

    def __init__(self, loads: Iterable[Callable[[], Unit]], depth: int) -> None:
        self._loads = loads
        self._permits = threading.Semaphore(depth)
        self._done: queue.SimpleQueue[Unit | BaseException | type[_End]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beamq-read-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for load in self._loads:
                self._permits.acquire()
                if self._stopped.is_set():
                    return
                self._done.put(load())
        except BaseException as error:  # handed to the consumer, which raises it
            self._done.put(error)
            return
        self._done.put(_End)

    def take(self) -> Unit | BaseException | type[_End]:
        """The next unit, an error or the end; frees one permit for a further load."""
        unit = self._done.get()
        self._permits.release()
        return unit

    def stop(self) -> None:
        """Let the thread end after the load it is in, and wait for it."""
        self._stopped.set()
        self._permits.release()
        self._thread.join()


def read_ahead(loads: Iterable[Callable[[], Unit]], *, depth: int = 1) -> Iterator[Unit]:
    """Yield each load's result in order, up to `depth` of them loaded ahead (0: none, no thread).

    Raises what a load raises, when its turn comes.
    """
    if depth < 1:
        for load in loads:
            yield load()
        return
    reader = _Reader(loads, depth)
    try:
        while True:
            unit = reader.take()
            if unit is _End:
                return
            if isinstance(unit, BaseException):
                raise unit
            yield unit  # type: ignore[misc]  # the two other kinds were just handled
            del unit  # or the unit in use would stay alive while the next is waited for
    finally:
        reader.stop()
