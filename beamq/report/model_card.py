"""The model card (`README.md` of an output): Hub metadata, and facts that the run itself knows.

In: the plan, the origin of the source, the record of the input scales. Out: Markdown with YAML
front matter. Commands come from the table `ENGINES`; every figure is computed.

A card never holds a path of this machine. A base model is named only if it is an id on the Hub: one
given by the user, the SOURCE itself (a folder in the Hub's cache as well), or the config's
`_name_or_path` if that cannot be a folder.

`card_with_comparison` later writes the comparison with the source between two markers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.beam.tensors import Role
from beamq.errors import CheckpointError, UsageError, counted
from beamq.io.checkpoint import ADAPTER_STAMP, HUB_STAMP, Checkpoint
from beamq.io.companions import card_name, front_matter, licence_file
from beamq.io.hub import cached_repo, could_be_path, parse_hub_id
from beamq.io.shard_writer import write_file
from beamq.plan.layout import SCHEMES
from beamq.plan.plan import Plan, Work
from beamq.plan.recipe import FORMATS
from beamq.plan.serving import GPUS, KV_ITEMSIZE, default_context, fit, model_weights
from beamq.report.tables import FORMAT_NAMES, Table, page, role_sums
from beamq.units import show_bytes, show_count
from beamq.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

# The Hub offers vLLM and SGLang only for text generation with transformers. (For NVFP4 its snippet
# for transformers itself does not work, and the card says so.)
LIBRARY, TASK = "transformers", "text-generation"
ENGINE_TAGS = {"vLLM": "vllm", "SGLang": "sglang"}
_LINK = re.compile(r"https?://[^\s]{1,500}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What may be said of the source. `repo` and `commit` are set when it was read from the Hub."""

    base_model: str | None = None
    repo: str | None = None
    commit: str | None = None
    front: Mapping[str, Any] = field(default_factory=dict)
    card_fault: str | None = None
    licence_file: str | None = None

    def record(self) -> dict[str, str]:
        """For beamq.json."""
        found = {"base_model": self.base_model, "repo": self.repo, "commit": self.commit}
        return {key: value for key, value in found.items() if value is not None}


def check_base_model(text: str | None) -> None:
    """Raise `UsageError` if `--base-model` is not an id on the Hub."""
    if text is not None:
        found = parse_hub_id(text)
        if found is None or found.revision is not None:
            raise UsageError(f"--base-model {text!r}: expected an id on the Hub, org/name")


def trace_origin(source: Checkpoint, fingerprint: str, base_model: str | None = None) -> Origin:
    """The origin, from the source's fingerprint, config and card."""
    repo = commit = None
    if fingerprint.startswith(HUB_STAMP):
        plain = fingerprint.partition(ADAPTER_STAMP)[0]
        repo, _, commit = plain.removeprefix(HUB_STAMP).partition("@")
    named = source.config.get("_name_or_path")
    if not isinstance(named, str) or could_be_path(named):
        named = None
    if source.source.local:
        named = cached_repo(source.source.folder()) or named
    files = source.source.names()
    card = card_name(files)
    front, fault = ({}, None) if card is None else front_matter(source.source.path(card))
    return Origin(
        base_model=base_model or repo or named,
        repo=repo,
        commit=commit,
        front=front,
        card_fault=fault,
        licence_file=licence_file(files),
    )


