"""Can checkpoints run side by side: are they of one model, and the same at every rank?

In: configs of a source and of a candidate; opened checkpoints. Out: nothing, or an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from beamq.checkpoint import Checkpoint
from beamq.config import BeamConfig
from beamq.errors import ConfigError, EnvironmentFault
from beamq.ranks import Ranks

SHAPES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_layers",
    "vocab_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "top_k",
    "mlp_layer_types",
)


def expect_alike(base: BeamConfig, other: BeamConfig, name: str) -> None:
    """Raise `ConfigError` unless both configs are of one model's shapes."""
    for key in SHAPES:
        if getattr(base, key) != getattr(other, key):
            raise ConfigError(
                f"{name}: {key} is {str(getattr(other, key))[:60]}, in the source"
                f" {str(getattr(base, key))[:60]}; only checkpoints of one model can be compared"
            )


def expect_same_files(checkpoints: Sequence[Checkpoint], ranks: Ranks) -> None:
    """Raise `EnvironmentFault` at all ranks unless all have opened the same, as headers tell."""
    if ranks.world == 1:
        return
    seen = ranks.gather([checkpoint.layout_digest() for checkpoint in checkpoints])
    for checkpoint, digests in zip(checkpoints, zip(*seen, strict=True), strict=True):
        if len(set(digests)) > 1:
            raise EnvironmentFault(
                f"{checkpoint.name}: the ranks do not see the same files; all need the same folders"
            )
