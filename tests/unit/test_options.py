"""Options as data: public calls, their keywords for editors and the command line say the same."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import beamq
from beamq.adapter.options import AdapterOptions
from beamq.calib.calibrate import CalibrationEvents, CalibrationKeywords
from beamq.calib.options import CalibrationOptions
from beamq.convert.dequantize import DequantizeEvents, DequantizeKeywords
from beamq.convert.merge import MergeEvents, MergeKeywords
from beamq.convert.options import (
    ConvertOptions,
    DequantizeOptions,
    MergeOptions,
    PlanOptions,
    RepairOptions,
)
from beamq.convert.quantize import ConvertEvents, QuantizeKeywords
from beamq.convert.repair import RepairEvents, RepairKeywords
from beamq.convert.resources import DEFAULT_MEMORY_BYTES
from beamq.errors import UsageError
from beamq.eval.compare.compare import CompareEvents, CompareKeywords, given_text
from beamq.eval.compare.options import CompareOptions, SensitivityOptions
from beamq.eval.compare.sensitivity import SensitivityEvents, SensitivityKeywords
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.options import from_keywords, taken
from beamq.plan.plan import DEFAULT_SHARD_BYTES
from beamq.plan.recipe import load_recipe

CALLS: list[tuple[Callable[..., Any], Any, tuple[Any, ...]]] = [
    (beamq.quantize, QuantizeKeywords, (ConvertOptions, ConvertEvents, AdapterOptions)),
    (beamq.dequantize, DequantizeKeywords, (DequantizeOptions, DequantizeEvents)),
    (beamq.calibrate, CalibrationKeywords, (CalibrationOptions, CalibrationEvents, AdapterOptions)),
    (beamq.merge, MergeKeywords, (MergeOptions, MergeEvents)),
    (beamq.repair, RepairKeywords, (RepairOptions, RepairEvents)),
    (beamq.compare, CompareKeywords, (CompareOptions, CompareEvents, AdapterOptions)),
    (
        beamq.sensitivity,
        SensitivityKeywords,
        (SensitivityOptions, SensitivityEvents, AdapterOptions),
    ),
]


@pytest.mark.parametrize(("call", "keywords", "classes"), CALLS)
def test_editors_and_help_know_the_fields(
    call: Callable[..., Any], keywords: Any, classes: tuple[Any, ...]
) -> None:
    found = {each.name: each for cls in classes for each in fields(cls)}
    known = {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()}
    assert known == {name: taken(each) for name, each in found.items()}
    shown = inspect.signature(call).parameters
    assert [name for name in shown if name not in PLACES[call.__name__]] == list(found)
    assert {name: shown[name].default for name in found} == {
        name: each.default for name, each in found.items()
    }
    flags = {name: each.metadata["flag"] for name, each in found.items() if each.metadata}
    assert call.__doc__
    assert [
        name for name, flag in flags.items() if f"\n    {name}: {flag.help}" in call.__doc__
    ] == (list(flags))


OTHERS = ("make_plan", "verify", "push", "logits", "quantize_tensors")


@pytest.mark.parametrize("name", [*OTHERS, *(call.__name__ for call, *_ in CALLS)])
def test_help_describes_every_keyword(name: str) -> None:
    call = getattr(beamq, name)
    keywords = [
        each.name
        for each in inspect.signature(call).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    ]
    described = inspect.getdoc(call) or ""
    assert keywords
    assert [
        keyword
        for keyword in keywords
        if f"`{keyword}`" not in described and f"\n    {keyword}: " not in described
    ] == []


FROZEN = ("quantize", "dequantize", "merge", "calibrate", "compare", "sensitivity", "verify")


def test_keywords_are_frozen() -> None:
    """Names, types and defaults as in tests/golden/keywords.txt; no call may lose one."""
    lines = []
    for name in (
        "quantize",
        "dequantize",
        "merge",
        "repair",
        "calibrate",
        "compare",
        "sensitivity",
        "verify",
    ):
        found = []
        for each in inspect.signature(getattr(beamq, name)).parameters.values():
            default = "a function" if callable(each.default) else repr(each.default)
            if each.default is each.empty:
                lines.append(f"{name}({each.name}: {each.annotation}) = required\n")
            else:
                found.append(f"{name}({each.name}: {each.annotation}) = {default}\n")
        lines += sorted(found)
    golden = Path(__file__).parents[1] / "golden" / "keywords.txt"
    assert "".join(lines) == golden.read_text()


@pytest.mark.parametrize("call", [call for call, *_ in CALLS])
def test_an_unknown_keyword_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) got an unexpected .* 'colour'"):
        call("source", "output", colour="red")
    with pytest.raises(TypeError):
        call("source")
    assert call.__doc__


def test_sizes_have_one_default() -> None:
    assert ConvertOptions().max_shard_bytes == DEFAULT_SHARD_BYTES
    assert ConvertOptions().max_host_memory == DEFAULT_MEMORY_BYTES
    assert ConvertOptions().cache_bytes == DEFAULT_CACHE_BYTES == CalibrationOptions().cache_bytes


# Every argument of every public call is checked before anything is touched

PLACES: dict[str, tuple[str, ...]] = {
    "calibrate": ("source", "stats"),
    "compare": ("source", "checkpoints"),
    "dequantize": ("checkpoint", "output"),
    "inspect_adapter": ("adapter",),
    "inspect_checkpoint": ("checkpoint",),
    "load_recipe": ("name_or_path",),
    "logits": ("checkpoint", "input_ids"),
    "make_plan": ("source",),
    "merge": ("source", "adapter", "output"),
    "merge_statistics": ("paths", "target"),
    "open_checkpoint": ("source",),
    "output_metadata": ("config", "recipe"),
    "push": ("checkpoint", "repo"),
    "quantization_config": ("recipe", "config"),
    "quantize": ("source", "output"),
    "quantize_tensors": ("named", "recipe", "config"),
    "repair": ("checkpoint", "output"),
    "sensitivity": ("source", "checkpoint"),
    "verify": ("checkpoint",),
    "write_report": ("comparison", "folder"),
}
GIVEN = {
    "input_ids": [[1, 2]], "comparison": type("Comparison", (), {})(), "repo": "org/name",
    "recipe": "nvfp4", "named": {},
}  # fmt: skip
PARAMETERS = [
    pytest.param(name, each, id=f"{name}-{each.name}")
    for name in PLACES
    for each in inspect.signature(getattr(beamq, name)).parameters.values()
]
ODD: list[object] = [
    object(), -1, float("nan"), float("inf"), 1.5, 10**30, "", "a\0b", b"x", {}, {"a": 1}, {1},
    [object()], [1, "x", None], True, "abacus", range,
]  # fmt: skip


def _fits(value: object, each: inspect.Parameter) -> bool:
    """Whether the annotation lets an odd value through; what it means is another question."""
    hint = str(each.annotation)
    words = isinstance(value, str) and len(value) == len("abacus")
    return (
        (value is True and "bool" in hint)
        or (value == -1 and each.name == "seed")
        or (value is range and "Callable" in hint)
        or (isinstance(value, Mapping) and "Mapping" in hint)
        or (isinstance(value, Iterable) and hint.startswith("Iterable"))
        or (words and ("str" in hint and not re.search(r"\bint\b|Literal", hint)))
    )


def test_the_public_calls_are_all_here() -> None:
    calls = {name for name in beamq.__all__ if inspect.isfunction(getattr(beamq, name))}
    assert calls == set(PLACES)


@pytest.mark.parametrize(("name", "each"), PARAMETERS)
def test_odd_arguments_are_refused_by_name_and_nothing_is_touched(
    beam_nano: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    each: inspect.Parameter,
) -> None:
    monkeypatch.chdir(tmp_path)
    finished = tmp_path / "finished"
    finished.mkdir()
    (finished / "beamq.json").write_text("{}")
    given = {place: GIVEN.get(place, beam_nano) for place in PLACES[name]}
    given |= dict.fromkeys({"output", "stats", "target", "folder"} & set(given), finished)
    if "overwrite" in inspect.signature(getattr(beamq, name)).parameters:
        given["overwrite"] = True
    words = each.name in ("device", "dtype", "gemm", "kv_cache", "experts", "profile", "partial")
    for odd in ODD:
        if not _fits(odd, each) or (words and odd == "abacus"):
            with pytest.raises(UsageError, match=each.name):
                getattr(beamq, name)(**given | {each.name: odd})
    assert [path.name for path in tmp_path.rglob("*")] == ["finished", "beamq.json"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"workers": -3}, "workers is -3, expected at least 1"),
        ({"workers": 0}, "workers is 0, expected at least 1"),
        ({"samples": "8"}, "samples is '8', expected a whole number"),
        ({"max_shard_bytes": "5 apples"}, "max_shard_bytes '5 apples': not a size"),
        ({"exclude": ["lm_head", 3]}, "exclude is 3, expected text"),
        ({"resume": "no"}, "resume is 'no', expected True or False"),
        ({"on_plan": "print"}, "on_plan is 'print', expected a function"),
        ({"kv_cache": "fp9"}, "kv_cache is 'fp9', expected none or fp8; did you mean 'fp8'"),
        ({"device": "gpu"}, "device 'gpu': expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_a_refusal_says_what_was_given_and_expected(
    beam_nano: Path, tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        beamq.quantize(beam_nano, tmp_path / "out", **given)
    assert not list(tmp_path.iterdir())


def test_one_is_a_list_of_one_and_text_says_what_objects_say() -> None:
    assert from_keywords(ConvertOptions, {"exclude": "lm_head"}).exclude == ("lm_head",)
    assert from_keywords(ConvertOptions, {"data": Path("x.py")}).data == ("x.py",)
    assert from_keywords(ConvertOptions, {"data": ["a", Path("b")]}).data == ("a", "b")
    assert from_keywords(ConvertOptions, {"recipe": Path("r.yaml")}).recipe == "r.yaml"
    assert from_keywords(ConvertOptions, {"recipe": load_recipe("fp8")}).recipe == (
        load_recipe("fp8")
    )
    for size in ("5GB", 5e9, np.int64(5_000_000_000)):
        made = from_keywords(ConvertOptions, {"max_shard_bytes": size})
        assert (made.max_shard_bytes, type(made.max_shard_bytes)) == (5_000_000_000, int)
    for dtype in (torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16"):
        assert from_keywords(CompareOptions, {"dtype": dtype}).dtype == "bfloat16"
    for device in (torch.device("cuda", 1), "cuda:1"):
        assert from_keywords(CompareOptions, {"device": device}).device == "cuda:1"
    assert from_keywords(PlanOptions, {"context": "128k"}).context == 131_072
    assert repr(CompareEvents().on_start) == "ignore"


def test_token_ids_of_the_caller_are_taken_as_they_are_or_refused(beam_nano: Path) -> None:
    for ids in ([[1, 2]], torch.tensor([[1, 2]], dtype=torch.int32), np.array([[1, 2]])):
        found, record = given_text(ids)
        assert (found.tolist(), found.dtype, record["samples"]) == ([[1, 2]], np.int64, 1)
    for odd in ([[1.7, 2.0]], [[1], [2]], [1, 2], [[1, 2], [3]], [["a", "b"]]):
        with pytest.raises(UsageError, match="input_ids"):
            given_text(odd)  # type: ignore[arg-type]
    for other in ({"data": "text.txt"}, {"samples": 2}):
        with pytest.raises(UsageError, match="input_ids takes the place of data"):
            beamq.compare(beam_nano, beam_nano, input_ids=[[1, 2]], **other)  # type: ignore[arg-type]
