"""beamq.json: its bytes, what is refused, and that a stranger's file can do no harm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beamq.errors import CheckpointError, ResumeError
from beamq.io.files import FREE_BRACKETS
from beamq.io.manifest import (
    DEFAULT_ALGORITHM,
    MANIFEST_NAME,
    XXH3,
    ListedShard,
    Manifest,
    new_checksum,
    seal_of,
)
from beamq.io.shard_writer import OutputTensor, Shard
from beamq.io.source import LocalFiles
from beamq.version import __version__

HEADER = b"\x02\0\0\0\0\0\0\0{}"
CONFIG = b'{"model_type": "beam"}'
GOLDEN = """{
  "format": 1,
  "beamq": "VERSION",
  "recipe": {
    "name": "ü"
  },
  "checksum": "xxh3-128",
  "shards": [
    {
      "name": "model.safetensors",
      "bytes": 14,
      "digest": "DIGEST",
      "tensors": {
        "b": "0123456789abcdef",
        "a": "fedcba9876543210"
      }
    }
  ],
  "files": {
    "config.json": "CONFIG"
  },
  "seal": "SEAL"
}
"""


def checksum(data: bytes) -> str:
    found = new_checksum()
    found.update(data)
    return found.hexdigest()


def tensor(name: str, offset: int) -> OutputTensor:
    return OutputTensor(name=name, dtype="U8", shape=(2,), nbytes=2, offset=offset)


@pytest.fixture
def written(tmp_path: Path) -> Manifest:
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "README.md").write_bytes(b"people edit it")
    tensors = (tensor("b", 10), tensor("a", 12))
    shard = Shard(name="model.safetensors", header=HEADER, tensors=tensors, nbytes=14)
    listed = ListedShard.of(shard, {"a": "fedcba9876543210", "b": "0123456789abcdef"}, {}, {})
    content = {"recipe": {"name": "ü"}}
    return Manifest.write(tmp_path, content, [listed], ["README.md", "absent.txt"])


@pytest.mark.skipif(DEFAULT_ALGORITHM != XXH3, reason="needs xxhash")
def test_its_bytes(written: Manifest, tmp_path: Path) -> None:
    text = (tmp_path / MANIFEST_NAME).read_text()
    expected = GOLDEN
    for word, value in (
        ("VERSION", __version__),
        ("DIGEST", checksum(HEADER + b"0123456789abcdef" + b"fedcba9876543210")),
        ("CONFIG", checksum(CONFIG)),
        ("SEAL", str(written.data["seal"])),
    ):
        expected = expected.replace(word, value)
    assert text == expected
    rest = json.loads(text)
    del rest["seal"]
    seal = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    assert written.data["seal"] == seal == seal_of(rest)


def test_what_is_written_is_what_is_read(written: Manifest, tmp_path: Path) -> None:
    found = Manifest.of(LocalFiles(tmp_path))
    assert found == written == Manifest.read(tmp_path / MANIFEST_NAME)
    assert found.sealed
    assert found.shards is not None
    assert list(found.shards) == ["model.safetensors"]
    assert list(found.tensors) == ["b", "a"]
    assert (found.version, found.algorithm) == (__version__, DEFAULT_ALGORITHM)
    assert found.recipe == {"name": "ü"}


def test_none_is_no_error(tmp_path: Path) -> None:
    assert Manifest.of(LocalFiles(tmp_path)) is None


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": ' + "[" * (FREE_BRACKETS + 99)])
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        Manifest.of(LocalFiles(tmp_path))
    with pytest.raises(ResumeError, match=MANIFEST_NAME):
        Manifest.read(tmp_path / MANIFEST_NAME, ResumeError)


def test_one_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST_NAME).open("wb") as stream:
        stream.truncate((1 << 30) + 1)
    with pytest.raises(CheckpointError, match="expected at most"):
        Manifest.of(LocalFiles(tmp_path))


def test_a_missing_file_and_a_folder_in_its_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not found"):
        Manifest.read(tmp_path / MANIFEST_NAME)
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(CheckpointError, match="a folder"):
        Manifest.of(LocalFiles(tmp_path))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no list": lambda data: data.update(shards={"model.safetensors": {}}),
    "no shards": lambda data: data.pop("shards"),
    "an entry that is no object": lambda data: data["shards"].append(7),
    "no name": lambda data: data["shards"][0].update(name=7),
    "a digest that is none": lambda data: data["shards"][0].update(digest="x" * 32),
    "no tensors": lambda data: data["shards"][0].pop("tensors"),
    "a tensor's digest that is none": lambda data: data["shards"][0]["tensors"].update(b=None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_damaged_list_of_shards_is_none(written: Manifest, name: str) -> None:
    """Checksums that are in order can still be compared."""
    data = json.loads(json.dumps(written.data))
    CHANGES[name](data)
    damaged = Manifest.parse(data)
    assert damaged.shards is None
    assert not damaged.sealed
    assert damaged.tensors.items() <= written.tensors.items()


@pytest.mark.parametrize("value", [None, 7, "text", [1], [[]], {"a": [7]}, True, float("inf")])
def test_a_strangers_values_have_the_types_that_are_promised(value: object) -> None:
    keys = ("format", "beamq", "checksum", "shards", "files", "recipe", "input_scales", "digests")
    found = Manifest.parse(dict.fromkeys((*keys, "versions", "seal"), value))
    assert isinstance(found.algorithm, str)
    assert isinstance(found.version, str | None)
    assert isinstance(found.files, dict | None)
    assert isinstance(found.recipe, dict | None)
    assert isinstance(found.input_scales, dict)
    assert isinstance(found.digests, dict)
    assert all(isinstance(text, str) for text in found.versions.values())
    assert found.shards is None or all(isinstance(name, str) for name in found.shards)
    assert found.tensors == {}
    assert not found.sealed
    with pytest.raises(CheckpointError, match="unknown checksum"):
        new_checksum(found.algorithm)
