"""Pages that scripts write are current: docs/commands/ and docs/licences.md."""

from __future__ import annotations

from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from beamq.cli import MODULES
from scripts import command_pages, licences


def test_every_command_has_its_page(repo: Path) -> None:
    found = {path.stem: path.read_text() for path in (repo / "docs" / "commands").glob("*.md")}
    assert list(command_pages.SEE) == list(MODULES)
    assert found == {command: command_pages.page(command) for command in MODULES}, (
        "run: python scripts/command_pages.py"
    )
    assert "Usage: beamq plan [OPTIONS]" in found["plan"]
    assert max(len(line) for line in command_pages.shown("quantize").splitlines()) <= 80


def test_what_is_linked_is_there(repo: Path) -> None:
    for command, links in command_pages.SEE.items():
        for to in links:
            folder = "" if to.endswith(".md") else "commands"
            assert (repo / "docs" / folder / to).with_suffix(".md").is_file(), (command, to)


def test_every_dependency_has_a_licence(repo: Path) -> None:
    """Versions move on elsewhere: what is compared is what has the version that was looked at."""
    lines = (repo / "docs" / "licences.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    told = {row[0]: tuple(row[1:3]) for row in rows if len(row) == 4}
    named = {Requirement(text).name.lower().replace("_", "-") for text in licences.own()}
    assert named <= set(told), "run: python scripts/licences.py"
    for row in licences.rows():
        version, licence = told.get(row.name, ("", ""))
        assert row.licence
        assert version != row.version or licence == row.licence


def test_a_package_without_a_licence_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Message()
    silent["Name"] = "silent"
    monkeypatch.setattr(metadata.Distribution, "metadata", silent)
    with pytest.raises(LookupError, match="silent states no licence"):
        licences.licence(metadata.distribution("pytest"))
    monkeypatch.setattr(licences, "own", lambda: ["no-such-package"])
    with pytest.raises(LookupError, match="no-such-package, which beamq needs, is not installed"):
        licences.rows()
