"""Measure a whole process, or calls in turns; make and remove the files that a process works on.

`run` measures a process: wall time from start to exit, CPU time and peak memory (from the kernel,
for the process and its threads), and how busy other processes kept the machine meanwhile. The last
figure tells a disturbed run from a slow one. `in_turns` measures calls in this process.

This module imports nothing large: a child started by `vfork` reports at least its parent's peak
memory as its own.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WARM_NBYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds, bytes, and `others`: share of all cores that other processes used meanwhile."""

    wall_s: float
    user_s: float
    system_s: float
    peak_nbytes: int
    others: float
    output: str


def run(command: Sequence[str]) -> Cost:
    """Run to the end. Raises `RuntimeError` with the last lines if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+") as output:
        busy, begun = _busy_seconds(), time.monotonic()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - begun
        busy = _busy_seconds() - busy
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]}: exit {process.returncode}\n{text[-2000:]}")
    own = usage.ru_utime + usage.ru_stime
    return Cost(
        wall_s=wall,
        user_s=usage.ru_utime,
        system_s=usage.ru_stime,
        peak_nbytes=usage.ru_maxrss * 1024,
        others=max(0.0, busy - own) / (wall * cores_online()),
        output=text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Seconds of one call: wall clock, and CPU time of all threads of this process."""

    wall_s: float
    cpu_s: float


def in_turns(
    ways: Mapping[str, Callable[[], object]],
    rounds: int,
    after: Callable[[], object] = lambda: None,
) -> dict[str, list[Turn]]:
    """Call each of `ways` once a round, after one round to warm up that is not counted.

    `after` is called after each and not timed: to remove a large output takes as long as to write
    it. CPU time is hardly disturbed by other processes; wall time is.
    """
    found: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            turn = Turn(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)
            if number:
                found[name].append(turn)
            after()
    return found


def median_s(turns: Sequence[Turn], *, cpu_time: bool = False) -> float:
    """Median wall or CPU seconds."""
    return statistics.median(turn.cpu_s if cpu_time else turn.wall_s for turn in turns)


def _busy_seconds() -> float:
    """Seconds that all cores together were not idle since boot; 0 where Linux does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    idle = int(fields[3]) + int(fields[4])
    return float(sum(map(int, fields[:8])) - idle) / os.sysconf("SC_CLK_TCK")


def cores_online() -> int:
    """Cores of the machine, used or not."""
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def available_nbytes() -> int:
    """Memory that can be had without swapping; a large number where Linux does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 60


class Workplace:
    """A folder for slices and outputs, removed at the end. `make_slice` gets `options` as well."""

    def __init__(self, parent: Path, *options: str) -> None:
        self._options = options
        self.root = Path(tempfile.mkdtemp(prefix="beamq-benchmark-", dir=parent))
        self.output = self.root / "output"
        self._slice: tuple[int, Path] | None = None

    def slice(self, experts: int) -> Path:
        """The slice with so many experts; an earlier one with another number is removed first."""
        if self._slice is not None and self._slice[0] == experts:
            return self._slice[1]
        if self._slice is not None:
            shutil.rmtree(self._slice[1])
            self._slice = None
        folder = self.root / f"slice-{experts}"
        command = [sys.executable, "-m", "benchmarks.make_slice", str(folder)]
        run([*command, "--experts", str(experts), *self._options])
        self._slice = experts, folder
        return folder

    def warm_memory(self, nbytes: int) -> None:
        """Touch as much free memory as a run will take, right before it.

        A virtual machine may give memory that was free for seconds back to its host; touching it
        again costs more than a second per GB, which would fall on whoever runs first.
        """
        scratch = self.root / "scratch"
        zeros = bytes(1 << 20)
        with scratch.open("wb") as stream:
            for _ in range(nbytes >> 20):
                stream.write(zeros)
        scratch.unlink()

    def clear_output(self) -> None:
        """Free what the last run wrote."""
        shutil.rmtree(self.output, ignore_errors=True)

    def remove(self) -> None:
        """Free everything."""
        shutil.rmtree(self.root, ignore_errors=True)


def weights_nbytes(folder: Path) -> int:
    """Bytes of all weight files in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def forget_cached(folder: Path) -> None:
    """Drop the folder's files from the page cache, so that the next reader goes to the disk."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
