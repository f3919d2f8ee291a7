"""What a checkpoint's config files declare, read with each engine's own precedence and defaults.

In: `quantization_config` (config.json) and the content of `hf_quant_config.json`. Out: the
scheme, and the ignore list or targets that engine goes by; `EngineRefusal` where it would not
accept the files at all.

config.json wins wherever it says anything; `hf_quant_config.json` counts only without it. The
traps are in the defaults: a group without `input_activations` turns vLLM's NVFP4 into weight-only,
and anything but exactly "NVFP4" turns SGLang's Beam away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beamq.eval.matching import EngineRefusal

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
