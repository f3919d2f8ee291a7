"""Beam's `config.json`, read strictly: the numbers that every expected shape follows from.

In: the parsed JSON of a checkpoint's `config.json`. Out: a frozen `BeamConfig`.

Only what beamq needs is kept. The file itself is copied to an output unchanged, with
`quantization_config` added, because each engine has its own config class and reads further keys.
Layer kinds come from `layer_types` and `mlp_layer_types`, never from a pattern ("the first three
are dense") that happens to hold for one checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamq.errors import ConfigError, counted, shown_value
from beamq.io.files import read_json_object

MODEL_TYPE = "beam"
MAX_LAYERS = 4096
MAX_TENSORS = 1 << 20  # 27 times the 501B model's; a config must not fill memory
LAYER_KINDS = ("sliding_attention", "full_attention")
MLP_KINDS = ("dense", "sparse")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamConfig:
    """Beam's dimensions. `from_dict` raises `ConfigError` where they contradict each other."""

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
    sliding_window: int
    rms_norm_eps: float
    final_logit_softcapping: float
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
        """Read a parsed `config.json`; a missing, mistyped or contradictory key is an error."""
        if config.get("model_type") != MODEL_TYPE:
            raise ConfigError(
                f"config.json: model_type is {config.get('model_type')!r}, expected"
                f" {MODEL_TYPE!r}; beamq converts Beam checkpoints only"
            )
        layers = _integer(config, "num_hidden_layers", high=MAX_LAYERS)
        layer_types = _kinds(config, "layer_types", LAYER_KINDS, layers)
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
            n_group=_integer(config, "n_group", default=1),
            topk_group=_integer(config, "topk_group", default=1),
            routed_scaling_factor=_number(config, "routed_scaling_factor", 2.5),
            norm_topk_prob=_flag(config, "norm_topk_prob", True),
            sliding_window=_integer(config, "sliding_window"),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            final_logit_softcapping=_number(config, "final_logit_softcapping", 30.0),
            rope_theta=_rope_theta(config, layer_types),
            tie_word_embeddings=_flag(config, "tie_word_embeddings", False),
            max_position_embeddings=_integer(config, "max_position_embeddings", default=1 << 20),
            layer_types=layer_types,
            mlp_layer_types=_kinds(config, "mlp_layer_types", MLP_KINDS, layers),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        )
        _check_relations(built)
        return built


def read_config(folder: Path) -> dict[str, Any]:
    """Parse `folder/config.json`. Raises `ConfigError` if absent, oversized or not an object."""
    return read_json_object(folder / "config.json", ConfigError)


def _fail(key: str, got: object, expected: str) -> ConfigError:
    return ConfigError(f"config.json: {key} is {shown_value(got)}, expected {expected}")


def _integer(
    config: dict[str, Any], key: str, *, default: int | None = None, high: int = 1 << 31
) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise _fail(key, value, f"a whole number from 1 to {high}")
    return value


def _number(config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise _fail(key, value, "a positive number")
    return float(value)


def _flag(config: dict[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise _fail(key, value, "true or false")
    return value


def _kinds(
    config: dict[str, Any], key: str, allowed: tuple[str, ...], layers: int
) -> tuple[str, ...]:
    value = config.get(key)
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
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        raise _fail("rope_parameters", rope, "an object with one entry for each layer kind")
    if rope.get("full_attention") is not None:
        raise _fail("rope_parameters.full_attention", rope["full_attention"], "null (NoPE)")
    sliding = rope.get("sliding_attention")
    if not isinstance(sliding, dict):
        if "sliding_attention" in layer_types:
            raise _fail("rope_parameters.sliding_attention", sliding, "an object with rope_theta")
        return 10_000.0
    if sliding.get("rope_type", "default") != "default":
        raise _fail("rope_parameters.sliding_attention.rope_type", sliding["rope_type"], "default")
    return _number(sliding, "rope_theta", 10_000.0)


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
