"""A statistics file: `CalibrationStats` as one safetensors file, and back.

In: statistics, or a file that anyone may have made. Out: the file, or statistics that were
checked to the last value. Nothing is ever unpickled.

Tensors (names of entries: see `calib.stats`):

    <entry>.amax, .percentile      F32   [] or [E]
    <entry>.rows                   I64   [] or [E]
    <entry>.second_moment          F32   [K] or [E, K]
    layers.N.experts.routed_tokens I64   [E]

All else is one JSON object in the header's metadata, under `beamq_calibration`; one key, since
the order of several would differ from run to run and so would the file's digest. A real model's
file without second moments is under 1 MB, with them 0.4 GB.

The file appears whole or not at all (`shards.write_file`). Limits: read as a whole into memory.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from beamq.calib.stats import CalibrationStats, InputStats, layer_of
from beamq.errors import CalibrationError
from beamq.shards import write_file

FORMAT_VERSION = 1
METADATA_KEY = "beamq_calibration"
_DTYPES = {"amax": "F32", "percentile": "F32", "second_moment": "F32", "rows": "I64"}
_ROUTED = re.compile(r"layers\.(0|[1-9]\d{0,4})\.experts\.routed_tokens")
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "model_name": str,
    "model_fingerprint": str,
    "experts": str,
    "total_tokens": int,
    "data": list,
    "versions": dict,
    "percentile": (int, float, type(None)),
    "dropped_rows": int,
    "dropped_names": list,
}


def save_stats(stats: CalibrationStats, path: Path) -> None:
    """Write `stats` to `path`, whole or not at all. Raises `DiskError` where that fails."""
    tensors: dict[str, NDArray[Any]] = {
        f"{name}.{key}": np.asarray(array, order="C")
        for name, entry in stats.inputs.items()
        for key, array in entry.arrays().items()
    }
    for layer, counts in stats.routed_tokens.items():
        tensors[f"layers.{layer}.experts.routed_tokens"] = np.asarray(counts, order="C")
    record = {
        "version": FORMAT_VERSION,
        "model_name": stats.model_name,
        "model_fingerprint": stats.model_fingerprint,
        "experts": stats.experts,
        "total_tokens": stats.total_tokens,
        "data": list(stats.data),
        "versions": dict(stats.versions),
        "percentile": stats.percentile,
        "dropped_rows": stats.dropped_rows,
        "dropped_names": list(stats.dropped_names),
    }
    write_file(path, save(tensors, {METADATA_KEY: json.dumps(record, sort_keys=True)}))


def load_stats(path: Path) -> CalibrationStats:
    """Read a statistics file. Raises `CalibrationError`, naming what is wrong with it."""
    tensors, record = _read(path)
    entries: dict[str, dict[str, NDArray[Any]]] = {}
    routed: dict[int, NDArray[np.int64]] = {}
    for name, array in tensors.items():
        if found := _ROUTED.fullmatch(name):
            routed[int(found[1])] = array
            continue
        entry, _, key = name.rpartition(".")
        entries.setdefault(entry, {})[key] = array
    for entry, arrays in entries.items():
        for key in ("amax", "rows"):
            if key not in arrays:
                raise CalibrationError(f"{path}: {entry}.{key} is missing; calibrate again")
    try:
        return CalibrationStats(
            inputs={name: InputStats(**entries[name]) for name in sorted(entries, key=_order)},
            routed_tokens={layer: routed[layer] for layer in sorted(routed)},
            **record,
        )
    except CalibrationError as fault:
        raise CalibrationError(f"{path}: {fault}") from None


def _order(name: str) -> tuple[int, str]:
    return layer_of(name), name


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    if not path.is_file():
        raise CalibrationError(f"{path}: no such statistics file; make one with `beamq calibrate`")
    try:
        with safe_open(str(path), framework="np") as file:
            record = _record(path, file.metadata())
            tensors = {}
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                key = name.rpartition(".")[2]
                expected = "I64" if _ROUTED.fullmatch(name) else _DTYPES.get(key)
                if expected is None:
                    raise CalibrationError(f"{path}: unknown tensor {name[:120]!r}")
                found = file.get_slice(name).get_dtype()
                if found != expected:
                    raise CalibrationError(f"{path}: {name} is {found}, expected {expected}")
                tensors[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as fault:
        raise CalibrationError(
            f"{path}: not a whole safetensors file: {str(fault)[:120]}; calibrate again"
        ) from fault
    return tensors, record


def _record(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    """The JSON object of the header as keyword arguments of `CalibrationStats`."""
    if not metadata or METADATA_KEY not in metadata:
        raise CalibrationError(
            f"{path}: not a statistics file of beamq (no {METADATA_KEY} in its metadata)"
        )
    try:
        record = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise CalibrationError(f"{path}: metadata {METADATA_KEY} is not a JSON object")
    version = record.pop("version", None)
    if version != FORMAT_VERSION:
        raise CalibrationError(
            f"{path}: statistics of version {str(version)[:20]}, this beamq reads"
            f" {FORMAT_VERSION}; calibrate again"
        )
    if set(record) != set(_FIELDS):
        odd = ", ".join(sorted(set(record) ^ set(_FIELDS)))
        raise CalibrationError(f"{path}: metadata keys unknown or missing: {odd[:120]}")
    for key, kind in _FIELDS.items():
        if not isinstance(record[key], kind) or isinstance(record[key], bool):
            raise CalibrationError(
                f"{path}: metadata {key} is a {type(record[key]).__name__}, not what it should be"
            )
    _check_nested(path, record)
    record["data"] = tuple(record["data"])
    record["dropped_names"] = tuple(record["dropped_names"])
    return record


def _check_nested(path: Path, record: dict[str, Any]) -> None:
    percentile = record["percentile"]
    sound = {
        "data": all(
            isinstance(one, dict) and isinstance(one.get("digest"), str) for one in record["data"]
        ),
        "versions": all(isinstance(one, str) for one in record["versions"].values()),
        "dropped_names": all(isinstance(one, str) for one in record["dropped_names"]),
        "percentile": percentile is None or 0 < percentile <= 100,
    }
    for key, good in sound.items():
        if not good:
            raise CalibrationError(f"{path}: metadata {key} holds a value of the wrong kind")
