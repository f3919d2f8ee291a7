"""What the config files declare, checked against what each engine needs and what is stored.

In: a `Folder`. Out: findings under `config.*` and `engine.*`.

Two questions. Are the files exactly in the form that vLLM 0.33, SGLang 0.5.23 and transformers
read alike? And, played through each engine's own matching rules (engines.py): would it build as
quantized exactly the modules whose scales are stored? The second is the one that matters; the
first names the cause when the second goes wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from beamq.eval.verify.checks import FP8, NEEDS_QUANTIZED, NVFP4, Ledger
from beamq.eval.verify.engine_rules import (
    FP8_ACTIVATIONS,
    FP8_WEIGHTS,
    TRANSFORMERS,
    EngineRefusal,
    equal_or_regex,
)
from beamq.eval.verify.engine_views import mismatches, simulate
from beamq.eval.verify.folder import HF_QUANT_NAME, Folder
from beamq.plan.layout import NVFP4_BLOCK

UNDECLARED = "undeclared"
PLAIN = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}  # by config.json's dtype

_FOUR_BITS = {"num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK, "dynamic": False}
_KV_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}


def declared_format(folder: Folder, ledger: Ledger) -> str:
    """`nvfp4` or `fp8` as the config files say, `bf16` and the like where nothing is quantized.

    `undeclared`, with a fault, otherwise.
    """
    if folder.plain:
        for name in NEEDS_QUANTIZED:
            ledger.skip(name, "not quantized")
        return PLAIN.get(str(plain_dtype(folder)), "bf16")
    ledger.examined("config.declared", 1, "formats")
    block = folder.block
    nested = (folder.hf_quant_config or {}).get("quantization")
    if block is None and isinstance(nested, Mapping):
        ledger.fault(
            "config.declared",
            "config.json",
            "no quantization_config; SGLang's Beam does not go by hf_quant_config.json alone",
        )
        return NVFP4
    if block is None:
        ledger.fault("config.declared", "config.json", "no quantization_config: not quantized?")
        return UNDECLARED
    method = str(block.get("quant_method", "")).lower()
    if method in ("modelopt", "modelopt_fp4") and block.get("quant_algo") == "NVFP4":
        return NVFP4
    if method == "compressed-tensors" and block.get("format") == "float-quantized":
        return FP8
    what = block.get("quant_algo") or block.get("format")
    ledger.fault(
        "config.declared",
        "config.json",
        f"quant_method {method!r} with {what!r}; engines agree only on ModelOpt NVFP4 and"
        " compressed-tensors float-quantized",
    )
    return NVFP4 if method.startswith("modelopt") else FP8 if method else UNDECLARED


def plain_dtype(folder: Folder) -> Any:
    """The dtype of config.json, by its name of today or by the older one."""
    return folder.raw_config.get("dtype", folder.raw_config.get("torch_dtype"))


def check_config(folder: Folder, fmt: str, ledger: Ledger) -> None:
    """Everything under `config.*` but the declaration itself."""
    ledger.examined("config.dtype", 1, "keys")
    if folder.plain and folder.manifest is None:
        said = plain_dtype(folder)
        if said not in PLAIN:
            ledger.fault("config.dtype", "config.json", f"dtype is {said!r}, expected a float")
    elif folder.raw_config.get("dtype") != "bfloat16":
        said = folder.raw_config.get("dtype")
        ledger.fault("config.dtype", "config.json", f"dtype is {said!r}, expected 'bfloat16'")
    if fmt == NVFP4:
        _check_nvfp4(folder, ledger)
        ledger.skip("config.schema", "ModelOpt has no schema class; config.fields covers it")
    elif fmt == FP8:
        _check_fp8(folder, ledger)
    elif fmt == UNDECLARED:
        for name in ("config.fields", "config.agreement", "config.schema"):
            ledger.skip(name, "no format is declared")


def _check_nvfp4(folder: Folder, ledger: Ledger) -> None:
    block = folder.block or {}
    ledger.examined("config.fields", 2, "files")
    ledger.examined("config.agreement", 2, "files")
    _check_ignore(block.get("ignore"), "quantization_config.ignore", ledger)
    if block.get("group_size", NVFP4_BLOCK) != NVFP4_BLOCK:
        ledger.fault("config.fields", "group_size", f"is {block['group_size']!r}, expected 16")
    groups = block.get("config_groups")
    if groups is not None:
        _check_nvfp4_groups(groups, ledger)
    scheme = block.get("kv_cache_scheme")
    if scheme is not None:
        _compare(scheme, _KV_CACHE, "kv_cache_scheme", ledger)
    hf = folder.hf_quant_config
    if hf is None:
        if not ledger.failed("config.agreement"):
            ledger.fault("config.agreement", HF_QUANT_NAME, "missing; write both files")
        return
    nested = hf.get("quantization")
    producer = hf.get("producer")
    if not isinstance(nested, Mapping):
        ledger.fault("config.fields", HF_QUANT_NAME, "has no `quantization` object")
        return
    name = producer.get("name") if isinstance(producer, Mapping) else None
    if not str(name).startswith("modelopt"):
        ledger.fault("config.fields", HF_QUANT_NAME, f"producer.name is {name!r}, not modelopt")
    for key in ("quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules"):
        if key not in nested:
            ledger.fault("config.fields", HF_QUANT_NAME, f"quantization.{key} is missing")
    _check_agreement(block, nested, ledger)


def _check_nvfp4_groups(groups: Any, ledger: Ledger) -> None:
    if not isinstance(groups, Mapping) or not groups:
        ledger.fault("config.fields", "config_groups", "is empty or not an object")
        return
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            ledger.fault("config.fields", f"config_groups.{name}", "is not an object")
            continue
        if group.get("targets") != ["Linear"]:
            ledger.fault("config.fields", f"{name}.targets", "expected ['Linear']")
        if group.get("input_activations") is None:
            ledger.fault(
                "config.fields",
                f"{name}.input_activations",
                "is missing, and vLLM would silently serve weight-only W4A16",
            )
        else:
            _compare(group["input_activations"], _FOUR_BITS, f"{name}.input_activations", ledger)
        _compare(group.get("weights"), _FOUR_BITS, f"{name}.weights", ledger)


def _check_agreement(block: Mapping[str, Any], nested: Mapping[str, Any], ledger: Ledger) -> None:
    pairs = (
        ("quant_algo", block.get("quant_algo"), nested.get("quant_algo")),
        ("group_size", NVFP4_BLOCK, nested.get("group_size")),
        (
            "KV cache",
            "FP8" if block.get("kv_cache_scheme") else None,
            nested.get("kv_cache_quant_algo"),
        ),
    )
    for what, ours, theirs in pairs:
        if ours != theirs:
            ledger.fault(
                "config.agreement", what, f"config.json says {ours!r}, {HF_QUANT_NAME} {theirs!r}"
            )
    ignored, excluded = _as_set(block.get("ignore")), _as_set(nested.get("exclude_modules"))
    for entry in sorted(ignored ^ excluded):
        where = "config.json" if entry in ignored else HF_QUANT_NAME
        ledger.fault("config.agreement", entry, f"is ignored in {where} only")


def _as_set(entries: Any) -> set[str]:
    return set(map(str, entries)) if isinstance(entries, list) else set()


def _check_ignore(entries: Any, where: str, ledger: Ledger) -> None:
    if not isinstance(entries, list) or not all(isinstance(e, str) and e for e in entries):
        ledger.fault("config.fields", where, "must be a list of names")


def _compare(given: Any, wanted: Mapping[str, Any], where: str, ledger: Ledger) -> None:
    if not isinstance(given, Mapping):
        ledger.fault("config.fields", where, "is missing or not an object")
        return
    for key, value in wanted.items():
        if given.get(key) != value:
            ledger.fault(
                "config.fields", f"{where}.{key}", f"is {given.get(key)!r}, expected {value!r}"
            )


def _check_fp8(folder: Folder, ledger: Ledger) -> None:
    block = folder.block or {}
    ledger.examined("config.fields", 1, "files")
    ledger.examined("config.agreement", 1, "files")
    if (folder.root / HF_QUANT_NAME).exists():
        ledger.fault(
            "config.agreement", HF_QUANT_NAME, "must not stand beside compressed-tensors' config"
        )
    for key, value in (("format", "float-quantized"), ("quantization_status", "compressed")):
        if block.get(key) != value:
            ledger.fault("config.fields", key, f"is {block.get(key)!r}, expected {value!r}")
    _check_ignore(block.get("ignore"), "quantization_config.ignore", ledger)
    scheme = block.get("kv_cache_scheme")
    if scheme is not None:
        _compare(scheme, _KV_CACHE, "kv_cache_scheme", ledger)
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        ledger.fault("config.fields", "config_groups", "is empty or not an object")
        groups = {}
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            ledger.fault("config.fields", f"config_groups.{name}", "is not an object")
            continue
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            ledger.fault("config.fields", f"{name}.targets", "is not a list of names")
        if group.get("format") not in (None, "float-quantized"):
            ledger.fault("config.fields", f"{name}.format", f"is {group['format']!r}")
        _compare(group.get("weights"), FP8_WEIGHTS, f"{name}.weights", ledger)
        _compare(
            group.get("input_activations"), FP8_ACTIVATIONS, f"{name}.input_activations", ledger
        )
    _check_schema(block, ledger)


def _check_schema(block: Mapping[str, Any], ledger: Ledger) -> None:
    """Read the block through compressed-tensors' own class; nothing may be lost or changed."""
    try:  # takes seconds to import, and is needed here only
        from compressed_tensors.quantization import QuantizationConfig
    except ImportError:
        ledger.skip("config.schema", "compressed-tensors is not installed")
        return
    ledger.examined("config.schema", 1, "blocks")
    try:
        parsed = QuantizationConfig.model_validate(dict(block)).model_dump(mode="json")
    except Exception as fault:  # whatever their validators raise, it is their refusal
        ledger.fault("config.schema", "quantization_config", " ".join(str(fault).split())[:160])
        return
    for path, ours, theirs in _changed(block, parsed, ""):
        ledger.fault("config.schema", path, f"is {ours!r}, but reads back as {theirs!r}")


