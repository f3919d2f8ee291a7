"""Read-ahead: order, bound, errors, early end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from beamq.model.layer_stream import read_ahead


class Unit:
    """Something loaded, whose life can be watched."""

    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_order(depth: int) -> None:
    loads = [lambda n=n: n for n in range(20)]
    assert list(read_ahead(loads, depth=depth)) == list(range(20))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_units_alive_are_bounded(depth: int) -> None:
    alive: weakref.WeakSet[Unit] = weakref.WeakSet()
    most = 0
    lock = threading.Lock()

    def load(number: int) -> Unit:
        nonlocal most
        unit = Unit(number)
        with lock:
            alive.add(unit)
            most = max(most, len(alive))
        return unit

    units = read_ahead([lambda n=n: load(n) for n in range(30)], depth=depth)
    for unit in units:
        assert unit.number >= 0
        del unit
    assert most <= depth + 1


def test_a_failed_load_raises_at_its_turn() -> None:
    def fail() -> int:
        raise OSError("gone")

    units = read_ahead([lambda: 1, fail, lambda: 3])
    assert next(units) == 1
    with pytest.raises(OSError, match="gone"):
        next(units)


def test_a_failing_iterable_of_loads_raises() -> None:
    def loads() -> Iterator[Callable[[], int]]:
        yield lambda: 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(read_ahead(loads()))


def test_a_consumer_that_stops_stops_the_loads() -> None:
    loaded: list[int] = []
    units = read_ahead([lambda n=n: loaded.append(n) or n for n in range(100)])
    assert next(units) == 0
    units.close()  # type: ignore[attr-defined]
    assert len(loaded) <= 3
    assert not any(t.name == "beamq-read-ahead" and t.is_alive() for t in threading.enumerate())
