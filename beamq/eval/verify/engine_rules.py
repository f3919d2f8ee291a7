"""How each engine matches a module's name against an ignore list or a list of targets.

In: the name under which an engine asks about a module (its prefix, with fused linears under one
name: `model.layers.0.self_attn.qkv_proj`), and the entries of a checkpoint's config. Out: yes, no,
or `EngineRefusal` for the exception that the engine raises there. engine_views.py knows the layers.

The one idea: three readers share one list and read it by three rules. An entry is a substring and
a shell glob in vLLM's ModelOpt code. In SGLang's it is a dotted path or a full-match glob. In
compressed-tensors code it is an exact name or a regular expression, and in SGLang also a dotted
suffix. A list is right only if all readers come to the same answer.

Checked against vLLM 0.33.0, SGLang 0.5.23 and compressed-tensors 0.20.1. They use the `regex`
package; `re`, used here, differs from it only in syntax that ignore lists do not use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

from beamq.patterns import slow_part
from beamq.plan.layout import CT_ARGUMENTS, SCHEMES, declared_scheme

Block = Mapping[str, Any]  # an object of a config file
Fused = Mapping[str, tuple[str, ...]]
"""Last component of a fused module's name -> those of the linears that it fuses."""

WEIGHT_ONLY = "-weight-only"
VLLM = "vllm"
VLLM_WIDE = "vllm-wide"  # more tensor-parallel ranks than KV heads: the gate is not fused then
SGLANG = "sglang"
TRANSFORMERS = "transformers"

_RENAMED = (".self_attn.gate_proj", ".self_attn.output_gate_proj")


class EngineRefusal(Exception):
    """What an engine would raise while it builds a model: `kind` is the exception's name there,
    `where` the module's prefix."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.where = "config"


@lru_cache(maxsize=65536)
def _compiled(pattern: str) -> re.Pattern[str]:
    shown = f"pattern {pattern[:80]!r}"
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise EngineRefusal("re.error", f"{shown} does not compile: {error}") from error
    if slow := slow_part(pattern):
        reason = f"{shown} has {slow}, which could take exponential time, so it is not simulated"
        raise EngineRefusal("unknown", reason)
    return compiled


def _unfused(prefix: str, fused: Fused) -> list[str]:
    """The names of the linears that a module fuses; empty if it is not fused."""
    last = prefix.rsplit(".", 1)[-1]
    return [prefix.replace(last, linear) for linear in fused.get(last, ())]


def _all_or_none(prefix: str, fused: Fused, matches: Callable[[str], bool]) -> bool:
    """One answer for a module, fused or not; engines refuse to build it half quantized."""
    answers = {name: matches(name) for name in _unfused(prefix, fused) or [prefix]}
    if len(set(answers.values())) > 1:
        listed = ", ".join(n.rsplit(".", 1)[-1] for n, hit in answers.items() if hit)
        left = ", ".join(n.rsplit(".", 1)[-1] for n, hit in answers.items() if not hit)
        raise EngineRefusal(
            "ValueError", f"{prefix} is fused, but only {listed} is ignored and {left} is not"
        )
    return all(answers.values())


# --- ModelOpt lists -------------------------------------------------------------------------


def vllm_renamed(entries: Iterable[str]) -> list[str]:
    """vLLM rewrites a ModelOpt list: `x*` becomes `x` and `x.*`, the attention gate is renamed."""
    split: list[str] = []
    for entry in entries:
        if len(entry) >= 2 and entry[-1] == "*" and entry[-2] != ".":
            split += [entry[:-1], entry[:-1] + ".*"]
        else:
            split.append(entry)
    return [entry.replace(*_RENAMED, 1) for entry in split]


def vllm_excludes(prefix: str, entries: Sequence[str], fused: Fused) -> bool:
    """vLLM's `is_layer_excluded`: exact or fused name, then substring, then shell glob."""
    if "experts" in prefix:
        listed = any(prefix in entry for entry in entries)
    else:
        listed = prefix in entries or _all_or_none(prefix, fused, entries.__contains__)
    return listed or any(entry in prefix or fnmatchcase(prefix, entry) for entry in entries)


