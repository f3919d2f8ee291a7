"""Calibration statistics: largest magnitudes at the inputs of linears, tokens of each expert.

In: arrays from the forward pass, or a file that anyone may have made. Out: `CalibrationStats`, and
one safetensors file. Every value of a file is checked; nothing is unpickled.

The one idea: linears that read the same input share one entry, and the experts of a layer share
one array. A real Beam has 37,632 expert linears and 260 attention ones; here they are 2 arrays of
[E] in each sparse layer and 2 scalars for each attention. An entry's name says layer and input:

    layers.N.self_attn.qkv_gate    q, k, v and the output gate     []      (hidden_size)
    layers.N.self_attn.o           o_proj                          []      (heads x head_dim)
    layers.N.mlp.gate_up           dense gate_proj, up_proj        []      (hidden_size)
    layers.N.mlp.down              dense down_proj                 []      (intermediate_size)
    layers.N.experts.gate_up       gate_proj, up_proj of expert e  [E]     (hidden_size)
    layers.N.experts.down          down_proj of expert e           [E]     (moe_intermediate_size)

The file has these tensors, and one JSON object under `beamq_calibration` in the header's metadata
(one key, because the order of several would differ from run to run):

    <entry>.amax                   F32   [] or [E]
    <entry>.rows                   I64   [] or [E]
    layers.N.experts.routed_tokens I64   [E]
    layers.N.experts.domain_tokens I64   [D, E]   where the data has several domains: the same by
                                                  the domain of the text (`data`'s `domains`)

Files of earlier versions may also hold percentiles and second moments; they are ignored.

`rows` counts the tokens of an entry: with `experts="routed"` those that the router sent to the
expert, with "all" every token; `routed_tokens` is the router's choice in both modes. An expert
without tokens has 0 rows and amax 0; calib/input_scales.py decides what becomes its scale.

Merging takes maxima of amax and sums of counts; domains stay apart. It is commutative but for the
order of the data. Limits: numpy only, because
converting needs these values but not torch; a file is read whole (under 1 MB for the real model).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from beamq.beam.tensors import Role, classify, fused_group
from beamq.errors import BeamqError, CalibrationError, ResumeError
from beamq.io.safetensors_header import read_header
from beamq.io.shard_writer import write_file
from beamq.units import short_repr

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]
ExpertsMode = Literal["routed", "all"]

MAX_DROPPED_NAMES = 100
_DTYPES = {"amax": "F32", "rows": "I64"}
_IGNORED = (".percentile", ".second_moment")
_ENTRY = re.compile(
    r"layers\.(0|[1-9]\d{0,4})\.(self_attn\.(qkv_gate|o)|mlp\.(gate_up|down)|experts\.(gate_up|down))"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputStats:
    """One entry, [] or [E]: `amax` is the largest |x|, `rows` the number of tokens."""

    amax: Floats
    rows: Counts

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by their names in a file."""
        return {"amax": self.amax, "rows": self.rows}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationStats:
    """Statistics of one model on known data. Checked when made: raises `CalibrationError`.

    `inputs` maps entry names (see above) to `InputStats`; `routed_tokens` maps sparse layers to
    [E]. `data` is one record (`CalibrationData.to_dict`) for each data set that was merged in.
    `dropped_rows` counts tokens left out for non-finite values; `dropped_names` lists some.
    """

    __repr__ = short_repr

    model_name: str
    model_fingerprint: str
    experts: ExpertsMode
    total_tokens: int
    inputs: Mapping[str, InputStats]
    routed_tokens: Mapping[int, Counts]
    data: tuple[dict[str, Any], ...]
    versions: Mapping[str, str]
    dropped_rows: int = 0
    dropped_names: tuple[str, ...] = ()
    domain_tokens: Mapping[int, Counts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every array: a statistics file is a user's input like any other."""
        if self.experts not in ("routed", "all"):
            raise CalibrationError(f"statistics: experts is {self.experts!r}, not routed or all")
        for name, entry in self.inputs.items():
            _check_entry(name, entry)
        for layer, counts in self.routed_tokens.items():
            name = f"layers.{layer}.experts.routed_tokens"
            _check_array(name, counts, np.int64)
            if counts.ndim != 1:
                raise CalibrationError(f"statistics: {name} has shape {counts.shape}, expected [E]")
        for layer, counts in self.domain_tokens.items():
            name = f"layers.{layer}.experts.domain_tokens"
            _check_array(name, counts, np.int64)
            shape = len(self.domains), *self.routed_tokens.get(layer, np.zeros(0)).shape
            if counts.shape != shape:
                raise CalibrationError(
                    f"statistics: {name} has shape {counts.shape}, expected {shape}"
                )
        for name, entry in self.inputs.items():
            layer = layer_of(name)
            if ".experts." in name and (
                layer not in self.routed_tokens
                or self.routed_tokens[layer].shape != entry.amax.shape
            ):
                raise CalibrationError(
                    f"statistics: {name}.amax has shape {entry.amax.shape}, which is not that of"
                    f" layers.{layer}.experts.routed_tokens"
                )
        for name in ("total_tokens", "dropped_rows"):
            if getattr(self, name) < 0:
                raise CalibrationError(f"statistics: {name} is {getattr(self, name)}, below 0")

    @property
    def data_digests(self) -> tuple[str, ...]:
        """Digest of each data set in these statistics."""
        return tuple(str(record["digest"]) for record in self.data)

    @property
    def domains(self) -> tuple[str, ...]:
        """The rows of `domain_tokens`; a data set that names no domains is one."""
        found: list[str] = []
        for record in self.data:
            names = record.get("domains")
            several = isinstance(names, list) and all(isinstance(name, str) for name in names)
            sources = record.get("sources") or [{}]
            found += names if names and several else [str(sources[0].get("name", "unnamed data"))]
        return tuple(found)

    @property
    def run_digest(self) -> str:
        """Digest of model, data, mode and activations' dtype, known before the run."""
        return run_digest(self.model_fingerprint, self.experts, self.data)

    def check_model(self, fingerprint: str, name: str) -> None:
        """Raise `CalibrationError` unless these statistics are of the model `fingerprint`."""
        if fingerprint != self.model_fingerprint:
            raise CalibrationError(
                f"the statistics are of {self.model_name!r} ({self.model_fingerprint[:12]}), not of"
                f" {name!r} ({fingerprint[:12]}); calibrate this checkpoint"
            )

    def with_layer(
        self,
        inputs: Mapping[str, InputStats],
        routed_tokens: Mapping[int, Counts],
        domain_tokens: Mapping[int, Counts] | None = None,
    ) -> CalibrationStats:
        """These statistics with another layer's."""
        return replace(
            self,
            inputs={**self.inputs, **inputs},
            routed_tokens={**self.routed_tokens, **routed_tokens},
            domain_tokens={**self.domain_tokens, **(domain_tokens or {})},
        )


def run_digest(fingerprint: str, experts: str, data: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 over all that decides a run's largest magnitudes, except the kind of device."""
    runs = [[str(record["digest"]), str(record.get("activations"))] for record in data]
    text = json.dumps([fingerprint, experts, runs])
    return hashlib.sha256(f"beamq calibration 1\n{text}".encode()).hexdigest()


def entry_of(module: str) -> tuple[str, int | None]:
    """The entry of a linear's input and the expert in it.

    `model.layers.3.mlp.experts.7.down_proj` is expert 7 of `layers.3.experts.down`. Raises
    `CalibrationError` for anything but a linear of a layer.
    """
    role = classify(f"{module}.weight")
    parent = _PARENTS.get(role.role)
    if parent is None or role.layer is None or role.packed is not None:
        raise CalibrationError(f"{module}: not a linear with calibration statistics")
    group = fused_group(role).rpartition(".")[2]
    return f"layers.{role.layer}.{parent}.{group}", role.expert


_PARENTS = {Role.ATTENTION: "self_attn", Role.DENSE_MLP: "mlp", Role.EXPERT: "experts"}


def layer_of(name: str) -> int:
    """The layer in an entry's name. Raises `CalibrationError` for other names."""
    found = _ENTRY.fullmatch(name)
    if found is None:
        raise CalibrationError(f"statistics: unknown entry {name[:120]!r}")
    return int(found[1])


def merge(first: CalibrationStats, second: CalibrationStats) -> CalibrationStats:
    """The statistics of both runs' tokens together.

    Raises `CalibrationError` unless both are of one model, with the same entries and mode, and of
    different data: a run merged with itself would count its tokens twice.
    """
    second.check_model(first.model_fingerprint, first.model_name)
    if first.experts != second.experts:
        raise CalibrationError(
            f"cannot merge: one run has experts = {first.experts}, the other {second.experts};"
            " calibrate again with the same options"
        )
    layers = set(first.routed_tokens) ^ set(second.routed_tokens)
    for odd in sorted(set(first.inputs) ^ set(second.inputs)) + [f"layer {n}" for n in layers]:
        raise CalibrationError(
            f"cannot merge: only one run has statistics of {odd}; finish or repeat the other"
        )
    for digest in set(first.data_digests) & set(second.data_digests):
        raise CalibrationError(
            f"cannot merge: both runs include the data {digest[:12]}, whose tokens would count"
            " twice; use other data or another seed"
        )
    tools = {*first.versions, *second.versions}
    return replace(
        first,
        total_tokens=first.total_tokens + second.total_tokens,
        inputs={
            name: _merge_entry(name, entry, second.inputs[name])
            for name, entry in first.inputs.items()
        },
        routed_tokens={
            layer: counts + second.routed_tokens[layer]
            for layer, counts in first.routed_tokens.items()
        },
        domain_tokens=_merge_domains(first, second),
        data=first.data + second.data,
        versions={tool: _both(tool, first.versions, second.versions) for tool in sorted(tools)},
        dropped_rows=first.dropped_rows + second.dropped_rows,
        dropped_names=(first.dropped_names + second.dropped_names)[:MAX_DROPPED_NAMES],
    )


def _merge_domains(first: CalibrationStats, second: CalibrationStats) -> dict[int, Counts]:
    """Rows of both; a run of one domain has `routed_tokens` as its row."""
    if not (first.domain_tokens or second.domain_tokens):
        return {}

    def rows(stats: CalibrationStats, layer: int) -> Counts:
        return stats.domain_tokens.get(layer, stats.routed_tokens[layer][None])

    return {
        layer: np.concatenate([rows(first, layer), rows(second, layer)])
        for layer in first.routed_tokens
    }


def _both(tool: str, first: Mapping[str, str], second: Mapping[str, str]) -> str:
    return " + ".join(sorted({found[tool] for found in (first, second) if tool in found}))


def _merge_entry(name: str, first: InputStats, second: InputStats) -> InputStats:
    ours, theirs = first.arrays(), second.arrays()
    if {key: array.shape for key, array in ours.items()} != {
        key: array.shape for key, array in theirs.items()
    }:
        raise CalibrationError(
            f"cannot merge: {name} has {', '.join(ours)} in one run and {', '.join(theirs)} in the"
            " other, or their shapes differ; calibrate again with the same options"
        )
    return InputStats(
        amax=np.asarray(np.maximum(first.amax, second.amax)),
        rows=np.asarray(first.rows + second.rows),
    )


def _check_entry(name: str, entry: InputStats) -> None:
    layer_of(name)
    for key, array in entry.arrays().items():
        _check_array(f"{name}.{key}", array, np.int64 if key == "rows" else np.float32)
    dimensions = 1 if ".experts." in name else 0
    if entry.amax.shape != entry.rows.shape or entry.amax.ndim != dimensions:
        raise CalibrationError(
            f"statistics: {name} has shapes amax {entry.amax.shape}, rows {entry.rows.shape};"
            f" expected {'[E]' if dimensions else '[]'} for both"
        )


def _check_array(name: str, array: NDArray[Any], dtype: type[np.generic]) -> None:
    if array.dtype != dtype:
        raise CalibrationError(f"statistics: {name} is {array.dtype}, expected {dtype.__name__}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise CalibrationError(f"statistics: {name} holds a value that is negative or not finite")


FORMAT_VERSION = 1
METADATA_KEY = "beamq_calibration"
_ROUTED = re.compile(r"layers\.(0|[1-9]\d{0,4})\.experts\.(routed|domain)_tokens")
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


def check_replaceable(path: Path) -> None:
    """Raise `ResumeError` if `path` exists and is not a statistics file that may be replaced."""
    with suppress(BeamqError):
        if not path.exists() or METADATA_KEY in read_header(path, path.name)[1]:
            return
    raise ResumeError(f"{path}: exists, and is not a statistics file of beamq; choose another name")


def save_stats(stats: CalibrationStats, path: Path) -> None:
    """Write `stats` to `path`, whole or not at all. Raises `DiskError`."""
    tensors: dict[str, NDArray[Any]] = {
        f"{name}.{key}": np.asarray(array, order="C")
        for name, entry in stats.inputs.items()
        for key, array in entry.arrays().items()
    }
    for layer, counts in stats.routed_tokens.items():
        tensors[f"layers.{layer}.experts.routed_tokens"] = np.asarray(counts, order="C")
    for layer, counts in stats.domain_tokens.items():
        tensors[f"layers.{layer}.experts.domain_tokens"] = np.asarray(counts, order="C")
    record = {key: getattr(stats, key, None) for key in _FIELDS}  # percentile is always null
    record["version"] = FORMAT_VERSION
    write_file(path, save(tensors, {METADATA_KEY: json.dumps(record, sort_keys=True)}))


def load_stats(path: Path) -> CalibrationStats:
    """Read a statistics file. Raises `CalibrationError` with what is wrong with it."""
    tensors, record = _read(path)
    entries: dict[str, dict[str, NDArray[Any]]] = {}
    routed: dict[int, NDArray[np.int64]] = {}
    by_domain: dict[int, NDArray[np.int64]] = {}
    for name, array in tensors.items():
        if found := _ROUTED.fullmatch(name):
            (routed if found[2] == "routed" else by_domain)[int(found[1])] = array
            continue
        entry, _, key = name.rpartition(".")
        entries.setdefault(entry, {})[key] = array
    for entry, arrays in entries.items():
        for key in ("amax", "rows"):
            if key not in arrays:
                raise CalibrationError(f"{path}: {entry}.{key} is missing; calibrate again")
    try:
        return CalibrationStats(
            inputs={
                name: InputStats(**entries[name])
                for name in sorted(entries, key=lambda name: (layer_of(name), name))
            },
            routed_tokens={layer: routed[layer] for layer in sorted(routed)},
            domain_tokens={layer: by_domain[layer] for layer in sorted(by_domain)},
            **record,
        )
    except CalibrationError as fault:
        raise CalibrationError(f"{path}: {fault}") from None


def _read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    if not path.is_file():
        raise CalibrationError(f"{path}: no such statistics file; make one with `beamq calibrate`")
    try:
        with safe_open(str(path), framework="np") as file:
            record = _record(path, file.metadata())
            tensors = {}
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name.endswith(_IGNORED):
                    continue
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
    """The header's JSON object as keyword arguments of `CalibrationStats`."""
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
                f"{path}: metadata {key} has the wrong type, {type(record[key]).__name__}"
            )
    percentile = record.pop("percentile")
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
    record["data"] = tuple(record["data"])
    record["dropped_names"] = tuple(record["dropped_names"])
    return record
