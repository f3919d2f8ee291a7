"""Which modules each engine would build quantized, given only a checkpoint's config files.

In: `quantization_config` (config.json), the content of `hf_quant_config.json`, and the model's
shape. Out: one `EngineView` for each engine: the answer for every module that it builds, or the
exception that it would raise. `mismatches` compares a view with what is stored.

The one idea: a checkpoint loads only if exactly those modules have scales that the engine builds
quantized. Each engine has its own module names: vLLM fuses q, k, v and the output gate (with more
ranks than KV heads only q, k and v), SGLang fuses q, k and v, transformers fuses nothing.

Simulated: ModelOpt NVFP4, ModelOpt MIXED_PRECISION (NVFP4 and FP8 rows), FP8 rows and MXFP8 of
compressed-tensors, and block FP8, as vLLM 0.33.0, SGLang 0.5.23 and transformers 5.24 (FP8 only)
read them. Other methods are refused by name, not guessed at.
No engine is imported. Numerics, kernels and hardware are out of scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from beamq.beam.config import BeamConfig
from beamq.eval.verify.engine_rules import (
    SGLANG,
    TRANSFORMERS,
    VLLM,
    VLLM_WIDE,
    WEIGHT_ONLY,
    Block,
    EngineRefusal,
    Fused,
    block_fp8_ignored,
    ct_targets,
    ct_terms,
    equal_or_regex,
    modelopt_terms,
    names,
    sglang_ct_ignores,
    sglang_excludes,
    transformers_ignores,
    vllm_algo_of,
    vllm_ct_ignores,
    vllm_ct_renamed,
    vllm_excludes,
    vllm_fp8_ignores,
    vllm_layers_renamed,
    vllm_renamed,
)
from beamq.plan.layout import SCHEMES, WEIGHT_FORMATS, declared_scheme


@dataclass(frozen=True, slots=True)
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
_GATE = ("ColumnParallelLinear", ("gate_proj",))
_OUT = ("o_proj", "RowParallelLinear", ("o_proj",))
_ATTENTION: dict[str, _Modules] = {
    VLLM: (("qkv_gate_proj", "MergedColumnParallelLinear", (*_QKV, "gate_proj")), _OUT),
    VLLM_WIDE: (_FUSED_QKV, ("output_gate_proj", *_GATE), _OUT),
    SGLANG: (_FUSED_QKV, ("gate_proj", *_GATE), _OUT),
    TRANSFORMERS: tuple((name, "Linear", (name,)) for name in (*_QKV, "gate_proj", "o_proj")),
}
_FUSED_MLP: _Modules = (
    ("gate_up_proj", "MergedColumnParallelLinear", ("gate_proj", "up_proj")),
    ("down_proj", "RowParallelLinear", ("down_proj",)),
)
_UNFUSED_MLP: _Modules = tuple((name, "Linear", (name,)) for name in _MLP)
# transformers keeps experts as plain parameters, which it decodes in whatever form they are stored.
_EXPERTS = {VLLM: "RoutedExperts", VLLM_WIDE: "RoutedExperts", SGLANG: "FusedMoE"}
_FUSED_LINEARS: Fused = {"qkv_proj": _QKV, "gate_up_proj": ("gate_proj", "up_proj")}
_VLLM_FUSED: Fused = {**_FUSED_LINEARS, "qkv_gate_proj": (*_QKV, "output_gate_proj")}


def sites(engine: str, config: BeamConfig) -> Iterator[Site]:
    """Every module that `engine` builds from `config`, in layer order."""
    if engine in (VLLM, VLLM_WIDE):
        name = "model.embed_tokens"
        yield Site(name, "VocabParallelEmbedding", (name,), "embedding")
    for layer, mlp in enumerate(config.mlp_layer_types):
        yield from _linears(f"model.layers.{layer}.self_attn", _ATTENTION[engine])
        prefix = f"model.layers.{layer}.mlp"
        if mlp == "dense":
            fused = engine != TRANSFORMERS
            yield from _linears(prefix, _FUSED_MLP if fused else _UNFUSED_MLP)
        elif engine in _EXPERTS:
            prefix += ".experts"
            experts = [f"{prefix}.{expert}" for expert in range(config.num_experts)]
            stored = tuple(f"{expert}.{proj}" for expert in experts for proj in _MLP)
            yield Site(prefix, _EXPERTS[engine], stored, "experts")
    head = "Linear" if engine == TRANSFORMERS else "ParallelLMHead"
    yield Site("lm_head", head, ("lm_head",), "head")


def _linears(prefix: str, modules: _Modules) -> Iterator[Site]:
    for name, class_name, stored in modules:
        yield Site(f"{prefix}.{name}", class_name, tuple(f"{prefix}.{each}" for each in stored))


@dataclass(frozen=True, slots=True)
class EngineView:
    """What one engine makes of the config: by which rounding (`layout.WeightFormat`) it builds the
    module of each prefix quantized; "" stands for high precision.

    `scheme` is None where it refuses the whole config.
    """

    engine: str
    scheme: str | None
    quantized: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[EngineRefusal, ...] = ()
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A site whose stored form is not the one that the engine would build.

    `built` and `stored` are "quantized", "unquantized", or what it is quantized to where both are;
    `stored` may be "mixed".
    """

    prefix: str
    built: str
    stored: str
    effect: str