def sglang_excludes(prefix: str, entries: Sequence[str], fused: Fused, *, linear: bool) -> bool:
    """SGLang's two rules: dotted paths for linears, full-match globs for everything."""

    def on_path(name: str) -> bool:
        return any(f".{entry.rstrip('.')}." in f".{name}." for entry in entries)

    names = {prefix, *prefix.split(".")}
    if (linear and _all_or_none(prefix, fused, on_path)) or not names.isdisjoint(entries):
        return True
    # Anything but `.` and `*` keeps its regular-expression meaning there, as it does here.
    patterns = (_compiled(e.replace(".", r"\.").replace("*", ".*")) for e in entries)
    return any(pattern.fullmatch(name) for pattern in patterns for name in names)


# --- compressed-tensors lists ---------------------------------------------------------------


def equal_or_regex(name: str, entry: str) -> bool:
    """The common core: `re:` patterns match from the start of the name, others must equal it."""
    if entry.startswith("re:"):
        return _compiled(entry[3:]).match(name) is not None
    return entry == name


def vllm_ct_renamed(entries: Iterable[str]) -> list[str]:
    """vLLM renames the attention gate in plain dotted entries only; a regex stays as written."""
    return [e.replace(*_RENAMED, 1) if "." in e and not e.startswith("re:") else e for e in entries]


def vllm_ct_ignores(prefix: str, entries: Sequence[str], fused: Fused) -> bool:
    """The fused name itself, or else all of its linears; some of them is a `ValueError`."""

    def matches(name: str) -> bool:
        return any(equal_or_regex(name, entry) for entry in entries)

    return matches(prefix) or _all_or_none(prefix, fused, matches)


def sglang_ct_ignores(prefix: str, entries: Sequence[str], fused: Fused) -> bool:
    """All linears, unless the fused name is listed literally (a regex on it does not count).

    A plain entry may also be a dotted suffix.
    """

    def matches(name: str) -> bool:
        return any(
            equal_or_regex(name, e) or (not e.startswith("re:") and name.endswith("." + e))
            for e in entries
        )

    return matches(prefix) if prefix in entries else _all_or_none(prefix, fused, matches)


def ct_targets(prefix: str, class_name: str, targets: Sequence[str], fused: Fused) -> bool:
    """Whether a config group claims a module: by name, by class (a substring), or all of the
    linears that it fuses by theirs."""

    def named(name: str) -> bool:
        return any(equal_or_regex(name, target) for target in targets)

    def claims_class(target: str) -> bool:
        if target.startswith("re:"):
            return equal_or_regex(class_name, target)
        return target.lower() in class_name.lower()

    linears = _unfused(prefix, fused)
    fused_named = bool(linears) and all(map(named, linears))
    return named(prefix) or any(map(claims_class, targets)) or fused_named


# --- what the config files declare ----------------------------------------------------------
# Each engine has its own precedence and defaults. config.json wins wherever it says anything;
# hf_quant_config.json counts only without it. Two defaults are traps: a group without
# `input_activations` makes vLLM serve NVFP4 weight-only, and SGLang's Beam refuses any quant_algo
# but exactly "NVFP4".


class ModelOptTerms(NamedTuple):
    """What an engine reads from the two files: `layers` are names with their `quant_algo`, where
    that differs from layer to layer."""

    scheme: str
    ignore: list[str]
    layers: dict[str, str]


