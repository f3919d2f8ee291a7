"""The command line in this process, for the fault tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from beamq.cli import app
from tests.helpers.craft import Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line; returns (exit code, stdout, stderr). A traceback fails the test."""
    for heavy in ("compressed_tensors.quantization", "modelopt.torch.quantization.qtensor"):
        monkeypatch.setitem(sys.modules, heavy, None)  # seconds to import, and tested elsewhere

    def go(*arguments: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app([str(argument) for argument in arguments], prog_name="beamq")
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert "internal error" not in captured.err
        code = ended.value.code
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return go
