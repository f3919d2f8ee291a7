"""Where the processes of a run meet: MASTER_ADDR and MASTER_PORT, as torchrun sets them."""

from __future__ import annotations

import os

from beamq.errors import UsageError, shown_value

LAST_PORT = 65535


def meeting_place() -> tuple[str, int]:
    """Host and port. Raises `UsageError` where one is missing, or the port is none."""
    host, text = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", text)):
        if not value:
            raise UsageError(f"WORLD_SIZE is above 1 and {name} is not set; torchrun sets both")
    port = int_or_none(text or "")
    if port is None or not 1 <= port <= LAST_PORT:
        raise UsageError(f"MASTER_PORT must be from 1 to {LAST_PORT}, not {shown_value(text, 40)}")
    return host or "", port


def int_or_none(text: str) -> int | None:
    """A whole number as the environment holds it."""
    try:
        return int(text)
    except ValueError:
        return None
