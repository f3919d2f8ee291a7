"""Whatever is typed or parsed: patterns, sizes, names and plain data, from hypothesis."""

from __future__ import annotations

import fnmatch
import re
import time
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import classify, fused_group
from beamq.errors import BeamqError, printable
from beamq.io.files import parse_json, parse_yaml
from beamq.io.hub import parse_hub_id
from beamq.io.safetensors_header import parse_header
from beamq.plan.recipe import matches, parse_recipe
from beamq.plan.serving import parse_gpu
from beamq.units import parse_size

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
DATA = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
MODULE = "model.layers.3.mlp.experts.17.gate_proj"
often = settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
seldom = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))


def only_ours(call: Any, *arguments: Any) -> Any:
    """The result, or None for an error of ours."""
    text = ""
    try:
        return call(*arguments)
    except BeamqError as fault:
        text = str(fault)
    assert text.isprintable()
    return None


@often
@given(st.text(max_size=40))
def test_patterns(pattern: str) -> None:
    found = only_ours(matches, pattern, MODULE)
    if found is not None and not pattern.startswith("re:") and not set(pattern) & set("*?["):
        assert found == (f".{pattern}." in f".{MODULE}.")


@often
@given(st.text(alphabet="abgate.*?[]!-_{}()|+\\^$0123", max_size=24))
def test_expressions_and_globs(text: str) -> None:
    """Those that are taken end in time, on the worst name that they are tried on."""
    begun = time.thread_time()
    for name in (MODULE, "a" * 200, "a" * 199 + "!", "ab" * 100):
        if (found := only_ours(matches, f"re:{text}", name)) is not None:
            assert found == (re.fullmatch(text, name) is not None)
        if set(text) & set("*?["):
            assert only_ours(matches, text, name) == fnmatch.fnmatchcase(name, text)
    assert time.thread_time() - begun < 5


@often
@given(st.text(max_size=24))
def test_sizes_names_and_ids(text: str) -> None:
    for call in (lambda t: parse_size(t, "--x"), parse_gpu, parse_hub_id):
        only_ours(call, text)
    assert len(printable(text)) <= 10 * len(text) + 3
    assert printable(text).isprintable()


CONFIG_KEYS = [
    "model_type", "hidden_size", "num_hidden_layers", "layer_types", "mlp_layer_types",
    "rope_parameters", "num_experts", "head_dim", "dtype", "tie_word_embeddings",
]  # fmt: skip
RECIPE_KEYS = ["name", "summary", "rules", "scales", "kv_cache", "exclude", "bounds", "x"]


@often
@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), DATA))
def test_configs(data: dict[str, Any]) -> None:
    only_ours(BeamConfig.from_dict, {"model_type": "beam", **data})


@often
@given(st.dictionaries(st.sampled_from(RECIPE_KEYS), DATA))
def test_recipes(data: dict[str, Any]) -> None:
    only_ours(parse_recipe, data)
    only_ours(parse_recipe, {"name": "x", "summary": "y", "rules": {"expert": "fp8"}, **data})


@often
@given(st.binary(max_size=200))
def test_headers_of_noise(raw: bytes) -> None:
    views = [raw, len(raw).to_bytes(8, "little") + raw]
    for view in views:
        position = 0

        def read(count: int, view: bytes = view) -> bytes:
            nonlocal position
            position += count
            return view[position - count : position]

        only_ours(parse_header, "x", "x", len(view), read)


@seldom
@given(st.text(max_size=60))
def test_text_formats(text: str) -> None:
    for call in (parse_yaml, lambda t: parse_json(t.encode(errors="replace"), unique=True)):
        try:
            call(text)
        except ValueError:
            continue


@often
@given(st.text(max_size=60) | st.from_regex(r"model\.layers\.[0-9.]{1,9}\.[a-z_.]{1,30}"))
def test_names(name: str) -> None:
    role = classify(name)
    assert role.name == name
    if role.role.value in ("expert", "attention", "dense-mlp") and role.packed is None:
        assert fused_group(role)