def modelopt_terms(engine: str, block: Block | None, hf: Block | None) -> ModelOptTerms:
    """The terms as `engine` reads them from the content of both files."""
    nested = (hf or {}).get("quantization")
    keys: tuple[str, ...] = ("exclude_modules",)
    if block:
        method = str(block.get("quant_method", "")).lower()
        if not method.startswith("modelopt"):
            raise EngineRefusal("unknown", f"quant_method {method!r} is not simulated")
        source = block
        keys = ("ignore", "exclude_modules")
        if engine == SGLANG:
            keys = ("ignore", "modules_to_not_convert", "exclude_modules")
        elif _is_mixed(block) and "quantized_layers" not in block and isinstance(nested, Mapping):
            source, keys = nested, ("exclude_modules",)  # vLLM falls back to the older file
    elif isinstance(nested, Mapping):
        if engine == SGLANG:
            raise EngineRefusal(
                "ValueError",
                "with hf_quant_config.json alone the default MoE runner is refused;"
                " config.json needs quantization_config",
            )
        wanted = ("group_size", "kv_cache_quant_algo", "exclude_modules")
        missing = [key for key in wanted if key not in nested]
        if missing:
            raise EngineRefusal("ValueError", f"hf_quant_config.json lacks {', '.join(missing)}")
        source = nested
    else:
        raise EngineRefusal("none", "no quantization_config and no hf_quant_config.json")
    entries = names(next((source[key] for key in keys if key in source), []))
    scheme = _modelopt_scheme(engine, source)
    return ModelOptTerms(scheme, entries, _layers(source) if _is_mixed(source) else {})


MIXED = "MIXED_PRECISION"


def _is_mixed(source: Block) -> bool:
    return str(source.get("quant_algo")).upper() == MIXED


def _layers(source: Block) -> dict[str, str]:
    """`quantized_layers`: each name's algorithm in capitals. Raises `EngineRefusal`."""
    layers = source.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise EngineRefusal("ValueError", f"{MIXED} needs quantized_layers")
    if not all(
        isinstance(each, Mapping) and isinstance(each.get("quant_algo"), str)
        for each in layers.values()
    ):
        raise EngineRefusal("AttributeError", "quantized_layers holds an entry without quant_algo")
    return {str(name): each["quant_algo"].upper() for name, each in layers.items()}


def vllm_layers_renamed(layers: Mapping[str, str]) -> dict[str, str]:
    """vLLM renames the attention gate in `quantized_layers` too."""
    return {name.replace(*_RENAMED, 1): algo for name, algo in layers.items()}


def vllm_algo_of(prefix: str, layers: Mapping[str, str], fused: Fused) -> str | None:
    """The algorithm of a module in a mixed checkpoint, or None: its own name, else those of the
    linears that it fuses, else any name below it (or, for experts, beside it)."""
    if prefix in layers:
        return layers[prefix]
    found = {layers[name] for name in _unfused(prefix, fused) if name in layers}
    if len(found) > 1:
        raise EngineRefusal("ValueError", f"{prefix} fuses {' and '.join(sorted(found))}")
    if found:
        return found.pop()
    stems = [f"{prefix}."]
    if prefix.endswith(".experts"):
        stems.append(prefix.removesuffix("experts"))
    return next(
        (algo for stem in stems for name, algo in layers.items() if name.startswith(stem)), None
    )


def names(entries: Any) -> list[str]:
    """The entries of an ignore list. Raises `EngineRefusal` if they are not names."""
    if not is_names(entries):
        raise EngineRefusal("ValueError", "the ignore list is not a list of names")
    return list(entries)


def is_names(value: Any) -> TypeGuard[list[str]]:
    """Whether a value from a config is a list of names."""
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _modelopt_scheme(engine: str, source: Block) -> str:
    algo = source.get("quant_algo")
    if not algo:
        raise EngineRefusal("ValueError", "quant_algo is missing")
    if engine == SGLANG:
        if algo != "NVFP4":
            raise EngineRefusal("NotImplementedError", f"Beam refuses quant_algo {algo!r}")
        return "nvfp4"
    if str(algo).upper() == MIXED:
        return "nvfp4-fp8"
    if str(algo).upper() != "NVFP4":
        raise EngineRefusal("unknown", f"quant_algo {algo!r} is not simulated")
    groups = source.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "nvfp4"
    weight_only = all(
        isinstance(each, Mapping) and each.get("input_activations") is None
        for each in groups.values()
    )
    return f"nvfp4{WEIGHT_ONLY}" if weight_only else "nvfp4"


