"""Which bounds a checkpoint is held to, what breaks them, and where the streams part."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from beamq.beam.tensors import Role
from beamq.errors import RecipeError
from beamq.eval.compare import records
from beamq.eval.compare.findings import Findings, breaches, limits_for, parting_layer
from beamq.eval.compare.footprint import Footprint
from beamq.eval.compare.metrics import (
    Divergence,
    Estimate,
    LayerError,
    TokenScores,
    score_base,
)
from beamq.eval.compare.weight_error import WeightError
from beamq.io.manifest import Manifest
from beamq.plan.recipe import BUILT_IN, Bounds, load_recipe, parse_recipe

BOUNDS = Bounds(mean_kld=0.05, same_top=0.9, router_overlap=0.9, weight_error=0.15)
EXPERTS = frozenset({(3, Role.EXPERT)})
LINEAR = WeightError(
    module="model.layers.2.mlp.down_proj",
    layer=2,
    format="nvfp4",
    elements=64,
    relative_rms=0.1,
    sqnr_db=20.0,
    max_abs_error=0.1,
    saturated_share=0.0,
    underflowed_share=0.0,
)


def divergence(noise: float = 0.0) -> Divergence:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(40, 12, generator=generator)
    scores = TokenScores()
    following = torch.zeros(40, dtype=torch.long)
    other = base + noise * torch.randn(40, 12, generator=generator)
    scores.add(score_base(base, following), other)
    return scores.result()


def layer(index: int, relative: float, added: float, overlap: float | None) -> LayerError:
    share = None if overlap is None else Estimate(value=overlap, standard_error=0.0)
    return LayerError(
        layer=index,
        relative_error=Estimate(value=relative, standard_error=0.0),
        sqnr_db=20.0,
        added=added,
        same_experts=share,
        expert_overlap=share,
    )


SOUND = Findings(
    divergence=divergence(),
    layers=(layer(0, 0.01, 1e-4, None), layer(1, 0.02, 3e-4, 0.99), layer(2, 0.03, 5e-4, 0.98)),
    linears=(LINEAR,),
    not_the_sources=(),
)


def test_every_recipe_has_bounds_that_change_no_byte() -> None:
    for name in BUILT_IN:
        recipe = load_recipe(name)
        assert None not in (
            recipe.bounds.mean_kld,
            recipe.bounds.same_top,
            recipe.bounds.router_overlap,
            recipe.bounds.weight_error,
        ), name
        assert recipe.digest() == replace(recipe, bounds=Bounds()).digest()
        assert parse_recipe(recipe.to_dict()) == recipe


@pytest.mark.parametrize(
    "bounds",
    [{"kl": 1}, {"mean_kld": "low"}, {"same_top": 93}, {"mean_kld": -1}, {"mean_kld": True}, 5],
)
def test_bounds_that_cannot_be(bounds: object) -> None:
    with pytest.raises(RecipeError, match="bounds"):
        parse_recipe({"name": "x", "summary": "y", "rules": {"expert": "fp8"}, "bounds": bounds})


def test_whose_bounds() -> None:
    experts, wide = dict.fromkeys(EXPERTS, "nvfp4"), {(0, Role.ATTENTION): "nvfp4"}
    assert limits_for(None, {}).recipe is None
    assert limits_for(None, experts).recipe == "nvfp4"
    assert limits_for(Manifest.parse({}), dict.fromkeys(EXPERTS, "fp8")).recipe == "fp8-experts"
    assert limits_for(None, experts | wide).recipe == "nvfp4-all"
    eight = dict.fromkeys([*EXPERTS, *wide], "fp8")
    assert limits_for(None, eight).recipe == "fp8"
    mixed = experts | {(0, Role.ATTENTION): "fp8-modelopt"}
    assert limits_for(None, mixed).recipe == "nvfp4-fp8"
    named = {"recipe": {"name": "nvfp4-mlp", "bounds": {"mean_kld": 100}}}
    assert limits_for(Manifest.parse(named), experts).bounds == load_recipe("nvfp4-mlp").bounds
    own = {"name": "mine", "summary": "s", "rules": {"expert": "nvfp4"}}
    assert limits_for(Manifest.parse({"recipe": own}), experts).recipe == "nvfp4"
    bounded = {"recipe": {**own, "bounds": {"mean_kld": 0.01}}}
    assert limits_for(Manifest.parse(bounded), experts).bounds == Bounds(mean_kld=0.01)
    broken = {"recipe": {**own, "bounds": 5}}
    assert limits_for(Manifest.parse(broken), experts).recipe == "nvfp4"


def test_what_breaks_them() -> None:
    assert breaches(SOUND, BOUNDS) == ()
    lost = replace(SOUND, divergence=divergence(2.0))
    assert [breach.measure for breach in breaches(lost, BOUNDS)] == ["mean_kld", "same_top"]
    assert breaches(lost, Bounds()) == ()
    low = layer(2, 0.03, 5e-4, 0.5)
    routed = breaches(replace(SOUND, layers=(*SOUND.layers[:2], low)), BOUNDS)
    assert [(breach.measure, breach.layer) for breach in routed] == [("router_overlap", 1)]
    broken = replace(LINEAR, relative_rms=math.nan)
    weights = breaches(replace(SOUND, linears=(broken,)), BOUNDS)
    assert [(breach.measure, breach.layer) for breach in weights] == [("weight_error", 2)]
    changed = replace(SOUND, not_the_sources=("lm_head.weight", "model.layers.1.mlp.gate.weight"))
    assert [(b.measure, b.layer) for b in breaches(changed, BOUNDS)] == [("unquantized", None)]
    assert "1 more" in breaches(changed, BOUNDS)[0].text


def test_where_the_streams_part() -> None:
    assert parting_layer(SOUND, ()) == 1  # the first that loses half of what the worst does
    jump = replace(
        SOUND, layers=(*SOUND.layers[:1], layer(1, 0.5, 0.25, 0.9), layer(2, 0.6, 0.11, 0.5))
    )
    assert parting_layer(jump, ()) == 1
    lost = replace(SOUND, layers=(layer(0, np.nan, np.nan, None), *SOUND.layers[1:]))
    assert parting_layer(lost, breaches(lost, BOUNDS)) == 0
    exact = replace(SOUND, layers=(layer(0, 0.0, 0.0, None),))
    assert parting_layer(exact, ()) is None


def test_the_layers_that_hurt_add_no_more_than_all_of_it() -> None:
    """A layer that reduces the error is not in the sum; it made the others' share 102%."""
    layers = [
        replace(layer(index, 0.1, added, 0.9), extra_bytes_in_bf16=1 << 20)
        for index, added in enumerate((0.5, -0.2, 0.3, 0.2, 0.0))
    ]
    own = Footprint(disk_bytes=1 << 22, tensor_bytes=1 << 22, parameters=1 << 22,
                    bits_per_weight=8.0, weight_bytes_per_gpu={}, kv_dtype="bf16", kv_bytes={},
                    fits={})  # fmt: skip
    assert records._layers(layers, own).startswith("Layers 0, 2 and 3 add 100% of the error")
    assert records._layers(layers[1:3], own).startswith("Layer 2 adds 100% of the error")
    assert records._layers(layers[1:2], own) == ""
