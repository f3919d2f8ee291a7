"""Which modules each engine would build quantized, given only a checkpoint's config files.

In: `quantization_config` (config.json), the content of `hf_quant_config.json`, and the model's
shape. Out: one `EngineView` for each engine: the answer for every module that it builds, or the
exception that it would raise. `mismatches` then compares a view with what is really stored.

The one idea: a checkpoint loads only if a module has scales exactly where the engine builds it
quantized. That is asked for each engine under its own module names: vLLM fuses q, k, v and the
output gate (with more ranks than KV heads only q, k and v), SGLang fuses q, k and v, transformers
fuses nothing.

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
    names,
    sglang_ct_ignores,
    vllm_ct_ignores,
    vllm_ct_renamed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One module that an engine builds: the prefix it asks about, and what it loads into it.

    `stored` are module names in the checkpoint; for an expert layer, those of all its experts.
    compressed-tensors targets may name a module by its class, so `class_name` is the engine's.
    """

    prefix: str
    class_name: str
    stored: tuple[str, ...]
    kind: str = "linear"  # linear | experts | head | embedding


# The modules of a layer by engine: name and class there, and the stored modules that they take.
# Routers and norms are absent: no engine gives them a quantization method.
_Modules = tuple[tuple[str, str, tuple[str, ...]], ...]
_QKV = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_FUSED_QKV = ("qkv_proj", "QKVParallelLinear", _QKV)
_OUT = ("o_proj", "RowParallelLinear", ("o_proj",))
_FUSED_MLP: _Modules = (
    ("gate_up_proj", "MergedColumnParallelLinear", ("gate_proj", "up_proj")),
    ("down_proj", "RowParallelLinear", ("down_proj",)),
)
_ATTENTION: dict[str, _Modules] = {
    VLLM: (("qkv_gate_proj", "MergedColumnParallelLinear", (*_QKV, "gate_proj")), _OUT),
    VLLM_WIDE: (
        _FUSED_QKV,
        ("output_gate_proj", "ColumnParallelLinear", ("gate_proj",)),
        _OUT,
    ),
    SGLANG: (_FUSED_QKV, ("gate_proj", "ColumnParallelLinear", ("gate_proj",)), _OUT),
    TRANSFORMERS: tuple((name, "Linear", (name,)) for name in (*_QKV, "gate_proj", "o_proj")),
}
_DENSE: dict[str, _Modules] = {
    VLLM: _FUSED_MLP,
    VLLM_WIDE: _FUSED_MLP,
    SGLANG: _FUSED_MLP,
    TRANSFORMERS: tuple((name, "Linear", (name,)) for name in _MLP),
}
# transformers keeps experts as plain parameters, which it decodes in whatever form they are stored.
_EXPERTS = {VLLM: "RoutedExperts", VLLM_WIDE: "RoutedExperts", SGLANG: "FusedMoE"}
_FUSED_LINEARS: Fused = {"qkv_proj": _QKV, "gate_up_proj": ("gate_proj", "up_proj")}
_VLLM_FUSED: Fused = {**_FUSED_LINEARS, "qkv_gate_proj": (*_QKV, "output_gate_proj")}


def sites(engine: str, config: BeamConfig) -> Iterator[Site]:
    """Every module that `engine` builds from `config`, in layer order."""
    if engine in (VLLM, VLLM_WIDE):
        name = "model.embed_tokens"
        yield Site(
            prefix=name, class_name="VocabParallelEmbedding", stored=(name,), kind="embedding"
        )
    for layer, mlp in enumerate(config.mlp_layer_types):
        yield from _linears(f"model.layers.{layer}.self_attn", _ATTENTION[engine])
        prefix = f"model.layers.{layer}.mlp"
        if mlp == "dense":
            yield from _linears(prefix, _DENSE[engine])
        elif engine in _EXPERTS:
            experts = f"{prefix}.experts"
            stored = tuple(
                f"{experts}.{expert}.{proj}"
                for expert in range(config.num_experts)
                for proj in _MLP
            )
            yield Site(prefix=experts, class_name=_EXPERTS[engine], stored=stored, kind="experts")
    head = "Linear" if engine == TRANSFORMERS else "ParallelLMHead"
    yield Site(prefix="lm_head", class_name=head, stored=("lm_head",), kind="head")


