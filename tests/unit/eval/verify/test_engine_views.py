"""The engines' reading of ignore lists: each row of the loader contract's tables is one case here.

Expected outcomes were observed on the engines themselves (vLLM 0.33.0, SGLang 0.5.23), models
built on the meta device and real weight loaders run; "ok" means built and loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import Role
from beamq.eval.verify.engine_views import EngineView, mismatches, simulate
from beamq.plan.layout import (
    compressed_tensors_ignore,
    layer_units,
    modelopt_ignore,
    plain_ignore,
    quantization_config,
)

NANO = Path(__file__).parents[4] / "examples" / "beam-nano" / "config.json"
CONFIG = BeamConfig.from_dict(json.loads(NANO.read_text()))
DENSE, SPARSE = CONFIG.dense_layers, CONFIG.sparse_layers
ALL_ROLES = frozenset({Role.EXPERT, Role.DENSE_MLP, Role.ATTENTION})
EXPERTS_MLP = frozenset({Role.EXPERT, Role.DENSE_MLP})
EXPERTS = frozenset({Role.EXPERT})
ATTENTION = ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj")
ENGINES = ("vllm", "vllm-wide", "sglang")


def stored(
    roles: frozenset[Role], kept_layers: tuple[int, ...] = (), rounding: str = "nvfp4"
) -> dict[str, str]:
    """What a checkpoint holds whose `roles` are quantized, except experts of `kept_layers`."""
    modules = {"lm_head": "", "model.embed_tokens": ""}
    for layer, role in layer_units(CONFIG):
        prefix = f"model.layers.{layer}"
        if role is Role.ATTENTION:
            names = [f"{prefix}.self_attn.{name}" for name in ATTENTION]
        else:
            ups = ("gate_proj", "up_proj", "down_proj")
            stems = [f"{prefix}.mlp"]
            if role is Role.EXPERT:
                stems = [f"{prefix}.mlp.experts.{e}" for e in range(CONFIG.num_experts)]
            names = [f"{stem}.{name}" for stem in stems for name in ups]
        quantized = role in roles and not (role is Role.EXPERT and layer in kept_layers)
        modules |= dict.fromkeys(names, rounding * quantized)
    return modules


def modelopt(ignore: list[str], **changes: Any) -> dict[str, Any]:
    return quantization_config("nvfp4", ignore, "none") | changes


def fp8(ignore: list[str], targets: list[str] | None = None) -> dict[str, Any]:
    block = quantization_config("fp8", ignore, "none")
    block["config_groups"]["group_0"]["targets"] = targets or ["Linear"]
    return block


def outcome(view: EngineView, holds: dict[str, str]) -> str:
    """ "ok", the exception's name, or "mismatch" where something is built unlike it is stored."""
    if view.faults:
        return view.faults[0].kind
    return "mismatch" if mismatches(view, holds) else "ok"


def views(block: dict[str, Any] | None, hf: dict[str, Any] | None = None) -> dict[str, EngineView]:
    return {view.engine: view for view in simulate(block, hf, CONFIG)}


BASE = ["lm_head", "model.embed_tokens", *(f"model.layers.{s}.mlp.gate" for s in SPARSE)]
DENSE_NAMES = [
    f"model.layers.{d}.mlp.{p}" for d in DENSE for p in ("gate_proj", "up_proj", "down_proj")
]
ATTENTION_GLOBS = [f"model.layers.{n}.self_attn*" for n in range(CONFIG.num_layers)]


def attention_names(*names: str) -> list[str]:
    return [f"model.layers.{n}.self_attn.{p}" for n in range(CONFIG.num_layers) for p in names]


