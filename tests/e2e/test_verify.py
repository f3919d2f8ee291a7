"""Each named check of `verify` passes on a good checkpoint and fails on one that is broken its way.

Conversions of beam-nano are copied and damaged by one fault each; the set of failed checks must be
exactly the one expected, so that a fault is neither missed nor reported as something else.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beamq.beam.tensors import Role
from beamq.cli import app
from beamq.commands.verify import verify_blocks
from beamq.convert.quantize import quantize
from beamq.errors import (
    AlreadyQuantizedError,
    CheckpointError,
    TensorError,
    UsageError,
)
from beamq.eval.verify import second_opinion
from beamq.eval.verify.checks import CHECKS, VerifyReport
from beamq.eval.verify.verify import verify
from beamq.io.source import INDEX_NAME
from beamq.plan.recipe import BUILT_IN, load_recipe
from tests.helpers import safetensors_edit
from tests.helpers.checkpoint_damage import (
    edit_json,
    find,
    flip,
    poke,
    put_float,
    read,
    resign,
    rewrite,
    shards,
    swap,
)

EXPERT = "model.layers.4.mlp.experts.7"
ATTENTION = "model.layers.2.self_attn"
NORM = "model.layers.6.input_layernorm.weight"
ROUTER = "model.layers.5.mlp.gate.weight"
NAN = float("nan")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, beam_nano: Path) -> Callable[[str], Path]:
    """Good checkpoints by recipe, each made once, in several shards."""
    root = tmp_path_factory.mktemp("made")

    def make(recipe: str) -> Path:
        output = root / recipe
        if not output.exists():
            quantize(
                beam_nano,
                output,
                recipe=recipe,
                no_calibration=load_recipe(recipe).calibrated and recipe != "nvfp4-gptq",
                max_shard_bytes=1_000_000,
                samples=16 if recipe == "nvfp4-gptq" else None,
                sequence_length=256 if recipe == "nvfp4-gptq" else None,
            )
        return output

    return make


SWEPT = ("nvfp4", "nvfp4-mlp", "nvfp4-all", "nvfp4-fp8")
SKIPPED = {
    "nvfp4": {"config.schema", "engine.transformers", "values.row-scales", "values.codes"},
    "nvfp4-fp8": {"config.schema", "engine.transformers", "engine.sglang"},
    "fp8": {"values.block-scales", "scales.global", "scales.shared", "scales.input",
            "scales.input-shared"},
}  # fmt: skip
SKIPPED["mxfp8"] = SKIPPED["fp8"] | {"engine.sglang", "engine.transformers"}
SKIPPED["fp8-block"] = SKIPPED["fp8"] | {"engine.sglang", "config.schema"}


def failed(report: VerifyReport) -> set[str]:
    return {check.name for check in report.failures}


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_every_recipe_passes(
    recipe: str, made: Callable[[str], Path], beam_nano: Path, tmp_path: Path
) -> None:
    steps: list[tuple[int, int]] = []
    report = verify(
        made(recipe),
        source=beam_nano,
        sample=0,
        workers=3,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert report.ok, report.failures
    assert steps[-1][0] == steps[-1][1] == report.bytes_read
    skipped = {check.name: check.detail for check in report.checks if check.status == "skip"}
    forward = {name for name in skipped if name.startswith("forward.")}
    assert {skipped.pop(name) for name in forward} == {"needs --level forward"}
    assert set(skipped) == SKIPPED[load_recipe(recipe).format] | {"values.second-opinion"}
    low, high = (0.08, 0.093) if recipe in SWEPT else (0.085, 0.11)
    bounds = {"nvfp4": (low, high)}
    for error in report.errors:
        low, high = bounds.get(load_recipe(recipe).rules[Role(error.role)], (0.023, 0.029))
        assert low < error.relative_rms < high
    assert all(skipped.values())
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True
    assert [check.name for check in report.checks] == list(CHECKS)


@pytest.mark.parametrize("recipe", ["nvfp4-all", "fp8", "mxfp8", "fp8-block"])
def test_mini_passes(recipe: str, beam_mini: Path, tmp_path: Path) -> None:
    quantize(beam_mini, tmp_path / "out", recipe=recipe, no_calibration=recipe == "nvfp4-all")
    assert failed(verify(tmp_path / "out", source=beam_mini, sample=0)) == set()


@pytest.mark.parametrize("recipe", ["nvfp4-all", "fp8", "mxfp8", "fp8-block"])
def test_the_libraries_decode_alike(recipe: str, made: Callable[[str], Path]) -> None:
    report = verify(made(recipe), sample=9)
    assert report.ok
    opinion = report.check("values.second-opinion")
    assert opinion.status == "pass"
    assert opinion.detail.endswith(": 9")


@pytest.mark.parametrize("recipe", ["nvfp4-all", "fp8"])
def test_exclusions_and_kv_cache_pass(recipe: str, beam_nano: Path, tmp_path: Path) -> None:
    quantize(
        beam_nano,
        tmp_path / "out",
        recipe=recipe,
        no_calibration=recipe != "fp8",
        exclude=(
            "model.layers.4.mlp.experts*",
            "model.layers.1.self_attn.q_proj",
            "re:.*layers.0.*",
        ),
        kv_cache="fp8",
    )
    report = verify(tmp_path / "out", source=beam_nano, sample=0)
    assert report.ok, report.failures


def test_levels_say_what_they_left_out(made: Callable[[str], Path]) -> None:
    report = verify(made("nvfp4"), level="structure")
    assert report.ok
    assert report.bytes_read == 0
    for name, check in CHECKS.items():
        wanted = {"tensors": "needs --level tensors", "source": "needs --source"}.get(check.level)
        assert wanted is None or report.check(name).detail == wanted


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault: how to make it, the checks that must fail, and a place that must be named."""

    title: str
    recipe: str
    damage: Callable[[Path], object]
    fails: frozenset[str]
    where: str = ""
    level: str = "structure"
    source: bool = False
    signed: bool = True


