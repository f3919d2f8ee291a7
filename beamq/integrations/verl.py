"""verl: a function in place of its `quant_weights`, which would take Beam's attention gate for an
MLP's.

In: Beam's config and an FP8 recipe. Out: a function with the signature that verl calls
(`verl/utils/vllm/vllm_fp8_utils.py`, commit b178a3c), with the bytes and names of its own:

    from beamq.integrations.verl import make_quant_weights
    vllm_fp8_utils.quant_weights = make_quant_weights("BEAM_FOLDER", "fp8")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from beamq.beam.config import BeamConfig
from beamq.convert.tensors import quantize_tensors
from beamq.errors import UsageError
from beamq.plan.recipe import Recipe
from beamq.plan.targets import beam_config, checked_recipe

Named = tuple[str, torch.Tensor]


def make_quant_weights(
    config: BeamConfig | Mapping[str, Any] | str | Path, recipe: Recipe | str | Path = "fp8"
) -> Callable[..., Iterator[Named]]:
    """A `quant_weights(weights, model, quant_config, dtype)`. The recipe says which parts are
    quantized; `model` is not looked at. It raises `UsageError` for blocks that are not 128 x 128,
    and what `quantize_tensors` raises."""
    config, recipe = beam_config(config), checked_recipe(recipe)

    def quant_weights(
        weights: Iterable[Named],
        model: Any,
        quant_config: Any,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Iterator[Named]:
        blocks = getattr(quant_config, "weight_block_size", None)
        if list(blocks or ()) != [128, 128]:
            raise UsageError(f"quant_config has weight_block_size {blocks}, expected [128, 128]")
        rounded = ((name, tensor.to(dtype)) for name, tensor in weights)
        # A bucket at a time may come; FP8 never waits for partners.
        return quantize_tensors(rounded, recipe, config, profile="verl-fp8-block")

    return quant_weights
