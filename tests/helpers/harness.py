"""Run beamq in processes that are killed, starved or deprived, and look at what they leave."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamq.io.manifest import MANIFEST_NAME
from tests.helpers.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SHARD_BYTES = 1_200_000
RARE = ("open", "ftruncate", "fsync", "replace", "unlink", "mkdir", "rmdir")  # steps
Reference = tuple[Path, dict[str, str]]
"""What an undisturbed command leaves: its folder and the digests of its files."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one process ended; `code` is -9 for a killed one."""

    code: int
    seconds: float
    peak_bytes: int
    out: str
    err: str

    @property
    def killed(self) -> bool:
        return self.code == -9


class Zygote:
    """The near side of `zygote.py`."""

    def __init__(self, scratch: Path, *extra: str) -> None:
        self._scratch = scratch
        self._numbers = itertools.count()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
                       "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py")), *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def _answer(self) -> Any:
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the zygote died")
        return json.loads(line)

    def run(self, *args: str | Path, **order: Any) -> Ended:
        """One command line, with the traps of `order` (see `zygote.Traps`)."""
        return self.run_all([{"args": [str(arg) for arg in args], **order}])[0]

    def run_all(self, orders: Sequence[dict[str, Any]]) -> list[Ended]:
        """Several at the same time."""
        if self._process.stdin is None:
            raise RuntimeError("no pipe")
        for order in orders:
            number = next(self._numbers)
            for key in ("stdout", "stderr"):
                order[key] = str(self._scratch / f"{number}.{key}")
        self._process.stdin.write(json.dumps(list(orders)) + "\n")
        self._process.stdin.flush()
        ended = []
        for order, answer in zip(orders, self._answer(), strict=True):
            texts = {key: Path(order[key]).read_text() for key in ("stdout", "stderr")}
            if answer["code"] == "timeout":
                raise AssertionError(f"hung: {order['args']}: {texts['stderr'][-500:]}")
            if answer["code"] in (98, 99) or "Traceback" in texts["stderr"]:
                raise AssertionError(f"{order['args']}: {texts['stderr'][-2000:]}")
            ended.append(
                Ended(
                    code=answer["code"],
                    seconds=answer["seconds"],
                    peak_bytes=answer["peak_kib"] * 1024,
                    out=texts["stdout"],
                    err=texts["stderr"],
                )
            )
        return ended

    def two_ranks(
        self, args: Sequence[str | Path], orders: Sequence[dict[str, Any]] = ({}, {})
    ) -> list[Ended]:
        """The same command on two ranks, as torchrun would start it; each with its own traps."""
        port = free_port()
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return self.run_all(
            [
                {"args": [str(a) for a in args], "env": {**meeting, "RANK": str(rank)}, **order}
                for rank, order in enumerate(orders)
            ]
        )

    def count(self, *args: str | Path, **order: Any) -> int:
        """How many steps a command takes that is left alone."""
        target = self._scratch / f"count-{next(self._numbers)}"
        ended = self.run(*args, count=str(target), **order)
        if ended.code:
            raise AssertionError(ended.err)
        return int(target.read_text())

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)


def quantize_args(source: Path, output: Path, *more: str) -> list[str | Path]:
    return ["quantize", source, output, "--no-calibration", "--quiet", "--workers", "1",
            "--max-shard-size", str(SHARD_BYTES), *more]  # fmt: skip


def dequantize_args(source: Path, output: Path, *more: str) -> list[str | Path]:
    return ["dequantize", source, output, "--quiet", "--workers", "1", "--max-shard-size",
            str(4 * SHARD_BYTES), *more]  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def times(folder: Path) -> dict[str, int]:
    """When each finished shard was last written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def check_left(folder: Path, whole: dict[str, str]) -> None:
    """Whatever has its final name must be what an undisturbed run leaves under it."""
    if not folder.exists():
        return
    left = digests(folder)
    for name, digest in left.items():
        ours = name.startswith(".beamq") or name.endswith(".partial")
        if not ours and digest != whole.get(name):
            raise AssertionError(f"{name} is there, and is not what it should be")
    if MANIFEST_NAME in left and not set(whole) <= set(left):
        raise AssertionError("the mark of a whole conversion came before the rest")


def batches(orders: Sequence[dict[str, Any]], size: int = 4) -> Iterator[list[dict[str, Any]]]:
    for begin in range(0, len(orders), size):
        yield list(orders[begin : begin + size])
