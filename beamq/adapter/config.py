"""`adapter_config.json`: whether an adapter can be merged, and the scaling of each of its updates.

In: the parsed JSON, possibly from a stranger. Out: an `AdapterConfig`.

The config never says which weights are adapted; the names and shapes of the tensors do. It is read
for scaling, for the layout of packed experts, and for kinds of adapters that are not `W + s B A`:
these are refused, and so is any key that is not known here and asks for something.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamq import patterns
from beamq.errors import AdapterError, shown_value
from beamq.io.files import read_json_object

CONFIG_NAME = "adapter_config.json"
PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica", "velora")
"""`init_lora_weights` that leaves the base as it is. Others (pissa, olora, corda, loftq, lora_ga)
change the base in training, so the adapter alone does not give the trained model back."""

OTHER_MATHEMATICS = {
    "alora_invocation_tokens": "an activated LoRA, which acts on some tokens only",
    "arrow_config": "an Arrow router between adapters",
    "kasa_config": "KaSA, which changes the base",
    "use_qalora": "QA-LoRA, which pools its inputs",
    "use_bdlora": "a block-diagonal LoRA",
    "monteclora_config": "MonteCLoRA, which is random",
    "lora_bias": "a bias besides B A",
    "layer_replication": "layers that the model does not have",
}
_HARMLESS = """
    auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config
    exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config
    lora_dropout lora_ga_config megatron_config megatron_core modules_to_save peft_version
    qalora_group_size revision runtime_config target_modules task_type velora_config
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys of training or loading that change nothing in what is merged. `bias` and `fan_in_fan_out`
have no effect on a Beam, whose linears have no bias and one orientation."""
_READ = """
    peft_type init_lora_weights r lora_alpha rank_pattern alpha_pattern use_rslora use_dora
    target_parameters trainable_token_indices
