"""A folder to push, the server it goes to, and what should be there afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from beamq.convert.quantize import quantize
from tests.helpers.hub_server import TOKEN, HubServer, client_of, hub_server

REPO = "someone/beam-nano-nvfp4"


def folder_to_push(nano: Path, scratch: Path) -> Path:
    """A converted folder, with a sub-folder, false state files, and a name with brackets."""
    source = scratch / "nano"
    shutil.copytree(nano, source)
    (source / "code").mkdir()
    (source / "code" / "tool [1].py").write_text("print()")
    folder = scratch / "out"
    quantize(source, folder, no_calibration=True, max_shard_bytes=700_000, workers=1)
    (folder / ".beamq").mkdir()
    (folder / ".beamq" / "journal-0.jsonl").write_text("{}")
    (folder / "code" / "notes.txt.partial").write_text("cut")
    return folder


@contextmanager
def hub_to_push_to(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A local Hub, which this process uses with a token."""
    with hub_server() as running, client_of(running, scratch / "hf", monkeypatch):
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


def sent(folder: Path) -> dict[str, bytes]:
    """The files of `folder` that a push sends."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".beamq" not in path.parts and not path.name.endswith(".partial")
    }


def there(hub: HubServer, revision: str = "main") -> dict[str, bytes]:
    """The files that the repository has."""
    files = hub.files(REPO, revision)
    files.pop(".gitattributes", None)
    return files
