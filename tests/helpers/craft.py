"""Sources with one thing wrong, made from beam-nano: what the fault tests have in common.

`S0` in the list of reports is beam-nano with one change. Report ids stand in the tests' ids: MO
Model-Optimizer, LLMC llm-compressor, CT compressed-tensors, VL vllm, SG sglang, HF transformers, LC
llama.cpp, GQ GPTQModel.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import FP32_ROLES, TensorRole, expected_tensors
from beamq.convert.quantize import QuantizeResult, quantize
from beamq.eval.verify.checks import VerifyReport
from beamq.eval.verify.verify import verify
from beamq.plan.recipe import Recipe, parse_recipe
from tests.helpers import safetensors_edit as st
from tests.helpers.independent_decoder import bf16

ROOT = Path(__file__).resolve().parents[2]
SINGLE = "model.safetensors"
ROLES = ("attention", "dense-mlp", "expert")
Run = Callable[..., tuple[int, str, str]]
"""Runs a command line; returns (exit code, stdout, stderr)."""


def recipe(fmt: str = "nvfp4", *roles: str, **options: object) -> Recipe:
    """Every linear (or those of `roles`) in a format, with plain maximum scales."""
    rules = dict.fromkeys(roles or ROLES, fmt)
    if fmt == "nvfp4":
        options.setdefault("scales", "max")
    return parse_recipe({"name": "faults", "summary": "for tests", "rules": rules, **options})


def convert(source: Path, output: Path, fmt: str = "nvfp4", **options: object) -> QuantizeResult:
    """Quantize every linear, NVFP4 with constant input scales."""
    chosen = options.pop("recipe", None) or recipe(fmt)
    if isinstance(chosen, Recipe) and chosen.calibrated and "calibration" not in options:
        options.setdefault("no_calibration", True)
    return quantize(source, output, recipe=chosen, **options)  # type: ignore[arg-type]


def to_bf16(values: np.ndarray) -> bytes:
    """Nearest BF16, ties to even."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def put(tensors: st.Tensors, name: str, values: np.ndarray, dtype: str | None = None) -> None:
    """Replace a tensor's values, and its dtype if one is given."""
    old = tensors[name][0] if name in tensors else "BF16"
    kind = dtype or old
    data = to_bf16(values) if kind == "BF16" else values.astype(st_kind(kind)).tobytes()
    tensors[name] = (kind, list(values.shape), data)


def st_kind(dtype: str) -> str:
    return {"F32": "<f4", "F16": "<f2", "I64": "<i8", "U8": "u1", "F8_E4M3": "u1"}[dtype]


def values_of(tensors: st.Tensors, name: str) -> np.ndarray:
    """A BF16 or FP32 tensor as FP32."""
    dtype, shape, data = tensors[name]
    if dtype == "BF16":
        return bf16(data, shape)
    return np.frombuffer(data, st_kind(dtype)).reshape(shape).astype(np.float32)


def source(
    nano: Path, target: Path, change: Callable[[st.Tensors], object] = lambda tensors: None
) -> Path:
    """A copy of nano with its tensors changed."""
    folder = Path(shutil.copytree(nano, target))
    tensors = st.load(folder / SINGLE)
    change(tensors)
    st.save(folder / SINGLE, tensors)
    return folder


def scatter(folder: Path, parts: Iterable[Iterable[str]]) -> None:
    """Turn the single file into shards with an index: one for each list of names."""
    tensors = st.load(folder / SINGLE)
    lists = [list(names) for names in parts]
    weight_map: dict[str, str] = {}
    for number, names in enumerate(lists, 1):
        file = f"model-{number:05d}-of-{len(lists):05d}.safetensors"
        st.save(folder / file, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file))
    (folder / SINGLE).unlink()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def deal(folder: Path, count: int) -> None:
    """Deal the tensors over `count` shards, one after another, so that partners are apart."""
    names = list(st.load(folder / SINGLE))
    scatter(folder, [names[number::count] for number in range(count)])


def light_verify(
    folder: Path, *, source: Path | None = None, level: Literal["structure", "tensors"] = "tensors"
) -> VerifyReport:
    """`verify` without the libraries that take seconds to import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "compressed_tensors.quantization", None)
        return verify(folder, source=source, level=level, sample=0, workers=2)


def read_json(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text())
    return found


def synthetic(
    folder: Path, *, layers: int, experts: int, hidden: int, width: int, shards: int = 1
) -> Path:
    """A sparse Beam, in files with holes: large in bytes, small on disk. The first and the last
    value of a tensor is 1, because beamq refuses a Beam of zeros."""
    nano = json.loads((ROOT / "examples" / "beam-nano" / "config.json").read_text())
    nano.update(
        hidden_size=hidden, intermediate_size=hidden, moe_intermediate_size=width,
        num_hidden_layers=layers, layer_types=["full_attention"] * layers,
        mlp_layer_types=["sparse"] * layers, num_experts=experts, n_group=1, topk_group=1,
        num_experts_per_tok=min(4, experts), vocab_size=64, num_attention_heads=1,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(nano))
    tensors = list(expected_tensors(BeamConfig.from_dict(nano)))
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = tensors[len(tensors) * number // shards : len(tensors) * (number + 1) // shards]
        file = SINGLE if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        _write_zeros(folder / file, part)
        weight_map.update({role.name: file for role, _ in part})
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _write_zeros(path: Path, tensors: Iterable[tuple[TensorRole, tuple[int, ...]]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin, ends = 0, []
    for role, shape in tensors:
        dtype = "F32" if role.role in FP32_ROLES else "BF16"
        end = begin + math.prod(shape) * (4 if dtype == "F32" else 2)
        header[role.name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        ends += [begin, end - 2]
        begin = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + begin)
    with path.open("r+b") as stream:
        for place in ends:
            stream.seek(8 + len(text) + place)
            stream.write(b"\x80\x3f")  # 1.0 in BF16, the upper half of 1.0 in FP32