CASES: list[Case] = []


def case(
    recipe: str,
    title: str,
    damage: Callable[[Path], object],
    *fails: str,
    where: str = "",
    signed: bool = True,
) -> None:
    """Register a fault; the level and whether a source is needed follow from the checks."""
    levels = {CHECKS[name].level for name in fails}
    CASES.append(
        Case(
            title=title,
            recipe=recipe,
            damage=damage,
            fails=frozenset(fails),
            where=where,
            level="structure" if levels == {"structure"} else "tensors",
            source="source" in levels,
            signed=signed,
        )
    )


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "config.json", change)


def block(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return config(lambda data: change(data["quantization_config"]))


def hf(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(
        folder / "hf_quant_config.json", lambda data: change(data["quantization"])
    )


def index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / INDEX_NAME, change)


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "beamq.json", change)


def group(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return block(lambda data: change(data["config_groups"]["group_0"]))


def ignoring(*entries: str) -> Callable[[Path], object]:
    """Add entries to the ignore list, in both files where there are two."""

    def damage(folder: Path) -> None:
        block(lambda data: data["ignore"].extend(entries))(folder)
        if (folder / "hf_quant_config.json").exists():
            hf(lambda data: data["exclude_modules"].extend(entries))(folder)

    return damage


def unlisted(entry: str) -> Callable[[Path], object]:
    """Remove an entry from both ignore lists."""
    return all_of(
        block(lambda data: data["ignore"].remove(entry)),
        hf(lambda data: data["exclude_modules"].remove(entry)),
    )


def tensor(
    name: str, dtype: str, shape: list[int], *, like: str = EXPERT + ".up_proj.weight"
) -> Callable[[Path], object]:
    """Add or replace a tensor (zeros), in the shard of another."""
    size = {"BF16": 2, "F32": 4}.get(dtype, 1)
    for length in shape:
        size *= length

    def change(tensors: safetensors_edit.Tensors) -> None:
        tensors[name] = (dtype, shape, bytes(size))

    return lambda folder: rewrite(folder, like, change)


def drop(name: str) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder, name, lambda tensors: tensors.pop(name))


def retype(name: str, dtype: str, shape: list[int] | None = None) -> Callable[[Path], object]:
    """Give a tensor another dtype or shape (zeros)."""

    def damage(folder: Path) -> None:
        spec = find(folder, name)
        tensor(name, dtype, list(spec.shape) if shape is None else shape, like=name)(folder)

    return damage


