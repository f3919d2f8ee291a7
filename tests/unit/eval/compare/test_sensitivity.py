"""Choosing parts to leave precise, and the recipe of a choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from beamq.beam.tensors import Role
from beamq.errors import UsageError
from beamq.eval.compare.metrics import Estimate
from beamq.eval.compare.sensitivity import (
    PartLoss,
    Sensitivity,
    choose,
    recipe_yaml,
    sparing_recipe,
)
from beamq.plan.plan import make_plan
from beamq.plan.recipe import load_recipe

GB = 10**9


def part(layer: int, role: Role, kld: float, extra: int) -> PartLoss:
    return PartLoss(
        layer=layer,
        part=role,
        mean_kld=Estimate(value=kld),
        same_top=Estimate(value=0.9),
        precise_bytes=extra + GB,
        stored_bytes=GB,
    )


def sensitivity(recipe: Any = None) -> Sensitivity:
    """Four parts that cost 0.10 together, of a candidate that costs 0.08 and has 4 bits."""
    return Sensitivity(
        source="base",
        checkpoint="quantized",
        format="nvfp4",
        recipe=recipe,
        parts=(
            part(0, Role.ATTENTION, 0.03, GB),
            part(0, Role.DENSE_MLP, 0.01, GB),
            part(3, Role.EXPERT, 0.04, 4 * GB),
            part(4, Role.EXPERT, 0.02, 4 * GB),
        ),
        mean_kld=Estimate(value=0.08),
        parameters=20 * GB,
        tensor_bytes=10 * GB,
        data={"notes": []},
        settings={},
        seconds=1.0,
    )


def layers(choice: Any) -> list[tuple[int, str]]:
    return [(p.layer, p.part.value) for p in choice.spared]


def test_worth_is_nats_for_each_byte() -> None:
    found = sensitivity()
    assert [(p.layer, p.part) for p in found.by_worth()] == [
        (0, Role.ATTENTION), (0, Role.DENSE_MLP), (3, Role.EXPERT), (4, Role.EXPERT)
    ]  # fmt: skip
    curve = found.curve()
    assert [c.predicted_kld for c in curve] == pytest.approx([0.08, 0.056, 0.048, 0.016, 0.0])
    assert [c.bits_per_weight for c in curve] == pytest.approx([4.0, 4.4, 4.8, 6.4, 8.0])


def test_each_way_to_choose() -> None:
    found = sensitivity()
    assert choose(found) is None
    worst = choose(found, exclude_worst=2)
    assert layers(worst) == [(3, "expert"), (0, "attention")]
    assert layers(choose(found, max_kl=0.05)) == [(0, "attention"), (0, "dense-mlp")]
    assert layers(choose(found, max_kl=0.1)) == []
    # The costly part that does not fit is passed over for a smaller one that does.
    assert layers(choose(found, target_bits=5.0)) == [(0, "attention"), (0, "dense-mlp")]
    assert layers(choose(found, target_bits=4.0)) == []
    assert len(layers(choose(found, target_bits=99))) == 3  # something stays quantized


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude_worst": 4}, "from 1 to 3"),
        ({"exclude_worst": 0}, "from 1 to 3"),
        ({"max_kl": 0.001}, "nothing quantized is that close"),
        ({"target_bits": 3.9}, "4.00 bits a weight already"),
        ({"max_kl": 0.1, "target_bits": 5}, "give one of"),
    ],
)
def test_what_cannot_be_chosen(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose(sensitivity(), **options)


@pytest.mark.parametrize("known", [True, False])
def test_the_recipe_excludes_whole_parts_in_forms_that_engines_take(
    known: bool, beam_nano: Path, tmp_path: Path
) -> None:
    own = load_recipe("nvfp4-all").to_dict() if known else ["a stranger's"]
    found = sensitivity(own)
    choice = choose(found, exclude_worst=3)
    assert choice is not None
    recipe = sparing_recipe(found, choice)
    assert recipe.exclude == (
        "model.layers.3.mlp.experts*", "model.layers.0.self_attn*", "model.layers.4.mlp.experts*"
    )  # fmt: skip
    assert recipe.name == ("nvfp4-all-spared" if known else "nvfp4-spared")
    path = tmp_path / "spared.yaml"
    path.write_text(recipe_yaml(recipe))
    assert load_recipe(str(path)) == recipe
    plan = make_plan(beam_nano, str(path))
    precise = {(0, Role.ATTENTION), (3, Role.EXPERT), (4, Role.EXPERT)}
    assert not precise & plan.units
    assert not any(exclusion.widened for exclusion in plan.exclusions)
    assert {"model.layers.0.self_attn*", "model.layers.3.mlp.experts*"} <= set(plan.ignore)
