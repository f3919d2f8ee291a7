"""What this process may really use: cores and memory, as containers and schedulers limit them.

In: the process's affinity, its control groups (version 1 and 2) and /proc/meminfo. Out: numbers. A
limit that cannot be read is no limit. `ulimit -v` is looked at where buffers are planned.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from beamq.errors import MemoryBudgetError
from beamq.units import show_bytes

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
UNLIMITED = 1 << 60  # what version 1 writes for no limit is a little less than 2^63
_LOG = logging.getLogger("beamq")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLeft:
    """Bytes: the least that the machine and each control group allow; None where nothing says.

    `available` counts file caches, which the kernel takes back where memory is short. `swap` is
    the machine's free swap space.
    """

    total: int | None
    available: int | None
    swap: int


def usable_cores() -> int:
    """Cores that this process may use: by its affinity and by the CPU quota of its groups."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not Linux, or a sandbox that refuses
        cores = os.cpu_count() or 1
    for folder in _groups("cpu"):
        quota = _numbers(folder / "cpu.max") or [
            *_numbers(folder / "cpu.cfs_quota_us"),  # -1 for none
            *_numbers(folder / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and min(quota) > 0:
            cores = min(cores, math.ceil(quota[0] / quota[1]))
    return cores


def memory() -> MemoryLeft:
    """What the machine and this process's control groups leave now."""
    machine = _table(MEMINFO, unit=1024)
    totals = [machine[key] for key in ("MemTotal:",) if key in machine]
    rooms = [machine[key] for key in ("MemAvailable:",) if key in machine]
    for folder in _groups("memory"):
        for limit, usage, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            most, used = _numbers(folder / limit), _numbers(folder / usage)
            if most and used and most[0] < UNLIMITED:
                held = _table(folder / "memory.stat")
                cache = sum(held.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                totals.append(most[0])
                rooms.append(max(0, most[0] - max(0, used[0] - cache)))
    return MemoryLeft(
        total=min(totals, default=None),
        available=min(rooms, default=None),
        swap=machine.get("SwapFree:", 0),
    )


def check_room(least: int, most: int, what: str, remedy: str) -> None:
    """Compare the bytes that `what` takes, at least and at most, with what is available.

    Raises `MemoryBudgetError` if even `least` bytes are not available with all swap space. Logs a
    warning if `most` may be too much, since the kernel kills a process without a word.
    """
    now = memory()
    if now.available is None:
        return
    left = f"this machine or its container has {show_bytes(now.available)} available"
    if least > now.available + now.swap:
        raise MemoryBudgetError(
            f"{what} needs at least {show_bytes(least)} of memory and {left}; {remedy}"
        )
    if most > now.available:
        _LOG.warning(
            "warning: %s may take up to %s of memory and %s; if it is killed, %s",
            what, show_bytes(most), left, remedy,
        )  # fmt: skip


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group for `controller` and of all groups above it."""
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = OWN_CGROUPS.read_text().splitlines()
    for number, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number == "0":
            root = CGROUPS
        elif controller in names.split(","):
            root = CGROUPS / controller
        else:
            continue
        # In a container the path may be the host's, and only the root of it is mounted.
        inner = root / path.strip("/")
        yield from (each for each in (inner, *inner.parents) if each.is_relative_to(root))


def _numbers(file: Path) -> list[int]:
    """The whole numbers of a small file; none where it is absent or says `max`."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []


def _table(file: Path, unit: int = 1) -> dict[str, int]:
    """Lines of a name and a number, in `unit`s; nothing where there is no such file."""
    with suppress(OSError, ValueError):
        rows = (line.split() for line in file.read_text().splitlines())
        return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1}
    return {}
