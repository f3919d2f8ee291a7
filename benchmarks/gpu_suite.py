"""Everything measured on one GPU, in some minutes: tests, kernels, GEMMs, layers, conversion.

    python -m benchmarks.gpu_suite FOLDER

Writes a log and a JSON file for each step into FOLDER; ends with 1 if any of them failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

STEP_SECONDS = 240
ROOT = Path(__file__).resolve().parent.parent
# 62 GB of source, and half as much of output meanwhile. One pass needs three layers to be steady.
CONVERSION = ("/dev/shm/beamq-conversion", "--sparse-layers", "3", "--rounds", "2")
DOCTOR = (
    "import json, sys; from beamq.model.gemm.select import probe;"
    " text = json.dumps(probe(), indent=1); open(sys.argv[1], 'w').write(text); print(text)"
)


def steps(folder: Path) -> dict[str, list[str]]:
    """Commands by name, in order."""

    def script(name: str, *options: str) -> list[str]:
        return ["-u", "-m", f"benchmarks.{name}", "--json", str(folder / f"{name}.json"), *options]

    side_by_side = ["-n", str(min(24, os.cpu_count() or 1))] if find_spec("xdist") else []
    return {
        "tests": ["-m", "pytest", "tests/gpu", "-q", *side_by_side],
        "doctor": ["-c", DOCTOR, str(folder / "doctor.json")],
        "kernels": script("kernels_gpu"),
        "streams": script("stream_gpu"),
        "gemms": script("gemm_gpu"),
        "forward": script("forward_gpu", "--transformers"),
        "conversion": script("convert_gpu", *CONVERSION),
    }


def _run(command: list[str], path: str, log: IO[str]) -> int:
    """The exit code; 124 for a step that took too long."""
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=STEP_SECONDS,
        ).returncode
    except subprocess.TimeoutExpired:
        return 124


def main(arguments: Sequence[str] | None = None) -> int:
    (argument,) = sys.argv[1:] if arguments is None else arguments
    folder = Path(argument)
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    for name, command in steps(folder).items():
        start = time.monotonic()
        with (folder / f"{name}.log").open("w") as log:
            code = _run([sys.executable, *command], path, log)
        print(f"== {name}: exit {code}, {time.monotonic() - start:.0f} s", flush=True)
        print((folder / f"{name}.log").read_text()[-4000:], flush=True)
        failed += [name] if code else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