MODELOPT_ROWS = {
    "per-layer attention globs and explicit dense names": (
        [*BASE, *ATTENTION_GLOBS, *DENSE_NAMES], EXPERTS, "ok", "ok"),
    "*.self_attn.* and mlp.*": (
        [*BASE, "*.self_attn.*", *(f"model.layers.{d}.mlp.*" for d in DENSE)], EXPERTS, "ok", "ok"),
    "*self_attn* and .mlp*": (
        [*BASE, "*self_attn*", *(f"model.layers.{d}.mlp*" for d in DENSE)], EXPERTS, "ok", "ok"),
    "all five explicit": (
        [*BASE, *attention_names(*ATTENTION)], EXPERTS_MLP, "ok", "ok"),
    "explicit without gate_proj": (
        [*BASE, *attention_names("q_proj", "k_proj", "v_proj", "o_proj")],
        EXPERTS_MLP, "ValueError", "mismatch"),
    "attention globs at shard level": (
        [*BASE, *(f"*.self_attn.{p}" for p in ATTENTION)], EXPERTS_MLP, "mismatch", "mismatch"),
    "dense globs at shard level": (
        [*BASE, "*.self_attn.*", "*.mlp.gate_proj", "*.mlp.up_proj", "*.mlp.down_proj"],
        EXPERTS, "mismatch", "mismatch"),
    "regex": (
        [*BASE, r"re:.*\.self_attn\..*"], EXPERTS_MLP, "mismatch", "mismatch"),
    "router glob with quantized dense MLPs": (
        ["lm_head", "*.mlp.gate*", "*.self_attn.*"], EXPERTS_MLP, "ok", "mismatch"),
    "no lm_head": (
        [e for e in BASE if e != "lm_head"], ALL_ROLES, "mismatch", "mismatch"),
    "router not listed": (["lm_head"], ALL_ROLES, "ok", "ok"),
    "recommended, everything but the router": (BASE, ALL_ROLES, "ok", "ok"),
    "recommended, experts and dense MLPs": ([*BASE, *ATTENTION_GLOBS], EXPERTS_MLP, "ok", "ok"),
    "recommended, experts": (
        [*BASE, *ATTENTION_GLOBS, *(f"model.layers.{d}.mlp*" for d in DENSE)],
        EXPERTS, "ok", "ok"),
    "bare router name on a dense layer": (
        [*BASE, "model.layers.0.mlp.gate"], ALL_ROLES, "mismatch", "ok"),
}  # fmt: skip


@pytest.mark.parametrize("row", MODELOPT_ROWS)
def test_modelopt_row(row: str) -> None:
    ignore, roles, vllm, sglang = MODELOPT_ROWS[row]
    seen = {name: outcome(v, stored(roles)) for name, v in views(modelopt(ignore)).items()}
    assert (seen["vllm"], seen["sglang"]) == (vllm, sglang)


def test_one_layer_of_experts_kept() -> None:
    block = modelopt(["lm_head", "model.layers.7.mlp.experts*"])
    holds = stored(ALL_ROLES, kept_layers=(7,))
    assert {outcome(view, holds) for view in views(block).values()} == {"ok"}
    spoiled = holds | {"model.layers.7.mlp.experts.5.up_proj": "nvfp4"}
    found = mismatches(views(block)["sglang"], spoiled)
    assert [(m.prefix, m.stored) for m in found] == [("model.layers.7.mlp.experts", "mixed")]


def test_vllm_substring_reaches_layers_that_begin_with_the_same_digits() -> None:
    wide = replace(
        CONFIG,
        num_layers=12,
        layer_types=("sliding_attention",) * 12,
        mlp_layer_types=("sparse",) * 12,
    )
    vllm, _, sglang = simulate(modelopt(["lm_head", "model.layers.1"]), None, wide)
    assert not vllm.quantized["model.layers.11.mlp.experts"]
    assert sglang.quantized["model.layers.11.mlp.experts"]
    # Their dotted-path rule serves linears only, so even layer 1's own experts are built quantized.
    assert sglang.quantized["model.layers.1.mlp.experts"]
    assert not sglang.quantized["model.layers.1.self_attn.o_proj"]


def test_naming_one_expert_excludes_the_layer_in_vllm_only() -> None:
    seen = views(modelopt(["lm_head", "model.layers.4.mlp.experts.9.down_proj"]))
    assert not seen["vllm"].quantized["model.layers.4.mlp.experts"]
    assert seen["sglang"].quantized["model.layers.4.mlp.experts"]


