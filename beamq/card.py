"""The model card (`README.md` of an output): Hub metadata and facts, each taken from the plan.

No claim here is typed by hand: formats, shares, sizes and calibration come from what was done.
Paths of this machine never appear; a base model is named only by its Hub id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from beamq.plan import Plan
from beamq.roles import Role
from beamq.version import __version__

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_FORMAT_NAMES = {"nvfp4": "NVFP4 (W4A4)", "fp8": "FP8 (W8A8, dynamic)"}
_LAYOUT_NAMES = {"nvfp4": "ModelOpt", "fp8": "compressed-tensors"}
_PART_NAMES = {
    Role.EXPERT: "routed experts",
    Role.DENSE_MLP: "dense MLPs",
    Role.ATTENTION: "attention",
}
MAX_CARD_BYTES = 1 << 20


def model_card(
    plan: Plan, source_config: Mapping[str, Any], source: Path, input_scales: Mapping[str, Any]
) -> str:
    """The card as Markdown with YAML front matter."""
    import yaml  # only where a card is written

    front = yaml.safe_dump(
        hub_metadata(plan, source_config, source), sort_keys=False, allow_unicode=True
    )
    parts = sorted({role for _, role in plan.units}, key=list(_PART_NAMES).index)
    precise = [name for role, name in _PART_NAMES.items() if role not in parts]
    share = plan.quantized_parameters / plan.total_parameters
    rows = [
        (
            "Format",
            f"{_FORMAT_NAMES[plan.recipe.format]}, {_LAYOUT_NAMES[plan.recipe.format]} layout",
        ),
        ("Recipe", f"`{plan.recipe.name}`: {plan.recipe.summary}"),
        ("Quantized", f"{', '.join(_PART_NAMES[part] for part in parts)}: {share:.1%} of weights"),
        ("Kept precise", ", ".join([*precise, "router (FP32), norms, embeddings, head"])),
        ("Size", f"{plan.tensor_nbytes / 1e9:.1f} GB, {plan.bits_per_weight:.2f} bits a weight"),
        ("Source size", f"{plan.source_nbytes / 1e9:.1f} GB"),
        ("KV cache", "FP8 scheme declared" if plan.recipe.kv_cache == "fp8" else "as the engine"),
        ("Made with", f"beamq {__version__}"),
    ]
    if plan.recipe.format == "nvfp4":
        rows.insert(4, ("Input scales", str(input_scales.get("description", "unknown"))))
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows)
    return (
        f"---\n{front}---\n\n# Beam, {_FORMAT_NAMES[plan.recipe.format]}\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        "`beamq.json` holds the recipe, versions, digests and the checksum of every tensor;"
        " `beamq verify` checks them.\n"
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def hub_metadata(plan: Plan, source_config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Front matter as the Hub defines it; licence inherited from the source's card."""
    inherited = source_front_matter(source)
    data: dict[str, Any] = {}
    base = source_config.get("_name_or_path")
    if isinstance(base, str) and _HUB_ID.fullmatch(base):
        data["base_model"] = base
        data["base_model_relation"] = "quantized"
    data["library_name"] = "transformers"
    data["pipeline_tag"] = "text-generation"
    for key in ("license", "license_name", "license_link", "language"):
        if isinstance(inherited.get(key), (str, list)):
            data[key] = inherited[key]
    tags = ["beam", plan.recipe.format, "beamq", "vllm", "sglang"]
    tags.append("modelopt" if plan.recipe.format == "nvfp4" else "compressed-tensors")
    data["tags"] = tags
    return data


def source_front_matter(source: Path) -> dict[str, Any]:
    """YAML front matter of the source's README.md, or nothing if absent or unreadable."""
    import yaml

    try:
        path = source / "README.md"
        if path.stat().st_size > MAX_CARD_BYTES:
            return {}
        text = path.read_text(encoding="utf-8")
        if not text.startswith("---"):
            return {}
        parsed = yaml.safe_load(text[3:].split("\n---", 1)[0])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
