"""Recipes are closed: what isn't named stays in high precision, what isn't known is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from beamq.beam.tensors import Role
from beamq.errors import RecipeError
from beamq.plan.recipe import BUILT_IN, HEADROOM, load_recipe, matches, parse_recipe

GOOD = {"name": "x", "summary": "y", "rules": {"expert": "nvfp4"}}


def test_the_built_in_recipes_are_those_of_the_design() -> None:
    rules = {name: dict(load_recipe(name).rules) for name in BUILT_IN}
    linears = (Role.EXPERT, Role.DENSE_MLP, Role.ATTENTION)
    assert rules == {
        "nvfp4": {Role.EXPERT: "nvfp4"},
        "nvfp4-max": {Role.EXPERT: "nvfp4"},
        "nvfp4-gptq": {Role.EXPERT: "nvfp4"},
        "nvfp4-mlp": dict.fromkeys(linears[:2], "nvfp4"),
        "nvfp4-all": dict.fromkeys(linears, "nvfp4"),
        "nvfp4-fp8": {**dict.fromkeys(linears, "fp8"), Role.EXPERT: "nvfp4"},
        "fp8": dict.fromkeys(linears, "fp8"),
        "fp8-experts": {Role.EXPERT: "fp8"},
        "fp8-block": dict.fromkeys(linears, "fp8-block"),
        "mxfp8": dict.fromkeys(linears, "mxfp8"),
        "mxfp8-experts": {Role.EXPERT: "mxfp8"},
    }
    assert all(load_recipe(name).name == name for name in BUILT_IN)
    swept = {name for name in BUILT_IN if load_recipe(name).scales == "sweep"}
    assert swept == {"nvfp4", "nvfp4-gptq", "nvfp4-mlp", "nvfp4-all", "nvfp4-fp8"}
    methods = {name: load_recipe(name).expert_method for name in BUILT_IN}
    assert {name for name, method in methods.items() if method} == {"nvfp4-gptq"}
    assert methods["nvfp4-gptq"] == "gptq"


def test_a_mix_is_for_vllm_alone() -> None:
    mixed = parse_recipe({**GOOD, "rules": {"dense-mlp": "nvfp4", "attention": "fp8"}})
    assert (mixed.format, mixed.calibrated) == ("nvfp4-fp8", True)
    assert mixed.weight_format(Role.ATTENTION) == "fp8-modelopt"
    assert parse_recipe({**GOOD, "rules": {"attention": "fp8"}}).weight_format(Role.ATTENTION) == (
        "fp8"
    )
    mixed.check_engine("vllm")
    mixed.check_engine(None)
    for engine, why in (("sglang", "refuses Beam"), ("transformers", "no loader")):
        with pytest.raises(RecipeError, match=f"not for .*{why}.*; vLLM can load it"):
            mixed.check_engine(engine)
    load_recipe("fp8").check_engine("sglang")


def test_scales_are_swept_unless_it_says_otherwise() -> None:
    assert parse_recipe(GOOD).scales == "sweep"
    assert parse_recipe({**GOOD, "scales": "max"}).scales == "max"
    assert parse_recipe({**GOOD, "rules": {"expert": "fp8"}}).scales == "max"
    assert parse_recipe(GOOD).digest() != parse_recipe({**GOOD, "scales": "max"}).digest()
    weighed = parse_recipe({**GOOD, "weighting": "second-moment"})
    assert weighed.expert_method == "second-moment"
    assert parse_recipe(weighed.to_dict()) == weighed


def test_input_scales_have_room_unless_the_bytes_are_model_optimizers() -> None:
    rooms = {name: load_recipe(name).headroom for name in BUILT_IN}
    assert {name for name, room in rooms.items() if room == 1} == {
        "nvfp4-max",
        "fp8",
        "fp8-experts",
        "fp8-block",
        "mxfp8",
        "mxfp8-experts",
    }
    assert (
        {room for room in rooms.values() if room != 1}
        == {HEADROOM}
        == {parse_recipe(GOOD).headroom}
    )
    wide = load_recipe("nvfp4").with_options(headroom=8)
    assert wide.headroom == 8
    assert parse_recipe(wide.to_dict()) == wide
    assert (
        wide.digest()
        != load_recipe("nvfp4").digest()
        == load_recipe("nvfp4").with_options().digest()
    )


BAD: dict[str, tuple[dict[str, object], str]] = {
    "unknown key": ({"quantise": 1}, "unknown key quantise"),
    "no rules": ({"rules": {}}, "rules must map"),
    "router": ({"rules": {"router": "fp8"}}, "only attention, dense-mlp, expert"),
    "embedding": ({"rules": {"embedding": "fp8"}}, "can be quantized"),
    "unknown format": ({"rules": {"expert": "int4"}}, "expected nvfp4 or fp8"),
    "experts in FP8 next to NVFP4": (
        {"rules": {"expert": "fp8", "attention": "nvfp4"}},
        "rules mix fp8 and nvfp4; engines load no such file",
    ),
    "MXFP8 next to FP8": (
        {"rules": {"expert": "mxfp8", "attention": "fp8"}},
        "rules mix fp8 and mxfp8",
    ),
    "a KV-cache scheme next to blocks": (
        {"rules": {"expert": "fp8-block"}, "kv_cache": "fp8"},
        "no place in config.json",
    ),
    "unknown scales": ({"scales": "best"}, "expected sweep or max"),
    "gptq without experts": (
        {"rules": {"attention": "nvfp4"}, "rounding": "gptq"},
        "for experts in NVFP4",
    ),
    "gptq in fp8": ({"rules": {"expert": "fp8"}, "rounding": "gptq"}, "for experts in NVFP4"),
    "gptq with max": ({"rounding": "gptq", "scales": "max"}, "leave out scales: max"),
    "gptq twice weighed": (
        {"rounding": "gptq", "weighting": "second-moment"},
        "leave out weighting",
    ),
    "weights with max": ({"weighting": "second-moment", "scales": "max"}, "leave out scales"),
    "unknown rounding": ({"rounding": "up"}, "rounding is 'up', expected nearest or gptq"),
    "a number for a word": ({"rounding": 4}, "rounding is 4, expected nearest or gptq"),
    "unknown weighting": ({"weighting": "amax"}, "expected none or second-moment"),
    "swept fp8": ({"rules": {"expert": "fp8"}, "scales": "sweep"}, "expected max"),
    "headroom of 3": ({"headroom": 3}, "headroom is 3, expected a power of two from 1 to 64"),
    "headroom of 0": ({"headroom": 0}, "headroom is 0, expected"),
    "headroom of 128": ({"headroom": 128}, "headroom is 128, expected"),
    "headroom true": ({"headroom": True}, "headroom is True, expected"),
    "headroom a word": ({"headroom": "2"}, "headroom is '2', expected"),
    "headroom a list": ({"headroom": [2]}, "headroom is .*, expected"),
    "headroom in fp8": ({"rules": {"expert": "fp8"}, "headroom": 2}, "FP8 has none; leave it out"),
    "kv cache": ({"kv_cache": "int8"}, "kv_cache"),
    "exclude not a list": ({"exclude": "gate"}, "list of patterns"),
    "bad regex": ({"exclude": ["re:("]}, "not a regular expression"),
    "name of two lines": ({"name": "a\nb"}, "one line"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_recipe_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe({**GOOD, **changes})


def test_a_recipe_file_is_read_and_its_faults_name_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nsummary: my own\nrules: {expert: fp8}\n")
    assert load_recipe(str(path)).format == "fp8"
    path.write_text("name: [")
    with pytest.raises(RecipeError, match=r"mine\.yaml: not valid YAML"):
        load_recipe(str(path))
    path.write_text("!!python/object/apply:os.system ['true']")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(str(path))
    with pytest.raises(RecipeError, match="no recipe named 'nvfp5'"):
        load_recipe("nvfp5")
    with pytest.raises(RecipeError, match=r"absent\.yaml: there is no such recipe file.* nvfp4,"):
        load_recipe(str(tmp_path / "absent.yaml"))
    path.write_text("name: mine\nrules: {expert: fp8}\n")
    with pytest.raises(RecipeError, match="summary is missing, expected one line of text"):
        load_recipe(str(path))
    path.write_text("")
    with pytest.raises(RecipeError, match="is empty, expected at least name, summary and rules"):
        load_recipe(str(path))


def test_the_digest_is_of_what_changes_bytes() -> None:
    recipe = parse_recipe(GOOD)
    assert recipe.digest() == parse_recipe({**GOOD, "summary": "other words"}).digest()
    assert recipe.digest() != recipe.with_options(exclude=("model.layers.3",)).digest()
    assert recipe.digest() != recipe.with_options(kv_cache="fp8").digest()


ROUTER, GATE = "model.layers.3.mlp.gate", "model.layers.3.mlp.experts.0.gate_proj"


@pytest.mark.parametrize(
    ("pattern", "router", "gate"),
    [
        ("gate", True, False),
        ("*gate", True, False),
        (r"re:.*mlp\.gate$", True, False),
        ("gate_proj", False, True),
        ("*gate*", True, True),
        ("model.layers.3", True, True),
        ("model.layers.30", False, False),
        ("layers.3.mlp.experts", False, True),
        ("model.layers.3.mlp.experts*", False, True),
        ("re:gate", False, False),
    ],
)
def test_patterns_mean_what_they_say(pattern: str, router: bool, gate: bool) -> None:
    assert (matches(pattern, ROUTER), matches(pattern, GATE)) == (router, gate)


@pytest.mark.parametrize(
    ("expression", "module", "found"),
    [
        (r"[\][]", "[", True),  # an escaped bracket does not end the set
        (r"[\](a+)+]", "(", True),
        (r"[](a+)+]", ")", True),  # nor does one that comes first
        (r"[^\](a+)+]", "x", True),
        (r"[^](a+)+]", "]", False),
        (r"[\\]", "\\", True),
    ],
)
def test_what_a_set_holds_is_no_group(expression: str, module: str, found: bool) -> None:
    assert matches(f"re:{expression}", module) is found


@pytest.mark.parametrize("before", [r"[\]]", "[]]", "[^]]", r"[^\]]", r"[\\]", r"\["])
def test_a_repeated_group_behind_a_set_is_refused(before: str) -> None:
    with pytest.raises(RecipeError, match="a repeated group, which could take exponential time"):
        matches(f"re:{before}(a+)+", "a")


def test_built_in_names_in_other_spellings() -> None:
    for name in ("NVFP4", "Nvfp4_MLP", "FP8_experts"):
        assert load_recipe(name) == load_recipe(name.lower().replace("_", "-"))
    with pytest.raises(RecipeError, match=r"no recipe named 'nvfp4-mpl'.*did you mean 'nvfp4-mlp'"):
        load_recipe("nvfp4-mpl")