def _changed(ours: Any, theirs: Any, path: str) -> list[tuple[str, Any, Any]]:
    """Every leaf of `ours` that `theirs` lacks or has otherwise; defaults it adds don't count."""
    if isinstance(ours, Mapping):
        if not isinstance(theirs, Mapping):
            return [(path, ours, theirs)]
        return [
            change
            for key, value in ours.items()
            for change in _changed(value, theirs.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if ours == theirs else [(path, ours, theirs)]


def check_ignore_covers(
    folder: Folder, fmt: str, stored: Mapping[str, bool], ledger: Ledger
) -> None:
    """Linears, routers and head that are not quantized must be listed, for readers that go by
    the list alone; vLLM and SGLang would also do without the routers."""
    entries = (folder.block or {}).get("ignore")
    if not isinstance(entries, list) or fmt == UNDECLARED:
        ledger.skip("config.ignore", "no ignore list; see config.fields")
        return
    listed = _Listed([entry for entry in entries if isinstance(entry, str)])
    routers = {f"model.layers.{i}.mlp.gate": False for i in folder.config.sparse_layers}
    precise = [m for m, quantized in {**stored, **routers}.items() if not quantized]
    for module in precise:
        if module == "model.embed_tokens" and fmt == FP8:
            continue  # targets name Linear, and this is none
        ledger.examined("config.ignore", 1, "modules")
        if not listed.covers(module):
            ledger.fault("config.ignore", module, "is stored unquantized, but not listed")


class _Listed:
    """An ignore list read by its plain meaning: names, `re:` patterns, globs, `x*` as a prefix."""

    def __init__(self, entries: list[str]) -> None:
        self._names = frozenset(entries)
        self._patterns = [e for e in entries if e.startswith("re:") or set(e) & set("*?[")]

    def covers(self, module: str) -> bool:
        if module in self._names:
            return True
        return any(self._matches(pattern, module) for pattern in self._patterns)

    @staticmethod
    def _matches(pattern: str, module: str) -> bool:
        if not pattern.startswith("re:"):
            return fnmatchcase(module, pattern)
        try:
            return equal_or_regex(module, pattern)
        except EngineRefusal:
            return False  # the engines' own checks name it


def check_engines(folder: Folder, stored: Mapping[str, bool], ledger: Ledger) -> None:
    """Build the model in each engine's mind and hold it against what has scales."""
    views = simulate(folder.block, folder.hf_quant_config, folder.config)
    if TRANSFORMERS not in (view.engine for view in views):
        ledger.skip(f"engine.{TRANSFORMERS}", "no loader for ModelOpt NVFP4 there")
    for view in views:
        name = f"engine.{view.engine}"
        ledger.examined(name, len(view.sites), "modules")
        for fault in view.faults:
            ledger.fault(name, fault.where, f"{fault.kind}: {fault.reason}")
        if view.scheme == "nvfp4-weight-only":
            ledger.fault(name, "config_groups", "would be served weight-only (W4A16), not W4A4")
        for mismatch in mismatches(view, stored):
            built = "quantized" if mismatch.built else "unquantized"
            ledger.fault(
                name,
                mismatch.prefix,
                f"built {built}, stored {mismatch.stored}: {mismatch.effect}",
            )
