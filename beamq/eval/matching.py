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
