"""Read-ahead: order, bound, errors, early end; shards are waited for and then let go."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import classify
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.io.source import Prefetch
from beamq.model.layer_stream import LayerStream, PrefetchingLoader, read_ahead
from tests.helpers.model_fixtures import random_beam


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


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("slice_experts", [None, 3])
def test_shards_are_there_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, slice_experts: int | None
) -> None:
    """Before that, a read would be a request of its own; after it, the shard may be deleted."""
    events: list[tuple[str, int]] = []

    class Noted(Prefetch):
        def wait(self, job: int, stopped: Callable[[], bool]) -> None:
            events.append(("wait", job))

        def finish(self, job: int) -> None:
            events.append(("finish", job))

    def read_into(self: Checkpoint, spec: Any, *rest: Any) -> None:
        layer = classify(spec.name).layer
        # Units count from the embedding, or from the first layer.
        events.append(("read", 0 if layer is None else layer - first + (not first)))
        genuine(self, spec, *rest)

    genuine = Checkpoint.read_into
    checkpoint = open_checkpoint(random_beam(tmp_path))
    config = BeamConfig.from_dict(checkpoint.config)
    monkeypatch.setattr(Checkpoint, "prefetch", lambda self, jobs: nullcontext(Noted()))
    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    loader = PrefetchingLoader(
        checkpoint,
        config,
        first=first,
        experts=range(config.num_experts),
        keep_rest=False,
        stopped=lambda: False,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with loader:
        if not first:
            loader.embedding()
        layers = range(first, config.num_layers)
        for _ in LayerStream(loader, layers=layers, slice_experts=slice_experts):
            pass
    units = range(config.num_layers - first + (not first))
    for unit in units:
        reads = [at for at, event in enumerate(events) if event == ("read", unit)]
        assert events.index(("wait", unit)) < reads[0], unit
        assert reads[-1] < events.index(("finish", unit)), unit
    assert {unit for _, unit in events} == set(units)
