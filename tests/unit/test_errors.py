"""The error tree: documented, complete, public, with the exit codes that the docs promise."""

from __future__ import annotations

import ast
import importlib.util
import pickle
from pathlib import Path
from types import ModuleType

import pytest

import beamq
from beamq import errors
from beamq.errors import BeamqError, Interrupted, UsageError, printable

CODES = {
    "CheckFailed": 1, "UsageError": 2, "InputError": 3, "CheckpointError": 3, "ConfigError": 3,
    "TensorError": 3, "AlreadyQuantizedError": 3, "RecipeError": 3, "CalibrationError": 3,
    "AdapterError": 3, "HubError": 3, "ResumeError": 3, "EnvironmentFault": 4, "DiskError": 4,
    "MemoryBudgetError": 4,
    "DeviceError": 4, "OutputBusyError": 4, "HubUnreachableError": 4, "MissingDependencyError": 4,
    "Interrupted": 130,
}  # fmt: skip


@pytest.fixture(scope="module")
def script(repo: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("errors_table", repo / "scripts/errors_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current(script: ModuleType, repo: Path) -> None:
    assert (repo / "docs" / "errors.md").read_text() == script.table(), (
        "run: python scripts/errors_table.py"
    )


def test_every_class_has_its_code_cause_and_remedy(script: ModuleType) -> None:
    found = {kind.__name__: kind for _, kind in script.classes()}
    assert {name: kind.exit_code for name, kind in found.items()} == CODES
    for name, kind in found.items():
        assert kind.__doc__
        assert kind.remedy != BeamqError.remedy
        assert getattr(beamq, name) is kind
        assert f"── {name}" in (errors.__doc__ or "")


def test_no_other_module_makes_its_own(repo: Path) -> None:
    for path in (repo / "beamq").rglob("*.py"):
        if path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                assert not bases & {*CODES, "BeamqError"}, (path, node.name)


def test_messages_are_one_line_of_print() -> None:
    fault = UsageError("a\x1b[31m\nb\ud800\u202e" + "x" * 5000)
    assert str(fault).isprintable()
    assert str(fault).startswith(r"a\x1b[31m\nb\ud800\u202e")
    assert len(str(fault)) < 2100
    assert str(pickle.loads(pickle.dumps(Interrupted("a\nb")))) == r"a\nb"
    assert printable("größe ∑ 模型") == "größe ∑ 模型"
    short = UsageError("give one")
    assert str(pickle.loads(pickle.dumps(short))) == str(short)