def test_more_ranks_than_kv_heads_take_the_gate_out_of_the_fused_set() -> None:
    seen = views(modelopt(["lm_head", *attention_names("q_proj", "k_proj", "v_proj")]))
    assert seen["vllm"].faults[0].kind == "ValueError"
    assert seen["vllm-wide"].faults == ()
    gate = "model.layers.0.self_attn.output_gate_proj"
    assert seen["vllm-wide"].quantized[gate]


FP8_ATTENTION = r"re:.*\.self_attn\..*"
FP8_DENSE = r"re:.*\.mlp\.(gate_proj|up_proj|gate_up_proj|down_proj)$"
FP8_BASE = ["lm_head", r"re:.*\.mlp\.gate$"]
FP8_ROWS: dict[str, tuple[list[str], list[str], frozenset[Role], str, str]] = {
    "all": (["Linear"], FP8_BASE, ALL_ROLES, "ok", "ok"),
    "experts and dense MLPs": (
        ["Linear"], [*FP8_BASE, FP8_ATTENTION], EXPERTS_MLP, "ok", "ok"),
    "experts": (
        ["Linear"], [*FP8_BASE, FP8_ATTENTION, FP8_DENSE], EXPERTS, "ok", "ok"),
    "experts by target, nothing ignored": (
        [r"re:.*\.mlp\.experts\..*"], [], EXPERTS, "ok", "ValueError"),
    "attention by separate patterns": (
        ["Linear"],
        [*FP8_BASE, "re:.*[qkv]_proj$", r"re:.*self_attn\.gate_proj$", "re:.*o_proj$"],
        EXPERTS_MLP, "ValueError", "ok"),
    "attention by one pattern": (
        ["Linear"], [*FP8_BASE, r"re:.*self_attn\..*_proj$"], EXPERTS_MLP, "ok", "ok"),
    "attention by explicit names": (
        ["Linear"], [*FP8_BASE, *attention_names(*ATTENTION)], EXPERTS_MLP, "ok", "ok"),
    "router pattern without an end": (
        ["Linear"], ["lm_head", "re:.*mlp.gate"], ALL_ROLES, "mismatch", "ValueError"),
    "lm_head not ignored": (
        ["Linear"], [r"re:.*\.mlp\.gate$"], ALL_ROLES, "ok", "ok"),
    "attention only": (
        ["Linear"], [*FP8_BASE, r"re:.*\.mlp\..*"], frozenset({Role.ATTENTION}), "ok", "ok"),
}  # fmt: skip


@pytest.mark.parametrize("row", FP8_ROWS)
def test_compressed_tensors_row(row: str) -> None:
    targets, ignore, roles, vllm, sglang = FP8_ROWS[row]
    seen = {
        n: outcome(v, stored(roles, rounding="fp8")) for n, v in views(fp8(ignore, targets)).items()
    }
    assert (seen["vllm"], seen["sglang"]) == (vllm, sglang)


def test_one_layer_of_experts_kept_by_pattern() -> None:
    block = fp8([*FP8_BASE, r"re:model\.layers\.7\.mlp\.experts.*"])
    holds = stored(ALL_ROLES, (7,), "fp8")
    assert {outcome(view, holds) for view in views(block).values()} == {"ok"}


def test_transformers_alone_quantizes_an_lm_head_that_is_not_ignored() -> None:
    seen, eight = views(fp8([r"re:.*\.mlp\.gate$"])), stored(ALL_ROLES, rounding="fp8")
    assert outcome(seen["transformers"], eight) == "mismatch"
    assert mismatches(seen["transformers"], eight)[0].prefix == "lm_head"


def test_experts_are_judged_by_expert_0_and_must_agree() -> None:
    seen = views(fp8([*FP8_BASE, r"re:.*experts\.0\.down_proj"]))
    assert {seen[e].faults[0].kind for e in ENGINES} == {"ValueError"}
    seen = views(fp8([*FP8_BASE, r"re:.*experts\.5\.down_proj"]))
    assert all(seen[e].quantized["model.layers.5.mlp.experts"] for e in ENGINES)


