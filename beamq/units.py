"""Figures as people and JSON write them: `5GB` to bytes, bytes to `293.62 GB`, NaN to null.

kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB of 1024. What is shown is decimal
unless it says GiB.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from beamq.errors import UsageError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) *([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """Bytes of `5GB`, `500 MB`, `4GiB` or a plain number. Raises `UsageError` naming `option`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise UsageError(f"{option} {text!r}: not a size; write for example 5GB, 500MB or 4GiB")
    nbytes = _multiplied(found[1], 1024 if found[3] else 1000, found[2])
    if nbytes < 1:
        raise UsageError(f"{option} {text!r}: expected at least one byte")
    return nbytes


def parse_tokens(text: str, option: str) -> int:
    """Tokens of `8192`, `131,072`, `128k` (131,072) or `1M` (1,048,576), as models' contexts are
    named. Raises `UsageError` naming `option`."""
    found = _SIZE.fullmatch(text.strip().replace(",", ""))
    if found is None or text.strip()[-1:] in "bB":
        raise UsageError(f"{option} {text!r}: not a number of tokens; write for example 8192 or 8k")
    return _multiplied(found[1], 1024, found[2])


def _multiplied(number: str, base: int, power: str) -> int:
    from fractions import Fraction  # late, as above all `--help` has no use for it

    return int(Fraction(number) * base ** _POWERS[power.lower()])


def show_bytes(nbytes: int) -> str:
    """Decimal, three or more digits: `7.25 MB`, `293.62 GB`, `1,002.66 GB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes} B"


def show_gib(nbytes: int) -> str:
    """Binary, as is usual for KV caches: `4.58 GiB`, or MiB below one."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB"


def show_count(number: int) -> str:
    """Parameters: `501.27 B`, `3.62 M`, `1,152`."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,}"


def show_seconds(seconds: float) -> str:
    """`0.42 s`, `37.1 s`, `12 min 5 s`, `2 h 14 min`."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def plain(value: Any) -> Any:
    """A result in JSON's own types: a dataclass is an object of its fields, keys are text, and what
    is not finite is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def short_repr(result: Any) -> str:
    """A result in a line or two, however large the model: for notebooks and logs."""
    shown = (f"{f.name}={_short(getattr(result, f.name))}" for f in fields(result) if f.repr)
    return f"{type(result).__name__}({', '.join(shown)})"


def _short(value: Any) -> str:
    if isinstance(value, (Mapping, Set, list, tuple)) and value:
        return f"<{len(value):,} in all>"
    if isinstance(value, Path):
        return repr(str(value))
    return f"{type(value).__name__}(...)" if is_dataclass(value) else reprlib.repr(value)
