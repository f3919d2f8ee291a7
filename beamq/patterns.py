"""Regular expressions from a stranger: from a recipe's patterns or an adapter's config.

Python's `re` cannot be stopped once it runs. So an expression that could take exponential time is
refused beforehand, and a long name matches nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache

from beamq.errors import BeamqError

MAX_PATTERN = 300  # characters of a regular expression
MAX_NAME = 200  # characters of a name that one is tried on
MAX_REPEATS = 4


def matches(expression: str, name: str, where: str, error: type[BeamqError]) -> bool:
    """Whether an expression matches the whole of `name`.

    Raises `error`, which begins with `where`, for an expression that is invalid or slow.
    """
    if fault := _fault(expression):
        raise error(f"{where}: {fault}; simplify it")
    return len(name) <= MAX_NAME and re.fullmatch(expression, name) is not None


@lru_cache(maxsize=256)
def _fault(expression: str) -> str | None:
    """Why an expression is not tried, or None."""
    if len(expression) > MAX_PATTERN or re.search(r"\(\?[aiLmsux-]", expression):
        return f"flags, or more than {MAX_PATTERN} characters"
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as fault:
        return f"not a regular expression: {fault}"
    slow = slow_part(expression)
    return f"{slow}, which could take exponential time" if slow else None


def slow_part(expression: str) -> str | None:
    """What in a valid regular expression can take more than polynomial time to fail, or None.

    Exponential time needs a repeated group, or several optional items in a row.
    """
    position, repeats, before = 0, 0, ""
    while position < len(expression):
        character = expression[position]
        if character == "\\":
            position, before = position + 2, "x"
            continue
        if character == "[":
            position, before = _after_set(expression, position), "x"
            continue
        if character in "*+?{" and before not in ("*", "("):
            if before == ")" and character != "?":
                return "a repeated group"
            repeats += 1
            character = "*"
        before = character
        position += 1
    return f"more than {MAX_REPEATS} repeats" if repeats > MAX_REPEATS else None


def _after_set(expression: str, position: int) -> int:
    """The position after the set that begins at `position`. A leading `]` belongs to the set."""
    position += 2 if expression[position + 1] == "^" else 1
    begin = position
    while expression[position] != "]" or position == begin:
        position += 2 if expression[position] == "\\" else 1
    return position + 1
