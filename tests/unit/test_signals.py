"""A first signal is a wish to stop, a second one an order; under torchrun each comes twice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from beamq import signals
from beamq.signals import SAME_REQUEST_SECONDS, stop_on_signals


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """SIGINT as in a foreground process; a shell has those in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_acts_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    stop = threading.Event()
    with stop_on_signals(stop):
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)  # a first one of its kind
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_under_torchrun_signals_at_once_are_one_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setenv("LOCAL_RANK", "0")
    before, stop = signal.getsignal(signal.SIGINT), threading.Event()
    with stop_on_signals(stop):
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            now += SAME_REQUEST_SECONDS / 4 - 0.01
        assert stop.is_set()
        now = 100.0 + SAME_REQUEST_SECONDS
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
