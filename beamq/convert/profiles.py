"""Other frameworks' FP8 bytes for `quantize_tensors`: what SkyRL, Miles and verl send to engines.

In: stacks of linears [G, N, K]. Out: codes and scales, and the name of the scale.

    skyrl-fp8-block     F32 [N/128, K/128]  codes RNE(w / s)         M.weight_scale_inv
    miles-fp8-block     F32 [N/128, K/128]  codes RNE(w * (1 / s))   M.weight_scale_inv
    verl-fp8-block      as Miles; M.weight_scale_inv of experts, else M.weight_scale
    skyrl-mxfp8         U8 [N, K/32]                                 M.weight_scale
    miles-mxfp8         the same bytes                               M.weight_scale_inv
    miles-fp8-channel   F32 [N, 1]          codes RNE(w / s)         M.weight_scale

The one idea: the same torch operations in the same order as theirs, because dividing and
multiplying by the reciprocal differ in some codes, and torch on a GPU divides by a number by
multiplying with its reciprocal, for them as for us.

Limits: SkyRL's and Miles's scales that are powers of two (FP8 in blocks) are not made. Miles and
verl divide in a Triton kernel, which on a GPU may round a quotient otherwise than IEEE does; this
is the rule as their source states it, and equals Miles's kernel in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from beamq.beam.tensors import Role, TensorRole
from beamq.errors import RecipeError
from beamq.formats.fp8 import MX_BLOCK, block_amax, quantize_mx, spread_blocks
from beamq.formats.numerics import E4M3_MAX, to_e4m3
from beamq.plan.plan import JobKind
from beamq.plan.recipe import Recipe
from beamq.plan.targets import ModelTargets

Quantized = tuple[torch.Tensor, torch.Tensor]
CHANNEL_AMAX_FLOOR = 1e-12
"""Of a row's largest magnitude in Miles's tool, in the weight's own dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How a framework quantizes a linear. `scale` and `expert_scale` are what its scale is called;
    K must be a multiple of `block`."""

    quantize: Callable[[torch.Tensor], Quantized]
    scale: str
    expert_scale: str
    block: int = 1

    def names(self, role: TensorRole) -> tuple[str, str]:
        """Of the codes and of the scale of a linear."""
        scale = self.expert_scale if role.role is Role.EXPERT else self.scale
        return f"{role.module}.weight", f"{role.module}.{scale}"


def _blocks_divided(w: torch.Tensor) -> Quantized:
    scale = block_amax(w) / E4M3_MAX
    return to_e4m3(w.float() / spread_blocks(scale, *w.shape[-2:])), scale


def _blocks_multiplied(w: torch.Tensor) -> Quantized:
    scale = block_amax(w) / E4M3_MAX
    return to_e4m3(w.float() * spread_blocks(1.0 / scale, *w.shape[-2:])), scale


def _rows(w: torch.Tensor) -> Quantized:
    amax = w.abs().amax(dim=-1, keepdim=True)
    scale = amax.clamp(min=CHANNEL_AMAX_FLOOR).float() / E4M3_MAX
    return to_e4m3(w / scale), scale


_INVERSE, _PLAIN = "weight_scale_inv", "weight_scale"
PROFILES = {
    "skyrl-fp8-block": Profile(quantize=_blocks_divided, scale=_INVERSE, expert_scale=_INVERSE),
    "miles-fp8-block": Profile(quantize=_blocks_multiplied, scale=_INVERSE, expert_scale=_INVERSE),
    "verl-fp8-block": Profile(quantize=_blocks_multiplied, scale=_PLAIN, expert_scale=_INVERSE),
    "skyrl-mxfp8": Profile(quantize=quantize_mx, scale=_PLAIN, expert_scale=_PLAIN, block=MX_BLOCK),
    "miles-mxfp8": Profile(
        quantize=quantize_mx, scale=_INVERSE, expert_scale=_INVERSE, block=MX_BLOCK
    ),
    "miles-fp8-channel": Profile(quantize=_rows, scale=_PLAIN, expert_scale=_PLAIN),
}


def profile_of(name: str, recipe: Recipe, model: ModelTargets) -> Profile | None:
    """The profile, None for beamq's own. The recipe says which parts are quantized, so it has to be
    an FP8 one. Raises `RecipeError`."""
    if name == "beamq":
        return None
    profile = PROFILES[name]
    quantized = [each for each in model.by_name.values() if each.kind is not JobKind.COPY]
    if any(each.kind is not JobKind.FP8 for each in quantized):
        raise RecipeError(
            f"profile {name} is FP8, and recipe {recipe.name} has other parts; take the recipe fp8,"
            " or your own with fp8 for the parts that the engine expects in FP8"
        )
    for each in quantized:
        if each.shape[-1] % profile.block:
            raise RecipeError(
                f"{each.name}: K is {each.shape[-1]}; profile {name} needs a multiple of"
                f" {profile.block}; leave that part out of the recipe"
            )
    return profile


def quantize_stack(
    profile: Profile, w: torch.Tensor, linears: int
) -> tuple[Quantized, torch.Tensor]:
    """Codes [G, n, K] and scales [G, m, ...] of a stack [G, n, K] whose matrices are `linears`
    linears each, one below the other; and I32 [2]: how many values are not finite, and 0."""
    stacked = w.view(w.shape[0] * linears, -1, w.shape[-1])
    # Values in F16 have less range than the scales' floors.
    stacked = stacked.float() if w.dtype == torch.float16 else stacked
    codes, scale = profile.quantize(stacked)
    nonfinite = stacked.isfinite().logical_not().sum(dtype=torch.int32)
    counts = torch.stack([nonfinite, torch.zeros_like(nonfinite)])
    return (codes.view(w.shape), scale.reshape(w.shape[0], -1, scale.shape[-1])), counts
