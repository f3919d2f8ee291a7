"""Options as data: public calls, their keywords for editors and the command line say the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import beamq
from beamq.calib.calibrate import CalibrationEvents, CalibrationKeywords
from beamq.calib.options import CalibrationOptions
from beamq.convert.dequantize import DequantizeEvents, DequantizeKeywords
from beamq.convert.options import ConvertOptions, DequantizeOptions
from beamq.convert.quantize import ConvertEvents, QuantizeKeywords
from beamq.convert.resources import DEFAULT_MEMORY_BYTES
from beamq.eval.compare.compare import CompareEvents, CompareKeywords
from beamq.eval.compare.options import CompareOptions, SensitivityOptions
from beamq.eval.compare.sensitivity import SensitivityEvents, SensitivityKeywords
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.plan.plan import DEFAULT_SHARD_BYTES

CALLS: list[tuple[Callable[..., Any], Any, tuple[Any, ...]]] = [
    (beamq.quantize, QuantizeKeywords, (ConvertOptions, ConvertEvents)),
    (beamq.dequantize, DequantizeKeywords, (DequantizeOptions, DequantizeEvents)),
    (beamq.calibrate, CalibrationKeywords, (CalibrationOptions, CalibrationEvents)),
    (beamq.compare, CompareKeywords, (CompareOptions, CompareEvents)),
    (beamq.sensitivity, SensitivityKeywords, (SensitivityOptions, SensitivityEvents)),
]


@pytest.mark.parametrize(("call", "keywords", "classes"), CALLS)
def test_editors_and_help_know_the_fields(
    call: Callable[..., Any], keywords: Any, classes: tuple[Any, ...]
) -> None:
    found = {each.name: each for cls in classes for each in fields(cls)}
    known = {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()}
    assert known == {name: each.type for name, each in found.items()}
    shown = inspect.signature(call).parameters
    assert list(shown)[2:] == list(found)
    assert {name: shown[name].default for name in found} == {
        name: each.default for name, each in found.items()
    }
    flags = {name: each.metadata["flag"] for name, each in found.items() if each.metadata}
    assert call.__doc__
    assert [
        name for name, flag in flags.items() if f"\n    {name}: {flag.help}" in call.__doc__
    ] == (list(flags))


@pytest.mark.parametrize(
    "name", ["make_plan", "verify", "push", "logits", *(call.__name__ for call, *_ in CALLS)]
)
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


def test_keywords_are_frozen() -> None:
    """Names, types and defaults as in tests/golden/keywords.txt; no call may lose one."""
    lines = []
    for name in ("quantize", "dequantize", "calibrate", "compare", "sensitivity", "verify"):
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
