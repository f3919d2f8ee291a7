"""Faults of names and patterns: what is quantized, what is spared, and that all agree on it."""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from beamq.beam.tensors import Role
from beamq.errors import RecipeError, TensorError
from beamq.io.safetensors_header import read_header
from beamq.plan.layout import harmless_entries
from beamq.plan.plan import make_plan
from beamq.plan.recipe import matches
from tests.helpers import safetensors_edit as st
from tests.helpers.craft import SINGLE, Run, convert, light_verify, put, read_json, recipe, source
from tests.helpers.independent_decoder import tensors_of

SCALES = (".weight_scale", ".weight_scale_2", ".input_scale")
BUILT = ("nvfp4", "nvfp4-mlp", "nvfp4-all", "fp8", "fp8-experts")


@pytest.mark.parametrize("pattern", ["gate", "*gate", r"re:.*mlp\.gate$"])
def test_gate_means_the_router_LLMC2604(
    run: Run, beam_nano: Path, tmp_path: Path, pattern: str
) -> None:
    code, _, err = run(
        "quantize", beam_nano, tmp_path / "out", "--no-calibration", "--dry-run",
        "--exclude", pattern,
    )  # fmt: skip
    assert code == 0
    assert "mlp.gate" in err
    assert "gate_proj" not in err
    plan = make_plan(beam_nano, "nvfp4-all", exclude=(pattern,))
    assert plan.units == make_plan(beam_nano, "nvfp4-all").units


@pytest.mark.parametrize(
    ("pattern", "units"),
    [
        ("*.experts.*.gate_proj", 5),
        (r"re:.*\.mlp\.gate_proj", 3),
        (r"re:.*\.self_attn\.gate_proj", 8),
    ],
)
def test_gate_proj_only_if_meant_LLMC2604(beam_nano: Path, pattern: str, units: int) -> None:
    plan = make_plan(beam_nano, "nvfp4-all", exclude=(pattern,))
    assert len(plan.exclusions[0].units) == units
    assert all(name.endswith("gate_proj") for name in plan.exclusions[0].matched)


@pytest.mark.parametrize(
    "pattern", ["gates", "*.gateproj", "re:gate", "model.layers.8", "Gate", ""]
)
def test_no_match_is_an_error_LLMC2604(
    run: Run, beam_nano: Path, tmp_path: Path, pattern: str
) -> None:
    code, _, err = run("plan", beam_nano, "--exclude", pattern)
    assert code == (3 if pattern else 2)
    assert "error: " in err


@pytest.mark.parametrize(
    "pattern",
    [
        r"re:(a+)+$", r"re:(.*)*x", r"re:(a|a)*b", "re:a?a?a?a?a?aaaaa", "re:.*.*.*.*.*x",
        "re:(?i)GATE", "re:(?:ab){50}", "re:" + "a" * 400, "re:(", "re:[", "re:*",
    ],
)  # fmt: skip
def test_patterns_that_could_run_for_ever_are_refused(beam_nano: Path, pattern: str) -> None:
    with pytest.raises(RecipeError, match="pattern"):
        make_plan(beam_nano, "nvfp4", exclude=(pattern,))


def test_globs_are_taken_literally() -> None:
    assert matches("model.layers.[12].mlp*", "model.layers.2.mlp.gate")
    assert not matches("model.layers.[12].mlp*", "model.layers.3.mlp.gate")
    assert not matches("*" * 200 + "x", "model.layers.3.mlp.gate" * 20)


PARTS = {
    "only q_proj": (("model.layers.1.self_attn.q_proj",), {(1, Role.ATTENTION)}),
    "only self_attn.gate_proj": (("model.layers.2.self_attn.gate_proj",), {(2, Role.ATTENTION)}),
    "all v_proj": (("v_proj",), {(layer, Role.ATTENTION) for layer in range(8)}),
    "some experts": (("re:.*layers.4.mlp.experts.[0-3].*",), {(4, Role.EXPERT)}),
    "one up_proj": (("model.layers.5.mlp.experts.7.up_proj",), {(5, Role.EXPERT)}),
    "dense gate_proj": (("model.layers.0.mlp.gate_proj",), {(0, Role.DENSE_MLP)}),
    "two patterns": (("model.layers.0.mlp.up_proj", "o_proj"),
                     {(0, Role.DENSE_MLP), *((n, Role.ATTENTION) for n in range(8))}),
}  # fmt: skip


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
@pytest.mark.parametrize(("patterns", "spared"), PARTS.values(), ids=PARTS.keys())
def test_part_of_a_fused_set_is_widened_SG36596(
    beam_nano: Path, tmp_path: Path, fmt: str, patterns: tuple[str, ...], spared: set[object]
) -> None:
    plan = make_plan(beam_nano, recipe(fmt), exclude=patterns)
    everything = make_plan(beam_nano, recipe(fmt)).units
    assert everything - plan.units == spared
    assert all(exclusion.widened for exclusion in plan.exclusions)


