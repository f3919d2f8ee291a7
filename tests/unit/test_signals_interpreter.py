"""The switch interval is short where it was asked for, and as before afterwards."""

from __future__ import annotations

import sys

import pytest

from beamq.signals import SHORT_SECONDS, short_turns


def test_turns_are_short_within_and_as_before_behind() -> None:
    before = sys.getswitchinterval()
    with short_turns(True):
        assert sys.getswitchinterval() == pytest.approx(SHORT_SECONDS, rel=0.02)
        with short_turns(False):
            assert sys.getswitchinterval() == pytest.approx(SHORT_SECONDS, rel=0.02)
    assert sys.getswitchinterval() == before
    with pytest.raises(ZeroDivisionError), short_turns(True):
        raise ZeroDivisionError
    assert sys.getswitchinterval() == before


def test_blocks_may_end_in_any_order() -> None:
    before = sys.getswitchinterval()
    first, second = short_turns(True), short_turns(True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SHORT_SECONDS, rel=0.02)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_what_is_shorter_already_stays() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        with short_turns(True):
            assert sys.getswitchinterval() == pytest.approx(2e-4, rel=0.02)
    finally:
        sys.setswitchinterval(before)
