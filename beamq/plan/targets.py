"""What becomes of each tensor of a model by its name, where there is no source to look into.

In: a config and a recipe. Out: for each name under which a tensor may come (experts one by one or
packed), the tensors that a checkpoint has instead, with names, dtypes and shapes, and the
`quantization_config` that tells an engine of them.

`plan.py` does the same for the files of a source, and gives each output its place in a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from beamq.beam.config import BeamConfig, read_config
from beamq.beam.tensors import (
    FP32_ROLES,
    TensorRole,
    classify,
    expected_tensors,
    fused_group,
    packed_shape,
)
from beamq.errors import TensorError
from beamq.io.files import user_path
from beamq.options import read, takes
from beamq.plan import layout
from beamq.plan.plan import JobKind, apply_exclusion, quantized_units
from beamq.plan.recipe import Recipe, load_recipe
from beamq.plan.sources import PREFIXES, unprefixed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One tensor that may come, and what it becomes.

    It is a matrix, a vector, or a stack of matrices; `linears` are for each matrix the tensors of a
    checkpoint that its rows are, in equal shares. `dtype` is that of a copy, `format` that of the
    linears ("" for a copy).
    """

    name: str
    role: TensorRole
    shape: tuple[int, ...]
    kind: JobKind
    dtype: str
    format: str
    group: str
    linears: tuple[tuple[TensorRole, ...], ...]


class ModelTargets(NamedTuple):
    """`by_name` in the order of layers, packed forms last; `groups`: the names of what is converted
    together."""

    by_name: dict[str, Target]
    groups: dict[str, list[str]]
    units: frozenset[layout.Unit]

    def target(self, name: str) -> Target:
        """Raises `TensorError` for a name that is none of the model's."""
        if (found := self.by_name.get(name)) is not None:
            return found
        remedy = "leave it out, or name it as transformers' save_pretrained does"
        for prefix in PREFIXES:
            own = unprefixed(name, prefix)
            if name.startswith(prefix) and own in self.by_name:
                remedy = f"a trainer or wrapper has added {prefix!r}, so name it {own}"
        raise TensorError(f"{name}: config.json calls for no such tensor; {remedy}")


@lru_cache(maxsize=4)
def targets_of(config: BeamConfig, recipe: Recipe) -> ModelTargets:
    """The same every time, so kept: a trainer may call for every few tensors. Raises
    `RecipeError`."""
    expected = list(expected_tensors(config))
    roles = [role for role, _ in expected]
    excluded = [apply_exclusion(pattern, recipe, roles) for pattern in recipe.exclude]
    units = quantized_units(config, recipe, excluded)
    model = ModelTargets({}, {}, units)

    def add(role: TensorRole, shape: tuple[int, ...], linears: Any) -> None:
        quantized = role.layer is not None and (role.layer, role.role) in units
        kind = JobKind(recipe.rules[role.role]) if quantized else JobKind.COPY
        alone = role.packed is not None or kind is not JobKind.NVFP4
        group = role.name if alone else fused_group(role)
        dtype = "F32" if role.role in FP32_ROLES else "BF16"
        model.by_name[role.name] = Target(
            name=role.name, role=role, shape=shape, kind=kind, dtype=dtype,
            format=recipe.weight_format(role.role) if quantized else "",
            group=group, linears=linears,
        )  # fmt: skip
        model.groups.setdefault(group, []).append(role.name)

    for role, shape in expected:
        add(role, shape, ((role,),))
    forms = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for layer, (packed, parts) in product(config.sparse_layers, forms.items()):
        experts = f"model.layers.{layer}.mlp.experts"
        linears = tuple(
            tuple(classify(f"{experts}.{expert}.{part}.weight") for part in parts)
            for expert in range(config.num_experts)
        )
        for suffix in ("", ".weight"):
            add(classify(f"{experts}.{packed}{suffix}"), packed_shape(config, packed), linears)
    return model


@takes()
def output_metadata(
    config: BeamConfig | Mapping[str, Any] | str | Path, recipe: Recipe | str | Path
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor of a quantized model, in the order of its layers, from
    the config alone. Raises `RecipeError` and `ConfigError`."""
    from beamq.formats.numerics import TORCH_DTYPES  # torch

    recipe = checked_recipe(recipe)
    outputs: list[tuple[str, str, tuple[int, ...]]] = []
    for target in targets_of(beam_config(config), recipe).by_name.values():
        if target.kind is JobKind.COPY and target.role.packed is None:
            outputs.append((target.name, target.dtype, target.shape))
        elif target.role.packed is None:
            n, k = target.shape
            outputs += layout.quantized_tensors(target.role.module, target.format, n, k)
    return [(name, TORCH_DTYPES[dtype], shape) for name, dtype, shape in outputs]


@takes()
def quantization_config(
    recipe: Recipe | str | Path, config: BeamConfig | Mapping[str, Any] | str | Path
) -> dict[str, Any]:
    """`quantization_config` of config.json, as `beamq quantize` writes it, so that an engine is
    built for the tensors that it will get. Raises `RecipeError` and `ConfigError`."""
    recipe, config = checked_recipe(recipe), beam_config(config)
    units = targets_of(config, recipe).units
    ignore = layout.ignore_list(config, recipe.format, units, ())
    formats = {unit: recipe.weight_format(unit[1]) for unit in sorted(units)}
    return layout.quantization_config(recipe.format, ignore, recipe.kv_cache, formats)


def checked_recipe(given: Recipe | str | Path) -> Recipe:
    """A recipe, or that of a name or path. Raises `RecipeError`."""
    return given if isinstance(given, Recipe) else load_recipe(given)


def beam_config(given: Any) -> BeamConfig:
    """A config, or that of a parsed config.json or a folder. Raises `ConfigError`, `UsageError`."""
    if isinstance(given, Mapping):
        return BeamConfig.from_dict(dict(given))
    given = read(given, "config", "BeamConfig | Mapping | str | Path")
    if isinstance(given, BeamConfig):
        return given
    path = user_path(given)
    return BeamConfig.from_dict(read_config(path.parent if path.is_file() else path))
