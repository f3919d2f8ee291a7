"""Rewrite safetensors files in tests: plain dictionaries of (dtype, shape, bytes), no library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Tensors = dict[str, tuple[str, list[int], bytes]]


def load(path: Path) -> Tensors:
    """Every tensor of a file, in file order."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in entries
    }


def save(path: Path, tensors: Tensors) -> None:
    """Write a file holding these tensors in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(data)]
        }  # fmt: skip
        begin += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def edit(path: Path, change: Callable[[Tensors], None]) -> None:
    """Load, let `change` mutate the dictionary, save."""
    tensors = load(path)
    change(tensors)
    save(path, tensors)


def edit_config(folder: Path, **changes: object) -> None:
    """Set keys of config.json; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))
