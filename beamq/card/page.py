"""The model card (`README.md` of an output): Hub metadata and facts, each taken from the run.

In: the plan, the origin of the source, the record of the input scales. Out: Markdown with YAML
front matter. No figure or claim is typed by hand: formats, shares and sizes come from the plan's
jobs, calibration from the manifest's own record, commands from `card.serving`. Paths of this
machine never appear.

The section between two markers is for the comparison with the source, which is measured later and
put there by `card_with_comparison`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from beamq.card.front import Origin, hub_metadata
from beamq.card.serving import serving_section
from beamq.errors import CheckpointError
from beamq.plan import Plan
from beamq.roles import PRECISE_FP32, Role
from beamq.shards import write_file
from beamq.sizes import show_bytes, show_count
from beamq.version import __version__

FORMAT_NAMES = {"nvfp4": "NVFP4", "fp8": "FP8"}
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
    Role.EXTRA: "tensors that are not Beam's",
}
_FORMAT_TEXTS = {
    "nvfp4": "NVFP4 weights and activations (4-bit values, an FP8 scale for every 16, ModelOpt's"
    " layout)",
    "fp8": "FP8 weights (E4M3, one FP32 scale a row) and activations (scaled per token when"
    " served), compressed-tensors' layout",
}
_SCALES_TEXTS = {
    "max": "from the largest value of each block (`max`)",
    "sweep": "for each block the stored scale near that of its largest value which gives the least"
    " squared error (`sweep`)",
}
_METHOD_TEXTS = {
    None: [],
    "gptq": ["", "Experts: rounded by GPTQ with the activations of the calibration text."],
    "second-moment": ["", "Experts: errors weighed by the second moments of calibrated inputs."],
}
COMPARISON_BEGIN = "<!-- beamq: comparison -->"
COMPARISON_END = "<!-- beamq: end of comparison -->"
_COMPARISON = re.compile(f"{COMPARISON_BEGIN}.*?{COMPARISON_END}", re.DOTALL)
_NOT_COMPARED = "Not measured yet."


def model_card(plan: Plan, origin: Origin, input_scales: Mapping[str, Any]) -> str:
    """The card as Markdown with YAML front matter."""
    import yaml  # only where a card is written

    front = yaml.safe_dump(
        hub_metadata(plan, origin, input_scales), sort_keys=False, allow_unicode=True
    )
    sections = [
        _introduction(plan, origin),
        _parts_section(plan),
        _calibration_section(plan, input_scales),
        _size_section(plan),
        _comparison_section(_NOT_COMPARED),
        serving_section(plan),
        _provenance_section(plan, origin),
    ]
    return f"---\n{front}---\n\n" + "\n".join(section for section in sections if section)


def card_with_comparison(folder: Path, table: str) -> None:
    """Put a comparison's Markdown into the card of a folder, in place of an earlier one.

    A card without the place for it (somebody's own) gets it at its end. Raises `CheckpointError`
    if there is no card.
    """
    path = folder / "README.md"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise CheckpointError(f"{path}: no card to write the comparison into ({fault})") from None
    section = _comparison_section(table)
    block = section[section.index(COMPARISON_BEGIN) :].rstrip("\n")
    if _COMPARISON.search(text):
        text = _COMPARISON.sub(lambda _: block, text, count=1)
    else:
        text = f"{text.rstrip()}\n\n{section}"
    write_file(path, text.encode(), resumable=False)


def _comparison_section(content: str) -> str:
    return (
        f"## Comparison with the source\n\n{COMPARISON_BEGIN}\n{content.strip()}\n"
        f"{COMPARISON_END}\n"
    )


def _introduction(plan: Plan, origin: Origin) -> str:
    name = FORMAT_NAMES[plan.recipe.format]
    if origin.base_model is None:
        return f"# Beam in {name}\n\nA Beam in {_FORMAT_TEXTS[plan.recipe.format]}.\n"
    base = origin.base_model
    return (
        f"# {base.partition('/')[2]} in {name}\n\n[{base}](https://huggingface.co/{base}) in"
        f" {_FORMAT_TEXTS[plan.recipe.format]}.\n"
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text of strangers: one line, no table or HTML of its own."""
    flat = " ".join(text.split())
    return flat.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _parts_section(plan: Plan) -> str:
    rows = [
        (
            PART_NAMES[role],
            show_count(plan.parameters[role.value]),
            f"{plan.parameters[role.value] / plan.total_parameters:.1%}",
            stored,
        )
        for role, stored in _stored_as(plan)
    ]
    share = plan.quantized_parameters / plan.total_parameters
    lines = [
        "## What is quantized",
        "",
        f"Recipe `{plan.recipe.name}`: {_cell(plan.recipe.summary).rstrip('.')}. {share:.1%} of the"
        " weights are quantized.",
        "",
        _table(("part", "parameters", "share", "stored as"), rows),
    ]
    if plan.recipe.format == "nvfp4":
        lines += ["", f"Block scales: {_SCALES_TEXTS[plan.recipe.scales]}."]
        lines += _METHOD_TEXTS[plan.recipe.expert_method]
    spared = sorted({unit for exclusion in plan.exclusions for unit in exclusion.units})
    for role in dict.fromkeys(role for _, role in spared):
        layers = ", ".join(str(layer) for layer, other in spared if other is role)
        lines += ["", f"Left precise on request: {PART_NAMES[role]} of layers {layers}."]
    return "\n".join(lines) + "\n"


def _stored_as(plan: Plan) -> Iterator[tuple[Role, str]]:
    """Every role the model has, and the formats its tensors are stored in."""
    found: dict[Role, dict[str, None]] = {}
    for job in plan.jobs:
        for member in job.members:
            role = member.role.role
            if member.source.spec.name == "lm_head.weight":
                role = Role.HEAD
            if job.kind in FORMAT_NAMES:
                kind = FORMAT_NAMES[job.kind]
            elif role is Role.EXTRA:
                kind = "as in the source"
            else:
                kind = "FP32" if role in PRECISE_FP32 else "BF16"
            found.setdefault(role, {})[kind] = None
    for role in Role:
        if role in found:
            yield role, " and ".join(sorted(found[role], reverse=True))


def _calibration_section(plan: Plan, record: Mapping[str, Any]) -> str:
    if plan.recipe.format == "fp8":
        return ""
    lines = ["## Calibration", "", f"Input scales: {_cell(str(record.get('description')))}."]
    rows = [
        (
            str(source.get("name")),
            str(source.get("kind")),
            f"{source.get('documents', 0):,}",
            f"{source.get('tokens', 0):,}",
            str(source.get("digest"))[:16],
        )
        for data in record.get("data") or ()
        for source in data.get("sources") or ()
    ]
    for data in record.get("data") or ():
        lines += [
            "",
            f"{data.get('samples')} rows of {data.get('sequence_length')} tokens, seed"
            f" {data.get('seed')}, activations in {data.get('activations', 'unknown')}.",
        ]
    if rows:
        lines += ["", _table(("data", "kind", "documents", "tokens", "digest"), rows)]
    lines += _coverage_lines(record)
    return "\n".join(lines) + "\n"


def _coverage_lines(record: Mapping[str, Any]) -> list[str]:
    reached = record.get("coverage")
    if not isinstance(reached, Mapping):
        return []
    lines = [
        "",
        f"{reached.get('calibrated', 0):,} of {reached.get('experts', 0):,} experts saw tokens"
        f" ({reached.get('percent', 0.0):.1f}%); the others have the scale of their layer.",
    ]
    layers = reached.get("layers") or ()
    if layers:
        least = min(layers, key=lambda layer: layer["tokens_min"])
        lines += [
            f"Least used: an expert of layer {least['layer']} with {least['tokens_min']:,} tokens"
            f" (median there {least['tokens_median']:,.0f})."
        ]
    if dropped := record.get("dropped_tokens"):
        lines += [f"{dropped:,} tokens were left out because activations were not finite."]
    return lines


def _size_section(plan: Plan) -> str:
    rows = [
        ("source", show_bytes(plan.source_nbytes), _bits(plan, plan.source_nbytes)),
        ("this", show_bytes(plan.tensor_nbytes), f"{plan.bits_per_weight:.2f}"),
    ]
    return "## Size\n\n" + _table(("", "tensors", "bits a weight"), rows) + "\n"


def _bits(plan: Plan, nbytes: int) -> str:
    return f"{8 * nbytes / plan.total_parameters:.2f}"


def _provenance_section(plan: Plan, origin: Origin) -> str:
    lines = ["## Provenance", "", f"Made with beamq {__version__}."]
    if origin.repo is not None and origin.commit is not None:
        lines += [f"Source: {origin.repo} at commit `{origin.commit}`."]
    licence = origin.front.get("license")
    lines += [
        "The licence is the source's." if licence else "The source's card states no licence.",
        "`beamq.json` holds the recipe, versions, digests and the checksum of every tensor;"
        " `beamq verify` checks them.",
    ]
    if any(companion.target == "README.source.md" for companion in plan.companions):
        lines += ["The source's own card is kept as `README.source.md`."]
    lines += [f"Note: {_cell(note)}." for note in plan.notes]
    return "\n".join(lines) + "\n"
