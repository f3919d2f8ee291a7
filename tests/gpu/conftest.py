"""All of this folder needs an NVIDIA GPU and Triton; elsewhere it is skipped, and says so."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent

# Twins run on the CPU: side by side, workers with all cores each would wait for one another.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "no NVIDIA GPU here"
    if find_spec("triton") is None:
        return "Triton is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _missing()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The first GPU."""
    return torch.device("cuda", 0)