def test_widening_is_said_SG36596(run: Run, beam_nano: Path) -> None:
    code, out, _ = run("plan", beam_nano, "--recipe", "nvfp4-all", "--exclude", "q_proj")
    assert code == 0
    assert "widened" in " ".join(out.split())


IGNORES = [
    (), ("model.layers.4.mlp.experts*",), ("model.layers.1.self_attn.q_proj",),
    ("self_attn", "model.layers.0"), (r"re:.*layers\.[0-6]\..*",),
]  # fmt: skip


def is_ignored(module: str, entries: list[str]) -> bool:
    """Names, globs and `re:` patterns, as both engines and both formats' libraries take them."""
    return any(
        re.match(entry[3:], module) if entry.startswith("re:") else fnmatch.fnmatch(module, entry)
        for entry in entries
    )


@pytest.mark.parametrize("exclude", IGNORES, ids=lambda patterns: " ".join(patterns) or "nothing")
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_scales_and_ignore_lists_are_one_MO1858_LLMC3040_VL45132(
    beam_nano: Path, tmp_path: Path, fmt: str, exclude: tuple[str, ...]
) -> None:
    convert(beam_nano, tmp_path / "out", fmt, exclude=exclude)
    headers = [read_header(path, path.name)[0] for path in (tmp_path / "out").glob("*.safetensors")]
    specs = {spec.name: spec for header in headers for spec in header}
    block = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    entries = block["ignore"]  # type: ignore[index]
    linears = [name.removesuffix(".weight") for name, spec in specs.items()
               if name.endswith(".weight") and len(spec.shape) == 2]  # fmt: skip
    assert "lm_head" in entries
    assert specs["lm_head.weight"].dtype == "BF16"
    for module in linears:
        if module == "model.embed_tokens":
            continue
        scaled = f"{module}.weight_scale" in specs
        assert scaled != is_ignored(module, entries), module
        assert scaled == (specs[f"{module}.weight"].dtype != "BF16") or module.endswith("mlp.gate")
    allowed = {
        "nvfp4": {"weight", "weight_scale", "weight_scale_2", "input_scale"},
        "fp8": {"weight", "weight_scale"},
    }[fmt]
    with_scales = {m for m in linears if f"{m}.weight_scale" in specs}
    for module in with_scales:
        parts = {name.rpartition(".")[2] for name in specs if name.rpartition(".")[0] == module}
        assert parts == allowed


@pytest.mark.parametrize("name", BUILT)
def test_output_keys_are_the_allow_list_MO2038(beam_nano: Path, name: str) -> None:
    plan = make_plan(beam_nano, name)
    written = {tensor.name for shard in plan.shards for tensor in shard.tensors}
    sources = {job.members[0].source.spec.name for job in plan.jobs} | {
        member.source.spec.name for job in plan.jobs for member in job.members
    }
    expected = set(sources)
    for job in plan.jobs:
        if job.kind != "copy":
            suffixes = SCALES if job.kind == "nvfp4" else SCALES[:1]
            expected |= {m.role.module + suffix for m in job.members for suffix in suffixes}
    assert written == expected