def test_sglang_suffix_and_fused_name_rules() -> None:
    seen = views(fp8([*FP8_BASE, "self_attn.o_proj", "mlp.down_proj"]))
    assert not seen["sglang"].quantized["model.layers.0.self_attn.o_proj"]
    assert seen["vllm"].quantized["model.layers.0.self_attn.o_proj"]
    # A pattern that hits the fused name only counts in vLLM, not in SGLang.
    seen = views(fp8([*FP8_BASE, r"re:.*\.gate_up_proj$"]))
    assert not seen["vllm"].quantized["model.layers.0.mlp.gate_up_proj"]
    assert seen["sglang"].quantized["model.layers.0.mlp.gate_up_proj"]


def recipes() -> Iterator[tuple[str, frozenset[Role], tuple[int, ...]]]:
    for roles in (EXPERTS, EXPERTS_MLP, ALL_ROLES, frozenset({Role.DENSE_MLP})):
        for kept in ((), (3,), (4, 7)):
            yield f"{'+'.join(sorted(roles))} without {kept}", roles, kept


@pytest.mark.parametrize(("_name", "roles", "kept"), recipes())
def test_the_lists_beamq_writes_are_read_alike(
    _name: str, roles: frozenset[Role], kept: tuple[int, ...]
) -> None:
    units = {
        (layer, role)
        for layer, role in layer_units(CONFIG)
        if role in roles and not (role is Role.EXPERT and layer in kept)
    }
    nvfp4 = modelopt(modelopt_ignore(CONFIG, units, ()))
    eight = fp8(compressed_tensors_ignore(CONFIG, units, ()))
    for rounding, block in (("nvfp4", nvfp4), ("fp8", eight)):
        holds = stored(roles, kept, rounding)
        assert {n: outcome(v, holds) for n, v in views(block).items()} == dict.fromkeys(
            views(block), "ok"
        )


# ModelOpt MIXED_PRECISION: one algorithm for each layer


def mixed(**changes: Any) -> dict[str, Any]:
    formats = {
        unit: "nvfp4" if unit[1] is Role.EXPERT else "fp8-modelopt" for unit in layer_units(CONFIG)
    }
    ignore = modelopt_ignore(CONFIG, formats, ())
    return quantization_config("nvfp4-fp8", ignore, "none", formats) | changes


def test_a_mixed_checkpoint_is_built_as_stored_by_vllm_and_refused_by_sglang() -> None:
    holds = stored(ALL_ROLES, rounding="fp8") | {
        module: "nvfp4" for module in stored(EXPERTS) if ".experts." in module
    }
    seen = views(mixed())
    assert {name: outcome(view, holds) for name, view in seen.items()} == {
        "vllm": "ok", "vllm-wide": "ok", "sglang": "NotImplementedError",
    }  # fmt: skip
    assert seen["vllm"].quantized["model.layers.3.mlp.experts"] == "nvfp4"
    assert seen["vllm-wide"].quantized["model.layers.3.self_attn.output_gate_proj"] == "fp8"
    wrong = holds | dict.fromkeys((m for m in holds if "layers.4.mlp.experts" in m), "fp8")
    (found,) = mismatches(seen["vllm"], wrong)
    assert (found.prefix, found.built, found.stored) == (
        "model.layers.4.mlp.experts", "nvfp4", "fp8",
    )  # fmt: skip