def ct_terms(engine: str, block: Block) -> tuple[str, list[str]]:
    """(scheme, targets), once every group is the one scheme that the engine accepts for Beam.

    SGLang's Beam refuses all but FP8 rows; what vLLM or transformers would make of other groups is
    not simulated.
    """
    scheme = declared_scheme(block) or "fp8"
    fault = _ct_fault(block, scheme)
    if fault is None and scheme == "mxfp8" and engine == SGLANG:
        fault = "Beam refuses MXFP8"
    if fault is None and scheme == "mxfp8" and engine == TRANSFORMERS:
        raise EngineRefusal("RuntimeError", "the conversion of weights stops at MXFP8 scales")
    if fault is not None:
        raise EngineRefusal("NotImplementedError" if engine == SGLANG else "unknown", fault)
    groups = block["config_groups"].values()
    return scheme, [target for group in groups for target in group["targets"]]


def _ct_fault(block: Block, scheme: str) -> str | None:
    fmt, groups = block.get("format"), block.get("config_groups")
    if fmt not in (SCHEMES[scheme].what, "float-quantized"):
        return f"format is {fmt!r}, but Beam needs float-quantized"
    if "linear_fp8_config" in block:
        return "linear_fp8_config is refused for Beam"
    if not isinstance(groups, Mapping) or not groups:
        return "there are no config_groups"
    faults = ((name, _ct_group_fault(group, fmt, scheme)) for name, group in groups.items())
    return next((f"{name}: {fault}" for name, fault in faults if fault), None)


def _ct_group_fault(group: Any, fmt: Any, scheme: str) -> str | None:
    if not isinstance(group, Mapping) or not is_names(group.get("targets")):
        return "targets is not a list of names"
    if group.get("format") not in (None, fmt):
        return f"format is {group['format']!r}"
    parts = ("weights", "input_activations")
    for part, wanted in zip(parts, CT_ARGUMENTS[scheme], strict=True):
        given = group.get(part)
        if not isinstance(given, Mapping):
            return f"{part} is missing"
        for key, value in wanted.items():
            # The defaults of compressed-tensors for absent keys: symmetric, not dynamic.
            got = given.get(key, {"symmetric": True, "dynamic": False}.get(key))
            if got != value:
                return f"{part}.{key} is {got!r}, expected {value!r}"
    return None


# --- block FP8 ------------------------------------------------------------------------------


def block_fp8_ignored(engine: str, block: Block) -> list[str]:
    """The ignore list of block FP8 as `engine` reads it. Raises `EngineRefusal`."""
    if engine == SGLANG:
        raise EngineRefusal("NotImplementedError", "Beam refuses block FP8")
    if block.get("activation_scheme") != "dynamic":
        raise EngineRefusal("ValueError", "activation_scheme must be dynamic")
    first, second = "ignored_layers", "modules_to_not_convert"
    if engine == TRANSFORMERS:
        first, second = second, first
    return names(block.get(first) or block.get(second) or [])


def vllm_fp8_ignores(prefix: str, entries: Sequence[str], fused: Fused) -> bool:
    """vLLM compares whole names: all that are fused, and experts as a part of an entry."""
    if "experts" in prefix:
        return any(prefix in entry for entry in entries if "experts" in entry)
    return prefix in entries or _all_or_none(prefix, fused, entries.__contains__)


def transformers_ignores(name: str, entries: Sequence[str]) -> bool:
    """An entry is the beginning of a name up to a dot, as a pattern, or its end."""
    return any(
        name.endswith(entry) or _compiled(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))").match(name)
        for entry in entries
    )
