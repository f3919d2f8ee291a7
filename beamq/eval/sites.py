"""The modules each engine builds from a Beam config, named as that engine names them.

In: an engine's name and a `BeamConfig`. Out: `Site` records in layer order. vLLM fuses q, k, v and
the output gate (q, k, v only, once there are more ranks than KV heads), SGLang fuses q, k, v,
transformers fuses nothing. Class names are kept because compressed-tensors targets name classes.
Routers and norms are absent: no engine gives them a quantization method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from beamq.config import BeamConfig
from beamq.eval.declared import SGLANG, TRANSFORMERS, VLLM, VLLM_WIDE

EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One module an engine builds: the prefix it asks about and the stored modules behind it.

    `shards` are module names in the checkpoint; of an expert layer, those of every expert.
    """

    prefix: str
    class_name: str
    shards: tuple[str, ...]
    kind: str = "linear"  # linear | experts | head | embedding


def sites(engine: str, config: BeamConfig) -> Iterator[Site]:
    """Every module `engine` builds from `config`, in layer order."""
    if engine in (VLLM, VLLM_WIDE):
        yield Site(
            prefix="model.embed_tokens",
            class_name="VocabParallelEmbedding",
            shards=("model.embed_tokens",),
            kind="embedding",
        )
    for layer, mlp in enumerate(config.mlp_layer_types):
        prefix = f"model.layers.{layer}"
        yield from _attention_sites(engine, f"{prefix}.self_attn")
        if mlp == "dense":
            yield from _dense_sites(engine, f"{prefix}.mlp")
        elif engine != TRANSFORMERS:  # there experts are plain parameters, decoded as stored
            experts = f"{prefix}.mlp.experts"
            yield Site(
                prefix=experts,
                class_name="FusedMoE" if engine == SGLANG else "RoutedExperts",
                shards=tuple(
                    f"{experts}.{e}.{proj}"
                    for e in range(config.num_experts)
                    for proj in EXPERT_PROJECTIONS
                ),
                kind="experts",
            )
    head = "Linear" if engine == TRANSFORMERS else "ParallelLMHead"
    yield Site(prefix="lm_head", class_name=head, shards=("lm_head",), kind="head")


def _attention_sites(engine: str, prefix: str) -> Iterator[Site]:
    def stored(*names: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}" for name in names)

    if engine == TRANSFORMERS:
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj"):
            yield Site(prefix=f"{prefix}.{name}", class_name="Linear", shards=stored(name))
        return
    if engine == VLLM:
        yield Site(
            prefix=f"{prefix}.qkv_gate_proj",
            class_name="MergedColumnParallelLinear",
            shards=stored("q_proj", "k_proj", "v_proj", "gate_proj"),
        )
    else:
        yield Site(
            prefix=f"{prefix}.qkv_proj",
            class_name="QKVParallelLinear",
            shards=stored("q_proj", "k_proj", "v_proj"),
        )
        gate = "gate_proj" if engine == SGLANG else "output_gate_proj"
        yield Site(
            prefix=f"{prefix}.{gate}",
            class_name="ColumnParallelLinear",
            shards=stored("gate_proj"),
        )
    yield Site(prefix=f"{prefix}.o_proj", class_name="RowParallelLinear", shards=stored("o_proj"))


def _dense_sites(engine: str, prefix: str) -> Iterator[Site]:
    if engine == TRANSFORMERS:
        for name in EXPERT_PROJECTIONS:
            full = f"{prefix}.{name}"
            yield Site(prefix=full, class_name="Linear", shards=(full,))
        return
    yield Site(
        prefix=f"{prefix}.gate_up_proj",
        class_name="MergedColumnParallelLinear",
        shards=(f"{prefix}.gate_proj", f"{prefix}.up_proj"),
    )
    yield Site(
        prefix=f"{prefix}.down_proj",
        class_name="RowParallelLinear",
        shards=(f"{prefix}.down_proj",),
    )
