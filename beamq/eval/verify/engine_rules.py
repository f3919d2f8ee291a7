"""How each engine matches a module's name against an ignore list or a list of targets.

In: the name an engine asks about (a *prefix*, already fused: `…self_attn.qkv_proj`) and the
entries of a checkpoint's config. Out: yes, no, or `EngineRefusal`, the exception that engine
raises at that point. Nothing here reads files or knows Beam's layers; `engines.py` does.

The one idea: three readers share one list and read it by three rules. An entry is a substring
and a shell glob in vLLM's ModelOpt code, a dotted path or a full-match glob in SGLang's, an exact
name or a regular expression in compressed-tensors code (plus a dotted suffix in SGLang's). A list
is right only if all of them answer alike, and only their own rules can tell.

Checked against vLLM 0.33.0, SGLang 0.5.23 and compressed-tensors 0.20.1. Their `regex` module is
stood in for by `re`; the two differ only in syntax that no ignore list uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

Fused = Mapping[str, tuple[str, ...]]

_RENAMED = (".self_attn.gate_proj", ".self_attn.output_gate_proj")


class EngineRefusal(Exception):
    """What an engine would raise while it builds a model: `kind` is the exception's name there."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason


@lru_cache(maxsize=65536)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise EngineRefusal("re.error", f"pattern {pattern!r} does not compile: {error}") from error


def shard_names(prefix: str, fused: Fused) -> list[str]:
    """The unfused names that stand behind a fused prefix; empty if it is not fused."""
    last = prefix.rsplit(".", 1)[-1]
    return [prefix.replace(last, shard) for shard in fused.get(last, ())]


def _all_or_none(prefix: str, fused: Fused, matches: Callable[[str], bool]) -> bool:
    """One answer for all shards of a fused module; engines refuse to build it half quantized."""
    answers = {name: matches(name) for name in shard_names(prefix, fused)}
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


class VllmModelOpt:
    """vLLM's `is_layer_excluded`: exact or fused name, then substring, then shell glob."""

    def __init__(self, entries: Iterable[str], fused: Fused) -> None:
        self.entries = vllm_renamed(entries)
        self._exact = frozenset(self.entries)
        self._globs = [e for e in self.entries if any(c in e for c in "*?[")]
        self._experts = [e for e in self.entries if "experts" in e]
        self._fused = fused

    def excludes(self, prefix: str) -> bool:
        if not self.entries:
            return False
        return (
            self._listed(prefix)
            or any(entry in prefix for entry in self.entries if entry != prefix)
            or any(fnmatchcase(prefix, glob) for glob in self._globs)
        )

    def _listed(self, prefix: str) -> bool:
        if prefix.rsplit(".", 1)[-1] in self._fused:
            return prefix in self._exact or _all_or_none(
                prefix, self._fused, self._exact.__contains__
            )
        if "experts" in prefix:
            return any(prefix in entry for entry in self._experts)
        return prefix in self._exact


class SglangModelOpt:
    """SGLang's two rules: dotted paths for linears, full-match globs for everything."""

    def __init__(self, entries: Iterable[str], fused: Fused) -> None:
        self.entries = list(entries)
        self._paths = frozenset(entry.rstrip(".") for entry in self.entries)
        self._plain = frozenset(e for e in self.entries if re.fullmatch(r"[\w.]+", e))
        self._patterns = [e for e in self.entries if e not in self._plain]
        self._fused = fused

    def excludes(self, prefix: str, *, linear: bool) -> bool:
        if not self.entries:
            return False
        return (linear and self._skipped(prefix)) or self._globbed(prefix)

    def _skipped(self, prefix: str) -> bool:
        if prefix.rsplit(".", 1)[-1] in self._fused:
            return _all_or_none(prefix, self._fused, self._on_path)
        return self._on_path(prefix)

    def _on_path(self, name: str) -> bool:
        parts = name.split(".")
        return any(
            ".".join(parts[start:end]) in self._paths
            for start in range(len(parts))
            for end in range(start + 1, len(parts) + 1)
        )

    def _globbed(self, prefix: str) -> bool:
        candidates = [prefix, *prefix.split(".")]
        if any(name in self._plain for name in candidates):
            return True
        # Anything but `.` and `*` keeps its regular-expression meaning there, as it does here.
        return any(
            _compiled(entry.replace(".", r"\.").replace("*", ".*")).fullmatch(name)
            for entry in self._patterns
            for name in candidates
        )


# --- compressed-tensors lists ---------------------------------------------------------------


def equal_or_regex(name: str, entry: str) -> bool:
    """The common core: `re:` patterns match from the start of the name, others must equal it."""
    if entry.startswith("re:"):
        return _compiled(entry[3:]).match(name) is not None
    return entry == name


def equal_regex_or_suffix(name: str, entry: str) -> bool:
    """SGLang's ignore rule: as above, and a plain entry may also be a dotted suffix."""
    return equal_or_regex(name, entry) or (
        not entry.startswith("re:") and name.endswith("." + entry)
    )


def vllm_ct_renamed(entries: Iterable[str]) -> list[str]:
    """vLLM renames the attention gate in plain dotted entries only; a regex stays as written."""
    return [e.replace(*_RENAMED, 1) if "." in e and not e.startswith("re:") else e for e in entries]


def vllm_ct_ignores(prefix: str, entries: Sequence[str], fused: Fused) -> bool:
    """The fused name itself, or else all of its shards; some of them is a `ValueError`."""
    if any(equal_or_regex(prefix, entry) for entry in entries):
        return True
    if prefix.rsplit(".", 1)[-1] not in fused:
        return False
    return _all_or_none(prefix, fused, lambda name: any(equal_or_regex(name, e) for e in entries))


