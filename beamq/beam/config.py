"""Beam's `config.json`, read strictly: the numbers that every expected shape follows from.

In: the parsed JSON of a checkpoint's `config.json`. Out: a frozen `BeamConfig`.

Only what beamq needs is kept. The file itself is copied to an output unchanged, with
`quantization_config` added, because each engine has its own config class and reads further keys.
Layer kinds come from `layer_types` and `mlp_layer_types`, never from a pattern ("the first three
are dense") that happens to hold for one checkpoint.

No key of the architecture has a default here, because engines fill a gap with defaults of their
own, and would then run another model. Keys that ask for what no Beam has (`FOREIGN`) are refused
unless they ask for nothing; what is in neither `FOREIGN` nor `HARMLESS` is for a note
(`unknown_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from beamq.errors import ConfigError, counted, shown_value
from beamq.io.files import read_json_object
from beamq.units import short_repr

MODEL_TYPE = "beam"
DRAFTER_ARCHITECTURE = "DFlash2BeamDraftModel"
MAX_LAYERS = 4096
MAX_TENSORS = 1 << 20  # 27 times the 501B model's; a config must not fill memory
LAYER_KINDS = ("sliding_attention", "full_attention")
MLP_KINDS = ("dense", "sparse")
_MISSING = object()

_LIKE_BEAM: tuple[tuple[tuple[object, ...], str], ...] = (
    (("silu", "swish"), "hidden_act hidden_activation activation_function"),
    (("sigmoid",), "scoring_func score_func score_function"),
    (("noaux_tc",), "topk_method"),
    ((True,), "use_qk_norm qk_norm use_sliding_window"),
    ((1,), "decoder_sparse_step moe_layer_freq partial_rotary_factor logit_scale logits_scaling"),
    ((1,), "embedding_multiplier residual_multiplier"),
    ((), "attention_bias qkv_bias use_qkv_bias use_bias mlp_bias mlp_only_layers zero_expert_num"),
    ((), "n_shared_experts num_shared_experts shared_expert_intermediate_size"),
    ((), "moe_shared_expert_intermediate_size moe_layer_start_index swiglu_limit"),
    ((), "rope_scaling rope_interleave no_rope_layers no_rope_layer_interval"),
    ((), "max_window_layers sliding_window_pattern attention_chunk_size is_encoder_decoder"),
    ((), "attn_logit_softcapping query_pre_attn_scalar attention_multiplier"),
    ((), "q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"),
    ((), "use_bidirectional_attention add_cross_attention"),
)
FOREIGN = {key: values for values, keys in _LIKE_BEAM for key in keys.split()}
"""Keys of other models that would change the forward pass, and the values that ask for what Beam
does anyway. Null, and where no value is listed false, 0 and [], ask for nothing."""

_OTHER_NAMES = """
    num_hidden_layers num_attention_heads num_key_value_heads num_experts_per_tok rope_parameters
    rope_theta n_routed_experts num_local_experts first_k_dense_replace