def test_what_vllm_makes_of_other_mixed_configs() -> None:
    layers = mixed()["quantized_layers"]

    def vllm(layers: object, block: dict[str, Any] | None = None) -> EngineView:
        return views((mixed() if block is None else block) | {"quantized_layers": layers})["vllm"]

    assert vllm({}).faults[0].kind == "ValueError"
    assert vllm({"lm_head": {}}).faults[0].kind == "AttributeError"
    other = layers | {"model.layers.0.self_attn.o_proj": {"quant_algo": "MXFP8"}}
    assert vllm(other).faults[0].kind == "unknown"
    split = layers | {"model.layers.0.self_attn.q_proj": {"quant_algo": "nvfp4"}}
    assert vllm(split).faults[0].kind == "ValueError"
    left = {name: each for name, each in layers.items() if "layers.0.self_attn.o_proj" not in name}
    assert vllm(left).quantized["model.layers.0.self_attn.o_proj"] == ""
    # Per-channel FP8 has no method for experts: they are left in high precision.
    eight = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    assert vllm(layers | {"model.layers.3.mlp.experts": eight}).quantized[
        "model.layers.3.mlp.experts"
    ] == ""  # fmt: skip
    # Named one by one, as ModelOpt does, experts are found by what begins with their prefix.
    one_by_one = {name: each for name, each in layers.items() if "experts" not in name}
    one_by_one |= {
        f"model.layers.{n}.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"} for n in SPARSE
    }
    assert vllm(one_by_one).quantized["model.layers.3.mlp.experts"] == "nvfp4"


def test_vllm_falls_back_to_the_older_file_without_quantized_layers() -> None:
    block = mixed()
    hf = {"quantization": {"quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"],
                           "quantized_layers": block.pop("quantized_layers")}}  # fmt: skip
    view = views(block, hf)["vllm"]
    assert view.quantized["model.layers.3.mlp.experts"] == "nvfp4"
    assert views(block)["vllm"].faults[0].kind == "ValueError"


# MXFP8 and block FP8: the verdicts of the engines' own loaders


@pytest.mark.parametrize("roles", [ALL_ROLES, EXPERTS])
@pytest.mark.parametrize("form", ["mxfp8-quantized", "float-quantized"])
def test_mxfp8_loads_in_vllm_alone(roles: frozenset[Role], form: str) -> None:
    units = {unit for unit in layer_units(CONFIG) if unit[1] in roles}
    block = quantization_config("mxfp8", compressed_tensors_ignore(CONFIG, units, ()), "none")
    holds = stored(roles, rounding="mxfp8")
    seen = {n: outcome(v, holds) for n, v in views(block | {"format": form}).items()}
    assert seen == {
        "vllm": "ok", "vllm-wide": "ok", "sglang": "NotImplementedError",
        "transformers": "RuntimeError",
    }  # fmt: skip
    for other in ("modelopt", "mxfp8"):  # which transformers reads as something else
        block = {"quant_method": other, "quant_algo": "MXFP8", "ignore": ["lm_head"]}
        kinds = {view.faults[0].kind for view in views(block).values()}
        assert kinds <= {"unknown", "NotImplementedError"}


@pytest.mark.parametrize("roles", [ALL_ROLES, EXPERTS])
def test_block_fp8_loads_in_vllm_and_transformers(roles: frozenset[Role]) -> None:
    units = {unit for unit in layer_units(CONFIG) if unit[1] in roles}
    block = quantization_config("fp8-block", plain_ignore(CONFIG, units, ()), "none")
    holds = stored(roles, rounding="fp8-block")
    seen = {n: outcome(v, holds) for n, v in views(block).items()}
    assert seen == {
        "vllm": "ok", "vllm-wide": "ok", "sglang": "NotImplementedError", "transformers": "ok",
    }  # fmt: skip