def sglang_ct_ignores(prefix: str, entries: Sequence[str], fused: Fused) -> bool:
    """All shards, unless the fused name is listed literally (a regex on it does not count)."""

    def matches(name: str) -> bool:
        return any(equal_regex_or_suffix(name, entry) for entry in entries)

    if prefix.rsplit(".", 1)[-1] in fused and prefix not in entries:
        return _all_or_none(prefix, fused, matches)
    return matches(prefix)


def _first_fused_target(prefix: str, targets: Sequence[str], fused: Fused) -> bool:
    """Whether every shard of a fused prefix is some target."""
    key = next((key for key in fused if prefix.endswith(key)), None)
    if key is None:
        return False
    names = [prefix.replace(key, shard) for shard in fused[key]]
    return all(any(equal_or_regex(name, target) for target in targets) for name in names)


def ct_targets(prefix: str, class_name: str, targets: Sequence[str], fused: Fused) -> bool:
    """Whether a config group claims the module: by name, by class (substring), or by its shards."""
    if any(equal_or_regex(prefix, target) for target in targets):
        return True
    by_class = any(
        equal_or_regex(class_name, target)
        if target.startswith("re:")
        else target.lower() in class_name.lower()
        for target in targets
    )
    return by_class or _first_fused_target(prefix, targets, fused)


# What a checkpoint's config files declare, read with each engine's own precedence and defaults.
#
# In: `quantization_config` (config.json) and the content of `hf_quant_config.json`. Out: the
# scheme, and the ignore list or targets that engine goes by; `EngineRefusal` where it would not
# accept the files at all.
#
# config.json wins wherever it says anything; `hf_quant_config.json` counts only without it. The
# traps are in the defaults: a group without `input_activations` turns vLLM's NVFP4 into
# weight-only, and anything but exactly "NVFP4" turns SGLang's Beam away.

VLLM = "vllm"
VLLM_WIDE = "vllm-wide"  # tensor parallel beyond the KV heads: q, k, v and the gate come apart
SGLANG = "sglang"
TRANSFORMERS = "transformers"

FP8_WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
}
FP8_ACTIVATIONS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


def modelopt_terms(
    engine: str,
    quantization_config: Mapping[str, Any] | None,
    hf_quant_config: Mapping[str, Any] | None,
) -> tuple[str, list[str]]:
    """(scheme, ignore list) as `engine` reads them. config.json wins wherever it says anything."""
    nested = (hf_quant_config or {}).get("quantization")
    keys: tuple[str, ...] = ("exclude_modules",)
    if quantization_config:
        method = str(quantization_config.get("quant_method", "")).lower()
        if not method.startswith("modelopt"):
            raise EngineRefusal("unknown", f"quant_method {method!r} is not simulated")
        source: Mapping[str, Any] = quantization_config
        keys = ("ignore", "exclude_modules")
        if engine == SGLANG:
            keys = ("ignore", "modules_to_not_convert", "exclude_modules")
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
    entries: Any = next((source[key] for key in keys if key in source), [])
    if not isinstance(entries, list) or not all(isinstance(e, str) for e in entries):
        raise EngineRefusal("ValueError", f"the ignore list is {type(entries).__name__}, not names")
    return _modelopt_scheme(engine, source), entries


def _modelopt_scheme(engine: str, source: Mapping[str, Any]) -> str:
    algo = source.get("quant_algo")
    if not algo:
        raise EngineRefusal("ValueError", "quant_algo is missing")
    if engine == SGLANG:
        if algo != "NVFP4":
            raise EngineRefusal("NotImplementedError", f"Beam refuses quant_algo {algo!r}")
        return "nvfp4"
    if str(algo).upper() != "NVFP4":
        raise EngineRefusal("unknown", f"quant_algo {algo!r} is not simulated")
    groups = source.get("config_groups")
    if (
        isinstance(groups, Mapping)
        and groups
        and all(
            isinstance(g, Mapping) and g.get("input_activations") is None for g in groups.values()
        )
    ):
        return "nvfp4-weight-only"
    return "nvfp4"


def ct_targets_of(engine: str, quantization_config: Mapping[str, Any]) -> list[str]:
    """The targets, once every group is the one scheme that all engines accept for Beam.

    SGLang's Beam refuses the rest; what vLLM or transformers would make of it is not simulated.
    """
    fault = _ct_fault(quantization_config)
    if fault is not None:
        raise EngineRefusal("NotImplementedError" if engine == SGLANG else "unknown", fault)
    groups = quantization_config["config_groups"].values()
    return [target for group in groups for target in group["targets"]]


def _ct_fault(quantization_config: Mapping[str, Any]) -> str | None:
    fmt = quantization_config.get("format")
    if fmt != "float-quantized":
        return f"format is {fmt!r}, Beam takes float-quantized"
    if "linear_fp8_config" in quantization_config:
        return "linear_fp8_config is refused for Beam"
    groups = quantization_config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "no config_groups"
    for name, group in groups.items():
        fault = _ct_group_fault(group)
        if fault is not None:
            return f"{name}: {fault}"
    return None


def _ct_group_fault(group: Any) -> str | None:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return "targets is not a list of names"
    if group.get("format") not in (None, "float-quantized"):
        return f"format is {group['format']!r}"
    for part, wanted in (("weights", FP8_WEIGHTS), ("input_activations", FP8_ACTIVATIONS)):
        given = group.get(part)
        if not isinstance(given, Mapping):
            return f"{part} is missing"
        for key, value in wanted.items():
            # compressed-tensors' own defaults stand in for absent keys: symmetric, not dynamic.
            got = given.get(key, {"symmetric": True, "dynamic": False}.get(key))
            if got != value:
                return f"{part}.{key} is {got!r}, expected {value!r}"
    return None
