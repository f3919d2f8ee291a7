"""What `--device` takes, checked before anything heavy is imported.

Whether a device of that name is here is another question, which torch answers (`DeviceError`).
"""

from __future__ import annotations

import re

from beamq.errors import UsageError

_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,4})?")


def check_device_name(name: str, *, auto: bool = True) -> None:
    """Raise `UsageError` unless it is `cpu`, `cuda` or `cuda:N` (or `auto`, if allowed)."""
    if _DEVICE.fullmatch(name) or (auto and name == "auto"):
        return
    words = "auto, cpu, cuda or cuda:N" if auto else "cpu, cuda or cuda:N"
    raise UsageError(f"device {name[:40]!r}: expected {words}")
