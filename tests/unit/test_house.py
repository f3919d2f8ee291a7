"""Limits on functions, names and imports; scripts/house_counts.py says what exceeds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.house_counts import Count, measure

LIMITS = {
    "import cycles, local imports included": 0,
    "functions over 60 lines": 0,
    "functions with over 8 parameters": 0,
    "class names used twice": 0,
}


@pytest.fixture(scope="module")
def counts(repo: Path) -> dict[str, Count]:
    return measure(repo)


@pytest.mark.parametrize(("name", "limit"), LIMITS.items(), ids=LIMITS.keys())
def test_limit(counts: dict[str, Count], name: str, limit: int) -> None:
    found = counts[name]
    assert found.value <= limit, "\n".join((f"{found.value} {name}", *found.items))