_WORDS = {"": "unquantized", "mixed": "mixed"}
_EFFECTS = {
    VLLM: "ValueError: no parameter for the scale tensors",
    VLLM_WIDE: "ValueError: no parameter for the scale tensors",
    SGLANG: "KeyError on the scale tensors",
    TRANSFORMERS: "codes loaded as weights, scales reported as unexpected",
}


def mismatches(view: EngineView, stored: Mapping[str, str]) -> list[Mismatch]:
    """Every site that is not stored as `view` builds it; `stored` maps modules to their rounding,
    "" where they are not quantized."""
    found: list[Mismatch] = []
    for site in view.sites:
        built = view.quantized.get(site.prefix)
        kinds = {stored[module] for module in site.stored if module in stored}
        if built is None or not kinds or kinds == {built}:
            continue
        effect = _EFFECTS[view.engine]
        if built:
            effect = "shape or dtype error while loading, or weights without scales"
        held = "mixed" if len(kinds) > 1 else kinds.pop()
        both = bool(built and held) and held != "mixed"
        words = (each if both else _WORDS.get(each, "quantized") for each in (built, held))
        found.append(Mismatch(site.prefix, next(words), next(words), effect))
    return found


_Decision = Callable[[Site], str | bool]
"""Whether a site is built quantized, or by which rounding in a scheme of several; raises
`EngineRefusal` where the engine would."""


def simulate(
    quantization_config: Block | None, hf_quant_config: Block | None, config: BeamConfig
) -> tuple[EngineView, ...]:
    """One view per engine that can read the format at all, in a fixed order."""
    block = quantization_config or {}
    method = str(block.get("quant_method", "")).lower()
    others = [TRANSFORMERS] if method in ("compressed-tensors", "fp8") else []
    views = []
    for engine in (VLLM, VLLM_WIDE, SGLANG, *others):
        try:
            if method == "compressed-tensors":
                scheme, decide = _compressed_tensors(engine, block)
            elif declared_scheme(block) == "fp8-block":
                scheme, decide = "fp8-block", _block_fp8(engine, block)
            else:
                scheme, decide = _modelopt(engine, quantization_config, hf_quant_config)
        except EngineRefusal as refusal:
            views.append(EngineView(engine, None, faults=(refusal,)))
        else:
            views.append(_view(engine, scheme, config, decide))
    return tuple(views)


def _view(engine: str, scheme: str, config: BeamConfig, decide: _Decision) -> EngineView:
    """Ask `decide` about every site, and collect what it raises."""
    asked = tuple(sites(engine, config))
    quantized: dict[str, str] = {}
    own = WEIGHT_FORMATS[SCHEMES[scheme.removesuffix(WEIGHT_ONLY)].formats[0]].rounding
    faults: list[EngineRefusal] = []
    if config.tie_word_embeddings and engine in (VLLM, VLLM_WIDE):
        faults.append(EngineRefusal("NotImplementedError", "tied embeddings are refused"))
    for site in asked:
        try:
            built = decide(site)
            quantized[site.prefix] = built if isinstance(built, str) else own * built
        except EngineRefusal as refusal:
            refusal.where = site.prefix
            faults.append(refusal)
    return EngineView(engine, scheme, quantized, tuple(faults), asked)


def _modelopt(engine: str, block: Block | None, hf: Block | None) -> tuple[str, _Decision]:
    scheme, entries, layers = modelopt_terms(engine, block, hf)
    renamed, layers = vllm_renamed(entries), vllm_layers_renamed(layers)

    def decide(site: Site) -> str | bool:
        if engine == SGLANG:
            linear = site.kind != "experts"
            return not sglang_excludes(site.prefix, entries, _FUSED_LINEARS, linear=linear)
        # vLLM's ModelOpt classes have no embedding method: embeddings stay as stored.
        if site.kind == "embedding" or vllm_excludes(site.prefix, renamed, _VLLM_FUSED):
            return False
        return _mixed(site, layers) if scheme == "nvfp4-fp8" else True

    return scheme, decide