def _linears(prefix: str, modules: _Modules) -> Iterator[Site]:
    for name, class_name, stored in modules:
        yield Site(
            prefix=f"{prefix}.{name}",
            class_name=class_name,
            stored=tuple(f"{prefix}.{each}" for each in stored),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFault:
    """An exception the engine would raise while building: `where` is a prefix or "config"."""

    where: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What one engine makes of the config: whether it builds the module of each prefix quantized.

    `scheme` is None where it refuses the whole config.
    """

    engine: str
    scheme: str | None
    quantized: Mapping[str, bool] = field(default_factory=dict)
    faults: tuple[EngineFault, ...] = ()
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A site whose stored form is not the one that the engine would build."""

    prefix: str
    built: bool
    stored: str  # "quantized", "unquantized" or "mixed"
    effect: str


_EFFECTS = {
    VLLM: "ValueError: no parameter for the scale tensors",
    VLLM_WIDE: "ValueError: no parameter for the scale tensors",
    SGLANG: "KeyError on the scale tensors",
    TRANSFORMERS: "codes loaded as weights, scales reported as unexpected",
}


def mismatches(view: EngineView, stored: Mapping[str, bool]) -> list[Mismatch]:
    """Every site whose modules are not stored the way `view` builds it.

    `stored` says of the checkpoint's modules which have scales; those it lacks are found missing
    elsewhere.
    """
    found: list[Mismatch] = []
    for site in view.sites:
        built = view.quantized.get(site.prefix)
        kinds = {stored[module] for module in site.stored if module in stored}
        if built is None or not kinds or kinds == {built}:
            continue
        effect = _EFFECTS[view.engine]
        if built:
            effect = "shape or dtype error while loading, or weights without scales"
        word = "mixed" if len(kinds) > 1 else ("quantized" if True in kinds else "unquantized")
        found.append(Mismatch(prefix=site.prefix, built=built, stored=word, effect=effect))
    return found


_Decision = Callable[[Site], bool]
"""Whether a site is built quantized; raises `EngineRefusal` where the engine would."""


def simulate(
    quantization_config: Mapping[str, Any] | None,
    hf_quant_config: Mapping[str, Any] | None,
    config: BeamConfig,
) -> tuple[EngineView, ...]:
    """One view per engine that can read the format at all, in a fixed order."""
    block = quantization_config or {}
    compressed = str(block.get("quant_method", "")).lower() == "compressed-tensors"
    views = []
    for engine in (VLLM, VLLM_WIDE, SGLANG, *([TRANSFORMERS] if compressed else [])):
        try:
            if compressed:
                scheme, decide = "fp8", _compressed_tensors(engine, block)
            else:
                scheme, decide = _modelopt(engine, quantization_config, hf_quant_config)
        except EngineRefusal as refusal:
            fault = EngineFault(where="config", kind=refusal.kind, reason=refusal.reason)
            views.append(EngineView(engine=engine, scheme=None, faults=(fault,)))
        else:
            views.append(_view(engine, scheme, config, decide))
    return tuple(views)


def _view(engine: str, scheme: str, config: BeamConfig, decide: _Decision) -> EngineView:
    """Ask `decide` about every site, and collect what it raises."""
    all_sites = tuple(sites(engine, config))
    quantized: dict[str, bool] = {}
    faults: list[EngineFault] = []
    if config.tie_word_embeddings and engine in (VLLM, VLLM_WIDE):
        reason = "tied embeddings are refused"
        faults.append(EngineFault(where="config", kind="NotImplementedError", reason=reason))
    for site in all_sites:
        try:
            quantized[site.prefix] = decide(site)
        except EngineRefusal as refusal:
            faults.append(EngineFault(where=site.prefix, kind=refusal.kind, reason=refusal.reason))
    return EngineView(
        engine=engine, scheme=scheme, quantized=quantized, faults=tuple(faults), sites=all_sites
    )


def _modelopt(
    engine: str,
    quantization_config: Mapping[str, Any] | None,
    hf_quant_config: Mapping[str, Any] | None,
) -> tuple[str, _Decision]:
    scheme, entries = modelopt_terms(engine, quantization_config, hf_quant_config)
    if engine == SGLANG:
        sglang = SglangModelOpt(entries, _FUSED_LINEARS)
        return scheme, lambda site: not sglang.excludes(site.prefix, linear=site.kind != "experts")
    vllm = VllmModelOpt(entries, _VLLM_FUSED)
    # vLLM's ModelOpt classes have no embedding method: embeddings stay as stored.
    return scheme, lambda site: site.kind != "embedding" and not vllm.excludes(site.prefix)


def _compressed_tensors(engine: str, block: Mapping[str, Any]) -> _Decision:
    targets = ct_targets_of(engine, block)
    entries = names(block.get("ignore") or [])
    if engine == SGLANG:
        return _sglang_ct(targets, entries)
    if engine == TRANSFORMERS:
        return lambda site: _names_site(site, targets) and not _names_site(site, entries)
    return _vllm_ct(vllm_ct_renamed(targets), vllm_ct_renamed(entries))


def _names_site(site: Site, entries: Sequence[str]) -> bool:
    """transformers' rule: an entry names a module exactly, by pattern, or by class."""
    return any(equal_or_regex(site.prefix, e) or e == site.class_name for e in entries)


def _vllm_ct(targets: Sequence[str], entries: Sequence[str]) -> _Decision:
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


def _sglang_ct(targets: Sequence[str], entries: Sequence[str]) -> _Decision:
    widened = [*targets, "FusedMoE"] if "Linear" in targets else list(targets)

    def one(prefix: str, class_name: str, wanted: Sequence[str]) -> bool:
        if sglang_ct_ignores(prefix, entries, _FUSED_LINEARS):
            return False
        if not ct_targets(prefix, class_name, wanted, _FUSED_LINEARS):
            raise EngineRefusal("ValueError", f"no target matches {prefix}")
        return True

    def decide(site: Site) -> bool:
        if site.kind == "experts":
            return _same_for_expert_0(site, lambda name: one(name, site.class_name, widened))
        if site.kind == "head":  # only a target that names it quantizes the head
            named = any(
                equal_or_regex(site.prefix, t) or site.prefix.endswith("." + t) for t in targets
            )
            return named and not sglang_ct_ignores(site.prefix, entries, _FUSED_LINEARS)
        return one(site.prefix, site.class_name, targets)

    return decide


def _same_for_expert_0(site: Site, ask: Callable[[str], bool]) -> bool:
    """Both engines ask for expert 0's three projections and want one answer for the layer."""
    answers = {name: ask(f"{site.prefix}.0.{name}") for name in _MLP}
    if len(set(answers.values())) > 1:
        hit = ", ".join(name for name, yes in answers.items() if yes)
        raise EngineRefusal("ValueError", f"of expert 0 only {hit} would be quantized")
    return all(answers.values())