def pack(tensors: st.Tensors, layer: int, *kinds: str, suffix: str = "") -> None:
    """Pack a layer's experts: gate rows first, as transformers does in memory."""
    base = f"model.layers.{layer}.mlp.experts"
    for kind in kinds:
        parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        rows = [tensors.pop(f"{base}.{e}.{p}_proj.weight") for e in range(16) for p in parts]
        n, k = rows[0][1]
        data = b"".join(row[2] for row in rows)
        tensors[f"{base}.{kind}{suffix}"] = ("BF16", [16, n * len(parts), k], data)


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize(
    "kinds",
    [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)],
    ids=["both", "gate_up only", "down only"],
)
def test_packed_experts_are_never_left_precise_MO1173_LLMC2833(
    run: Run, beam_nano: Path, tmp_path: Path, kinds: tuple[str, ...], suffix: str
) -> None:
    folder = source(beam_nano, tmp_path / "packed", lambda t: pack(t, 5, *kinds, suffix=suffix))
    plain, packed = make_plan(beam_nano), make_plan(folder)
    assert packed.quantized_parameters == plain.quantized_parameters
    assert [shard.header for shard in packed.shards] == [shard.header for shard in plain.shards]
    code, out, _ = run("plan", folder)
    assert code == 0
    assert "54.3% of the weights are quantized" in out


def test_gate_rows_come_first_MO1173(beam_nano: Path, tmp_path: Path) -> None:
    folder = source(beam_nano, tmp_path / "packed", lambda t: pack(t, 3, "gate_up_proj"))
    convert(beam_nano, tmp_path / "one", recipe=recipe("nvfp4", "expert"))
    convert(folder, tmp_path / "two", recipe=recipe("nvfp4", "expert"))
    assert tensors_of(tmp_path / "one") == tensors_of(tmp_path / "two")


BASE = "model.layers.3.mlp.experts"
DOUBLES: dict[str, Callable[[st.Tensors], object]] = {
    "packed beside one gate_proj": lambda t: t.update(
        {f"{BASE}.gate_up_proj": ("BF16", [16, 128, 128], bytes(2 * 16 * 128 * 128))}
    ),
    "packed beside the last down_proj": lambda t: (
        t.update({f"{BASE}.down_proj": ("BF16", [16, 128, 64], bytes(2 * 16 * 128 * 64))}),
        [t.pop(f"{BASE}.{e}.down_proj.weight") for e in range(15)],
    ),
    "packed twice": lambda t: (pack(t, 3, "down_proj"),
                               t.update({f"{BASE}.down_proj.weight": t[f"{BASE}.down_proj"]})),
}  # fmt: skip


@pytest.mark.parametrize("change", DOUBLES.values(), ids=DOUBLES.keys())
def test_experts_in_two_forms_are_refused(
    beam_nano: Path, tmp_path: Path, change: Callable[[st.Tensors], object]
) -> None:
    """Found here: packed gate and up beside per-expert ones were dropped without a word."""
    with pytest.raises(TensorError, match=r"twice|packed experts"):
        make_plan(source(beam_nano, tmp_path / "x", change))


EXTRAS: dict[str, tuple[str, list[int]]] = {
    "model.layers.8.input_layernorm.weight": ("BF16", [128]),
    "model.layers.8.self_attn.q_proj.weight": ("BF16", [128, 128]),
    "mtp.layers.0.mlp.down_proj.weight": ("F32", [2, 3]),
    "vision_tower.x.weight": ("F16", [4, 1]),
    "foo.bar": ("I64", [3]),
    "foo.empty": ("BF16", [0, 7]),
    "scalar": ("F64", []),
    "model.layers.3.mlp.experts.16.up_proj.weight": ("BF16", [64, 128]),
    "model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", [64, 128]),
    "übergröße ∑": ("U8", [5]),
}
DROPPED = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]


