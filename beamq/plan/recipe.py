"""Recipes: a format for each role of linear; everything else stays in high precision.

In: a built-in name or the path of a YAML file. Out: a frozen `Recipe` with a digest.

A recipe is closed by default: unknown keys are refused, and a role that no rule names keeps the
precision of the source. All keys:

    name         short name, used in cards and reports
    summary      one sentence for people
    rules        role -> format; roles: expert, dense-mlp, attention; formats: nvfp4, fp8 (a
                 scale a row), fp8-block (128 x 128), mxfp8 (see `layout`). Of mixes only experts in
                 nvfp4 next to others in fp8 are allowed
    scales       NVFP4 block scales; `sweep` (NVFP4's default): of the nearby stored scales, the one
                 with the least squared error; `max`: from the block's largest magnitude alone,
                 which gives the same bytes as Model-Optimizer
    weighting    how the sweep weighs an expert's errors: `none`, or by the `second-moment` of the
                 inputs that calibration saw
    rounding     of experts: `nearest`, or `gptq` with the activations that calibration saw; other
                 linears are rounded to nearest
    headroom     NVFP4 input scales are for so many times the largest input that calibration saw: a
                 power of two up to 64 (2 unless given), because other text has larger inputs;
                 1 gives Model-Optimizer's scales
    kv_cache     `none`, or `fp8` to write the FP8 KV-cache scheme (never scale tensors: SGLang's
                 Beam refuses them)
    exclude      patterns of modules to leave unquantized (see `matches`)
    bounds       what a sound result may lose at most (see `Bounds`); changes no byte of an output

A recipe may be a stranger's. Python's `re` cannot be stopped once it runs, so an exclude pattern
that could take exponential time is refused beforehand.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from beamq import patterns
from beamq.beam.tensors import QUANTIZABLE, Role
from beamq.errors import RecipeError, shown_value
from beamq.io.files import parse_yaml, read_small, user_path
from beamq.options import did_you_mean, takes
from beamq.plan.layout import SCHEMES, WEIGHT_FORMATS


def matches(pattern: str, module: str) -> bool:
    """Whether an exclude pattern names a module.

    `re:` + a regular expression that must match from the start to the end; a glob (with `*`,
    `?` or `[`) that must match the whole name; otherwise a name: the whole module or consecutive
    dotted parts of it (`gate` is the router `mlp.gate`, never `gate_proj`). Raises `RecipeError`
    for a regular expression that is invalid or could take exponential time (see `patterns`).
    """
    if pattern.startswith("re:"):
        return patterns.matches(pattern[3:], module, f"pattern {pattern[:60]!r}", RecipeError)
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


FORMATS = tuple(dict.fromkeys(each.rounding for each in WEIGHT_FORMATS.values()))
BUILT_IN = (
    "nvfp4", "nvfp4-max", "nvfp4-gptq", "nvfp4-mlp", "nvfp4-all", "nvfp4-fp8", "fp8", "fp8-experts",
    "fp8-block", "mxfp8", "mxfp8-experts",
)  # fmt: skip
SCALES = ("sweep", "max")
HEADROOM = 2  # measured: docs/results.md, "Input scales on other text"
HEADROOMS = (1, 2, 4, 8, 16, 32, 64)
MAX_RECIPE_BYTES = 1 << 16
MAX_PATTERNS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits that `verify --level forward` and comparison reports check a result against.

    Upper limits: `mean_kld` in nats per token, and `weight_error`, the relative RMS error of any
    one quantized linear. Lower limits: `same_top`, the share of tokens with the same likeliest next
    token, and `router_overlap`, the share of chosen experts in common, in any one layer.
    """

    mean_kld: float | None = None
    same_top: float | None = None
    router_overlap: float | None = None
    weight_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A checked recipe. Build one with `load_recipe` or `parse_recipe`."""

    name: str
    summary: str
    rules: Mapping[Role, str]
    scales: str = "max"
    weighting: str = "none"
    rounding: str = "nearest"
    headroom: int = 1
    kv_cache: str = "none"
    exclude: tuple[str, ...] = ()
    bounds: Bounds = Bounds()

    @property
    def format(self) -> str:
        """How the output declares its formats, a key of `layout.SCHEMES`."""
        return "-".join(each for each in FORMATS if each in self.rules.values())

    @property
    def calibrated(self) -> bool:
        """Whether any linear has an input scale: those in NVFP4."""
        return "nvfp4" in self.rules.values()

    def weight_format(self, role: Role) -> str:
        """What a linear of a role becomes, a key of `layout.WEIGHT_FORMATS`."""
        return SCHEMES[self.format].roundings[self.rules[role]]

    @property
    def expert_method(self) -> str | None:
        """How experts' inputs steer their rounding: `gptq`, `second-moment`, or None: not."""
        if self.rounding == "gptq":
            return "gptq"
        return "second-moment" if self.weighting == "second-moment" else None

    def check_engine(self, engine: str | None) -> None:
        """Raise `RecipeError` where `engine` ("vllm", "sglang", ...) does not load the output."""
        scheme = SCHEMES[self.format]
        for name, why in scheme.refusals.items():
            if name.lower() == engine:
                raise RecipeError(
                    f"recipe {self.name} is not for {name} ({why}); {' and '.join(scheme.loaders)}"
                    " can load it. Use a recipe of one format that both engines load, such as nvfp4"
                    " or fp8"
                )

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, as in its YAML."""
        data = dataclasses.asdict(self)
        data["rules"] = {role.value: fmt for role, fmt in self.rules.items()}
        data["exclude"] = list(self.exclude)
        return data

    def digest(self) -> str:
        """SHA-256 of everything that can change a byte of the output."""
        data = self.to_dict()
        del data["summary"], data["bounds"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest())  # `rules` has no hash of its own

    def with_options(
        self,
        *,
        exclude: tuple[str, ...] = (),
        kv_cache: str | None = None,
        headroom: int | None = None,
    ) -> Recipe:
        """This recipe with command-line options added. Raises `RecipeError`."""
        options = {
            "exclude": [*self.exclude, *exclude],
            "kv_cache": kv_cache or self.kv_cache,
            "headroom": headroom or self.headroom,
        }
        return parse_recipe({**self.to_dict(), **options}, origin=self.name)


@takes()
def load_recipe(name_or_path: str | Path) -> Recipe:
    """A built-in recipe by name (in any case, with `_` for `-`), or a YAML file by path.

    Raises `RecipeError`.
    """
    name = str(name_or_path).lower().replace("_", "-")
    if name in BUILT_IN:
        return _built_in(name)
    path = user_path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        raise RecipeError(
            f"no recipe named {str(name_or_path)!r}; choose one of {', '.join(BUILT_IN)} or give"
            f" the path of a .yaml file{did_you_mean(name, BUILT_IN)}"
        )
    if not path.exists():
        raise RecipeError(
            f"{path}: there is no such recipe file; give the path of one, or one of the built-in"
            f" recipes: {', '.join(BUILT_IN)}"
        )
    raw = read_small(path, RecipeError, MAX_RECIPE_BYTES)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise RecipeError(f"{path}: recipe cannot be read: {fault}") from None
    return _from_yaml(text, str(path))


@cache
def _built_in(name: str) -> Recipe:
    """Kept, because reading YAML takes milliseconds, and a trainer calls for every bucket."""
    text = resources.files("beamq").joinpath(f"recipes/{name}.yaml").read_text()
    return _from_yaml(text, name)


def _from_yaml(text: str, origin: str) -> Recipe:
    try:
        data = parse_yaml(text)
    except ValueError as fault:
        raise RecipeError(f"{origin}: not valid YAML: {fault}") from None
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else shown_value(data, 60)
        what = "is empty" if data is None else f"holds {kind}"
        raise RecipeError(f"{origin}: {what}, expected at least name, summary and rules")
    return parse_recipe(data, origin=origin)


def parse_recipe(data: Mapping[str, Any], *, origin: str = "recipe") -> Recipe:
    """Check plain data and build the `Recipe`; `origin` names the source in errors."""
    known = {field.name for field in dataclasses.fields(Recipe)}
    unknown = [str(key) for key in data if key not in known]
    if unknown:
        raise RecipeError(
            f"{origin}: unknown key {', '.join(unknown)[:120]}; known keys are"
            f" {', '.join(sorted(known))}"
        )
    for key in ("name", "summary"):
        value = data.get(key)
        if not isinstance(value, str) or not value or not value.isprintable() or len(value) > 300:
            found = f"is {shown_value(value, 60)}" if key in data else "is missing"
            raise RecipeError(
                f"{origin}: {key} {found}, expected one line of text, at most 300 characters"
            )
    exclude = data.get("exclude", ())
    if not isinstance(exclude, (list, tuple)) or not all(
        isinstance(pattern, str) and pattern for pattern in exclude
    ):
        raise RecipeError(f"{origin}: exclude must be a list of patterns")
    if len(exclude) > MAX_PATTERNS:
        raise RecipeError(f"{origin}: {len(exclude)} exclude patterns, at most {MAX_PATTERNS}")
    for pattern in exclude:
        matches(pattern, "")
    rules = _rules(data.get("rules"), origin)
    # FP8 has one scale a row, which its largest value calls for.
    scales = SCALES if "nvfp4" in rules.values() else ("max",)
    recipe = Recipe(
        name=data["name"],
        summary=data["summary"],
        rules=rules,
        scales=_choice(data, "scales", scales[0], scales, origin),
        weighting=_choice(data, "weighting", "none", ("none", "second-moment"), origin),
        rounding=_choice(data, "rounding", "nearest", ("nearest", "gptq"), origin),
        headroom=_headroom(data, "nvfp4" in rules.values(), origin),
        kv_cache=_choice(data, "kv_cache", "none", ("none", "fp8"), origin),
        exclude=tuple(exclude),
        bounds=_bounds(data.get("bounds", {}), origin),
    )
    _check_method(recipe, origin)
    if recipe.format == "fp8-block" and recipe.kv_cache != "none":
        raise RecipeError(
            f"{origin}: fp8-block has no place in config.json for a KV-cache scheme; leave out"
            " kv_cache, and give the engine --kv-cache-dtype fp8"
        )
    return recipe


def _headroom(data: Mapping[str, Any], nvfp4: bool, origin: str) -> int:
    value = data.get("headroom", HEADROOM if nvfp4 else 1)
    if isinstance(value, bool) or value not in HEADROOMS:
        raise RecipeError(
            f"{origin}: headroom is {shown_value(value, 60)}, expected a power of two from 1 to"
            f" {HEADROOMS[-1]}"
        )
    if value != 1 and not nvfp4:
        raise RecipeError(
            f"{origin}: headroom is for NVFP4's input scales, and FP8 has none; leave it out"
        )
    return int(value)


def _check_method(recipe: Recipe, origin: str) -> None:
    """Raise `RecipeError` where weighting or rounding contradicts the rest."""
    if recipe.expert_method is None:
        return
    key = "rounding: gptq" if recipe.rounding == "gptq" else "weighting: second-moment"
    if recipe.rules.get(Role.EXPERT) != "nvfp4":
        raise RecipeError(f"{origin}: {key} is for experts in NVFP4, and the rules name none")
    if recipe.scales != "sweep":
        raise RecipeError(f"{origin}: {key} chooses block scales itself; leave out scales: max")
    if recipe.rounding == "gptq" and recipe.weighting != "none":
        raise RecipeError(
            f"{origin}: rounding: gptq weighs errors by all second moments; leave out weighting"
        )


def _rules(value: Any, origin: str) -> dict[Role, str]:
    names = [role.value for role in QUANTIZABLE]
    if not isinstance(value, Mapping) or not value:
        raise RecipeError(
            f"{origin}: rules must map at least one of {', '.join(names)} to a format"
        )
    rules: dict[Role, str] = {}
    for role in QUANTIZABLE:
        if role.value in value:
            rules[role] = value[role.value]
    for key, fmt in value.items():
        if key not in names:
            raise RecipeError(
                f"{origin}: rules names {str(key)[:60]!r}; only {', '.join(names)} can be"
                " quantized, everything else stays in high precision"
            )
        if fmt not in FORMATS:
            raise RecipeError(
                f"{origin}: rules.{key} is {shown_value(fmt, 60)}, expected {' or '.join(FORMATS)}"
            )
    _check_mix(rules, origin)
    return rules


def _check_mix(rules: Mapping[Role, str], origin: str) -> None:
    """Raise `RecipeError` for formats that no engine loads together."""
    mix = set(rules.values())
    if len(mix) > 1 and (mix != {"nvfp4", "fp8"} or rules.get(Role.EXPERT) == "fp8"):
        raise RecipeError(
            f"{origin}: rules mix {' and '.join(sorted(mix))}; engines load no such file. Only"
            " attention and dense MLPs in fp8 next to others in nvfp4 can be mixed, for vLLM alone"
        )


def _bounds(value: Any, origin: str) -> Bounds:
    known = [field.name for field in dataclasses.fields(Bounds)]
    if not isinstance(value, Mapping) or any(key not in known for key in value):
        raise RecipeError(f"{origin}: bounds may hold {', '.join(known)}, each with a number")
    for key, limit in value.items():
        number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        most = 1.0 if key in ("same_top", "router_overlap") else float("inf")
        if limit is not None and not (number and 0 <= limit <= most):
            raise RecipeError(
                f"{origin}: bounds.{key} is {shown_value(limit, 60)}, expected a number from 0 to"
                f" {most}"
            )
    return Bounds(**value)


def _choice(
    data: Mapping[str, Any], key: str, default: str, allowed: tuple[str, ...], origin: str
) -> str:
    value = data.get(key, default)
    if value not in allowed:
        raise RecipeError(
            f"{origin}: {key} is {shown_value(value, 60)}, expected {' or '.join(allowed)}"
        )
    return str(value)
