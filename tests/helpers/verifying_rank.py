"""One rank of a `verify` under test: runs cases in turn, and records its report and its reads.

    python -m tests.helpers.verifying_rank CASES OUT

CASES is a JSON list of cases, OUT becomes a line of JSON for each. The same `observe` in a process
that is no rank gives what one process reports. Other libraries are left out: the second opinion is
a double that counts how often it is asked, and contradicts.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from beamq.cli import main as command_line
from beamq.errors import CheckpointError
from beamq.eval.verify import verify as verifying
from beamq.eval.verify.checks import Ledger
from beamq.eval.verify.inventory import Linear
from beamq.eval.verify.values import Examiner, Item, Outcome
from beamq.io.checkpoint import Checkpoint
from beamq.io.files import OpenFiles
from beamq.io.safetensors_header import TensorSpec
from beamq.plan import content

SCALAR = 4  # bytes; scalars are looked at by every rank
OPINION = "values.second-opinion"
READ, EXAMINE, SAMPLE = OpenFiles.read, Examiner.examine, content._is_zero


class Watch:
    """What a call of `verify` does to the files, and whom it asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reads: list[tuple[str, int, int]] = []
        self.sampling = False  # for zeros, which every rank does
        self.asked = 0
        self.steps: list[tuple[int, int]] = []

    def read(self, files: OpenFiles, file: str, offset: int, out: memoryview, name: str) -> None:
        READ(files, file, offset, out, name)
        if out.nbytes > SCALAR and not self.sampling:
            with self._lock:
                self.reads.append((str(files._locate(file)), offset, out.nbytes))

    def sample(self, checkpoint: Checkpoint, spec: TensorSpec, begin: int = 0) -> bool:
        self.sampling = True
        try:
            return SAMPLE(checkpoint, spec, begin)
        finally:
            self.sampling = False

    def opinion(
        self, checkpoint: Checkpoint, linears: Sequence[Linear], count: int, ledger: Ledger
    ) -> None:
        self.asked += 1
        for linear in linears[:count]:
            ledger.examined(OPINION, 1, "linears")
            ledger.fault(OPINION, linear.module, "reads otherwise")

    def step(self, done: int, total: int) -> None:
        self.steps.append((done, total))


def observe(arguments: dict[str, Any], trouble: str | None = None) -> dict[str, Any]:
    """Call `verify`, or with `line` the command line. Returns a report without its seconds, or the
    error's kind and text; and what was read."""
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "compressed_tensors.quantization", None)  # seconds to import
        patch.setattr(OpenFiles, "read", lambda *given: watch.read(*given))
        patch.setattr(content, "_is_zero", watch.sample)
        opinion = None if trouble == "opinion" else watch.opinion
        patch.setattr(verifying, "ask_second_opinion", opinion)
        if trouble in ("unreadable", "killed"):
            patch.setattr(Examiner, "examine", broken(trouble))
        found = run_command(**arguments) if "line" in arguments else run_verify(arguments, watch)
    return {**found, "reads": watch.reads, "asked": watch.asked, "steps": watch.steps[-1:]}


def run_verify(arguments: dict[str, Any], watch: Watch) -> dict[str, Any]:
    try:
        report = verifying.verify(**arguments, progress=watch.step).to_dict()
    except Exception as fault:
        return {"error": type(fault).__name__, "text": str(fault)}
    assert report.pop("seconds") > 0
    return {"report": json.loads(json.dumps(report))}


def run_command(line: list[str]) -> dict[str, Any]:
    out, errors, code = io.StringIO(), io.StringIO(), 0
    sys.argv = line
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            command_line()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return {"code": code, "out": out.getvalue(), "errors": errors.getvalue()}


def broken(trouble: str) -> Any:
    """An `examine` that reads two items and then fails, or is killed."""
    begun: list[Item] = []

    def examine(examiner: Examiner, item: Item) -> Outcome:
        begun.append(item)
        if len(begun) > 2 and trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(begun) > 2:
            raise CheckpointError("the disk has gone")
        return EXAMINE(examiner, item)

    return examine


def main() -> None:
    listed, target = map(Path, sys.argv[1:])
    cases = json.loads(listed.read_text())
    rank = os.environ["RANK"]
    with target.open("w") as out:
        for case in cases:
            os.environ["MASTER_PORT"] = str(case["port"])
            arguments = {**case["arguments"], **case["own"].get(rank, {})}
            found = observe(arguments, case["trouble"].get(rank))
            out.write(json.dumps(found) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
