"""Wait for what another process does, however busy the machine is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

PATIENCE = 120  # seconds: only a hanging process takes so long


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Return when `condition` holds. Fails if `process` ends first, or if it never comes."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, f"exit {process.returncode} before"
        assert time.monotonic() < end, "it never came so far"
        time.sleep(0.01)
