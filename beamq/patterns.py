"""Exclude patterns: which modules a word, a glob or a regular expression names.

In: a pattern from a command line or from a recipe that a stranger may have made, and a module's
name. Out: whether it is named. Python's `re` cannot be stopped, so an expression that could take
exponential time is refused before it runs.
"""

from __future__ import annotations

import fnmatch
import re
from functools import lru_cache

from beamq.errors import RecipeError

MAX_PATTERN = 300  # characters of a regular expression
MAX_NAME = 200  # characters of a module that one is tried on
MAX_REPEATS = 4


def matches(pattern: str, module: str) -> bool:
    """Whether an exclude pattern names a module.

    `re:` + a regular expression that must match from the start to the end; a glob (with `*`,
    `?` or `[`) that must match the whole name; otherwise a name: the whole module or a run of
    its dotted parts (`gate` is the router `mlp.gate`, never `gate_proj`). Raises `RecipeError`
    for a regular expression that is invalid or could run for ever (see `_slow`).
    """
    if pattern.startswith("re:"):
        return len(module) <= MAX_NAME and _compiled(pattern).fullmatch(module) is not None
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression behind `re:`, if it is one and cannot run for ever."""
    if len(pattern) > MAX_PATTERN or re.search(r"\(\?[aiLmsux-]", pattern):
        raise RecipeError(
            f"pattern {pattern[:60]!r}: flags, or more than {MAX_PATTERN} characters; simplify it"
        )
    try:
        compiled = re.compile(pattern[3:])
    except (re.error, RecursionError, OverflowError) as fault:
        raise RecipeError(f"pattern {pattern!r}: not a regular expression: {fault}") from None
    slow = _slow(pattern[3:])
    if slow:
        raise RecipeError(f"pattern {pattern!r}: {slow}, which could run for ever; simplify it")
    return compiled


def _slow(expression: str) -> str | None:
    """What in a valid regular expression can take more than polynomial time to fail, or None.

    Exponential time needs a repeated group, or one optional item after another; `re` has no other
    remedy against it than not to begin.
    """
    position, repeats, before = 0, 0, ""
    while position < len(expression):
        character = expression[position]
        if character == "\\":
            position, before = position + 2, "x"
            continue
        if character == "[":
            position, before = _behind_set(expression, position), "x"
            continue
        if character in "*+?{" and before not in ("*", "("):
            if before == ")" and character != "?":
                return "a repeated group"
            repeats += 1
            character = "*"
        before = character
        position += 1
    return f"more than {MAX_REPEATS} repeats" if repeats > MAX_REPEATS else None


def _behind_set(expression: str, position: int) -> int:
    """Where the set that begins at `position` is over. A `]` that comes first is one of it."""
    position += 2 if expression[position + 1] == "^" else 1
    begin = position
    while expression[position] != "]" or position == begin:
        position += 2 if expression[position] == "\\" else 1
    return position + 1