def hub_metadata(
    plan: Plan, origin: Origin, input_scales: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Front matter as the Hub defines it; licence and language are those of the source's card."""
    fmt = plan.recipe.format
    data = _inherited(origin, plan, "quantized")
    data["library_name"] = LIBRARY
    data["pipeline_tag"] = TASK
    scheme = SCHEMES[fmt]
    loaders = [ENGINE_TAGS[each] for each in scheme.loaders if each in ENGINE_TAGS]
    engines = loaders if is_servable(plan) else []
    formats = (each for each in FORMATS if each in plan.recipe.rules.values())
    data["tags"] = [LIBRARY, "beam", *formats, scheme.method, "beamq", *engines]
    if datasets := calibration_datasets(input_scales or {}):
        data["datasets"] = datasets
    return data


def _inherited(origin: Origin, work: Work, relation: str) -> dict[str, Any]:
    """Front matter that says where a model comes from and under which licence."""
    data: dict[str, Any] = {}
    if origin.base_model is not None:
        data["base_model"] = origin.base_model
        data["base_model_relation"] = relation
    if (licence := _words(origin.front.get("license"))) is not None:
        data["license"] = licence
    if _word(name := origin.front.get("license_name")):
        data["license_name"] = name
    link = origin.front.get("license_link") or (origin.licence_file if licence == "other" else None)
    if isinstance(link, str):
        link = link.removeprefix("./")
        files = {companion.target for companion in work.companions}
        if _LINK.fullmatch(link) or link in files:
            data["license_link"] = link
    if (language := _words(origin.front.get("language"))) is not None:
        data["language"] = language
    return data


def is_servable(plan: Plan) -> bool:
    """Whether all tensors belong to Beam; the engines stop at others."""
    return not plan.parameters[Role.EXTRA.value]


def calibration_datasets(input_scales: Mapping[str, Any]) -> list[str]:
    """Hub ids of the data the input scales were calibrated on."""
    names = {source.get("name") for source in _sources(input_scales) if source.get("kind") == "hub"}
    return sorted(name for name in names if isinstance(name, str))


def _sources(input_scales: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for data in input_scales.get("data") or () for each in data.get("sources") or ()]


def _word(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 100 and "\n" not in value


def _words(value: Any) -> str | list[str] | None:
    """A word or a list of words, which the Hub accepts for licence and language."""
    if _word(value):
        return str(value)
    if isinstance(value, list) and value and all(_word(item) for item in value):
        return [str(item) for item in value]
    return None


# --- serving ------------------------------------------------------------------------------------

COUNTS = (1, 2, 4, 8)
READ_VERSIONS = "vLLM 0.33.0, SGLang 0.5.23, transformers 5.24.0"
# What was run, and with which result (docs/serving.md).
_LOADED = (
    "No engine has run a Beam in this layout; vLLM 0.33.0's own loader took small ones on a CPU,"
    " without kernels."
)
RUN = {
    "nvfp4-fp8": _LOADED,
    "mxfp8": _LOADED,
    "fp8-block": _LOADED,
    "nvfp4": "On 2026-11-30 vLLM 0.33.0 ran small NVFP4 Beams by beamq on H200s. Their KL from"
    " the source was what `beamq compare` predicts, within 5%.",
    "fp8": "On 2026-11-30 vLLM 0.33.0 and SGLang 0.5.23 ran small FP8 Beams by beamq on H200s."
    " Their KL from the source was up to 14% above what `beamq compare` predicts, BF16 noise of"
    " the engine included.",
}


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """How to serve a format with an engine; `gpus` are names in `GPUS`, `note` says its limits."""

    name: str
    command: str
    gpus: tuple[str, ...]
    note: str = ""


_BLACKWELL = ("b200", "b300")
_HOPPER = ("h100", "h200")
_VLLM = "vllm serve $MODEL --tensor-parallel-size {count}"
_SGLANG = "python -m sglang.launch_server --model-path $MODEL --tp {count}"
_VLLM_NVFP4 = (
    "Blackwell GPUs multiply 4-bit weights and activations. On H100 and H200 vLLM chooses Marlin"
    " kernels: the weights stay 4-bit and the activations BF16, which loses less. `beamq compare"
    " --gemm weights-only` measures that."
)
_SGLANG_NVFP4 = (
    "Needs Blackwell: for an NVFP4 Beam it accepts only the flashinfer_trtllm runner, which it"
    " refuses on H100 and H200."
)
_VLLM_MXFP8 = (
    "Blackwell GPUs multiply MXFP8 weights and activations. On H100 and H200 vLLM's kernels take"
    " the weights only."
)
_VLLM_BLOCKS = (
    "Where the experts' width on a GPU is no multiple of 128, add --enable-expert-parallel: blocks"
    " are not cut."
)
_SGLANG_FP8 = "For an FP8 Beam its expert runner must be auto (as here) or triton."
_TRTLLM = f"{_SGLANG} --moe-runner-backend flashinfer_trtllm"
ENGINES = {
    "nvfp4": (
        ServingEngine("vLLM", _VLLM, (*_HOPPER, *_BLACKWELL), _VLLM_NVFP4),
        ServingEngine("SGLang", _TRTLLM, _BLACKWELL, _SGLANG_NVFP4),
    ),
    "fp8": (
        ServingEngine("vLLM", _VLLM, (*_HOPPER, *_BLACKWELL)),
        ServingEngine("SGLang", _SGLANG, (*_HOPPER, *_BLACKWELL), _SGLANG_FP8),
    ),
    "nvfp4-fp8": (ServingEngine("vLLM", _VLLM, (*_HOPPER, *_BLACKWELL), _VLLM_NVFP4),),
    "mxfp8": (ServingEngine("vLLM", _VLLM, (*_HOPPER, *_BLACKWELL), _VLLM_MXFP8),),
    "fp8-block": (ServingEngine("vLLM", _VLLM, (*_HOPPER, *_BLACKWELL), _VLLM_BLOCKS),),
}
_TRANSFORMERS = {
    "nvfp4": "transformers cannot load this layout.",
    "fp8": "transformers loads it too, but decodes the experts to BF16 in memory.",
    "mxfp8": "SGLang refuses a Beam in MXFP8, and transformers stops at its scales. Do not rename"
    " the `quant_method` of this checkpoint to `mxfp8` or `modelopt`: transformers 5.24 would load"
    " it without a message, with weights some 1,500 times too large.",
    "fp8-block": "transformers loads it too, but decodes the experts to BF16 in memory. SGLang"
    " refuses a Beam in block FP8.",
    "nvfp4-fp8": "SGLang and transformers cannot load this layout: SGLang refuses a Beam with parts"
    " in different formats.",
}


def commands(plan: Plan, engine: ServingEngine) -> list[str]:
    """A command for each number of GPUs, under the kinds of GPU that need so many."""
    wanted: dict[int, list[str]] = {}
    for gpu in GPUS:
        if gpu.name in engine.gpus and (count := smallest_tensor_parallel(plan, gpu.name)):
            wanted.setdefault(count, []).append(gpu.label)
    if not wanted:
        return [engine.command.format(count="N"), f"# more than {COUNTS[-1]} GPUs of any kind"]
    lines = []
    for count, labels in sorted(wanted.items()):
        lines += [f"# {count} x {' or '.join(labels)}", engine.command.format(count=count)]
    return lines


def smallest_tensor_parallel(plan: Plan, name: str) -> int | None:
    """The fewest GPUs of a kind that hold the model and one context with tensor parallelism."""
    weights = model_weights(plan.config, plan.formats)
    gpu = next(gpu for gpu in GPUS if gpu.name == name)
    itemsize = KV_ITEMSIZE["fp8" if plan.recipe.kv_cache == "fp8" else "bf16"]
    context = default_context(plan.config)
    for count in COUNTS:
        found = fit(weights, gpu, count, "tensor", context=context, kv_itemsize=itemsize)
        if found is not None and found.fits:
            return count
    return None


# --- the card ------------------------------------------------------------------------------------

PART_NAMES = {
    Role.EMBEDDING: "embeddings",
    Role.ATTENTION: "attention",
    Role.ATTENTION_EXTRA: "attention norms and gate biases",
    Role.NORM: "norms",
    Role.DENSE_MLP: "dense MLPs",
    Role.EXPERT: "routed experts",
    Role.ROUTER: "routers",
    Role.ROUTER_BIAS: "router biases",
    Role.HEAD: "head",
    Role.EXTRA: "tensors that do not belong to Beam",
}
_FORMAT_TEXTS = {
    "nvfp4": "NVFP4 weights and activations (4-bit values, one FP8 scale for every 16 of them) in"
    " ModelOpt's layout",
    "fp8": "FP8 weights (E4M3, one FP32 scale a row) and activations (scaled per token by the"
    " engine) in compressed-tensors' layout",
    "mxfp8": "MXFP8 weights and activations (E4M3, a power of two for every 32 values) in"
    " compressed-tensors' layout",
    "fp8-block": "FP8 weights (E4M3, one FP32 scale for 128 x 128 of them) and activations (scaled"
    " by the engine for every 128 values of a token) in DeepSeek-V3's layout",
    "nvfp4-fp8": "NVFP4 (4-bit values, one FP8 scale for every 16 of them) and FP8 (E4M3, one FP32"
    " scale a row; activations scaled per token by the engine) weights and activations, in"
    " ModelOpt's layout for mixed precision",
}
_SCALES_TEXTS = {
    "max": "from the largest value of each block (`max`)",
    "sweep": "chosen for each block, near the scale of its largest value, for the least squared"
    " error (`sweep`)",
}
_METHOD_TEXTS = {
    "gptq": "rounded by GPTQ on the activations of the calibration text",
    "second-moment": "errors weighted by the second moments of calibrated inputs",
}
COMPARED = "Comparison with the source"
COMPARISON_BEGIN = "<!-- beamq: comparison -->"
COMPARISON_END = "<!-- beamq: end of comparison -->"
_COMPARISON = re.compile(f"{COMPARISON_BEGIN}.*?{COMPARISON_END}", re.DOTALL)


def model_card(
    plan: Plan,
    origin: Origin,
    input_scales: Mapping[str, Any],
    counts: Mapping[str, Any] | None = None,
) -> str:
    """The card as Markdown with YAML front matter, by the template `card.md`. `counts` are those of
    the conversion, as in `beamq.json`."""
    import yaml  # only where a card is written

    fmt = plan.recipe.format
    metadata = hub_metadata(plan, origin, input_scales)
    coverage = input_scales.get("coverage")
    return page(
        "card.md",
        front=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        name="Beam" if origin.base_model is None else origin.base_model.partition("/")[2],
        base=origin.base_model,
        format=FORMAT_NAMES[fmt],
        nvfp4=plan.recipe.calibrated,
        stored=_FORMAT_TEXTS[fmt],
        plan=plan,
        quantized=f"{plan.quantized_parameters / plan.total_parameters:.1%}",
        parts=_parts(plan),
        scales=_SCALES_TEXTS.get(plan.recipe.scales),
        method=_METHOD_TEXTS.get(plan.recipe.expert_method or ""),
        spared=_spared(plan),
        swept=(counts or {}).get("swept_groups", 0),
        record=input_scales,
        sources=_source_table(input_scales),
        coverage=coverage if isinstance(coverage, Mapping) else None,
        sizes=_sizes(plan),
        comparison=_between_markers("Not measured yet."),
        servable=is_servable(plan),
        engines=ENGINES[fmt],
        commands=lambda engine: commands(plan, engine),
        transformers=_TRANSFORMERS[fmt],
        read_versions=READ_VERSIONS,
        run=RUN[fmt],
        context=default_context(plan.config),
        origin=origin,
        own_card=any(companion.target == "README.source.md" for companion in plan.companions),
        version=__version__,
        counted=counted,
    )


def merged_card(work: Work, origin: Origin, notes: Sequence[str]) -> str:
    """The card of a Beam with an adapter merged in, by the template `merged.md`."""
    import yaml  # only where a card is written

    metadata = _inherited(origin, work, "finetune")
    metadata |= {"library_name": LIBRARY, "pipeline_tag": TASK, "tags": [LIBRARY, "beam", "beamq"]}
    return page(
        "merged.md",
        front=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        name="Beam" if origin.base_model is None else origin.base_model.partition("/")[2],
        base=origin.base_model,
        notes=notes,
        own_card=any(companion.target == "README.source.md" for companion in work.companions),
        version=__version__,
    )


def card_with_comparison(folder: Path, table: str, results: Sequence[EvalResult] = ()) -> None:
    """Write a comparison into the card of a folder, in place of an earlier one; at the end of a
    card without the markers. Raises `CheckpointError` if there is no card.

    `results`, whose `task_name` is `COMPARED`, go into the metadata, if there are any to read.
    """
    path = folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise CheckpointError(f"{path}: no card to write the comparison into ({fault})") from None
    block = _between_markers(table)
    if _COMPARISON.search(text):
        text = _COMPARISON.sub(lambda _: block, text, count=1)
    else:
        text = f"{text.rstrip()}\n\n## Comparison with the source\n\n{block}\n"
    if results and front_matter(path)[0]:
        text = _with_results(text, results)
    write_file(path, text.encode(), resumable=False)


def _with_results(text: str, results: Sequence[EvalResult]) -> str:
    """The card with `results` in its `model-index`, and those of other evaluations as they were."""
    from huggingface_hub import ModelCard

    try:
        card: Any = ModelCard(text)
    except (AttributeError, TypeError, ValueError):  # of metadata that the Hub would not read
        return text
    others = [each for each in card.data.eval_results or () if each.task_name != COMPARED]
    card.data.eval_results = [*others, *results]
    title = re.search(r"^# (.+)$", card.text, re.MULTILINE)
    card.data.model_name = card.data.model_name or ("Beam" if title is None else title[1].strip())
    return str(card.content)


def card_gaps(folder: Path) -> tuple[str, ...]:
    """What the Hub's page of a folder would lack, each with the remedy."""
    front, fault = front_matter(folder / "README.md")
    if fault is not None:
        return (f"metadata that can be read: {fault}",)
    remedies = {
        "base_model": "the source's id on the Hub; quantize takes --base-model org/name",
        "license": "the source's card states none",
        "model-index": "figures of a comparison; compare --write-card adds them",
    }
    return tuple(f"{key} ({remedy})" for key, remedy in remedies.items() if not front.get(key))


def _between_markers(content: str) -> str:
    return f"{COMPARISON_BEGIN}\n{content.strip()}\n{COMPARISON_END}"


def _parts(plan: Plan) -> Table:
    rows = [
        (
            PART_NAMES[role],
            show_count(plan.parameters[role.value]),
            f"{plan.parameters[role.value] / plan.total_parameters:.1%}",
            entry.stored_as(" and "),
        )
        for role, entry in role_sums(plan).items()
    ]
    return Table(head=("part", "parameters", "share", "stored as"), rows=rows)


def _spared(plan: Plan) -> dict[str, list[int]]:
    """Layers that the user has excluded, by part."""
    found: dict[str, list[int]] = {}
    for layer, role in sorted({unit for each in plan.exclusions for unit in each.units}):
        found.setdefault(PART_NAMES[role], []).append(layer)
    return found


def _source_table(record: Mapping[str, Any]) -> Table:
    rows = [
        (
            str(source.get("name")),
            str(source.get("kind")),
            f"{source.get('documents', 0):,}",
            f"{source.get('tokens', 0):,}",
            str(source.get("digest"))[:16],
        )
        for source in _sources(record)
    ]
    return Table(head=("data", "kind", "documents", "tokens", "digest"), rows=rows)


def _sizes(plan: Plan) -> Table:
    bits = 8 * plan.source_nbytes / plan.total_parameters
    rows = [
        ("source", show_bytes(plan.source_nbytes), f"{bits:.2f}"),
        ("this checkpoint", show_bytes(plan.tensor_nbytes), f"{plan.bits_per_weight:.2f}"),
    ]
    return Table(head=("", "tensors", "bits a weight"), rows=rows)