_ROUNDINGS = {"NVFP4": "nvfp4", "FP8_PER_CHANNEL_PER_TOKEN": "fp8"}


def _mixed(site: Site, layers: Mapping[str, str]) -> str:
    """The rounding of a site in a mixed checkpoint; "" for a linear that vLLM would not quantize,
    because no name or an unknown algorithm belongs to it."""
    algo = vllm_algo_of(site.prefix, layers, _VLLM_FUSED)
    if site.kind == "experts" and algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return ""  # it has no method for experts, and leaves them in high precision
    if algo is not None and algo not in _ROUNDINGS:
        raise EngineRefusal("unknown", f"quant_algo {algo!r} is not simulated")
    return "" if algo is None else _ROUNDINGS[algo]


def _compressed_tensors(engine: str, block: Block) -> tuple[str, _Decision]:
    scheme, targets = ct_terms(engine, block)
    entries = names(block.get("ignore") or [])
    if engine == SGLANG:
        return scheme, _sglang_ct(targets, entries)
    if engine == TRANSFORMERS:
        return scheme, lambda site: _names_site(site, targets) and not _names_site(site, entries)
    return scheme, _vllm_ct(vllm_ct_renamed(targets), vllm_ct_renamed(entries))


def _block_fp8(engine: str, block: Block) -> _Decision:
    entries = block_fp8_ignored(engine, block)
    if engine == TRANSFORMERS:
        return lambda site: not transformers_ignores(site.prefix, entries)
    renamed = vllm_ct_renamed(entries)

    def decide(site: Site) -> bool:
        if site.kind in ("embedding", "head"):
            return False  # its FP8 class takes linears and experts only
        return not vllm_fp8_ignores(site.prefix, renamed, _VLLM_FUSED)

    return decide


def _names_site(site: Site, entries: Sequence[str]) -> bool:
    """transformers' rule: an entry names a module exactly, by pattern, or by class."""
    return any(equal_or_regex(site.prefix, e) or e == site.class_name for e in entries)


def _vllm_ct(targets: Sequence[str], entries: Sequence[str]) -> _Decision:
    def one(prefix: str, class_name: str, wanted: Sequence[str]) -> bool:
        ignored = vllm_ct_ignores(prefix, entries, _VLLM_FUSED)
        return not ignored and ct_targets(prefix, class_name, wanted, _VLLM_FUSED)

    def decide(site: Site) -> bool:
        if site.kind == "experts":
            return _same_for_expert_0(site, targets, one)
        quantized = one(site.prefix, site.class_name, targets)
        if quantized and site.kind == "embedding":
            raise EngineRefusal("ValueError", "embeddings support integer weights only")
        return quantized

    return decide


def _sglang_ct(targets: Sequence[str], entries: Sequence[str]) -> _Decision:
    def one(prefix: str, class_name: str, wanted: Sequence[str]) -> bool:
        if sglang_ct_ignores(prefix, entries, _FUSED_LINEARS):
            return False
        if not ct_targets(prefix, class_name, wanted, _FUSED_LINEARS):
            raise EngineRefusal("ValueError", f"no target matches {prefix}")
        return True

    def decide(site: Site) -> bool:
        if site.kind == "experts":
            return _same_for_expert_0(site, targets, one)
        if site.kind == "head":  # only a target that names it quantizes the head
            named = any(
                equal_or_regex(site.prefix, t) or site.prefix.endswith("." + t) for t in targets
            )
            return named and not sglang_ct_ignores(site.prefix, entries, _FUSED_LINEARS)
        return one(site.prefix, site.class_name, targets)

    return decide


def _same_for_expert_0(
    site: Site, targets: Sequence[str], one: Callable[[str, str, Sequence[str]], bool]
) -> bool:
    """Both engines ask for expert 0's three projections and want one answer for the layer.

    A target `Linear` also claims the class that holds the experts.
    """
    wanted = [*targets, site.class_name] if "Linear" in targets else targets
    answers = {name: one(f"{site.prefix}.0.{name}", site.class_name, wanted) for name in _MLP}
    if len(set(answers.values())) > 1:
        hit = ", ".join(name for name, yes in answers.items() if yes)
        raise EngineRefusal("ValueError", f"of expert 0 only {hit} would be quantized")
    return all(answers.values())
