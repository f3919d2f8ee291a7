"""Which modules each engine would build quantized, given only a checkpoint's config files.

In: `quantization_config` (config.json), the content of `hf_quant_config.json`, and the model's
shape. Out: one `EngineView` per engine: for every module it asks about, quantized or not, or the
exception it would raise. `mismatches` then holds a view against what is really stored.

The one idea: a checkpoint is loadable only if *has scales <=> the engine builds it quantized*,
for each engine separately, so we ask in each engine's words: vLLM fuses q, k, v and the output
gate (with more ranks than KV heads only q, k, v), SGLang fuses q, k, v, transformers nothing.

Simulated: ModelOpt NVFP4 and compressed-tensors per-channel FP8 as vLLM 0.33.0, SGLang 0.5.23
and transformers 5.24 (FP8 only) read them. Other methods are refused by name, not guessed at.
No engine is imported. Numerics, kernels and hardware are out of scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from beamq.beam.config import BeamConfig
from beamq.eval.verify.engine_rules import (
    SGLANG,
    TRANSFORMERS,
    VLLM,
    VLLM_WIDE,
    EngineRefusal,
    Fused,
    SglangModelOpt,
    VllmModelOpt,
    ct_targets,
    ct_targets_of,
    equal_or_regex,
    modelopt_terms,
    sglang_ct_ignores,
    vllm_ct_ignores,
    vllm_ct_renamed,
)

# The modules each engine builds from a Beam config, named as that engine names them.
#
# In: an engine's name and a `BeamConfig`. Out: `Site` records in layer order. vLLM fuses q, k, v
# and the output gate (q, k, v only, once there are more ranks than KV heads), SGLang fuses q, k,
# v, transformers fuses nothing. Class names are kept because compressed-tensors targets name
# classes. Routers and norms are absent: no engine gives them a quantization method.

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


_VLLM_FUSED: Fused = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qkv_gate_proj": ("q_proj", "k_proj", "v_proj", "output_gate_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_SGLANG_FUSED: Fused = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFault:
    """An exception the engine would raise while building: `where` is a prefix or "config"."""

    where: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What one engine makes of the config. `scheme` is None where it refuses the whole config."""

    engine: str
    scheme: str | None
    quantized: Mapping[str, bool] = field(default_factory=dict)
    faults: tuple[EngineFault, ...] = ()
    sites: tuple[Site, ...] = ()

    def modules(self) -> dict[str, bool]:
        """The same answer by the checkpoint's own module names."""
        return {
            shard: self.quantized[site.prefix]
            for site in self.sites
            if site.prefix in self.quantized
            for shard in site.shards
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A site whose stored form is not the one the engine would build."""

    engine: str
    prefix: str
    built: bool
    stored: str  # "quantized", "high precision" or "mixed"
    effect: str


def simulate(
    quantization_config: Mapping[str, Any] | None,
    hf_quant_config: Mapping[str, Any] | None,
    config: BeamConfig,
) -> tuple[EngineView, ...]:
    """One view per engine that can read the format at all, in a fixed order."""
    method = str((quantization_config or {}).get("quant_method", "")).lower()
    if method == "compressed-tensors" and quantization_config is not None:
        engines = (VLLM, VLLM_WIDE, SGLANG, TRANSFORMERS)
        return tuple(_compressed_tensors(e, quantization_config, config) for e in engines)
    return tuple(
        _modelopt(engine, quantization_config, hf_quant_config, config)
        for engine in (VLLM, VLLM_WIDE, SGLANG)
    )


def mismatches(view: EngineView, stored: Mapping[str, bool]) -> list[Mismatch]:
    """Every site whose shards are not stored the way `view` builds it.

    `stored` maps checkpoint modules to "has scales"; modules it lacks are someone else's finding.
    """
    found: list[Mismatch] = []
    for site in view.sites:
        built = view.quantized.get(site.prefix)
        kinds = {stored[shard] for shard in site.shards if shard in stored}
        if built is None or not kinds or kinds == {built}:
            continue
        word = "mixed" if len(kinds) > 1 else ("quantized" if True in kinds else "high precision")
        found.append(
            Mismatch(
                engine=view.engine,
                prefix=site.prefix,
                built=built,
                stored=word,
                effect=_effect(view.engine, built=built),
            )
        )
    return found


def _effect(engine: str, *, built: bool) -> str:
    if built:
        return "shape or dtype error while loading, or weights without scales"
    if engine == SGLANG:
        return "KeyError on the scale tensors"
    if engine == TRANSFORMERS:
        return "codes loaded as weights, scales reported as unexpected"
    return "ValueError: no parameter for the scale tensors"


def _view(
    engine: str, scheme: str, config: BeamConfig, decide: Callable[[Site], bool]
) -> EngineView:
    """Ask `decide` about every site, collecting what it raises."""
    all_sites = tuple(sites(engine, config))
    quantized: dict[str, bool] = {}
    faults: list[EngineFault] = []
    if config.tie_word_embeddings and engine in (VLLM, VLLM_WIDE):
        faults.append(
            EngineFault(
                where="config", kind="NotImplementedError", reason="tied embeddings are refused"
            )
        )
    for site in all_sites:
        try:
            quantized[site.prefix] = decide(site)
        except EngineRefusal as refusal:
            faults.append(EngineFault(where=site.prefix, kind=refusal.kind, reason=refusal.reason))
    return EngineView(
        engine=engine, scheme=scheme, quantized=quantized, faults=tuple(faults), sites=all_sites
    )


def _refused(engine: str, kind: str, reason: str) -> EngineView:
    fault = EngineFault(where="config", kind=kind, reason=reason)
    return EngineView(engine=engine, scheme=None, faults=(fault,))


# --- ModelOpt NVFP4 -------------------------------------------------------------------------


def _modelopt(
    engine: str,
    quantization_config: Mapping[str, Any] | None,
    hf_quant_config: Mapping[str, Any] | None,
    config: BeamConfig,
) -> EngineView:
    try:
        scheme, entries = modelopt_terms(engine, quantization_config, hf_quant_config)
    except EngineRefusal as refusal:
        return _refused(engine, refusal.kind, refusal.reason)
    if engine == SGLANG:
        sglang = SglangModelOpt(entries, _SGLANG_FUSED)
        return _view(
            engine,
            scheme,
            config,
            lambda site: not sglang.excludes(site.prefix, linear=site.kind != "experts"),
        )
    vllm = VllmModelOpt(entries, _VLLM_FUSED)
    return _view(
        engine,
        scheme,
        config,
        # Their ModelOpt classes have no embedding method: embeddings stay as stored.
        lambda site: site.kind != "embedding" and not vllm.excludes(site.prefix),
    )


# --- compressed-tensors FP8 -----------------------------------------------------------------


def _compressed_tensors(
    engine: str, quantization_config: Mapping[str, Any], config: BeamConfig
) -> EngineView:
    try:
        targets = ct_targets_of(engine, quantization_config)
    except EngineRefusal as refusal:
        return _refused(engine, refusal.kind, refusal.reason)
    entries = quantization_config.get("ignore") or []
    if not isinstance(entries, list) or not all(isinstance(e, str) for e in entries):
        return _refused(engine, "ValueError", "ignore is not a list of names")
    if engine == SGLANG:
        decide = _sglang_ct(targets, entries)
    elif engine == TRANSFORMERS:
        decide = _transformers_ct(targets, entries)
    else:
        decide = _vllm_ct(vllm_ct_renamed(targets), vllm_ct_renamed(entries))
    return _view(engine, "fp8", config, decide)


def _vllm_ct(targets: Sequence[str], entries: Sequence[str]) -> Callable[[Site], bool]:
    widened = [*targets, "RoutedExperts"] if "Linear" in targets else list(targets)

    def one(prefix: str, class_name: str, wanted: Sequence[str]) -> bool:
        return not vllm_ct_ignores(prefix, entries, _VLLM_FUSED) and ct_targets(
            prefix, class_name, wanted, _VLLM_FUSED
        )

    def decide(site: Site) -> bool:
        if site.kind == "experts":
            return _same_for_expert_0(site, lambda name: one(name, site.class_name, widened))
        quantized = one(site.prefix, site.class_name, targets)
        if quantized and site.kind == "embedding":
            raise EngineRefusal("ValueError", "embeddings support integer weights only")
        return quantized

    return decide


def _sglang_ct(targets: Sequence[str], entries: Sequence[str]) -> Callable[[Site], bool]:
    widened = [*targets, "FusedMoE"] if "Linear" in targets else list(targets)

    def one(prefix: str, class_name: str, wanted: Sequence[str]) -> bool:
        if sglang_ct_ignores(prefix, entries, _SGLANG_FUSED):
            return False
        if not ct_targets(prefix, class_name, wanted, _SGLANG_FUSED):
            raise EngineRefusal("ValueError", f"no target matches {prefix}")
        return True

    def decide(site: Site) -> bool:
        if site.kind == "experts":
            return _same_for_expert_0(site, lambda name: one(name, site.class_name, widened))
        if site.kind == "head":  # only a target that names it quantizes the head
            named = any(
                equal_or_regex(site.prefix, t) or site.prefix.endswith("." + t) for t in targets
            )
            return named and not sglang_ct_ignores(site.prefix, entries, _SGLANG_FUSED)
        return one(site.prefix, site.class_name, targets)

    return decide


def _transformers_ct(targets: Sequence[str], entries: Sequence[str]) -> Callable[[Site], bool]:
    def listed(site: Site, names: Sequence[str]) -> bool:
        return any(equal_or_regex(site.prefix, n) or n == site.class_name for n in names)

    return lambda site: listed(site, targets) and not listed(site, entries)


def _same_for_expert_0(site: Site, ask: Callable[[str], bool]) -> bool:
    """Both engines ask for expert 0's three projections and want one answer for the layer."""
    answers = {name: ask(f"{site.prefix}.0.{name}") for name in EXPERT_PROJECTIONS}
    if len(set(answers.values())) > 1:
        hit = ", ".join(name for name, yes in answers.items() if yes)
        raise EngineRefusal("ValueError", f"of expert 0 only {hit} would be quantized")
    return all(answers.values())
