"""SkyRL: what its FP8 weight sync must know of Beam, as a `ModelFp8Spec`.

In: an installed SkyRL with `weight_sync.fp8` (0.4). Out: the spec, registered:

    from beamq.integrations.skyrl import register
    register()                              # in the trainer and in the engine's worker

SkyRL quantizes with its own code; the bytes are those of the profile skyrl-fp8-block. Packed
experts [E, 2I, H] go as w1 and w3, [E, H, I] as w2. All linears are FP8, the attention gate too;
the router, the embedding and the head are not.

Limits: with tensor parallelism an expert's width per rank must be a multiple of 128 (2560 is with
1, 2 and 4 ranks, and with 8 not).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from beamq.beam.config import MODEL_TYPE
from beamq.beam.tensors import QUANTIZABLE, role_of

_PROJECTIONS = {
    "gate_proj": ("w13_weight", "w1"),
    "up_proj": ("w13_weight", "w3"),
    "down_proj": ("w2_weight", "w2"),
}
_PACKED = {"gate_up_proj": (("gate_proj", "up_proj"), 1), "down_proj": (("down_proj",), None)}


def register() -> Any:
    """Register the spec and return it. Raises `ImportError` where SkyRL is not installed, and its
    `ValueError` where it is registered already."""
    base = import_module("skyrl.backends.skyrl_train.weight_sync.fp8.models.base")
    return base.register_fp8_spec(make_spec(base))


def make_spec(base: Any) -> Any:
    """Beam's spec, of the classes in `base`, SkyRL's module `models.base`."""
    projections = {
        name: base.MoeProjection(hf_name=name, vllm_param=param, shard_id=shard)
        for name, (param, shard) in _PROJECTIONS.items()
    }

    def moe_expert_spec(name: str) -> Any:
        prefix, _, packed = name.removesuffix(".weight").rpartition(".")
        if packed not in _PACKED or not prefix.endswith(".mlp.experts"):
            return None
        names, split_dim = _PACKED[packed]
        return base.MoeExpertSpec(
            experts_base=prefix,
            projections=tuple(projections[each] for each in names),
            split_dim=split_dim,
        )

    return base.ModelFp8Spec(
        name="beam",
        matches=lambda hf_config: getattr(hf_config, "model_type", None) == MODEL_TYPE,
        should_quantize=_should_quantize,
        ignored_layers=_ignored_layers,
        moe_expert_spec=moe_expert_spec,
        moe_projections=tuple(projections.values()),
    )


def _should_quantize(name: str, shape: Any) -> bool:
    return len(shape) == 2 and role_of(name).role in QUANTIZABLE


def _ignored_layers(hf_config: Any, model_prefix: str = "model", **_: Any) -> list[str]:
    """Linears that vLLM must build in BF16: the head, and the router of each sparse layer."""
    routers = [
        f"{model_prefix}.layers.{layer}.mlp.gate"
        for layer, kind in enumerate(hf_config.mlp_layer_types)
        if kind == "sparse"
    ]
    return ["lm_head", *routers]