"""
READ = frozenset(_READ.split())
MAX_RANK = 1_000_000
MAX_ALPHA = 1e20
"""No trainer writes ranks or alphas beyond these; with them every scaling is finite in FP32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What merging needs of the config. `patterns` map regular expressions to ranks and alphas."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, float]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    target_parameters: tuple[str, ...]
    trained_tokens: Mapping[str, tuple[int, ...]]
    peft_version: str | None
    base_model: str | None

    def expected_rank(self, name: str) -> int:
        """The rank of the update of `name` (see `scaled_name`)."""
        return int(_first(self.rank_pattern, name, self.rank))

    def scaling(self, name: str) -> float:
        """s of `W + s B A`: alpha / r, or alpha / sqrt(r) with rank-stabilised scaling."""
        rank = self.expected_rank(name)
        alpha = _first(self.alpha_pattern, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def scaled_name(self, module: str) -> str:
        """What the patterns are matched with: a linear's module, or its parameter where the trainer
        reached it through `target_parameters`."""
        name = f"{module}.weight"
        found = any(f".{name}".endswith(f".{entry}") for entry in self.target_parameters)
        return name if found else module

    def ambiguous(self, name: str) -> tuple[str, str] | None:
        """Two keys of a pattern that match `name` with different values. PEFT trains with the
        first in the user's order, and saves the keys sorted."""
        for pattern in (self.rank_pattern, self.alpha_pattern):
            found = list(_matching(pattern, name))
            for key in found[1:]:
                if pattern[key] != pattern[found[0]]:
                    return found[0], key
        return None


def read_adapter_config(path: Path) -> AdapterConfig:
    """Read and check the file. Raises `AdapterError`."""
    raw = read_json_object(path, AdapterError)
    _refuse_others(raw, path)
    _check_number("r", raw.get("r"), path, "r")
    _check_number("lora_alpha", raw.get("lora_alpha"), path, "lora_alpha")
    base, version = raw.get("base_model_name_or_path"), raw.get("peft_version")
    return AdapterConfig(
        rank=int(raw["r"]),
        alpha=float(raw["lora_alpha"]),
        rank_pattern=_pattern(raw, "rank_pattern", path),
        alpha_pattern=_pattern(raw, "alpha_pattern", path),
        use_rslora=_flag(raw, "use_rslora", path),
        use_dora=_flag(raw, "use_dora", path),
        target_parameters=_texts(raw, "target_parameters", path),
        trained_tokens=_tokens(raw, path),
        peft_version=version if isinstance(version, str) and version else None,
        base_model=base if isinstance(base, str) and base else None,
    )


def _refuse_others(raw: Mapping[str, Any], path: Path) -> None:
    """Raise `AdapterError` for an adapter that is not `W + s B A` of an unchanged base."""
    if raw.get("peft_type") != "LORA":
        raise _fail(path, "peft_type", raw.get("peft_type"), "LORA; only LoRA adapters are merged")
    init = raw.get("init_lora_weights", True)
    if init is not None and not any(init is each or init == each for each in PLAIN_INITS):
        raise AdapterError(
            f"{path}: init_lora_weights is {shown_value(init)}, which changes the base in training,"
            " so these tensors alone do not give the model back; convert the adapter to a plain"
            " LoRA first (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for key, what in OTHER_MATHEMATICS.items():
        if raw.get(key) not in (None, False, [], {}):
            raise AdapterError(f"{path}: {key} is set: {what}; it cannot be merged into weights")
    for key, value in raw.items():
        known = key in HARMLESS or key in READ or key in OTHER_MATHEMATICS
        if not known and value not in (None, False, [], {}, "", 0):
            raise _fail(path, key, value, "a key of PEFT 0.18 to 0.21; what it asks for is unknown")


def _pattern(raw: Mapping[str, Any], key: str, path: Path) -> dict[str, float]:
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        raise _fail(path, key, found, "an object of regular expressions and numbers")
    for expression, value in found.items():
        _check_number(key, value, path, f"{key}[{expression[:60]!r}]")
        patterns.matches(expression, "", f"{path}: {key} {expression[:60]!r}", AdapterError)
    return {expression: float(value) for expression, value in found.items()}


def _matching(pattern: Mapping[str, float], name: str) -> Iterator[str]:
    """Keys that match `name` from any of its dots on, in the file's order, as in PEFT."""
    parts = name.split(".")
    for key in pattern:
        if any(
            patterns.matches(key, ".".join(parts[first:]), key, AdapterError)
            for first in range(len(parts))
        ):
            yield key


def _first(pattern: Mapping[str, float], name: str, default: float) -> float:
    return next((pattern[key] for key in _matching(pattern, name)), default)


def _flag(raw: Mapping[str, Any], key: str, path: Path) -> bool:
    value = raw.get(key)
    if value not in (None, True, False):
        raise _fail(path, key, value, "true or false")
    return bool(value)


def _texts(raw: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise _fail(path, key, value, "a list of names")
    return tuple(value)


def _tokens(raw: Mapping[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """`trainable_token_indices`: the rows that were trained, by the last part of the module."""
    key = "trainable_token_indices"
    value = raw.get(key) or {}
    found = {"embed_tokens": value} if isinstance(value, list) else value
    if not isinstance(found, dict) or not all(
        isinstance(rows, list) and all(type(row) is int and row >= 0 for row in rows)
        for rows in found.values()
    ):
        raise _fail(path, key, value, "a list of token ids, or an object of such lists")
    return {name.rpartition(".")[2]: tuple(rows) for name, rows in found.items()}


def _check_number(key: str, value: Any, path: Path, where: str) -> None:
    """Raise `AdapterError` unless a rank is a whole number and an alpha one that FP32 can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key in ("r", "rank_pattern"):
        if not (number and 1 <= value <= MAX_RANK and value == int(value)):
            raise _fail(path, where, value, f"a whole number from 1 to {MAX_RANK:,}")
    elif not (number and 1 / MAX_ALPHA <= value <= MAX_ALPHA):
        raise _fail(path, where, value, f"a number from {1 / MAX_ALPHA:g} to {MAX_ALPHA:g}")


def _fail(path: Path, key: str, value: Any, expected: str) -> AdapterError:
    return AdapterError(f"{path}: {key} is {shown_value(value)}, expected {expected}")