def all_of(*steps: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for step in steps:
            step(folder)

    return damage


def scalar(suffix: str, value: float, *linears: str) -> Callable[[Path], None]:
    return all_of(*(partial(put_float, name=f"{m}.{suffix}", value=value) for m in linears))


def delete(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def rename_shard(folder: Path) -> None:
    first = shards(folder)[0]
    first.rename(folder / first.name.replace("00001", "00009"))


def other_metadata(folder: Path) -> None:
    shard = shards(folder)[0]
    raw = shard.read_bytes()
    shard.write_bytes(raw.replace(b'"format":"pt"', b'"format":"tf"', 1))


def cut(folder: Path) -> None:
    shard = shards(folder)[-1]
    shard.write_bytes(shard.read_bytes()[:-100])


def dequantize_one_expert(folder: Path) -> None:
    def change(tensors: safetensors_edit.Tensors) -> None:
        _, (n, half), _ = tensors[f"{EXPERT}.down_proj.weight"]
        for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{EXPERT}.down_proj.{suffix}"]
        tensors[f"{EXPERT}.down_proj.weight"] = ("BF16", [n, half * 2], bytes(n * half * 4))

    rewrite(folder, f"{EXPERT}.down_proj.weight", change)


def swap_in_header(folder: Path) -> None:
    """Exchange two tensors of one shape in a shard's header, as a buggy writer would."""
    a, b = f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"
    path = folder / find(folder, a).file
    raw = path.read_bytes()
    path.write_bytes(
        raw.replace(f'"{a}"'.encode(), b'"\0"', 1)
        .replace(f'"{b}"'.encode(), f'"{a}"'.encode(), 1)
        .replace(b'"\0"', f'"{b}"'.encode(), 1)
    )
    length = len(path.read_bytes()) - len(raw)
    if length:
        raise AssertionError("names of one length were expected")


ENGINES = ("engine.vllm", "engine.vllm-wide", "engine.sglang")

# fmt: off
case("nvfp4", "cut shard", cut, "files.readable", signed=False)
case("nvfp4", "shard missing", lambda f: shards(f)[1].unlink(), "files.readable", signed=False)
case("nvfp4", "config of another model", config(lambda d: d.update(model_type="llama")),
     "config.model", where="model_type")
case("nvfp4", "config without a key", config(lambda d: d.pop("topk_group")), "config.model",
     where="topk_group is missing")
case("fp8", "config that is no JSON", lambda f: (f / "config.json").write_text("{"),
     "config.model", signed=False)
case("fp8", "no config", delete("config.json"), "config.model", where="not found", signed=False)
case("nvfp4", "another architecture", config(lambda d: d.update(architectures=["Llama"])),
     "config.model", where="Llama")
case("nvfp4", "index lacks a tensor", index(lambda d: d["weight_map"].pop(NORM)), "files.index",
     where=NORM, signed=False)
case("nvfp4", "index names another shard", index(lambda d: d["weight_map"].update(
    {NORM: next(f for f in d["weight_map"].values() if f != d["weight_map"][NORM])})),
    "files.index", where=NORM, signed=False)
case("nvfp4", "wrong total", index(lambda d: d["metadata"].update(total_size=1)),
     "files.total-size", signed=False)
case("nvfp4", "gap in shard names", rename_shard, "files.shard-names", where="00009")
case("nvfp4", "stray shard", lambda f: shutil.copy(shards(f)[0], f / "old.safetensors"),
     "files.unlisted", where="old.safetensors", signed=False)
case("nvfp4", "unfinished shard", lambda f: (f / "model-x.safetensors.partial").touch(),
     "files.unlisted", where="model-x.safetensors.partial", signed=False)
case("nvfp4", "an LFS pointer", lambda f: (f / "tokenizer.json").write_text(
    f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"),
     "files.companions", where="tokenizer.json", signed=False)
case("fp8", "an adapter's config", lambda f: (f / "adapter_config.json").write_text("{}"),
     "files.companions", where="adapter_config.json", signed=False)
case("nvfp4", "metadata", other_metadata, "files.metadata", where="model-00001")
case("nvfp4", "no beamq.json", delete("beamq.json"), "manifest.present", signed=False)
case("nvfp4", "beamq.json of another format", manifest(lambda d: d.update(format=9)),
     "manifest.present", signed=False)
case("nvfp4", "beamq.json without shards", manifest(lambda d: d.update(shards=[{}])),
     "manifest.present", signed=False)
case("nvfp4", "beamq.json with another size", manifest(lambda d: d["shards"][0].update(bytes=1)),
     "manifest.present", where="model-00001", signed=False)
case("nvfp4", "beamq.json lacks a tensor",
     manifest(lambda d: d["shards"][0]["tensors"].popitem()), "manifest.present", signed=False)
case("nvfp4", "beamq.json with another kind of checksum",
     manifest(lambda d: d.update(checksum="md5")), "manifest.present", signed=False)
case("nvfp4", "not declared", config(lambda d: d.pop("quantization_config")), "config.declared",
     "config.fields", "config.agreement", "engine.sglang")
case("nvfp4", "another algorithm", block(lambda d: d.update(quant_algo="NVFP4_AWQ")),
     "config.declared", "config.agreement", *ENGINES)
case("fp8", "another format", block(lambda d: d.update(format="naive-quantized")),
     "config.declared", "config.fields", *ENGINES, "engine.transformers")
case("fp8", "another method", block(lambda d: d.update(quant_method="fp8")), "config.declared",
     *ENGINES, "engine.transformers", where="quant_method is 'fp8'")
case("fp8", "a pattern that could take for ever", ignoring("re:(a+)+x"), *ENGINES,
     "engine.transformers", where="a repeated group")
case("nvfp4", "no input_activations", group(lambda d: d.pop("input_activations")),
     "config.fields", "engine.vllm", "engine.vllm-wide", where="input_activations")
case("nvfp4", "hf file lacks group_size", hf(lambda d: d.pop("group_size")), "config.fields",
     "config.agreement")
case("nvfp4", "three bits", group(lambda d: d["weights"].update(num_bits=3)), "config.fields",
     where="num_bits")
case("fp8", "static activations", group(lambda d: d["input_activations"].update(dynamic=False)),
     "config.fields", "config.schema", *ENGINES, "engine.transformers")
case("fp8", "frozen status", block(lambda d: d.update(quantization_status="frozen")),
     "config.fields", where="quantization_status")
case("nvfp4", "lists differ", hf(lambda d: d["exclude_modules"].append("model.norm")),
     "config.agreement", where="model.norm")
case("nvfp4", "KV cache in one file", hf(lambda d: d.update(kv_cache_quant_algo="FP8")),
     "config.agreement", where="kv_cache_quant_algo")
case("nvfp4", "no hf_quant_config.json", delete("hf_quant_config.json"), "config.agreement")
case("fp8", "both kinds of config", lambda f: (f / "hf_quant_config.json").write_text("{}"),
     "config.agreement")
case("fp8", "unknown key in the scheme", group(lambda d: d["weights"].update(strategy="diagonal")),
     "config.schema", "config.fields", *ENGINES, "engine.transformers")
case("fp8", "targets that are no names", group(lambda d: d.update(targets=[1])), "config.schema",
     "config.fields", *ENGINES, "engine.transformers", where="targets")
case("fp8", "scheme their class cannot build", group(lambda d: d["weights"].update(num_bits=3)),
     "config.schema", "config.fields", *ENGINES, "engine.transformers", where="num_bits")
case("fp8", "key that is lost", block(lambda d: d.update(kv_cache_scheme={
    "num_bits": 8, "type": "float", "dynamic": False, "colour": 1})), "config.schema")
case("nvfp4", "dtype", config(lambda d: d.update(dtype="float32")), "config.dtype")
case("nvfp4", "KV-cache scale", tensor("model.layers.4.self_attn.k_proj.k_scale", "F32", []),
     "tensors.known", where="k_scale")
case("nvfp4", "tensor of another model", tensor("mtp.layers.0.fc.weight", "BF16", [2, 2]),
     "tensors.known", where="mtp.layers.0.fc.weight")
case("fp8", "packed experts", tensor("model.layers.4.mlp.experts.down_proj", "BF16", [1]),
     "tensors.known", where="experts.down_proj")
case("nvfp4", "no input_scale", drop(f"{EXPERT}.up_proj.input_scale"), "tensors.present",
     where=f"{EXPERT}.up_proj.input_scale")
case("fp8", "no row scale", drop(f"{ATTENTION}.o_proj.weight_scale"), "tensors.present",
     where=f"{ATTENTION}.o_proj.weight_scale")
case("nvfp4", "no norm", drop(NORM), "tensors.present", where=NORM)
case("fp8", "1-D row scale", retype(f"{EXPERT}.up_proj.weight_scale", "F32", [64]),
     "tensors.shape", where=f"{EXPERT}.up_proj.weight_scale")
case("nvfp4", "swapped dimensions", retype(f"{EXPERT}.up_proj.weight", "U8", [128, 32]),
     "tensors.shape", where=f"{EXPERT}.up_proj.weight")
case("fp8", "BF16 row scale", retype(f"{EXPERT}.up_proj.weight_scale", "BF16"), "tensors.dtype",
     where=f"{EXPERT}.up_proj.weight_scale")
case("nvfp4", "FP32 norm", retype(NORM, "F32"), "tensors.dtype", where=NORM)
case("nvfp4", "one expert in high precision", dequantize_one_expert, "tensors.experts", *ENGINES,
     "config.ignore",
     where="model.layers.4.mlp.experts")
case("nvfp4", "one expert gone", all_of(*(drop(f"{EXPERT}.gate_proj.{s}") for s in (
    "weight", "weight_scale", "weight_scale_2", "input_scale"))), "tensors.experts",
    "tensors.present", where=EXPERT)
case("nvfp4", "BF16 router", retype(ROUTER, "BF16"), "tensors.router", where=ROUTER)
case("fp8", "scaled head", tensor("lm_head.weight_scale", "F32", [2048, 1]), "tensors.head",
     "tensors.known", *ENGINES, "engine.transformers", where="lm_head.weight_scale")
case("fp8", "FP8 embeddings", retype("model.embed_tokens.weight", "F8_E4M3"), "tensors.head",
     "engine.vllm", "engine.vllm-wide", where="model.embed_tokens.weight")
case("nvfp4", "NaN global scale", scalar("weight_scale_2", NAN, f"{EXPERT}.down_proj"),
     "scales.global", where=f"{EXPERT}.down_proj.weight_scale_2")
case("nvfp4", "zero global scale", scalar("weight_scale_2", 0.0, f"{EXPERT}.down_proj"),
     "scales.global")
case("nvfp4", "unshared gate and up", scalar("weight_scale_2", 0.5, f"{EXPERT}.up_proj"),
     "scales.shared", where=f"{EXPERT}.gate_up")
case("nvfp4-all", "unshared attention gate",
     scalar("weight_scale_2", 0.5, f"{ATTENTION}.gate_proj"), "scales.shared",
     where=f"{ATTENTION}.qkv_gate")
case("nvfp4", "negative input scale", scalar("input_scale", -1.0, f"{EXPERT}.down_proj"),
     "scales.input")
case("nvfp4", "denormal input scale", scalar("input_scale", 1e-39, f"{EXPERT}.down_proj"),
     "scales.input", where=f"{EXPERT}.down_proj.input_scale")
case("nvfp4", "unshared input scale", scalar("input_scale", 2.0, f"{EXPERT}.gate_proj"),
     "scales.input-shared", where=f"{EXPERT}.gate_up")
case("nvfp4-all", "attention ignored but for its gate", ignoring(*(
    f"{ATTENTION}.{p}_proj" for p in "qkvo")), *ENGINES, where=ATTENTION)
case("nvfp4-all", "gate ignored alone", ignoring(f"{ATTENTION}.gate_proj"), *ENGINES,
     where=ATTENTION)
case("nvfp4-all", "router name on a dense layer", ignoring("model.layers.0.mlp.gate"),
     "engine.vllm", "engine.vllm-wide", where="model.layers.0.mlp.gate_up_proj")
case("nvfp4-all", "router glob", ignoring("*.mlp.gate*"), "engine.sglang",
     where="model.layers.0.mlp.gate_up_proj")
case("fp8", "head not ignored", block(lambda d: d["ignore"].remove("lm_head")),
     "engine.transformers", "config.ignore", where="lm_head")
case("nvfp4-all", "router not listed", unlisted("model.layers.5.mlp.gate"), "config.ignore",
     where="model.layers.5.mlp.gate")
case("nvfp4", "flipped bit in a code", lambda f: flip(f, f"{EXPERT}.up_proj.weight", 99),
     "checksums.tensors", "checksums.shards", where=f"{EXPERT}.up_proj.weight", signed=False)
case("nvfp4", "flipped bit in a norm", lambda f: flip(f, NORM, 3), "checksums.tensors",
     "checksums.shards", where=NORM, signed=False)
case("fp8", "swapped tensors", swap_in_header, "checksums.tensors", "checksums.shards",
     signed=False)
case("nvfp4", "changed header", manifest(lambda d: d["shards"][1].update(digest="0" * 32)),
     "checksums.shards", "checksums.files", where="model-00002", signed=False)
case("nvfp4", "beamq.json without its list of files", manifest(lambda d: d.pop("files")),
     "checksums.files", where="beamq.json", signed=False)
case("nvfp4", "flipped bit in the tokenizer",
     lambda f: (f / "tokenizer.json").write_bytes(b"|" + (f / "tokenizer.json").read_bytes()[1:]),
     "checksums.files", where="tokenizer.json", signed=False)
for byte, word in ((0x7F, "NaN"), (0xFF, "negative NaN"), (0, "zero"), (0xB8, "negative")):
    case("nvfp4", f"{word} block scale",
         partial(poke, name=f"{EXPERT}.up_proj.weight_scale", data=bytes([byte]), at=5),
         "values.block-scales", where=f"{EXPERT}.up_proj.weight_scale")
case("fp8", "infinite row scale", lambda f: poke(
    f, f"{EXPERT}.up_proj.weight_scale", struct.pack("<f", float("inf")), 8), "values.row-scales",
    where=f"{EXPERT}.up_proj.weight_scale")
case("fp8", "NaN code", lambda f: poke(f, f"{EXPERT}.up_proj.weight", b"\x7f", 77),
     "values.codes", where=f"{EXPERT}.up_proj.weight")
case("nvfp4", "NaN in a norm", lambda f: poke(f, NORM, b"\xc0\x7f", 4), "values.finite",
     where=NORM)
case("nvfp4", "norm of zeros", lambda f: poke(f, NORM, bytes(256), 0), "values.zeros",
     where=NORM)
case("nvfp4", "another model's config",
     config(lambda d: d.update(routed_scaling_factor=1.0)), "source.config",
     where="routed_scaling_factor")
case("nvfp4", "changed tokenizer", lambda f: (f / "tokenizer.json").write_text("{}"),
     "source.files", where="tokenizer.json")
case("nvfp4", "missing template", delete("chat_template.jinja"), "source.files",
     where="chat_template.jinja")
case("nvfp4", "tensor that the source lacks", tensor("foo.bar", "BF16", [1]), "source.accounted",
     "tensors.known", where="foo.bar")
case("nvfp4", "lowest bit of the router", lambda f: flip(f, ROUTER), "source.router", where=ROUTER)
case("nvfp4", "lowest bit of the correction bias", lambda f: flip(
    f, "model.layers.3.mlp.gate.e_score_correction_bias", 4), "source.router",
    where="model.layers.3.mlp.gate.e_score_correction_bias")
case("nvfp4", "lowest bit of a norm", lambda f: flip(f, NORM, 2), "source.copied", where=NORM)
case("nvfp4", "one code off by a step", lambda f: flip(f, f"{EXPERT}.up_proj.weight", 99),
     "source.bound", where=f"{EXPERT}.up_proj")
case("nvfp4", "block scale off by a step", lambda f: flip(
    f, f"{EXPERT}.down_proj.weight_scale", 7), "source.bound", where=f"{EXPERT}.down_proj")
case("nvfp4", "swapped experts", lambda f: swap(
    f, f"{EXPERT}.up_proj.weight", "model.layers.4.mlp.experts.8.up_proj.weight"),
    "source.bound", "source.error", where=f"{EXPERT}.up_proj")
case("nvfp4-max", "block scale off by a step", lambda f: flip(
    f, f"{EXPERT}.down_proj.weight_scale", 7), "source.bound", where=f"{EXPERT}.down_proj")
case("nvfp4-gptq", "swapped experts", lambda f: swap(
    f, f"{EXPERT}.up_proj.weight", "model.layers.4.mlp.experts.8.up_proj.weight"),
    "source.bound", "source.error", where=f"{EXPERT}.up_proj")
case("nvfp4-gptq", "one row of another", lambda f: poke(
    f, f"{EXPERT}.up_proj.weight", read(f, f"{EXPERT}.up_proj.weight")[:64], 5 * 64),
    "source.bound", where="1 of 64 rows")
case("nvfp4-gptq", "scales doubled", scalar("weight_scale_2", 0.001, f"{EXPERT}.down_proj"),
     "source.bound", "source.error", where=f"{EXPERT}.down_proj")
case("nvfp4", "global scale doubled", scalar("weight_scale_2", 0.01, f"{EXPERT}.down_proj"),
     "source.bound", "source.error", where=f"{EXPERT}.down_proj")
case("fp8", "swapped experts", lambda f: swap(
    f, f"{EXPERT}.up_proj.weight", "model.layers.4.mlp.experts.8.up_proj.weight"),
    "source.bound", "source.error", where=f"{EXPERT}.up_proj")
OUT = f"{ATTENTION}.o_proj"


def halve_first_group(folder: Path, module: str) -> None:
    """The scale of 32 values doubled, and their codes made the nearest for it."""
    codes = np.frombuffer(read(folder, f"{module}.weight")[:32], np.uint8)
    byte = read(folder, f"{module}.weight_scale")[:1]
    values = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float() / 2
    halved = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
    poke(folder, f"{module}.weight", halved, 0)
    poke(folder, f"{module}.weight_scale", bytes([byte[0] + 1]), 0)


def layers(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change `quantized_layers` in both files."""
    return all_of(
        block(lambda d: change(d["quantized_layers"])), hf(lambda d: change(d["quantized_layers"]))
    )


case("nvfp4-fp8", "no algorithms for the layers", block(lambda d: d.pop("quantized_layers")),
     "config.fields", "config.agreement", where="quantized_layers")
case("nvfp4-fp8", "algorithms in one file only", hf(lambda d: d.pop("quantized_layers")),
     "config.agreement", where="quantized_layers")
case("nvfp4-fp8", "another layer's algorithm",
     layers(lambda d: d.update({OUT: {"quant_algo": "NVFP4", "group_size": 16}})),
     "engine.vllm", "engine.vllm-wide", where=OUT)
case("nvfp4-fp8", "an algorithm with one scale for all rows",
     layers(lambda d: d.update({OUT: {"quant_algo": "FP8"}})),
     "config.fields", "engine.vllm", "engine.vllm-wide", where=OUT)
case("nvfp4-fp8", "row scales [N, 1]", retype(f"{OUT}.weight_scale", "F32", [128, 1]),
     "tensors.shape", where=f"{OUT}.weight_scale")
case("nvfp4-fp8", "row scale off", lambda f: flip(f, f"{OUT}.weight_scale", 2, 0x40),
     "source.bound", where=OUT)
MX, BLOCKS = f"{EXPERT}.up_proj.weight_scale", f"{OUT}.weight_scale_inv"
case("mxfp8", "NaN scale", lambda f: poke(f, MX, b"\xff", 5), "values.row-scales", where=MX)
case("mxfp8", "a byte that is not the rule's, with codes to match",
     lambda f: halve_first_group(f, f"{EXPERT}.up_proj"), "source.bound", where=f"{EXPERT}.up_proj")
case("mxfp8", "float scales", retype(MX, "F32"), "tensors.dtype", "engine.vllm",
     "engine.vllm-wide", where=MX)
case("mxfp8", "a scale for 16 values", retype(MX, "U8", [64, 8]), "tensors.shape", where=MX)
case("mxfp8", "scales of blocks", lambda f: rewrite(f, MX, lambda d: d.update(
    {f"{EXPERT}.up_proj.weight_scale_inv": ("F32", [1, 1], bytes(4))})),
    "tensors.known", "engine.vllm", "engine.vllm-wide", where=f"{EXPERT}.up_proj.weight_scale_inv")
case("mxfp8", "activations without groups",
     group(lambda d: d["input_activations"].update(strategy="token")), "config.fields",
     "config.schema", "engine.vllm", "engine.vllm-wide")
case("mxfp8", "one code off", lambda f: flip(f, f"{EXPERT}.up_proj.weight", 99),
     "source.bound", where=f"{EXPERT}.up_proj")
case("fp8-block", "infinite scale", lambda f: poke(
    f, BLOCKS, struct.pack("<f", float("inf")), 0), "values.row-scales", where=BLOCKS)
case("fp8-block", "scale off", lambda f: flip(f, BLOCKS, 2, 0x40), "source.bound",
     "source.error", where=OUT)
case("fp8-block", "static activations", block(lambda d: d.update(activation_scheme="static")),
     "config.fields", "engine.vllm", "engine.vllm-wide", "engine.transformers")
case("fp8-block", "attention ignored",
     block(lambda d: d["ignored_layers"].append(OUT)),
     "engine.vllm", "engine.vllm-wide", "engine.transformers", where=OUT)
case("fp8-block", "other blocks", block(lambda d: d.update(weight_block_size=[64, 64])),
     "config.declared", *ENGINES, "engine.transformers")
case("fp8", "row scale off", lambda f: flip(f, f"{ATTENTION}.q_proj.weight_scale", 2, 0x40),
     "source.bound", "source.error", where=f"{ATTENTION}.q_proj")


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.recipe}: {c.title}")
def test_damage_is_named(
    case: Case, made: Callable[[str], Path], beam_nano: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(made(case.recipe), tmp_path / "damaged")
    case.damage(folder)
    if case.signed:
        resign(folder)
    report = verify(
        folder,
        source=beam_nano if case.source else None,
        level="structure" if case.level == "structure" else "tensors",
        workers=2,
        sample=0,
    )
    assert failed(report) == case.fails, [f"{c.name}: {c.detail}" for c in report.failures]
    assert not report.ok
    named = [place for check in report.failures for place in (*check.where, check.detail)]
    assert any(case.where in place for place in named)


def test_swept_codes_are_judged_by_the_recipe_in_the_manifest(
    made: Callable[[str], Path], beam_nano: Path, tmp_path: Path
) -> None:
    """Clipping is a fault where the recipe is `max`; where none is known, scales may be any."""
    folder = Path(shutil.copytree(made("nvfp4"), tmp_path / "swept"))
    assert verify(made("nvfp4-max"), source=beam_nano, sample=0).ok
    manifest(lambda d: d["recipe"].update(scales="max"))(folder)
    resign(folder)
    assert failed(verify(folder, source=beam_nano, sample=0)) == {"source.bound"}
    manifest(lambda d: d.update(recipe=["sweep"]))(folder)
    resign(folder)
    assert verify(folder, source=beam_nano, sample=0).ok


def test_a_second_opinion_that_differs_is_a_failure(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped() -> second_opinion.Decoder:
        genuine = modelopt()
        return lambda codes, scales, scale: genuine((codes >> 4) | (codes << 4), scales, scale)

    modelopt = second_opinion._modelopt_decoder
    monkeypatch.setattr(second_opinion, "_modelopt_decoder", swapped)
    report = verify(made("nvfp4"), sample=2)
    assert failed(report) == {"values.second-opinion"}
    assert report.check("values.second-opinion").count == 2


@pytest.mark.parametrize(
    ("recipe", "decoder"),
    [("nvfp4", "_modelopt_decoder"), ("fp8", "_compressed_tensors_decoder")],
)
@pytest.mark.parametrize(("off", "passes"), [(2.0**-22, True), (2.0**-19, False), (0.5, False)])
def test_a_second_opinion_may_differ_in_the_last_bits_only(
    recipe: str,
    decoder: str,
    off: float,
    passes: bool,
    made: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scaled() -> second_opinion.Decoder:
        genuine = decode()
        return lambda *stored: genuine(*stored) * (1 + off)

    decode = getattr(second_opinion, decoder)
    monkeypatch.setattr(second_opinion, decoder, scaled)
    report = verify(made(recipe), sample=1)
    assert failed(report) == (set() if passes else {"values.second-opinion"})


@pytest.mark.parametrize("value", [NAN, 0.0, -1.0, 1e-40])
def test_a_second_opinion_of_a_broken_global_scale_is_a_finding(
    value: float, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """And not an internal error that hides all other findings."""
    folder = Path(shutil.copytree(made("nvfp4-max"), tmp_path / "damaged"))
    scalar("weight_scale_2", value, f"{EXPERT}.down_proj")(folder)
    resign(folder)
    report = verify(folder, sample=10_000)
    assert failed(report) == {"scales.global", "values.second-opinion"}


def test_every_check_has_a_case_in_which_it_fails() -> None:
    shown = {name for case in CASES for name in case.fails} | {"values.second-opinion"}
    # Level forward has its own, in test_forward_check.
    assert shown == {name for name, check in CHECKS.items() if check.level != "forward"}


def test_missing_libraries_are_said(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "compressed_tensors.quantization", None)
    report = verify(made("fp8"), sample=1)
    assert report.ok
    for name in ("config.schema", "values.second-opinion"):
        assert report.check(name).status == "skip"
        assert "compressed" in report.check(name).detail
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization.qtensor", None)
    skipped = verify(made("nvfp4"), sample=1).check("values.second-opinion")
    assert (skipped.status, "nvidia-modelopt" in skipped.detail) == ("skip", True)


def test_a_shard_of_another_run_is_noticed(
    made: Callable[[str], Path], beam_nano: Path, nano_copy: Path, tmp_path: Path
) -> None:
    flip(nano_copy, f"{EXPERT}.up_proj.weight", 1, 0x40)
    quantize(nano_copy, tmp_path / "b", recipe="fp8", max_shard_bytes=1_000_000)
    folder = shutil.copytree(made("fp8"), tmp_path / "a")
    shard = find(folder, f"{EXPERT}.up_proj.weight").file
    shutil.copy(tmp_path / "b" / shard, folder / shard)
    sums = {"checksums.tensors", "checksums.shards"}
    assert failed(verify(folder, sample=0)) == failed(verify(folder, level="quick")) == sums
    assert failed(verify(folder, source=nano_copy, sample=0)) == sums
    assert "source.bound" in failed(verify(folder, source=beam_nano, sample=0))


def packed(folder: Path, suffix: str) -> None:
    """Rewrite a one-file source with its experts in packed 3-D tensors, gate rows first."""

    def change(tensors: safetensors_edit.Tensors) -> None:
        for layer in range(3, 8):
            prefix = f"model.layers.{layer}.mlp.experts"
            for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
                pieces = [
                    tensors.pop(f"{prefix}.{expert}.{part}_proj.weight")
                    for expert in range(16)
                    for part in parts
                ]
                n, k = pieces[0][1]
                data = b"".join(piece[2] for piece in pieces)
                tensors[f"{prefix}.{name}{suffix}"] = ("BF16", [16, n * len(parts), k], data)

    safetensors_edit.edit(folder / "model.safetensors", change)


def as_float32(folder: Path) -> None:
    """Rewrite a one-file source in FP32, with bits below BF16 in every value."""

    def change(tensors: safetensors_edit.Tensors) -> None:
        for name, (dtype, shape, data) in list(tensors.items()):
            if dtype == "BF16":
                wide = b"".join(b"\x01\x80" + data[i : i + 2] for i in range(0, len(data), 2))
                tensors[name] = ("F32", shape, wide)

    safetensors_edit.edit(folder / "model.safetensors", change)


def router_as_bfloat16(folder: Path) -> None:
    def change(tensors: safetensors_edit.Tensors) -> None:
        for name, (dtype, shape, data) in list(tensors.items()):
            if dtype == "F32":
                cast = b"".join(data[i + 2 : i + 4] for i in range(0, len(data), 4))
                tensors[name] = ("BF16", shape, cast)

    safetensors_edit.edit(folder / "model.safetensors", change)


@pytest.mark.parametrize("recipe", ["nvfp4-all", "fp8"])
@pytest.mark.parametrize(
    "change",
    [
        partial(packed, suffix=""),
        partial(packed, suffix=".weight"),
        as_float32,
        router_as_bfloat16,
    ],
    ids=["packed", "packed.weight", "FP32", "BF16 router"],
)
def test_other_forms_of_source(
    recipe: str, change: Callable[[Path], None], nano_copy: Path, tmp_path: Path
) -> None:
    change(nano_copy)
    quantize(nano_copy, tmp_path / "out", recipe=recipe, no_calibration=recipe != "fp8")
    assert failed(verify(tmp_path / "out", source=nano_copy, sample=0)) == set()
    flip(nano_copy, NORM, 3)
    assert failed(verify(tmp_path / "out", source=nano_copy, sample=0)) == {"source.copied"}


def test_packed_and_single_experts_are_the_same_source(
    made: Callable[[str], Path], nano_copy: Path
) -> None:
    packed(nano_copy, "")
    assert verify(made("fp8"), source=nano_copy, sample=0).ok


@pytest.mark.parametrize("level", ["structure", "quick", "tensors"])
def test_a_cut_shard_is_one_finding(
    level: Any, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Not one for each of its tensors; and beamq.json, which lists it, is not at fault."""
    folder = Path(shutil.copytree(made("nvfp4"), tmp_path / "damaged"))
    cut(folder)
    report = verify(folder, level=level)
    assert failed(report) == {"files.readable"}
    (check,) = report.failures
    assert "download it again" in check.detail
    assert check.where == (shards(folder)[-1].name,)
    assert "see files.readable" in report.check("checksums.tensors").detail
    assert set(report.loads.values()) == ({None} if level == "quick" else {False})


def test_shards_that_are_gone_are_the_one_finding(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Beside the index, where that is gone as well."""
    folder = Path(shutil.copytree(made("nvfp4"), tmp_path / "damaged"))
    shards(folder)[1].write_bytes(b"")
    (folder / INDEX_NAME).unlink()
    report = verify(folder)
    assert failed(report) == {"files.readable", "files.index", "checksums.files"}
    assert report.check("checksums.files").where == (INDEX_NAME,)
    assert report.check("files.readable").detail.count("download it again") == 1
    for path in shards(folder):
        path.unlink()
    report = verify(folder)
    assert failed(report) == {"files.readable", "checksums.files"}
    assert "no model.safetensors and no" in report.failures[0].detail
    (folder / INDEX_NAME).write_text("{}")
    report = verify(folder)
    assert failed(report) == {"files.index", "checksums.files"}
    assert "has no weight_map; restore the file" in report.failures[0].detail


def test_a_place_of_any_length_is_shown_in_a_line(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made("nvfp4"), tmp_path / "damaged"))
    hf(lambda d: d["exclude_modules"].append("x" * 5000))(folder)
    (check,) = verify(folder, level="structure").failures
    assert check.name == "config.agreement"
    assert "xxx...: is ignored in hf_quant_config.json only" in check.detail
    assert max(map(len, (check.detail, *check.where))) < 250


@pytest.mark.parametrize("level", ["quick", "tensors"])
def test_a_broken_config_leaves_the_checksums(
    level: Any, made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made("fp8"), tmp_path / "damaged"))
    (folder / "config.json").write_text('{"model_type": "beam", "num_hidden_layers": 0}')
    report = verify(folder, level=level)
    assert failed(report) == {"config.model", "checksums.files"}
    assert report.check("checksums.files").where == ("config.json",)
    assert report.check("checksums.tensors").status == "pass"
    if level == "tensors":
        assert "see config.model" in report.check("engine.vllm").detail


def strangers(folder: Path) -> Path:
    """An FP8 folder as llm-compressor's model_free_ptq leaves it."""
    for name in ("beamq.json", "README.md"):
        (folder / name).unlink()
    block(lambda d: d.update(transform_config={}, sparsity_config={}, version="0.17.0"))(folder)
    for shard in shards(folder):
        raw = shard.read_bytes()
        shard.write_bytes(raw.replace(b'"format":"pt"', b'"from":"them"', 1))
    retype(f"{EXPERT}.up_proj.weight_scale", "BF16")(folder)
    return folder


def test_a_strangers_folder_is_held_to_what_engines_need(
    made: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = strangers(Path(shutil.copytree(made("fp8"), tmp_path / "theirs")))
    report = verify(folder)
    assert report.ok, report.failures
    warned = {check.name for check in report.checks if check.status == "warn"}
    assert warned == {
        "files.metadata", "files.total-size", "manifest.present", "tensors.dtype"
    }  # fmt: skip
    assert report.to_dict()["loads"] == {"vLLM": True, "SGLang": True, "transformers": True}
    with pytest.raises(SystemExit) as left:
        app(["verify", str(folder)], prog_name="beamq")
    assert left.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Loads, by each engine's rules: vLLM yes, SGLang yes, transformers yes." in said
    assert "checks passed, 4 warnings," in said
    assert "manifest.present" in failed(verify(folder, level="quick")), "nothing to compare with"
    assert verify(made("nvfp4")).loads == {"vLLM": True, "SGLang": True, "transformers": False}


def test_a_format_that_one_engine_loads(
    made: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made("nvfp4-fp8")
    report = verify(folder)
    assert report.ok
    assert report.loads == {"vLLM": True, "SGLang": False, "transformers": False}
    said = " ".join(" ".join(map(str, verify_blocks(report, verbose=False))).split())
    assert "SGLang no (refuses Beam in ModelOpt MIXED_PRECISION), transformers no" in said
    assert verify(folder, level="structure", engine="vllm").ok
    for engine in ("sglang", "transformers"):
        assert failed(verify(folder, level="structure", engine=engine)) == {f"engine.{engine}"}
    with pytest.raises(SystemExit) as left:
        app(["verify", str(folder), "--level", "structure", "--engine", "sglang"])
    assert left.value.code == 1
    assert "FAILED: 1 of" in capsys.readouterr().out


def test_a_strangers_folder_that_one_engine_refuses(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = strangers(Path(shutil.copytree(made("fp8"), tmp_path / "theirs")))
    block(lambda d: d["config_groups"]["group_0"].update(
        targets=[r"re:.*self_attn\..*proj$", r"re:.*mlp\..*proj$", "Linear"]))(folder)
    block(lambda d: d.update(ignore=["lm_head"]))(folder)
    assert verify(folder, level="structure").ok
    block(lambda d: d["config_groups"]["group_0"].update(targets=[r"re:.*\.mlp\..*_proj$"]))(folder)
    report = verify(folder, level="structure")
    assert {name for name in failed(report) if name != "engine.vllm-wide"} == {
        "engine.vllm", "engine.sglang", "engine.transformers"}  # fmt: skip
    assert not any(report.loads.values())
    block(lambda d: d.update(ignore=["lm_head", "re:(a+)+x"]))(folder)
    block(lambda d: d["config_groups"]["group_0"].update(targets=["Linear"]))(folder)
    report = verify(folder, level="structure")
    assert report.ok, report.failures
    assert set(report.loads.values()) == {None}
    assert "a repeated group" in " ".join(map(str, verify_blocks(report, verbose=False)))


def test_what_cannot_be_asked_is_an_error(
    made: Callable[[str], Path], nano_copy: Path, beam_nano: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        verify(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="level"):
        verify(made("fp8"), level="everything")  # type: ignore[arg-type]
    with pytest.raises(AlreadyQuantizedError):
        verify(made("fp8"), source=made("nvfp4"))
    drop(NORM)(nano_copy)
    with pytest.raises(TensorError, match="is missing"):
        verify(made("fp8"), source=nano_copy)
    for path in nano_copy.iterdir():
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json and no weights"):
        verify(nano_copy)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"weight_map": 3}'])
@pytest.mark.parametrize("name", [INDEX_NAME, "beamq.json", "hf_quant_config.json"])
def test_garbage_in_small_files_is_a_finding(
    name: str, content: bytes, made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(made("nvfp4"), tmp_path / "damaged")
    (folder / name).write_bytes(content)
    found = failed(verify(folder, sample=0))
    wanted = {
        INDEX_NAME: {"files.index"},
        "beamq.json": {"manifest.present"},
        "hf_quant_config.json": {"config.agreement", "config.fields"},
    }[name]
    assert found & wanted


@pytest.mark.parametrize("hostile", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", 7])
def test_index_entries_may_not_leave_the_folder(
    hostile: object, made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(made("nvfp4"), tmp_path / "damaged")
    edit_json(folder / INDEX_NAME, lambda data: data["weight_map"].update({NORM: hostile}))
    assert "files.index" in failed(verify(folder, sample=0))
