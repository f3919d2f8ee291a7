"""From rules and patterns to the parts of the model that are quantized.

In: a `Recipe` and the tensors of a model. Out: units, i.e. (layer, expert|dense-mlp|attention).

An exclude pattern may name single modules, but both engines agree only on lists that leave a
whole part of a layer precise: partly excluded fused linears are refused by one and misread by
the other. So a pattern that hits any linear of a unit widens to the unit, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from beamq.config import BeamConfig
from beamq.errors import RecipeError
from beamq.formats.layout import NVFP4_BLOCK, Unit, layer_units
from beamq.patterns import matches
from beamq.recipe import Recipe
from beamq.roles import QUANTIZABLE, Role, TensorRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """What one pattern did: modules matched, how many of them the recipe would have quantized,
    the units left precise, and whether that is more than was matched."""

    pattern: str
    matched: tuple[str, ...]
    would_quantize: int
    units: tuple[Unit, ...]
    widened: bool


def apply_exclusions(
    config: BeamConfig, recipe: Recipe, roles: Iterable[TensorRole]
) -> tuple[Exclusion, ...]:
    """Match each pattern of the recipe. A pattern that matches nothing is a `RecipeError`."""
    if not recipe.exclude:
        return ()
    modules = [role for role in roles if role.role not in (Role.NORM, Role.ROUTER_BIAS)]
    return tuple(_apply(pattern, recipe, modules) for pattern in recipe.exclude)


def _apply(pattern: str, recipe: Recipe, modules: list[TensorRole]) -> Exclusion:
    matched: list[str] = []
    hit: dict[Unit, int] = {}
    total: dict[Unit, int] = {}
    for role in modules:
        planned = role.layer is not None and role.role in recipe.rules
        unit = (role.layer or 0, role.role)
        if planned:
            total[unit] = total.get(unit, 0) + 1
        if matches(pattern, role.module):
            matched.append(role.module)
            if planned:
                hit[unit] = hit.get(unit, 0) + 1
    if not matched:
        raise RecipeError(
            f"--exclude {pattern!r} matches no module; a plain word means a dotted part, globs"
            " and `re:` match the whole name (for example model.layers.3.mlp.experts*)"
        )
    return Exclusion(
        pattern=pattern,
        matched=tuple(matched),
        would_quantize=sum(hit.values()),
        units=tuple(hit),
        widened=any(hit[unit] < total[unit] for unit in hit),
    )


def quantized_units(
    config: BeamConfig, recipe: Recipe, exclusions: Iterable[Exclusion]
) -> frozenset[Unit]:
    """Units to quantize. Raises `RecipeError` if none is left or a width does not fit."""
    excluded = {unit for exclusion in exclusions for unit in exclusion.units}
    units = frozenset(
        unit for unit in layer_units(config) if unit[1] in recipe.rules and unit not in excluded
    )
    if not units:
        raise RecipeError(
            f"recipe {recipe.name}: nothing is left to quantize; rules name"
            f" {', '.join(role.value for role in recipe.rules)} and every such part is excluded"
            " or absent"
        )
    if recipe.format == "nvfp4":
        _check_widths(config, {role for _, role in units})
    return units


def input_widths(config: BeamConfig, role: Role) -> dict[str, int]:
    """K of the linears of a role: the dimension that blocks of 16 run along."""
    h = config.hidden_size
    if role is Role.ATTENTION:
        return {"self_attn.q_proj, k_proj, v_proj, gate_proj": h, "self_attn.o_proj": config.q_dim}
    width = config.moe_intermediate_size if role is Role.EXPERT else config.intermediate_size
    return {f"{role.value} gate_proj, up_proj": h, f"{role.value} down_proj": width}


def _check_widths(config: BeamConfig, roles: set[Role]) -> None:
    for role in QUANTIZABLE:
        if role not in roles:
            continue
        for name, k in input_widths(config, role).items():
            if k % NVFP4_BLOCK:
                raise RecipeError(
                    f"{name}: input width {k} is not a multiple of {NVFP4_BLOCK}, as NVFP4 needs;"
                    f" use an FP8 recipe or one without {role.value}"
                )


def tensor_parallel_sizes(config: BeamConfig, roles: Iterable[Role]) -> tuple[int, ...]:
    """Tensor-parallel sizes at which every rank's input width keeps whole blocks of 16."""
    split = []
    for role in roles:
        split.append(list(input_widths(config, role).values())[1])
    return tuple(
        size
        for size in (1, 2, 4, 8, 16)
        if all(k % size == 0 and (k // size) % NVFP4_BLOCK == 0 for k in split)
    )


def tensor_parallel_notes(
    config: BeamConfig, recipe: Recipe, units: frozenset[Unit]
) -> tuple[str, ...]:
    """A warning where usual tensor-parallel sizes would cut a block of 16."""
    if recipe.format != "nvfp4":
        return ()
    sizes = tensor_parallel_sizes(config, {role for _, role in units})
    if {1, 2, 4, 8} <= set(sizes):
        return ()
    return (
        "NVFP4 blocks of 16 stay whole only at tensor-parallel sizes"
        f" {', '.join(map(str, sizes))}; serve with one of these (or expert parallel)",
    )
