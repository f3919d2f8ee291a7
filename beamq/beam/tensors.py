"""Beam's tensor names: the role of each, its expected shape, and which linears share a scale.

In: a `BeamConfig` or a tensor name. Out: `TensorRole` records.

The names are those transformers' `save_pretrained` writes (one tensor per expert); packed 3-D
experts are recognised as a second form of source. Any other name is `EXTRA`: its tensor is copied
bit for bit, never interpreted and never quantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from beamq.beam.config import BeamConfig


class Role(StrEnum):
    """What a tensor is for. The order is the order of every table."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    ATTENTION_EXTRA = "attention-extra"
    NORM = "norm"
    DENSE_MLP = "dense-mlp"
    EXPERT = "expert"
    ROUTER = "router"
    ROUTER_BIAS = "router-bias"
    HEAD = "head"
    EXTRA = "extra"


QUANTIZABLE = (Role.ATTENTION, Role.DENSE_MLP, Role.EXPERT)
"""Roles of the linears that a recipe may quantize. All others stay in high precision."""

FP32_ROLES = (Role.ROUTER, Role.ROUTER_BIAS)
"""Roles whose source bits are kept as they are, never cast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRole:
    """One tensor of a Beam. `module` is the dotted path without `.weight`; `proj` its last part.

    `packed` is "gate_up_proj" or "down_proj" for a 3-D tensor that holds all experts of a layer.
    """

    name: str
    role: Role
    module: str
    proj: str
    layer: int | None = None
    expert: int | None = None
    packed: str | None = None


SCALES = (
    "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "input_scale",
    "input_global_scale", "weight_zero_point", "weight_shape", "k_scale", "v_scale",
)  # fmt: skip
"""Last parts of the names of tensors that describe a weight and hold no parameters themselves."""

_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,4})\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(0|[1-9]\d{0,5})\.(gate_proj|up_proj|down_proj)\.weight")
_ATTENTION = re.compile(r"self_attn\.(q_proj|k_proj|v_proj|gate_proj|o_proj)\.weight")
_DENSE = re.compile(r"mlp\.(gate_proj|up_proj|down_proj)\.weight")
_PACKED = re.compile(r"mlp\.experts\.(gate_up_proj|down_proj)(\.weight)?")
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_FIXED = {
    "model.embed_tokens.weight": Role.EMBEDDING,
    "lm_head.weight": Role.HEAD,
    "model.norm.weight": Role.NORM,
}
_IN_LAYER = {
    **{f"{norm}.weight": Role.NORM for norm in NORMS},
    "self_attn.q_norm.weight": Role.ATTENTION_EXTRA,
    "self_attn.k_norm.weight": Role.ATTENTION_EXTRA,
    "self_attn.gate_bias": Role.ATTENTION_EXTRA,
    "mlp.gate.weight": Role.ROUTER,
    "mlp.gate.e_score_correction_bias": Role.ROUTER_BIAS,
}


def module_of(name: str) -> str:
    """The module a tensor belongs to: its name without a trailing `.weight`."""
    return name.removesuffix(".weight")


def is_further_layer(name: str, layers: int) -> bool:
    """Whether a tensor is of a layer beyond the model's `layers`, such as one that predicts several
    tokens. SGLang passes over it, whatever precedes `layers.N.`; vLLM stops."""
    found = re.search(r"layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= layers


@lru_cache(maxsize=1 << 17)
def classify(name: str) -> TensorRole:
    """The role of a tensor, by its name alone (see `expected_tensors` for shapes)."""
    fixed = _FIXED.get(name)
    if fixed is not None:
        return _role(name, fixed)
    in_layer = _LAYER.fullmatch(name)
    if in_layer is None:
        return _role(name, Role.EXTRA)
    layer, rest = int(in_layer[1]), in_layer[2]
    if expert := _EXPERT.fullmatch(rest):
        return _role(name, Role.EXPERT, layer, int(expert[1]))
    if rest in _IN_LAYER:
        return _role(name, _IN_LAYER[rest], layer)
    if _ATTENTION.fullmatch(rest):
        return _role(name, Role.ATTENTION, layer)
    if _DENSE.fullmatch(rest):
        return _role(name, Role.DENSE_MLP, layer)
    if packed := _PACKED.fullmatch(rest):
        return _role(name, Role.EXPERT, layer, packed=packed[1])
    return _role(name, Role.EXTRA, layer)


def role_of(name: str) -> TensorRole:
    """The role of a tensor of any checkpoint; a scale has that of the weight it belongs to."""
    module, _, suffix = name.rpartition(".")
    if suffix in (*SCALES, "weight_packed"):
        return classify(f"{module}.weight")
    return classify(name)


def is_scale(name: str) -> bool:
    """Whether a tensor describes a weight and holds no parameters itself."""
    return name.rpartition(".")[2] in SCALES


def _role(
    name: str,
    role: Role,
    layer: int | None = None,
    expert: int | None = None,
    packed: str | None = None,
) -> TensorRole:
    module = module_of(name)
    return TensorRole(
        name=name,
        role=role,
        module=module,
        proj=module.rsplit(".", 1)[-1],
        layer=layer,
        expert=expert,
        packed=packed,
    )


def expected_tensors(config: BeamConfig) -> Iterator[tuple[TensorRole, tuple[int, ...]]]:
    """Every tensor a checkpoint of `config` must hold, with its shape, in layer order.

    Experts in the per-expert form. `lm_head.weight` is left out where embeddings are tied.
    """
    h = config.hidden_size
    yield classify("model.embed_tokens.weight"), (config.vocab_size, h)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for rest, shape in _attention_shapes(config):
            yield classify(prefix + rest), shape
        for norm in NORMS:
            yield classify(f"{prefix}{norm}.weight"), (h,)
        if config.mlp_layer_types[layer] == "dense":
            for rest, shape in _mlp_shapes(config.intermediate_size, h):
                yield classify(f"{prefix}mlp.{rest}"), shape
            continue
        yield classify(f"{prefix}mlp.gate.weight"), (config.num_experts, h)
        yield classify(f"{prefix}mlp.gate.e_score_correction_bias"), (config.num_experts,)
        shapes = _mlp_shapes(config.moe_intermediate_size, h)
        for expert in range(config.num_experts):
            for rest, shape in shapes:
                yield classify(f"{prefix}mlp.experts.{expert}.{rest}"), shape
    yield classify("model.norm.weight"), (h,)
    if not config.tie_word_embeddings:
        yield classify("lm_head.weight"), (config.vocab_size, h)


def _attention_shapes(config: BeamConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    h, q, kv = config.hidden_size, config.q_dim, config.kv_dim
    return (
        ("self_attn.q_proj.weight", (q, h)),
        ("self_attn.k_proj.weight", (kv, h)),
        ("self_attn.v_proj.weight", (kv, h)),
        ("self_attn.gate_proj.weight", (q, h)),
        ("self_attn.o_proj.weight", (h, q)),
        ("self_attn.q_norm.weight", (config.head_dim,)),
        ("self_attn.k_norm.weight", (config.head_dim,)),
        ("self_attn.gate_bias", (config.num_heads,)),
    )


def _mlp_shapes(width: int, hidden: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (
        ("gate_proj.weight", (width, hidden)),
        ("up_proj.weight", (width, hidden)),
        ("down_proj.weight", (hidden, width)),
    )


def packed_shape(config: BeamConfig, packed: str) -> tuple[int, int, int]:
    """Shape of a packed 3-D expert tensor: [E, 2I, H] (gate rows first) or [E, H, I]."""
    e, i, h = config.num_experts, config.moe_intermediate_size, config.hidden_size
    return (e, 2 * i, h) if packed == "gate_up_proj" else (e, h, i)


FUSED = {
    "q_proj": "qkv_gate",
    "k_proj": "qkv_gate",
    "v_proj": "qkv_gate",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
    "o_proj": "o",
}


def fused_group(role: TensorRole) -> str:
    """Name of the set of linears that the engines fuse, and that must therefore share scales.

    {q, k, v, gate} of an attention (vLLM fuses all four), {gate, up} of a dense MLP and of each
    expert; `o_proj` and `down_proj` are sets of one. Source: vLLM 0.33 `qkv_gate_proj`,
    `gate_up_proj`, and the w1/w3 rule of both engines' fused experts.
    """
    parent = role.module.rsplit(".", 1)[0]
    kind = FUSED[role.proj]
    if role.role is Role.ATTENTION and role.proj == "gate_proj":
        kind = "qkv_gate"
    return f"{parent}.{kind}"