"""
_HARMLESS = """
    architectures model_type dtype torch_dtype quantization_config transformers_version
    attention_dropout initializer_range use_cache output_router_logits pad_token_id bos_token_id
    eos_token_id sep_token_id decoder_start_token_id router_aux_loss_coef aux_loss_alpha seq_aux
    _name_or_path name_or_path _attn_implementation _experts_implementation cache_implementation
    chunk_size_feed_forward finetuning_task id2label label2id num_nextn_predict_layers
    output_attentions output_hidden_states pretraining_tp problem_type return_dict
    task_specific_params unsloth_version ep_size
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys that change nothing in a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamConfig:
    """Beam's dimensions. `from_dict` raises `ConfigError` where they contradict each other."""

    __repr__ = short_repr

    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    sliding_window: int | None  # null: there are full layers only
    rms_norm_eps: float
    final_logit_softcapping: float | None  # null: logits as they are
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    dtype: str

    @property
    def q_dim(self) -> int:
        """Rows of q_proj and gate_proj: query heads times head size."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Rows of k_proj and of v_proj."""
        return self.num_kv_heads * self.head_dim

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the mixture-of-experts layers."""
        return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "sparse")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of the layers with one dense SwiGLU MLP."""
        return tuple(i for i, kind in enumerate(self.mlp_layer_types) if kind == "dense")

    @property
    def tensor_count(self) -> int:
        """Tensors that a checkpoint of this config holds, experts one by one; see `roles`."""
        per_sparse = 2 + 3 * self.num_experts
        layers = 12 * self.num_layers + 3 * len(self.dense_layers)
        return layers + per_sparse * len(self.sparse_layers) + 3 - self.tie_word_embeddings

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers with full (global) attention."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> BeamConfig:
        """Read a parsed `config.json`; a missing, mistyped or contradictory key is an error, and so
        is one that asks for what no Beam has."""
        if is_drafter(config):
            raise ConfigError(
                f"config.json: describes a DFlash2 drafter ({DRAFTER_ARCHITECTURE}), not a Beam."
                " Here it is neither converted nor run, because no engine loads a quantized one."
                " Serve it as it is, beside its target, and check it with `beamq verify DRAFTER"
                " --target BEAM`"
            )
        if config.get("model_type") != MODEL_TYPE:
            raise ConfigError(
                f"config.json: model_type is {config.get('model_type')!r}, expected"
                f" {MODEL_TYPE!r}; beamq converts Beam checkpoints only"
            )
        layers = _integer(config, "num_hidden_layers", high=MAX_LAYERS)
        layer_types = _kinds(config, "layer_types", LAYER_KINDS, layers)
        sliding = "sliding_attention" in layer_types
        built = cls(
            hidden_size=_integer(config, "hidden_size"),
            intermediate_size=_integer(config, "intermediate_size"),
            moe_intermediate_size=_integer(config, "moe_intermediate_size"),
            num_layers=layers,
            vocab_size=_integer(config, "vocab_size"),
            num_heads=_integer(config, "num_attention_heads"),
            num_kv_heads=_integer(config, "num_key_value_heads"),
            head_dim=_integer(config, "head_dim"),
            num_experts=_integer(config, "num_experts", high=1 << 16),
            top_k=_integer(config, "num_experts_per_tok"),
            n_group=_integer(config, "n_group"),
            topk_group=_integer(config, "topk_group"),
            routed_scaling_factor=_number(config, "routed_scaling_factor"),
            norm_topk_prob=_flag(config, "norm_topk_prob"),
            sliding_window=(
                _integer(config, "sliding_window")
                if sliding or config.get("sliding_window", _MISSING) is not None
                else None
            ),
            rms_norm_eps=_number(config, "rms_norm_eps"),
            final_logit_softcapping=(
                None
                if config.get("final_logit_softcapping", _MISSING) is None
                else _number(config, "final_logit_softcapping")
            ),
            rope_theta=_rope_theta(config, layer_types),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            max_position_embeddings=_integer(config, "max_position_embeddings"),
            layer_types=layer_types,
            mlp_layer_types=_kinds(config, "mlp_layer_types", MLP_KINDS, layers),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        )
        _check_relations(built)
        _check_foreign(config, built)
        return built


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json describes a DFlash2 drafter (`beam.drafter`)."""
    named = config.get("architectures")
    return isinstance(named, list) and DRAFTER_ARCHITECTURE in named


def unknown_keys(config: dict[str, Any]) -> list[str]:
    """Keys of which nothing is known: neither Beam's nor another model's, nor harmless."""
    known = {*BeamConfig.__annotations__, *_OTHER_NAMES.split(), *FOREIGN, *HARMLESS}
    return sorted(config.keys() - known)


def read_config(folder: Path) -> dict[str, Any]:
    """Parse `folder/config.json`. Raises `ConfigError` if absent, oversized or not an object."""
    return read_json_object(folder / "config.json", ConfigError)


def _fail(key: str, got: object, expected: str) -> ConfigError:
    if got is _MISSING:
        return ConfigError(
            f"config.json: {key} is missing, expected {expected}; restore it from the original,"
            " because engines fill a gap with defaults of their own"
        )
    return ConfigError(f"config.json: {key} is {shown_value(got)}, expected {expected}")


def _integer(config: dict[str, Any], key: str, *, high: int = 1 << 31) -> int:
    value = config.get(key, _MISSING)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise _fail(key, value, f"a whole number from 1 to {high}")
    return value


def _number(config: dict[str, Any], key: str) -> float:
    value = config.get(key.rpartition(".")[2], _MISSING)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise _fail(key, value, "a positive number")
    return float(value)


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, _MISSING)
    if not isinstance(value, bool):
        raise _fail(key, value, "true or false")
    return value


def _kinds(
    config: dict[str, Any], key: str, allowed: tuple[str, ...], layers: int
) -> tuple[str, ...]:
    value = config.get(key, _MISSING)
    if not isinstance(value, list):
        raise _fail(key, value, f"a list of {layers}, one for each layer")
    if len(value) != layers:
        raise ConfigError(
            f"config.json: {key} has {counted(len(value), 'entry', 'entries')}, expected {layers},"
            " one for each layer"
        )
    for position, kind in enumerate(value):
        if kind not in allowed:
            raise _fail(f"{key}[{position}]", kind, " or ".join(allowed))
    return tuple(value)


def _rope_theta(config: dict[str, Any], layer_types: tuple[str, ...]) -> float:
    """RoPE base of the sliding layers; full-attention layers have no position encoding."""
    name = "rope_parameters"
    rope = config.get(name, _MISSING)
    if not isinstance(rope, dict):
        raise _fail(name, rope, "an object with one entry for each layer kind")
    full = rope.get("full_attention", _MISSING if "full_attention" in layer_types else None)
    if full is not None:
        raise _fail(f"{name}.full_attention", full, "null (NoPE)")
    sliding = rope.get("sliding_attention", _MISSING)
    name += ".sliding_attention"
    if not isinstance(sliding, dict):
        if "sliding_attention" in layer_types:
            raise _fail(name, sliding, "an object with rope_theta")
        return 10_000.0
    for key in sliding.keys() - {"rope_type", "rope_theta"}:
        if not _asks_for_nothing(sliding[key], FOREIGN.get(key, ())):
            raise _fail(f"{name}.{key}", sliding[key], "no such key; a Beam has rope_theta alone")
    if sliding.get("rope_type", "default") != "default":
        raise _fail(f"{name}.rope_type", sliding["rope_type"], "default")
    return _number(sliding, f"{name}.rope_theta")


def _check_relations(config: BeamConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise _fail(
            "num_attention_heads",
            config.num_heads,
            f"a multiple of num_key_value_heads ({config.num_kv_heads})",
        )
    if config.top_k > config.num_experts:
        raise _fail("num_experts_per_tok", config.top_k, f"at most {config.num_experts} experts")
    if config.num_experts % config.n_group:
        raise _fail("n_group", config.n_group, f"a divisor of num_experts ({config.num_experts})")
    if config.topk_group > config.n_group:
        raise _fail("topk_group", config.topk_group, f"at most n_group ({config.n_group})")
    if config.head_dim % 2:
        raise _fail("head_dim", config.head_dim, "an even number (RoPE turns pairs)")
    if config.tensor_count > MAX_TENSORS:
        raise _fail(
            "num_experts",
            config.num_experts,
            f"fewer: with {config.num_layers} layers these are {config.tensor_count} tensors,"
            f" beyond {MAX_TENSORS}",
        )


def _check_foreign(config: dict[str, Any], built: BeamConfig) -> None:
    """Refuse what would be another model: calibration and comparisons would run Beam's."""
    dense = len(list(takewhile(lambda kind: kind == "dense", built.mlp_layer_types)))
    equal = {
        "rope_theta": built.rope_theta,
        "n_routed_experts": built.num_experts,
        "num_local_experts": built.num_experts,
        "first_k_dense_replace": dense,
    }
    allowed = {**FOREIGN, **{key: (value,) for key, value in equal.items()}}
    for key, value in config.items():
        if key in allowed and not _asks_for_nothing(value, allowed[key]):
            same = " or ".join(map(shown_value, allowed[key]))
            raise _fail(
                key,
                value,
                f"{same or 'null or false'}; Beam has nothing else, so is this another's config?",
            )


def _asks_for_nothing(value: object, same: tuple[object, ...]) -> bool:
    """Whether a value is what Beam does anyway. 1 is 1.0 and true here."""
    return value is None or value in same or (not same and not value)
