"""Kernels in Triton's interpreter, where Triton is installed; no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("cases", ["gptq_cases", "low_rank_cases"])
def test_they_give_the_bits_of_their_twins(cases: str) -> None:
    # In a process of its own: Triton looks at the variable when a kernel is defined.
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-m", f"tests.helpers.{cases}"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "equal"
