"""What containers and schedulers leave: fake control groups of both versions."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NoReturn

import pytest

from beamq import limits
from beamq.commands import doctor
from beamq.errors import MemoryBudgetError

MB = 1_000_000
MEMINFO = """MemTotal:       16000000 kB
MemFree:         1000000 kB
MemAvailable:    8000000 kB
SwapFree:           1000 kB
HugePages_Total:       0
"""
# Version of control groups: the process's line, its own folder, and the names of the files there.
FORMS = {
    "v2": ("0::/pod/box", "pod/box", ("memory.max", "memory.current", "")),
    "v1": (
        "3:cpu,cpuacct:/\n4:memory:/pod/box\n0::/",
        "memory/pod/box",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ),
}


class Box:
    """A machine of 16.4 GB, 8.2 GB of them available, and the folders of its control groups."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root / "cgroup"
        self.own = root / "self"
        (root / "meminfo").write_text(MEMINFO)
        monkeypatch.setattr(limits, "CGROUPS", self.root)
        monkeypatch.setattr(limits, "OWN_CGROUPS", self.own)
        monkeypatch.setattr(limits, "MEMINFO", root / "meminfo")

    def write(self, place: str, **files: object) -> None:
        folder = self.root / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")

    def limit(self, form: str, most: object, used: int, cache: int = 0, up: int = 0) -> None:
        """A limit on memory, `up` groups above the process's own."""
        line, place, (limit, usage, prefix) = FORMS[form]
        self.own.write_text(line + "\n")
        folder = "/".join(place.split("/")[: len(place.split("/")) - up])
        self.write(folder, **{
            limit: most, usage: used,
            "memory.stat": f"anon 5\n{prefix}inactive_file {cache}\n{prefix}active_file {cache}",
        })  # fmt: skip


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    return Box(tmp_path, monkeypatch)


def test_a_machine_without_groups(box: Box) -> None:
    found = limits.memory()
    assert found == limits.MemoryLeft(total=16_384 * MB, available=8_192 * MB, swap=1_024_000)


def test_a_machine_that_says_nothing_has_no_limit(box: Box) -> None:
    limits.MEMINFO.unlink()
    assert limits.memory() == limits.MemoryLeft(total=None, available=None, swap=0)
    limits.check_room(1 << 60, 1 << 60, "the run", "do less")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("up", [0, 1, 2])
def test_a_groups_limit_counts_wherever_it_is_psutil2100(box: Box, form: str, up: int) -> None:
    """The file caches of the group are taken back where memory is short, so they are available."""
    box.limit(form, 700 * MB, 500 * MB, cache=90 * MB, up=up)
    found = limits.memory()
    assert (found.total, found.available) == (700 * MB, 380 * MB)


@pytest.mark.parametrize("form", FORMS)
def test_the_least_room_counts(box: Box, form: str) -> None:
    box.limit(form, 700 * MB, 100 * MB)
    box.limit(form, 900 * MB, 880 * MB, up=1)
    found = limits.memory()
    assert (found.total, found.available) == (700 * MB, 20 * MB)


@pytest.mark.parametrize(("form", "none"), [("v2", "max"), ("v1", 9223372036854771712)])
def test_no_limit_is_no_limit(box: Box, form: str, none: object) -> None:
    box.limit(form, none, 100 * MB)
    assert limits.memory().available == 8_192 * MB


def test_a_hosts_path_in_a_container(box: Box) -> None:
    """Without a namespace the process's path is the host's; its files are mounted at the root."""
    box.limit("v2", 300 * MB, 100 * MB, up=2)
    box.own.write_text("0::/docker/0123abc\n")
    assert limits.memory().available == 200 * MB


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu__max": "150000 100000"}, 2),
        ({"cpu__max": "max 100000"}, 8),
        ({"cpu__max": "50000 100000"}, 1),
        ({"cpu__max": "9900000 100000"}, 8),
    ],
)
def test_quotas_of_version_2(
    box: Box, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    box.own.write_text("0::/\n")
    box.write("", **files)
    assert limits.usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (300000, 3)])
def test_quotas_of_version_1(
    box: Box, monkeypatch: pytest.MonkeyPatch, quota: int, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    box.own.write_text("3:cpu,cpuacct:/pod\n")
    box.write("cpu/pod", cpu__cfs_quota_us=quota, cpu__cfs_period_us=100000)
    assert limits.usable_cores() == cores


def test_an_affinity_that_a_sandbox_refuses(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> NoReturn:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refused)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert limits.usable_cores() == 6


def test_too_little_room_is_refused_or_said(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    box.limit("v2", 500 * MB, 120 * MB)
    with caplog.at_level(logging.WARNING, logger="beamq"):
        limits.check_room(10 * MB, 380 * MB, "the run", "do less")
        limits.check_room(381 * MB, 0, "the run", "do less")  # 1 MB of swap space is free
        assert not caplog.messages
        limits.check_room(10 * MB, 494 * MB, "the run", "do less")
    (said,) = caplog.messages
    assert said == (
        "warning: the run may take up to 494.00 MB of memory and this machine or its container has"
        " 380.00 MB available; if it is killed, do less"
    )
    with pytest.raises(MemoryBudgetError, match=r"at least 494\.00 MB of memory .* 380\.00 MB"):
        limits.check_room(494 * MB, 600 * MB, "the run", "do less")


def test_doctor_shows_the_containers_memory(box: Box) -> None:
    box.limit("v2", 700 * MB, 320 * MB)
    found = doctor.doctor_data()["memory"]
    assert found == {"total_bytes": 700 * MB, "available_bytes": 380 * MB}
