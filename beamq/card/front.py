"""A card's front matter: what the Hub and its search read (base model, licence, library, tags).

In: where the source came from, its config and its own card. Out: a mapping that is valid Hub
metadata, and `Origin`, what the card's text may say of the source. Never a path of this machine:
a base model is named only if it is an id on the Hub, given by the user, the SOURCE itself, or the
config's `_name_or_path` where that cannot be taken for a folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beamq.checkpoint import HUB_STAMP, Checkpoint
from beamq.errors import CheckpointError, UsageError
from beamq.hub.repo import parse_hub_id
from beamq.plan import Plan
from beamq.roles import Role
from beamq.small_files import parse_yaml, read_small

MAX_CARD_BYTES = 1 << 20
LAYOUT_TAGS = {"nvfp4": "modelopt", "fp8": "compressed-tensors"}
# transformers has no loader for ModelOpt's NVFP4, so its snippet on the Hub would not work.
LIBRARIES = {"nvfp4": "vllm", "fp8": "transformers"}
ENGINE_TAGS = ("vllm", "sglang")
# First parts of a relative path that is spelled like a Hub id.
_FOLDERS = {
    "checkpoint", "checkpoints", "ckpt", "ckpts", "data", "exp", "experiments", "home", "local",
    "logs", "mnt", "model", "models", "out", "output", "outputs", "results", "root", "run", "runs",
    "save", "saved", "scratch", "tmp", "train", "trained", "user", "users", "work", "workspace",
}  # fmt: skip
_STEP = re.compile(r"(checkpoint|ckpt|epoch|global_step|iter|step)[-_]?\d+", re.IGNORECASE)
_LINK = re.compile(r"https?://[^\s]{1,500}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What may be said of the source. `repo` and `commit` are set when it was read from the Hub."""

    base_model: str | None = None
    repo: str | None = None
    commit: str | None = None
    front: Mapping[str, Any] = field(default_factory=dict)

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
    """Look at the source's fingerprint, config and card."""
    repo = commit = None
    if fingerprint.startswith(HUB_STAMP):
        repo, _, commit = fingerprint.removeprefix(HUB_STAMP).partition("@")
    named = source.config.get("_name_or_path")
    if not isinstance(named, str) or could_be_path(named):
        named = None
    return Origin(
        base_model=base_model or repo or named,
        repo=repo,
        commit=commit,
        front=front_matter(source.source.path("README.md"))
        if source.source.has("README.md")
        else {},
    )


def could_be_path(text: str) -> bool:
    """Whether a name may be a folder rather than an id on the Hub."""
    found = parse_hub_id(text)
    if found is None or found.revision is not None:
        return True
    first, _, last = text.partition("/")
    return first.lower() in _FOLDERS or bool(_STEP.search(last)) or Path(text).exists()


def front_matter(card: Path) -> dict[str, Any]:
    """YAML front matter of a card, or nothing if absent or unreadable."""
    try:
        text = read_small(card, CheckpointError, MAX_CARD_BYTES).decode("utf-8")
        parsed = parse_yaml(text[3:].split("\n---", 1)[0]) if text.startswith("---") else None
    except (CheckpointError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def hub_metadata(
    plan: Plan, origin: Origin, input_scales: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Front matter as the Hub defines it; licence and language inherited from the source's card."""
    fmt = plan.recipe.format
    data: dict[str, Any] = {}
    if origin.base_model is not None:
        data["base_model"] = origin.base_model
        data["base_model_relation"] = "quantized"
    data.update(_licence(plan, origin.front))
    if (language := _words(origin.front.get("language"))) is not None:
        data["language"] = language
    data["library_name"] = LIBRARIES[fmt]
    pipeline = origin.front.get("pipeline_tag")
    data["pipeline_tag"] = pipeline if _word(pipeline) else "text-generation"
    engines = ENGINE_TAGS if is_servable(plan) else ()
    data["tags"] = ["beam", fmt, LAYOUT_TAGS[fmt], "beamq", *engines]
    if datasets := calibration_datasets(input_scales or {}):
        data["datasets"] = datasets
    return data


def is_servable(plan: Plan) -> bool:
    """Whether the folder has no tensors besides Beam's, at which the engines would stop."""
    return not plan.parameters[Role.EXTRA.value]


def calibration_datasets(input_scales: Mapping[str, Any]) -> list[str]:
    """Hub ids of the data the input scales were calibrated on."""
    names = [
        source.get("name")
        for record in input_scales.get("data") or ()
        for source in record.get("sources") or ()
        if source.get("kind") == "hub"
    ]
    return sorted({name for name in names if isinstance(name, str)})


def _licence(plan: Plan, front: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (licence := _words(front.get("license"))) is not None:
        found["license"] = licence
    if _word(name := front.get("license_name")):
        found["license_name"] = name
    link = front.get("license_link")
    beside = {companion.target for companion in plan.companions}
    if isinstance(link, str) and (_LINK.fullmatch(link) or link in beside):
        found["license_link"] = link
    return found


def _word(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 100 and "\n" not in value


def _words(value: Any) -> str | list[str] | None:
    """A word or a list of words, as the Hub takes for licence and language."""
    if _word(value):
        return str(value)
    if isinstance(value, list) and value and all(_word(item) for item in value):
        return [str(item) for item in value]
    return None
