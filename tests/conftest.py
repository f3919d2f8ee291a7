"""Fixtures shared by all tests: the two trained small Beams, and copies that a test may break."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from hypothesis import settings
except ImportError:  # a bare machine, for tests/gpu
    pass
else:
    # The same cases in every run; `--hypothesis-profile default` looks for new ones.
    settings.register_profile("same", derandomize=True)
    settings.load_profile("same")

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = Path(os.environ.get("BEAMQ_FIXTURES", ROOT.parent / "shared" / "fixtures"))
MINI = FIXTURES / "beam-mini"


@pytest.fixture(scope="session")
def repo() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def beam_nano() -> Path:
    """The trained 3.6M-parameter Beam: one file, no index. Read only."""
    return ROOT / "examples" / "beam-nano"


@pytest.fixture(scope="session")
def beam_mini() -> Path:
    """The trained 26M-parameter Beam in four shards, where it is at hand. Read only."""
    if not MINI.is_dir():
        pytest.skip(f"beam-mini is not at {MINI}")
    return MINI


@pytest.fixture
def nano_copy(beam_nano: Path, tmp_path: Path) -> Path:
    """A private copy of beam-nano to change."""
    return Path(shutil.copytree(beam_nano, tmp_path / "nano"))


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A scratch folder in memory where there is one: hundreds of runs, each with its fsyncs."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < 1 << 30:
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="beamq-crash-", dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def adapters() -> Path:
    """Ten LoRA adapters of beam-nano, merged by PEFT, where they are at hand. Read only."""
    folder = FIXTURES / "adapters"
    if not folder.is_dir():
        pytest.skip(f"the adapters are not at {folder}")
    return folder
