"""A process that forks others to be killed: the far side of `harness.Zygote`.

In: JSON orders on stdin, one a line. Out: one JSON answer each. beamq is imported once; every
order runs a command line in a fork of this process, with traps set in the operating-system calls
through which bytes and names reach a disk. A trap counts them and kills, tears or fails the n-th.
Nothing in beamq knows about it.
"""

from __future__ import annotations

import base64
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

STEPS = ("open", "ftruncate", "pwrite", "fsync", "replace", "unlink", "mkdir", "rmdir")
GROWING = ("open", "ftruncate", "pwrite", "fsync", "mkdir")  # what a full disk refuses


class Traps:
    """Wraps the calls of `STEPS` (and `preadv`) in this process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._at = order.get("at", 0)  # the n-th step, counted from 1; 0: never
        self._kinds = frozenset(order.get("kinds", STEPS))
        self._action = order.get("action", "none")
        self._errno = order.get("errno", 0)
        self._lasting = order.get("lasting", False)
        self._match = order.get("match", "")  # only calls on paths that hold this text count
        self._trace = order.get("trace")
        self._seen = 0
        self._full = False
        self._lock = threading.RLock()
        self.events: list[dict[str, Any]] = []

    def install(self) -> None:
        for name in STEPS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        os.preadv = self._wrapped("preadv", os.preadv)

    def _wrapped(self, name: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT):
                return genuine(*args, **options)
            if self._trace and name != "preadv":
                with self._lock:  # one event after another, so that listings belong to them
                    result = genuine(*args, **options)
                    self._note(name, args)
                return result
            if name not in self._kinds or self._match not in _path(name, args):
                return genuine(*args, **options)
            with self._lock:
                self._seen += 1
                mine = self._seen == self._at
                self._full = self._full or (mine and self._lasting)
                failing = mine or (self._full and name in GROWING)
            if not failing:
                return genuine(*args, **options)
            return self._strike(name, genuine, args, options)

        return call

    def _strike(self, name: str, genuine: Callable[..., Any], args: Any, options: Any) -> Any:
        if self._action == "kill before":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._action == "error":
            raise OSError(self._errno, os.strerror(self._errno))
        if self._action == "tear" and name == "pwrite":
            genuine(args[0], args[1][: len(args[1]) // 2], args[2])
            os.kill(os.getpid(), signal.SIGKILL)
        if self._action == "short" and name in ("pwrite", "preadv"):
            half = args[1][: len(args[1]) // 2 or 1] if name == "pwrite" else None
            if half is not None:
                return genuine(args[0], half, args[2])
            return genuine(args[0], [args[1][0][:1]], args[2])
        try:
            return genuine(*args, **options)
        finally:
            if self._action in ("kill after", "tear"):
                os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, name: str, args: Any) -> None:
        root = self._trace
        event: dict[str, Any] = {"step": name, "tree": _tree(root)}
        event["path"], event["thread"] = _path(name, args), threading.get_ident()
        if name == "replace":
            event["to"] = os.path.abspath(os.fspath(args[1]))
        if name == "fsync" and os.path.isfile(event["path"]):
            with open(event["path"], "rb") as stream:
                event["content"] = base64.b64encode(stream.read()).decode()
        if name != "pwrite":
            self.events.append(event)


def _path(name: str, args: Any) -> str:
    if name in ("ftruncate", "pwrite", "fsync", "preadv"):
        return os.readlink(f"/proc/self/fd/{args[0]}")
    return os.path.abspath(os.fspath(args[0]))


def _tree(root: str) -> list[tuple[str, int, bool, int]]:
    """(path, inode, whether a folder, bytes) of everything in the output."""
    found = []
    for folder, folders, files in os.walk(root):
        for entry in (*folders, *files):
            path = os.path.join(folder, entry)
            status = os.lstat(path)
            found.append((path, status.st_ino, entry in folders, status.st_size))
    return found


def run(order: dict[str, Any]) -> int:
    """In the fork: set limits and traps, then behave like the command line."""
    for name, value in order.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.environ.update(order.get("env", {}))
    traps = Traps(order)
    traps.install()
    from beamq.cli import app

    try:
        app(order["args"], prog_name="beamq")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 99
    if order.get("events"):
        with open(order["events"], "w") as stream:
            json.dump(traps.events, stream)
    sys.stdout.flush()
    sys.stderr.flush()
    if order.get("count"):
        with open(order["count"], "w") as stream:
            stream.write(str(traps._seen))
    return code


def fork(order: dict[str, Any]) -> int:
    """Start one order. Returns the process's id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        for number, key in ((1, "stdout"), (2, "stderr")):
            descriptor = os.open(order[key], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(descriptor, number)
            os.close(descriptor)
        os._exit(run(order))
    finally:
        os._exit(98)


def wait(pid: int, order: dict[str, Any]) -> dict[str, Any]:
    """Wait for a fork, or kill it after `kill_after` or, as a failure of the test, `timeout`."""
    begun = time.monotonic()
    killer = order.get("kill_after")
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return {
                "code": os.waitstatus_to_exitcode(status),
                "seconds": time.monotonic() - begun,
                "peak_kib": usage.ru_maxrss,
            }
        passed = time.monotonic() - begun
        if killer is not None and passed > killer:
            os.kill(pid, signal.SIGKILL)
            killer = None
        if passed > order.get("timeout", 240):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"code": "timeout", "seconds": passed, "peak_kib": 0}
        time.sleep(0.002)


def warm() -> None:
    """Import and build, once, everything that commands need: forks then start in milliseconds."""
    from beamq.cli import app

    nano = Path(__file__).parents[2] / "examples" / "beam-nano"
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as nowhere:
        quantized, decoded = f"{scratch}/quantized", f"{scratch}/decoded"
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            for arguments in (
                ["quantize", str(nano), quantized, "--no-calibration"],
                ["dequantize", quantized, decoded],
                ["quantize", str(nano), quantized, "--no-calibration"],
            ):
                with suppress(SystemExit):
                    app(arguments, prog_name="beamq")


def main() -> None:
    if "torch" in sys.argv:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
    warm()
    gc.freeze()  # shared pages stay shared
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        orders = json.loads(line)
        pids = [fork(order) for order in orders]
        answers = [wait(pid, order) for pid, order in zip(pids, orders, strict=True)]
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
