"""Break a checkpoint on purpose, one fault at a time, for tests of `verify`.

`poke` and `swap` change bytes in place; `rewrite` changes a shard's tensors. `resign` then makes
index and beamq.json fit the files again, so that only the fault itself can be noticed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beamq.io.manifest import file_checksum, new_checksum, seal_of, shard_digest
from beamq.io.safetensors_header import TensorSpec, read_header
from beamq.io.source import INDEX_NAME
from tests.helpers import safetensors_edit
from tests.helpers.safetensors_edit import Tensors


def read_json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = read_json(path)
    change(data)
    path.write_text(json.dumps(data))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def find(folder: Path, name: str) -> TensorSpec:
    for shard in shards(folder):
        for spec in read_header(shard, shard.name)[0]:
            if spec.name == name:
                return spec
    raise KeyError(name)


def read(folder: Path, name: str) -> bytes:
    spec = find(folder, name)
    raw = (folder / spec.file).read_bytes()
    return raw[spec.offset : spec.offset + spec.nbytes]


def poke(folder: Path, name: str, data: bytes, at: int = 0) -> None:
    """Overwrite bytes of a tensor, from its byte `at`, in place."""
    spec = find(folder, name)
    with (folder / spec.file).open("r+b") as stream:
        stream.seek(spec.offset + at)
        stream.write(data)


def flip(folder: Path, name: str, at: int = 0, mask: int = 1) -> None:
    """Flip bits of one byte of a tensor."""
    poke(folder, name, bytes([read(folder, name)[at] ^ mask]), at)


def put_float(folder: Path, name: str, value: float) -> None:
    poke(folder, name, struct.pack("<f", value))


def swap(folder: Path, a: str, b: str) -> None:
    """Exchange the contents of two tensors of one size."""
    first, second = read(folder, a), read(folder, b)
    poke(folder, a, second)
    poke(folder, b, first)


def rewrite(folder: Path, name: str, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of the shard that holds `name`; see `resign`."""
    path = folder / find(folder, name).file
    tensors = safetensors_edit.load(path)
    change(tensors)
    safetensors_edit.save(path, tensors)


def resign(folder: Path) -> None:
    """Make index, totals and checksums fit the files as they are now."""
    weight_map: dict[str, str] = {}
    total = 0
    listed: list[dict[str, Any]] = []
    manifest = read_json(folder / "beamq.json")
    for shard in shards(folder):
        raw = shard.read_bytes()
        digests: dict[str, str] = {}
        for spec in read_header(shard, shard.name)[0]:
            weight_map[spec.name] = shard.name
            total += spec.nbytes
            checksum = new_checksum(manifest["checksum"])
            checksum.update(raw[spec.offset : spec.offset + spec.nbytes])
            digests[spec.name] = checksum.hexdigest()
        header = raw[: 8 + int.from_bytes(raw[:8], "little")]
        digest = shard_digest(header, digests.values(), manifest["checksum"])
        listed.append({"name": shard.name, "bytes": len(raw), "digest": digest, "tensors": digests})
    manifest["shards"] = listed
    edit_json(
        folder / INDEX_NAME,
        lambda index: index.update(metadata={"total_size": total}, weight_map=weight_map),
    )
    manifest["files"] = {
        name: file_checksum(folder / name, manifest["checksum"])
        for name in manifest["files"]
        if (folder / name).exists()
    }
    manifest["seal"] = seal_of(manifest)
    (folder / "beamq.json").write_text(json.dumps(manifest))


def pack_layer_3(tensors: Tensors) -> None:
    """Nano's experts of layer 3 as two packed tensors, in place."""
    prefix = "model.layers.3.mlp.experts"
    down = [tensors.pop(f"{prefix}.{e}.down_proj.weight")[2] for e in range(16)]
    tensors[f"{prefix}.down_proj"] = ("BF16", [16, 128, 64], b"".join(down))
    both = [
        tensors.pop(f"{prefix}.{e}.{name}.weight")[2]
        for e in range(16)
        for name in ("gate_proj", "up_proj")
    ]
    tensors[f"{prefix}.gate_up_proj"] = ("BF16", [16, 128, 128], b"".join(both))
