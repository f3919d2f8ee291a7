"""Miles: a function in place of its `quantize_params`, which has no channel FP8 and no Beam names.

In: Beam's config and a recipe. Out: a function with the signature that Miles calls for each
parameter (`megatron_to_hf/processors/__init__.py`, commit 31f1ca9):

    from beamq.integrations.miles import make_quantize_params
    processors.quantize_params = make_quantize_params("BEAM_FOLDER", "nvfp4")

The one idea: Miles hands over one tensor at a time, and NVFP4 needs gate and up together. So what
waits for a partner is kept until the partner comes; the list is empty meanwhile.

Limits: names must be those of transformers' Beam. Of NVFP4 and channel FP8 the bytes are beamq's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from beamq.beam.config import BeamConfig
from beamq.convert.tensors import quantize_tensors
from beamq.errors import UsageError
from beamq.plan.recipe import Recipe
from beamq.plan.targets import beam_config, checked_recipe

Named = tuple[str, torch.Tensor]
QuantizeParams = Callable[[Any, str, Iterable[Named], Mapping[str, Any] | None], list[Named]]


def make_quantize_params(
    config: BeamConfig | Mapping[str, Any] | str | Path,
    recipe: Recipe | str | Path,
    input_scales: Any = None,
) -> QuantizeParams:
    """A `quantize_params(args, megatron_name, converted_named_params, quantization_config)`.

    The `quantization_config` is that of the engine's config.json and chooses the bytes: `fp8` in
    blocks and `mxfp8` are Miles's (the recipe says which parts), ModelOpt NVFP4 and
    compressed-tensors FP8 are beamq's. Without one, tensors pass through. It raises `UsageError`
    for another method, and what `quantize_tensors` raises.
    """
    config, recipe = beam_config(config), checked_recipe(recipe)
    held: list[Named] = []

    def quantize_params(
        args: Any,
        megatron_name: str,
        converted_named_params: Iterable[Named],
        quantization_config: Mapping[str, Any] | None,
    ) -> list[Named]:
        named = list(converted_named_params)
        if quantization_config is None:
            return named
        stream = quantize_tensors(
            [*held, *named],
            recipe,
            config,
            profile=profile_of_config(quantization_config),
            input_scales=input_scales,
            partial="hold",
        )
        outputs = list(stream)
        held[:] = stream.held
        return outputs

    return quantize_params


def profile_of_config(quantization_config: Mapping[str, Any]) -> str:
    """The profile whose bytes an engine with this `quantization_config` expects from Miles."""
    method = quantization_config.get("quant_method")
    blocks = quantization_config.get("weight_block_size")
    if method == "fp8" and blocks == [128, 128] and "scale_fmt" not in quantization_config:
        return "miles-fp8-block"
    if method == "mxfp8":
        return "miles-mxfp8"
    if method in ("modelopt", "compressed-tensors"):
        return "beamq"
    raise UsageError(
        f"quantization_config has quant_method {method!r} and weight_block_size {blocks}; expected"
        " fp8 in blocks of [128, 128] without scale_fmt, mxfp8, or beamq's own quantization_config"
    )