def with_extras(tensors: st.Tensors) -> None:
    sizes = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}
    for number, (name, (dtype, shape)) in enumerate(EXTRAS.items()):
        nbytes = sizes[dtype] * math.prod(shape)
        tensors[name] = (dtype, shape, bytes((number + i) % 120 for i in range(nbytes)))
    for name in DROPPED:
        tensors[name] = ("F32", [2], bytes(8))


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_extra_tensors_are_accounted_for_MO2427(beam_nano: Path, tmp_path: Path, fmt: str) -> None:
    folder = source(beam_nano, tmp_path / "source", with_extras)
    result = convert(folder, tmp_path / "out", fmt)
    before, after = st.load(folder / SINGLE), tensors_of(tmp_path / "out")
    for name, (dtype, shape) in EXTRAS.items():
        assert after[name] == before[name]
        assert after[name][:2] == (dtype, shape)
    manifest = read_json(tmp_path / "out" / "beamq.json")
    assert [entry["tensor"] for entry in manifest["dropped"]] == DROPPED  # type: ignore[attr-defined]
    quantized = {m.role.name for job in result.plan.jobs if job.kind != "copy" for m in job.members}
    copied = {job.group for job in result.plan.jobs if job.kind == "copy"}
    assert quantized | copied | set(DROPPED) == set(before)
    assert any("tensors are not Beam's" in note for note in result.plan.notes)
    report = light_verify(tmp_path / "out", source=folder)
    # Engines stop at names they do not know, so verify says so; nothing else may be wrong.
    assert {check.name for check in report.failures} <= {"tensors.known"}


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
def test_experts_of_a_further_layer_are_one_entry(
    beam_nano: Path, tmp_path: Path, fmt: str
) -> None:
    """Not one for each, which SGLang's fused experts do not match. A note says who stops."""

    def add(tensors: st.Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.7.")]:
            tensors[name.replace(".7.", ".8.", 1)] = tensors[name]

    folder = source(beam_nano, tmp_path / "source", add)
    plan = convert(folder, tmp_path / "out", fmt).plan
    new = [entry for entry in plan.ignore if "layers.8" in entry or r"layers\.8" in entry]
    before = set(make_plan(beam_nano, recipe(fmt)).ignore)
    assert before.isdisjoint(new)
    assert {"model.layers.8.mlp.experts*", r"re:model\.layers\.8\.mlp\.experts\..*"} & set(new)
    assert len(new) == 7, "and five linears of attention, and the router"
    (note,) = (note for note in plan.notes if "of further layers" in note)
    assert "vLLM stops at them, SGLang passes over them" in note
    report = light_verify(tmp_path / "out")
    assert {check.name for check in report.failures} == {"tensors.known"}
    assert "SGLang passes over it" in report.failures[0].detail
    assert (report.loads["vLLM"], report.loads["SGLang"]) == (False, True)


@pytest.mark.parametrize(
    "module",
    ["", "mlp", "model.layers.1", "layers.3.mlp.experts.5.up_proj", "experts.5.up_proj",
     "gate_proj", "experts", "model", "*", "re:.*", "proj", "a[b", "l",
     "self_attn", "x.model.layers.3.mlp.experts.y", "model.layers.3.mlp.experts.99.up_proj"],
)  # fmt: skip
def test_a_strangers_name_spares_none_of_beams_linears(
    beam_nano: Path, tmp_path: Path, module: str
) -> None:
    """Found here: engines match ignore lists by substring, so a tensor `mlp.weight` would do."""

    def add(tensors: st.Tensors) -> None:
        put(tensors, f"{module}.weight", np.zeros((2, 2), np.float32), "F32")

    folder = source(beam_nano, tmp_path / "x", add)
    for fmt in ("nvfp4", "fp8"):
        assert make_plan(folder, recipe(fmt)).ignore == make_plan(beam_nano, recipe(fmt)).ignore
    config = make_plan(beam_nano).config
    assert harmless_entries(config, [module, "vision.x"]) == ["vision.x"]


@pytest.mark.parametrize("kv_cache", ["none", "fp8"])
def test_both_configs_agree_SG8829(beam_nano: Path, tmp_path: Path, kv_cache: str) -> None:
    exclude = ("model.layers.4.mlp.experts*", "model.layers.0.self_attn")
    convert(beam_nano, tmp_path / "a", "nvfp4", exclude=exclude, kv_cache=kv_cache)
    block = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    other = json.loads((tmp_path / "a" / "hf_quant_config.json").read_text())
    assert block["ignore"] == other["quantization"]["exclude_modules"]
    assert block["quant_algo"] == other["quantization"]["quant_algo"] == "NVFP4"
    assert block["producer"] == other["producer"]
    assert ("kv_cache_scheme" in block) == (kv_cache == "fp8")
    assert other["quantization"]["kv_cache_quant_algo"] == ("FP8" if kv_cache == "fp8" else None)
    convert(beam_nano, tmp_path / "b", "fp8", exclude=exclude, kv_cache=kv_cache)
    assert not (tmp_path / "b" / "hf_quant_config.json").exists()
