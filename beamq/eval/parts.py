"""Which parts to leave precise, from what each costs on its own: a choice and its recipe.

In: a `Sensitivity`. Out: `Choice`s along a curve, and the YAML of a recipe that makes one of them.

The one idea: a part is worth its bytes if it costs many nats for them, so parts are spared in the
order of nats per byte. What is left is predicted by adding up: the candidate's own KL times the
share of the parts' summed KL that is not spared. Losses do not quite add, which is why the whole is
measured too; how far the sum is from it is shown.

Parts are whole (a layer's experts, dense MLP or attention), the only lists that both engines take
(ADR 7). Nothing here runs a model; a predicted figure is to be measured by `beamq compare`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from beamq.errors import RecipeError, UsageError
from beamq.eval.estimates import Estimate
from beamq.recipe import Recipe, parse_recipe
from beamq.roles import Role

PATTERNS = {
    Role.EXPERT: "model.layers.{}.mlp.experts*",
    Role.DENSE_MLP: "model.layers.{}.mlp*",
    Role.ATTENTION: "model.layers.{}.self_attn*",
}
NAMES = {Role.EXPERT: "experts", Role.DENSE_MLP: "dense MLP", Role.ATTENTION: "attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLoss:
    """One part alone quantized: mean KL in nats a token, share of the same top token, bytes."""

    layer: int
    role: Role
    kld: Estimate
    same_top: Estimate
    precise_nbytes: int
    stored_nbytes: int

    @property
    def extra_nbytes(self) -> int:
        """What sparing it would add to the files."""
        return self.precise_nbytes - self.stored_nbytes

    @property
    def nats_per_gb(self) -> float:
        """Nats that a decimal GB spent on this part buys."""
        return max(self.kld.value, 0.0) / (max(self.extra_nbytes, 1) / 1e9)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layer": self.layer,
            "part": self.role.value,
            "mean_kld": self.kld.to_dict(),
            "same_top": self.same_top.to_dict(),
            "precise_bytes": self.precise_nbytes,
            "stored_bytes": self.stored_nbytes,
            "nats_per_gb": self.nats_per_gb,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Parts to spare, and what is expected of the result."""

    spared: tuple[PartLoss, ...]
    predicted_kld: float
    tensor_nbytes: int
    bits_per_weight: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "spared": [{"layer": part.layer, "part": part.role.value} for part in self.spared],
            "predicted_kld": self.predicted_kld,
            "tensor_bytes": self.tensor_nbytes,
            "bits_per_weight": self.bits_per_weight,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What was measured. `recipe` is beamq.json's, or None; `whole` the candidate's own KL."""

    source: str
    checkpoint: str
    format: str
    recipe: Any
    parts: tuple[PartLoss, ...]
    whole: Estimate
    parameters: int
    tensor_nbytes: int
    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    seconds: float

    @property
    def sum_kld(self) -> float:
        """The parts' losses added up."""
        return sum(max(part.kld.value, 0.0) for part in self.parts)

    def by_worth(self) -> list[PartLoss]:
        """Parts by nats for each byte, most first."""
        return sorted(self.parts, key=lambda p: (-p.nats_per_gb, p.layer, p.role.value))

    def sparing(self, parts: Sequence[PartLoss]) -> Choice:
        """The choice to spare `parts`."""
        nbytes = self.tensor_nbytes + sum(part.extra_nbytes for part in parts)
        spared = sum(max(part.kld.value, 0.0) for part in parts)
        left = 1 - spared / self.sum_kld if self.sum_kld else 0.0
        return Choice(
            spared=tuple(parts),
            predicted_kld=max(self.whole.value * left, 0.0),
            tensor_nbytes=nbytes,
            bits_per_weight=8 * nbytes / self.parameters,
        )

    def curve(self) -> list[Choice]:
        """Nothing spared, then one part more at a time, by worth."""
        order = self.by_worth()
        return [self.sparing(order[:count]) for count in range(len(order) + 1)]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "checkpoint": self.checkpoint,
            "format": self.format,
            "mean_kld": self.whole.to_dict(),
            "sum_of_parts": self.sum_kld,
            "tensor_bytes": self.tensor_nbytes,
            "parameters": self.parameters,
            "parts": [part.to_dict() for part in self.parts],
            "curve": [choice.to_dict() for choice in self.curve()],
            "data": dict(self.data),
            "settings": dict(self.settings),
        }


def choose(
    found: Sensitivity,
    *,
    exclude_worst: int | None = None,
    max_kl: float | None = None,
    target_bits: float | None = None,
) -> Choice | None:
    """The choice that an option asks for; None without one.

    `exclude_worst` spares so many parts with the largest KL; `max_kl` as few as bring the predicted
    KL down to it; `target_bits` as many, by worth, as bits a weight allow. Raises `UsageError` for
    more than one option, or what cannot be reached with anything left quantized.
    """
    given = [name for name in (exclude_worst, max_kl, target_bits) if name is not None]
    if len(given) > 1:
        raise UsageError("give one of --exclude-worst, --max-kl and --target-bits")
    if exclude_worst is not None:
        if not 0 < exclude_worst < len(found.parts):
            raise UsageError(
                f"--exclude-worst {exclude_worst}: expected from 1 to {len(found.parts) - 1}; the"
                f" checkpoint has {len(found.parts)} quantized parts"
            )
        worst = sorted(found.parts, key=lambda p: (-p.kld.value, p.layer, p.role.value))
        return found.sparing(worst[:exclude_worst])
    if max_kl is not None:
        for choice in found.curve()[:-1]:
            if choice.predicted_kld <= max_kl:
                return choice
        raise UsageError(f"--max-kl {max_kl:g}: only a model with nothing quantized is that close")
    if target_bits is not None:
        return _within(found, target_bits)
    return None


def _within(found: Sensitivity, bits: float) -> Choice:
    taken: list[PartLoss] = []
    if found.sparing(taken).bits_per_weight > bits:
        raise UsageError(
            f"--target-bits {bits:g}: {found.checkpoint} has"
            f" {found.sparing(taken).bits_per_weight:.2f} bits a weight already"
        )
    for part in found.by_worth():
        if len(taken) + 1 < len(found.parts):
            choice = found.sparing([*taken, part])
            taken = list(choice.spared) if choice.bits_per_weight <= bits else taken
    return found.sparing(taken)


def sparing_recipe(found: Sensitivity, choice: Choice) -> Recipe:
    """The candidate's recipe, or one like it, with the chosen parts excluded."""
    data: dict[str, Any]
    try:
        data = parse_recipe(found.recipe or {}, origin="beamq.json").to_dict()
    except (RecipeError, AttributeError, TypeError):
        roles = dict.fromkeys(part.role.value for part in found.parts)
        data = {"name": found.format, "rules": dict.fromkeys(roles, found.format)}
    patterns = [PATTERNS[part.role].format(part.layer) for part in choice.spared]
    data["exclude"] = [*data.get("exclude", ()), *patterns]
    data["name"] = f"{str(data['name'])[:80]}-spared"
    data["summary"] = (
        f"{len(patterns)} parts left precise by sensitivity; predicted mean KLD"
        f" {choice.predicted_kld:.4f} nats, {choice.bits_per_weight:.2f} bits a weight."
    )
    return parse_recipe(data, origin="sensitivity")


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as a file to give to `--recipe`."""
    import yaml  # only where a recipe is written

    data = {key: value for key, value in recipe.to_dict().items() if value not in ([], None)}
    data["bounds"] = {k: v for k, v in recipe.to_dict()["bounds"].items() if v is not None}
    if not data["bounds"]:
        del data["bounds"]
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