def test_what_engines_make_of_other_ignore_lists_of_block_fp8() -> None:
    everything = stored(ALL_ROLES, rounding="fp8-block")

    def seen(ignored: list[str], **more: Any) -> dict[str, str]:
        block = quantization_config("fp8-block", ignored, "none") | more
        return {name: outcome(view, everything) for name, view in views(block).items()}

    base = ["lm_head", *(f"model.layers.{s}.mlp.gate" for s in SPARSE)]
    assert set(seen(base).values()) == {"ok", "NotImplementedError"}
    # vLLM never asks for the head; in transformers it is a linear.
    assert (seen([])["vllm"], seen([])["transformers"]) == ("ok", "mismatch")
    one = [*base, "model.layers.0.self_attn.q_proj"]
    assert (seen(one)["vllm"], seen(one)["transformers"]) == ("ValueError", "mismatch")
    fused = [*base, *attention_names("gate_proj")]
    assert seen(fused)["vllm"] == "ValueError"
    assert seen([*base, "self_attn.o_proj"])["vllm"] == "ok"  # no whole name
    assert seen([*base, "self_attn.o_proj"])["transformers"] == "mismatch"
    assert seen([*base, "model.layers.3.mlp.experts"])["vllm"] == "mismatch"
    # transformers prefers the other key, vLLM falls back to it.
    both = seen(base, modules_to_not_convert=[])
    assert (both["vllm"], both["transformers"]) == ("ok", "ok")
    assert seen([], modules_to_not_convert=base)["transformers"] == "ok"
    assert seen(base, activation_scheme="static")["vllm"] == "ValueError"


def test_config_refusals() -> None:
    def kinds(block: dict[str, Any] | None, hf: dict[str, Any] | None = None) -> list[str]:
        return [v.faults[0].kind if v.faults else "ok" for v in views(block, hf).values()]

    hf = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None,
                           "group_size": 16, "exclude_modules": BASE}}  # fmt: skip
    assert kinds(modelopt(BASE)) == ["ok", "ok", "ok"]
    assert kinds(modelopt(BASE, quant_algo="nvfp4"))[2] == "NotImplementedError"
    assert kinds(modelopt(BASE, quant_algo="NVFP4_AWQ"))[2] == "NotImplementedError"
    assert kinds(modelopt(BASE, quant_algo="")) == ["ValueError"] * 3
    assert kinds(modelopt(BASE) | {"ignore": "lm_head"}) == ["ValueError"] * 3
    assert kinds(modelopt(BASE, quant_method="gptq"))[0] == "unknown"
    assert kinds(None, hf) == ["ok", "ok", "ValueError"]
    del hf["quantization"]["group_size"]
    assert kinds(None, hf)[0] == "ValueError"
    assert kinds(None) == ["none"] * 3
    block = fp8(FP8_BASE)
    assert kinds(block | {"format": "naive-quantized"})[2] == "NotImplementedError"
    assert kinds(block | {"ignore": [3]})[2] == "ValueError"
    block["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    assert kinds(block)[2] == "NotImplementedError"
    assert kinds(modelopt([*BASE, "model.layers[*"]))[2] == "re.error"


@pytest.mark.parametrize("pattern", ["(a+)+x", "a*b*c*d*e*", "(" * 5000 + ")" * 5000])
def test_patterns_that_could_take_for_ever_are_not_tried(pattern: str) -> None:
    found = views(fp8([*FP8_BASE, f"re:{pattern}"]))
    for view in found.values():
        assert view.faults[0].kind in ("unknown", "re.error")
        assert len(str(view.faults[0])) < 250


def test_groups_without_input_activations_turn_vllm_weight_only() -> None:
    block = modelopt(BASE)
    del block["config_groups"]["group_0"]["input_activations"]
    seen = views(block)
    assert (seen["vllm"].scheme, seen["sglang"].scheme) == ("nvfp4-weight-only", "nvfp4")


def test_tied_embeddings_are_refused_by_vllm() -> None:
    tied = replace(CONFIG, tie_word_embeddings=True)
    vllm, _, sglang = simulate(modelopt(BASE), None, tied)
    assert (vllm.faults[0].kind, sglang.faults) == ("NotImplementedError", ())


def test_every_stored_module_is_asked_about() -> None:
    for view in views(modelopt(BASE)).values():
        modules = {
            module: view.quantized[site.prefix] for site in view.sites for module in site.stored
        }
        assert set(modules) >= set(stored(ALL_ROLES)) - {"model.embed_tokens"}
        assert modules["model.layers.0.self_attn.gate_proj"]
        assert not modules["lm_head"]
