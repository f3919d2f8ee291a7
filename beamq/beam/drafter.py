"""The DFlash2 drafter of a Beam: its config, and the names and shapes of its tensors.

In: the parsed config.json of a drafter's folder. Out: what is wrong with it, or a `DrafterConfig`.

A drafter is a small model in a folder of its own. It proposes a block of tokens from hidden states
of the Beam that it was trained for, its target, and uses the target's embeddings and head. Names,
shapes and keys are those of the classes in vLLM 0.33.0 (`vllm/models/beam/nvidia/dflash2.py`) and
SGLang 0.5.23 (`sglang/srt/models/dflash.py`). Neither engine can load a quantized one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from beamq.beam.config import MAX_LAYERS
from beamq.errors import ConfigError, shown_value
from beamq.units import short_repr

BF16_BYTES = 2
ENGINES = ("vLLM", "SGLang")
_WHOLE = """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    vocab_size sliding_window max_position_embeddings
"""
_DRAFT_WHOLE = "conv_kernel_size conv_group_size selector_rank selector_top_k"
_WHAT_WHOLE = f"a whole number from 1 to {1 << 31}"


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """A key of config.json that is wrong, and the engines that it stops. None of them: the key
    describes the drafter, and neither class reads it while it loads."""

    key: str
    detail: str
    engines: tuple[str, ...] = ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """A drafter's dimensions; `from_dict` raises `ConfigError` where `config_faults` finds any."""

    __repr__ = short_repr

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sliding_window: int
    block_size: int | None
    target_layer_ids: tuple[int, ...]
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Raises `ConfigError` with the first key that keeps the shapes from being known."""
        for fault in config_faults(raw):
            if fault.key in _SIZES or fault.key in _DRAFT_SIZES:
                raise ConfigError(f"config.json: {fault.key} {fault.detail}")
        draft = raw["dflash_config"]
        block = raw.get("block_size")
        return cls(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            vocab_size=raw["vocab_size"],
            sliding_window=raw["sliding_window"],
            block_size=block if _is_whole(block) else None,
            target_layer_ids=tuple(draft["target_layer_ids"]),
            conv_kernel_size=draft["conv_kernel_size"],
            conv_group_size=draft["conv_group_size"],
            selector_rank=draft["selector_rank"],
        )

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, shape) of every tensor: 15 for each layer, and 6."""
        h, width = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        taps, groups = self.conv_kernel_size, self.hidden_size // self.conv_group_size
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}"
            for part, shape in (("q", (q, h)), ("k", (kv, h)), ("v", (kv, h)), ("o", (h, q))):
                yield f"{prefix}.self_attn.{part}_proj.weight", shape
            for part in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{part}.weight", (self.head_dim,)
            for part, shape in (("gate", (width, h)), ("up", (width, h)), ("down", (h, width))):
                yield f"{prefix}.mlp.{part}_proj.weight", shape
            for part in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}.{part}.weight", (h,)
            for part in ("attention_conv", "mlp_conv"):
                yield f"{prefix}.{part}.base_kernel", (2, taps, h)
                yield f"{prefix}.{part}.kernel_projection.weight", (2 * taps * groups, h)
        yield "fc.weight", (h, h * len(self.target_layer_ids))
        yield "hidden_norm.weight", (h,)
        yield "norm.weight", (h,)
        for side in ("predecessor", "successor"):
            yield f"candidate_selector.{side}_codebook", (self.vocab_size, self.selector_rank)
        yield "candidate_selector.hidden_projection.weight", (self.selector_rank, h)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in BF16."""
        return BF16_BYTES * sum(math.prod(shape) for _, shape in self.tensors())

    def kv_cache_nbytes(self, context: int) -> int:
        """KV cache in BF16 of one sequence of `context` tokens: every layer keeps its window."""
        token = 2 * self.num_kv_heads * self.head_dim * BF16_BYTES
        return self.num_layers * token * min(self.sliding_window, context)


_SIZES = {*_WHOLE.split(), "dflash_config"}
_DRAFT_SIZES = {
    f"dflash_config.{key}"
    for key in (*_DRAFT_WHOLE.split(), "target_layer_ids")
}  # fmt: skip


def config_faults(raw: Mapping[str, Any]) -> Iterator[ConfigFault]:
    """Every key that is missing, mistyped or contradictory, or that an engine asserts otherwise.

    Of `target_layer_ids` only the kind is looked at, see `layer_id_faults`.
    """
    for key in _WHOLE.split():
        high = MAX_LAYERS if key == "num_hidden_layers" else 1 << 31
        if not _is_whole(raw.get(key), high):
            yield _wrong(raw, key, _WHAT_WHOLE.replace(str(1 << 31), str(high)))
    if not _is_whole(raw.get("block_size")):
        yield _wrong(raw, "block_size", _WHAT_WHOLE, engines=())
    if not _is_number(raw.get("rms_norm_eps")):
        yield _wrong(raw, "rms_norm_eps", "a positive number")
    if not isinstance(raw.get("rope_parameters"), dict):
        yield _wrong(raw, "rope_parameters", "an object")
    draft = raw.get("dflash_config")
    if not isinstance(draft, dict):
        yield _wrong(raw, "dflash_config", "an object")
        draft = {}
    else:
        yield from _draft_faults(draft, raw.get("vocab_size"))
    h, group = raw.get("hidden_size"), draft.get("conv_group_size")
    if _is_whole(h) and _is_whole(group) and h % group:
        yield ConfigFault(
            "dflash_config.conv_group_size", f"is {group}, expected a divisor of hidden_size ({h})"
        )
    heads, shared = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if _is_whole(heads) and _is_whole(shared) and heads % shared:
        yield ConfigFault(
            "num_attention_heads", f"is {heads}, expected a multiple of {shared}, the KV heads"
        )


def _draft_faults(draft: Mapping[str, Any], vocab: object) -> Iterator[ConfigFault]:
    """What is wrong in `dflash_config`."""
    inside = "dflash_config."
    for key in _DRAFT_WHOLE.split():
        if not _is_whole(draft.get(key)):
            yield _wrong(draft, key, _WHAT_WHOLE, inside)
    ids = draft.get("target_layer_ids")
    plain = isinstance(ids, list) and 0 < len(ids) <= MAX_LAYERS
    if not plain or not all(type(each) is int for each in ids or ()):
        yield _wrong(draft, "target_layer_ids", "a list of whole numbers", inside)
    mask, high = draft.get("mask_token_id"), vocab if _is_whole(vocab) else 1 << 31
    if type(mask) is not int or not 0 <= mask < high:
        wanted = f"a token below vocab_size ({high})"
        yield _wrong(draft, "mask_token_id", wanted, inside, engines=("vLLM",))
    if not _is_number(draft.get("final_logit_softcapping")):
        key = "final_logit_softcapping"
        yield _wrong(draft, key, "a positive number", inside, engines=("vLLM",))


def attention_faults(raw: Mapping[str, Any]) -> Iterator[ConfigFault]:
    """What vLLM asserts of each layer: sliding attention, not causal."""
    layers, kinds = raw.get("num_hidden_layers"), raw.get("layer_types")
    if not isinstance(kinds, list) or not kinds or set(map(str, kinds)) != {"sliding_attention"}:
        yield _wrong(raw, "layer_types", "sliding_attention for every layer", engines=("vLLM",))
    elif _is_whole(layers, MAX_LAYERS) and len(kinds) != layers:
        detail = f"has {len(kinds)} entries, expected {layers}, one for each layer"
        yield ConfigFault("layer_types", detail, ("vLLM",))
    if raw.get("is_causal") is not False:
        yield _wrong(raw, "is_causal", "false", engines=("vLLM",))


def layer_id_faults(ids: object) -> Iterator[ConfigFault]:
    """What SGLang demands of `target_layer_ids`: ascending, each once, from 0 on."""
    key = "dflash_config.target_layer_ids"
    if isinstance(ids, list) and all(type(each) is int for each in ids):
        if ids != sorted(set(ids)):
            detail = f"is {shown_value(ids)}, expected ascending numbers, each once"
            yield ConfigFault(key, detail, ("SGLang",))
        if min(ids, default=0) < 0:
            yield ConfigFault(key, f"is {shown_value(ids)}, expected layers from 0 on")


def _wrong(
    where: Mapping[str, Any],
    key: str,
    expected: str,
    inside: str = "",
    engines: tuple[str, ...] = ENGINES,
) -> ConfigFault:
    found = f"is {shown_value(where[key])}" if key in where else "is missing"
    return ConfigFault(f"{inside}{key}", f"{found}, expected {expected}", engines)


def _is_whole(value: object, high: int = 1 << 31) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= high


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < 1e30
