"""Names on disk: which tensors a quantized linear becomes, and what both config files say.

In: a linear's name and format, the quantized units. Out: tensor names, dtypes and shapes, and the
quantization blocks of the configs, as vLLM 0.33.0, SGLang 0.5.23 and transformers 5.24.0 accept
them:

    NVFP4 (ModelOpt)     M.weight U8 [N,K/2]   M.weight_scale F8_E4M3 [N,K/16]
                         M.weight_scale_2 F32 []   M.input_scale F32 []
    FP8 (compressed-     M.weight F8_E4M3 [N,K]   M.weight_scale F32 [N,1]
         tensors)

Exclusions name a whole part of a layer (its experts, its dense MLP, its attention): the two
engines match finer lists in different ways, or refuse them. Both engines were tested with the forms
written here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import Role

NVFP4_BLOCK = 16
MODELOPT_VERSION = "0.47.0"  # the producer whose layout is written; engines read only the name

Unit = tuple[int, Role]
"""A part of a layer that is quantized or not as a whole: (layer, expert|dense-mlp|attention)."""


def quantized_tensors(
    module: str, fmt: str, n: int, k: int
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """(name, dtype, shape) of each tensor that the linear `module` [n, k] becomes."""
    if fmt == "fp8":
        return ((f"{module}.weight", "F8_E4M3", (n, k)), (f"{module}.weight_scale", "F32", (n, 1)))
    return (
        (f"{module}.weight", "U8", (n, k // 2)),
        (f"{module}.weight_scale", "F8_E4M3", (n, k // NVFP4_BLOCK)),
        (f"{module}.weight_scale_2", "F32", ()),
        (f"{module}.input_scale", "F32", ()),
    )


def layer_units(config: BeamConfig) -> tuple[Unit, ...]:
    """Every unit of a model, in layer order."""
    units: list[Unit] = []
    for layer, kind in enumerate(config.mlp_layer_types):
        units.append((layer, Role.ATTENTION))
        units.append((layer, Role.EXPERT if kind == "sparse" else Role.DENSE_MLP))
    return tuple(units)


_ENGINE_SUFFIXES = (
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "qkv", "qkv_gate", "output_gate")),
    *(f"self_attn.{part}_proj" for part in ("gate", "o")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "gate_up", "down")),
    *(f"mlp.experts.0.{part}_proj" for part in ("gate", "up", "down")),
    "mlp.gate",
)
"""Below `model.layers.N.`: the names under which engines ask whether a linear is ignored."""
_EXPERTS = ".experts"  # how an entry for all experts of a layer ends, before its pattern


def harmless_entries(config: BeamConfig, modules: Iterable[str]) -> list[str]:
    """Modules of tensors that are not Beam's, sorted, without those whose name in an ignore list
    would match other modules too. Experts that are stored one by one become one `x.experts`.

    Engines match entries by substring, by dotted part or as patterns: an entry `mlp` would leave
    every MLP unquantized when the model is served.
    """
    asked = "\n".join(
        f"model.layers.{layer}.{suffix}"
        for layer in range(config.num_layers)
        for suffix in _ENGINE_SUFFIXES
    )
    experts = [f"model.layers.{layer}.mlp.experts" for layer in config.sparse_layers]
    return sorted(
        module
        for module in {re.sub(r"(\bexperts)\.\d+\..*", r"\1", module) for module in modules}
        if module not in ("lm_head", "model.embed_tokens")
        and module not in asked
        and not module.startswith("re:")
        and not any(prefix in module for prefix in experts)
        and not any(character in module for character in "*?[\n")
    )


def ignore_list(
    config: BeamConfig, fmt: str, quantized: Collection[Unit], extra_modules: Iterable[str]
) -> list[str]:
    """What engines must not quantize, in the form of the format's config."""
    form = compressed_tensors_ignore if fmt == "fp8" else modelopt_ignore
    return form(config, quantized, extra_modules)


def modelopt_ignore(
    config: BeamConfig, quantized: Collection[Unit], extra_modules: Iterable[str]
) -> list[str]:
    """Ignore list in ModelOpt's form: names and `x*` globs, which both engines match equally."""
    entries = ["lm_head", "model.embed_tokens"]
    suffix = {Role.ATTENTION: "self_attn*", Role.DENSE_MLP: "mlp*", Role.EXPERT: "mlp.experts*"}
    for layer, role in layer_units(config):
        if role is Role.EXPERT:
            entries.append(f"model.layers.{layer}.mlp.gate")
        if (layer, role) not in quantized:
            entries.append(f"model.layers.{layer}.{suffix[role]}")
    return entries + [f"{each}*" if each.endswith(_EXPERTS) else each for each in extra_modules]


def compressed_tensors_ignore(
    config: BeamConfig, quantized: Collection[Unit], extra_modules: Iterable[str]
) -> list[str]:
    """Ignore list in compressed-tensors' form: names, and `re:` patterns for `re.match`.

    vLLM renames plain entries but not patterns, so attention is named by a pattern that covers
    `output_gate_proj` too; the router pattern ends in `$` or it would swallow `gate_up_proj`.
    """
    leaf = {
        Role.ATTENTION: r"\.self_attn\..*",
        Role.DENSE_MLP: r"\.mlp\.(gate_proj|up_proj|gate_up_proj|down_proj)$",
        Role.EXPERT: r"\.mlp\.experts\..*",
    }
    entries = ["lm_head", r"re:.*\.mlp\.gate$"]
    for role, pattern in leaf.items():
        layers = [layer for layer, kind in layer_units(config) if kind is role]
        left = [layer for layer in layers if (layer, role) not in quantized]
        if not left:
            continue
        if len(left) == len(layers):
            entries.append(f"re:.*{pattern}")
        else:
            numbers = "|".join(str(layer) for layer in left)
            entries.append(rf"re:model\.layers\.({numbers}){pattern}")
    return entries + [
        rf"re:{re.escape(each)}\..*" if each.endswith(_EXPERTS) else each for each in extra_modules
    ]


def quantization_config(fmt: str, ignore: list[str], kv_cache: str) -> dict[str, Any]:
    """The `quantization_config` block of config.json."""
    if fmt == "fp8":
        return _compressed_tensors_block(ignore, kv_cache)
    four_bit = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_BLOCK}
    block: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": MODELOPT_VERSION},
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": dict(four_bit),
                # Without this entry vLLM would serve W4A16 without a message.
                "input_activations": dict(four_bit),
            }
        },
        "ignore": ignore,
    }
    if kv_cache == "fp8":
        block["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return block


def _compressed_tensors_block(ignore: list[str], kv_cache: str) -> dict[str, Any]:
    """compressed-tensors' float-quantized block, keys that its release 0.17 parses."""
    eight_bit = {"num_bits": 8, "type": "float", "symmetric": True}
    scheme = None
    if kv_cache == "fp8":
        scheme = {**eight_bit, "strategy": "tensor", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight_bit, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight_bit, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": scheme,
    }


def hf_quant_config(config_block: Mapping[str, Any]) -> dict[str, Any]:
    """`hf_quant_config.json`, derived from config.json's block so that the two cannot differ."""
    return {
        "producer": dict(config_block["producer"]),
        "quantization": {
            "quant_algo": config_block["quant_algo"],
            "kv_cache_quant_algo": "FP8" if config_block.get("kv_cache_scheme") else None,
            "group_size": NVFP4_BLOCK,
            "exclude_modules": list(config_block["ignore"]),
        },
    }
