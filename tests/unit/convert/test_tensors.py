"""Streams of tensors in memory: the bytes of `beamq quantize`, in any order; what is refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import beamq
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import Role, expected_tensors
from beamq.calib.statistics import load_stats
from beamq.convert import tensors as module
from beamq.convert.tensors import CpuKernels
from beamq.errors import (
    BeamqError,
    CalibrationError,
    ConfigError,
    DeviceError,
    RecipeError,
    TensorError,
    UsageError,
)
from beamq.plan.recipe import BUILT_IN, Recipe, load_recipe, parse_recipe

Tensors = dict[str, torch.Tensor]
RECIPES = [name for name in BUILT_IN if name != "nvfp4-gptq"]
FILE = "model.safetensors"
LAYER = "model.layers.3.mlp"
GATE, UP, DOWN = (f"{LAYER}.experts.5.{part}_proj.weight" for part in ("gate", "up", "down"))
ATTENTION = [f"model.layers.1.self_attn.{part}_proj.weight" for part in ("q", "k", "v", "gate")]
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def nano(beam_nano: Path) -> Tensors:
    return load_file(beam_nano / FILE)


@pytest.fixture(scope="module")
def config(beam_nano: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((beam_nano / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def written(
    beam_nano: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str | Recipe], Path]:
    """The folder that `beamq quantize` makes of nano, without calibration."""
    folder, made = tmp_path_factory.mktemp("written"), dict[str, Path]()

    def convert(recipe: str | Recipe) -> Path:
        chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
        path = folder / chosen.digest()
        if path.name not in made:
            made[path.name] = path
            beamq.quantize(beam_nano, path, recipe=chosen, no_calibration=chosen.calibrated)
        return path

    return convert


def stored(folder: Path) -> Tensors:
    """In the order of the file."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def packed(tensors: Tensors, layers: Iterable[int] = (3, 4, 5, 6, 7), suffix: str = "") -> Tensors:
    """With the experts of some layers as two stacks."""
    out = dict(tensors)
    for layer in layers:
        base = f"model.layers.{layer}.mlp.experts"
        one: dict[str, list[torch.Tensor]] = {
            part: [out.pop(f"{base}.{expert}.{part}_proj.weight") for expert in range(16)]
            for part in ("gate", "up", "down")
        }
        pairs = zip(one["gate"], one["up"], strict=True)
        out[f"{base}.gate_up_proj{suffix}"] = torch.stack([torch.cat(pair) for pair in pairs])
        out[f"{base}.down_proj{suffix}"] = torch.stack(one["down"])
    return out


def shuffled(tensors: Tensors, seed: int = 1) -> list[tuple[str, torch.Tensor]]:
    items = list(tensors.items())
    random.Random(seed).shuffle(items)
    return items


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def assert_same(got: Iterable[tuple[str, torch.Tensor]], wanted: Tensors) -> None:
    pairs = list(got)
    made = dict(pairs)
    assert len(made) == len(pairs)
    assert made.keys() == wanted.keys()
    for name, tensor in made.items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape), name
        assert tensor.is_contiguous(), name
        assert torch.equal(raw(tensor), raw(wanted[name])), name


# The bytes


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "form",
    [
        lambda nano: nano,
        packed,
        lambda nano: packed(nano, (3, 6), ".weight"),
    ],
    ids=["one-by-one", "packed", "mixed"],
)
def test_the_bytes_of_quantize_in_any_order(
    nano: Tensors,
    config: dict[str, Any],
    written: Callable[[str], Path],
    recipe: str,
    form: Callable[[Tensors], Tensors],
) -> None:
    for seed in (1, 2):
        stream = beamq.quantize_tensors(shuffled(form(nano), seed), recipe, config)
        assert_same(stream, stored(written(recipe)))
        assert stream.held == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_metadata_and_config_say_what_comes(
    nano: Tensors, config: dict[str, Any], written: Callable[[str], Path], recipe: str
) -> None:
    """Tensors that come in the order of layers go in the order of the metadata."""
    said = beamq.output_metadata(config, recipe)
    expected = expected_tensors(BeamConfig.from_dict(config))
    ordered = [(role.name, nano[role.name]) for role, _ in expected]
    stream = beamq.quantize_tensors(ordered, recipe, config)
    assert [name for name, _ in stream] == [name for name, _, _ in said]
    wanted = stored(written(recipe))
    assert {name: (dtype, shape) for name, dtype, shape in said} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in wanted.items()
    }
    assert len(said) == len(wanted)
    block = json.loads((written(recipe) / "config.json").read_text())["quantization_config"]
    assert beamq.quantization_config(recipe, config) == block


def test_a_recipe_of_ones_own(
    nano: Tensors, config: dict[str, Any], written: Callable[[Recipe], Path]
) -> None:
    """Parts that patterns leave in high precision are divided, if packed, and not quantized."""
    recipe = parse_recipe(
        {
            "name": "own", "summary": "for tests", "kv_cache": "fp8",
            "rules": {"expert": "nvfp4", "attention": "nvfp4"},
            "exclude": ["model.layers.4.mlp.experts*", "model.layers.0.self_attn"],
        }
    )  # fmt: skip
    folder = written(recipe)
    assert_same(beamq.quantize_tensors(packed(nano), recipe, config), stored(folder))
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert beamq.quantization_config(recipe, config) == block
    assert len(beamq.output_metadata(config, recipe)) == len(stored(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", ["nvfp4-all", "fp8"])
def test_other_float_weights_are_quantized_from_their_own_values(
    nano_copy: Path, tmp_path: Path, config: dict[str, Any], recipe: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    source = {
        name: (tensor.float() + torch.randn(tensor.shape) * 1e-4).to(dtype)
        for name, tensor in load_file(nano_copy / FILE).items()
    }
    source[GATE] = source[GATE].bfloat16()  # beside a partner of another dtype
    save_file(source, nano_copy / FILE)
    options = {"no_calibration": True} if recipe != "fp8" else {}
    beamq.quantize(nano_copy, tmp_path / "out", recipe=recipe, **options)
    wanted = stored(tmp_path / "out")
    assert_same(beamq.quantize_tensors(shuffled(source), recipe, config), wanted)
    assert_same(beamq.quantize_tensors(shuffled(source), recipe, nano_copy), wanted)


def test_input_scales_of_a_calibration(
    beam_nano: Path, nano: Tensors, config: dict[str, Any], tmp_path: Path
) -> None:
    """Statistics, their file, and the scales that a checkpoint holds, are the same scales."""
    statistics = tmp_path / "stats"
    beamq.calibrate(beam_nano, statistics, samples=6, sequence_length=96)
    beamq.quantize(beam_nano, tmp_path / "out", recipe="nvfp4-all", calibration=statistics)
    wanted = stored(tmp_path / "out")
    inputs = {name: each for name, each in wanted.items() if name.endswith(".input_scale")}
    assert len({float(each) for each in inputs.values()}) > 10
    modules = {name.removesuffix(".input_scale"): float(each) for name, each in inputs.items()}
    for scales in (statistics, str(statistics), load_stats(statistics), inputs, modules):
        stream = beamq.quantize_tensors(packed(nano), "nvfp4-all", config, input_scales=scales)  # type: ignore[arg-type]
        assert_same(stream, wanted)


def test_experts_may_have_input_scales_of_their_own(nano: Tensors, config: dict[str, Any]) -> None:
    scales = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj": 1.0 + expert // 3
        for layer in range(3, 8)
        for expert in range(16)
        for part in ("gate", "up", "down")
    }
    for form in (nano, packed(nano)):
        found = dict(beamq.quantize_tensors(form, "nvfp4", config, input_scales=scales))
        assert {name: float(found[f"{name}.input_scale"]) for name in scales} == scales


def test_a_tensor_is_given_out_as_soon_as_it_can_be(nano: Tensors, config: dict[str, Any]) -> None:
    asked: list[str] = []

    def source() -> Iterable[tuple[str, torch.Tensor]]:
        for name in (NORM, GATE, DOWN, UP):
            asked.append(name)
            yield name, nano[name]

    stream = beamq.quantize_tensors(source(), "nvfp4", config)
    name, tensor = next(stream)
    assert (name, tensor) == (NORM, nano[NORM])
    assert tensor is nano[NORM]  # precise ones as the same object
    assert asked == [NORM]
    assert next(stream)[0] == DOWN
    assert asked == [NORM, GATE, DOWN]
    assert [name for name, _ in stream.held] == [GATE]
    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    rest = [name for name, _ in stream][3:]
    assert rest == [
        f"{LAYER}.experts.5.{part}_proj.{suffix}" for part in ("gate", "up") for suffix in suffixes
    ]


def test_tensors_as_a_trainer_has_them(
    nano: Tensors, config: dict[str, Any], written: Callable[[str], Path]
) -> None:
    """Parameters, strides and places of any kind, and torch in any mood, change no byte."""

    def odd(tensor: torch.Tensor) -> torch.Tensor:
        place = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)[1:-2].view(tensor.shape)
        return place.copy_(tensor)

    forms: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.nn.Parameter,
        odd,
        lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
    ]
    for form in forms:
        given = {name: form(tensor) for name, tensor in packed(nano, (3,)).items()}
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.float16):
            assert_same(
                beamq.quantize_tensors(given, "nvfp4-all", config), stored(written("nvfp4-all"))
            )
    with torch.inference_mode():
        assert_same(beamq.quantize_tensors(nano, "fp8", config), stored(written("fp8")))


def test_buckets(nano: Tensors, config: dict[str, Any], written: Callable[[str], Path]) -> None:
    """What one call could not convert is in `held`, for the next."""
    items, made, held = shuffled(nano), list[tuple[str, torch.Tensor]](), list[Any]()
    for begin in range(0, len(items), 20):
        bucket = [*held, *items[begin : begin + 20]]
        stream = beamq.quantize_tensors(bucket, "nvfp4-all", config, partial="hold")
        made += stream
        held = stream.held
    assert held == []
    assert_same(made, stored(written("nvfp4-all")))


# What is refused


def refused(
    given: Any, says: str, kind: type[BeamqError] = TensorError, **options: Any
) -> list[str]:
    """The names given out before the error."""
    names: list[str] = []
    options = {"recipe": "nvfp4-all", **options}
    stream = beamq.quantize_tensors(given, **options)
    with pytest.raises(kind, match=says):
        names.extend(name for name, _ in stream)
    with pytest.raises(StopIteration):
        next(stream)
    return names


def changed(tensor: torch.Tensor, value: float, *place: int) -> torch.Tensor:
    out = tensor.clone()
    out[place] = value
    return out


class Sharded(torch.Tensor):
    """Of a kind that the kernels would take for what it is not."""


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("module." + UP, None, rf"'module\.', so name it {UP}"),
        ("_orig_mod.layers.3.mlp.experts.5.up_proj.weight", None, f"name it {UP}"),
        ("model.layers.3.mlp.experts.16.up_proj.weight", None, "no such tensor; leave it out"),
        ("model.layers.9.self_attn.q_proj.weight", None, "no such tensor"),
        (f"{LAYER}.experts.5.up_proj.weight_scale", None, "no such tensor"),
        (UP, torch.zeros(64, 64), r"shape \[64, 64\], .* calls for \[64, 128\]"),
        (UP, torch.zeros(64, 128, dtype=torch.int8), r"dtype is torch\.int8"),
        (UP, torch.zeros(64, 128, dtype=torch.float64), r"dtype is torch\.float64"),
        (UP, torch.zeros(64, 128, device="meta"), "is on meta, expected cpu"),
        (UP, torch.zeros(64, 128).as_subclass(Sharded), "is a Sharded, .*full_tensor"),
        (UP, torch.zeros(64, 128).to_sparse(), "sparse_coo"),
        (GATE, torch.zeros(64, 128), "came twice"),
        (f"{LAYER}.experts.gate_up_proj", torch.zeros(16, 128, 128), "hold the same experts"),
    ],
)
def test_a_tensor_that_does_not_fit(
    nano: Tensors, config: dict[str, Any], name: str, tensor: torch.Tensor | None, says: str
) -> None:
    given = [(NORM, nano[NORM]), (GATE, nano[GATE]), (name, nano[UP] if tensor is None else tensor)]
    assert refused(given, says, config=config) == [NORM]


def test_a_stack_and_its_parts(nano: Tensors, config: dict[str, Any]) -> None:
    stacks = packed(nano, (3,))
    for name, other in (("gate_up_proj", UP), ("down_proj", DOWN)):
        stack = f"{LAYER}.experts.{name}"
        for again, says in (
            ((other, nano[other]), "same experts"),
            ((f"{stack}.weight", stacks[stack]), "same experts"),
            ((stack, stacks[stack]), "came twice"),
        ):
            assert len(refused([(stack, stacks[stack]), again], says, config=config)) > 16
    down = f"{LAYER}.experts.down_proj"  # packed beside those that are not
    assert dict(
        beamq.quantize_tensors(
            {GATE: nano[GATE], UP: nano[UP], down: stacks[down]}, "nvfp4", config
        )
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_partners_that_never_come(nano: Tensors, config: dict[str, Any], recipe: str) -> None:
    given = {name: nano[name] for name in (NORM, GATE, *ATTENTION[:2])}
    rules = load_recipe(recipe).rules
    if rules[Role.EXPERT] != "nvfp4":
        got = list(beamq.quantize_tensors(given, recipe, config))
        assert len(got) == 5 + 2 * (Role.ATTENTION in rules)
        return
    says = rf"without {UP}, with which {GATE} shares a scale \({'2' if 'all' in recipe else '1'} "
    names = refused(given, says, recipe=recipe, config=config)
    attention = [] if recipe == "nvfp4-all" else ATTENTION[:2]
    scales = [f"{name}_scale" for name in attention if rules.get(Role.ATTENTION) == "fp8"]
    assert sorted(names) == sorted([NORM, *attention, *scales])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("recipe", ["nvfp4-all", "fp8", "nvfp4-max"])
def test_values_that_are_not_finite(
    nano: Tensors, config: dict[str, Any], recipe: str, value: float
) -> None:
    """Of their group nothing is given out."""
    up = changed(nano[UP], value, 3, 7)
    rest = [(NORM, nano[NORM]), (GATE, nano[GATE]), (UP, up)]
    names = refused(rest, rf"{UP} holds NaN .*first at \[3, 7\]", recipe=recipe, config=config)
    assert names[0] == NORM
    assert not any(".up_proj" in name for name in names)
    assert recipe == "fp8" or len(names) == 1
    norm = changed(nano[NORM], value, 5)
    assert refused({NORM: norm}, rf"{NORM} .*first at \[5\]", recipe=recipe, config=config) == []
    stack = f"{LAYER}.experts.gate_up_proj"
    bad = changed(packed(nano, (3,))[stack], value, 9, 100, 2)
    says = r"gate_up_proj .*first at \[9, 100, 2\]"
    assert refused({stack: bad}, says, recipe=recipe, config=config) == []


def test_values_beyond_bf16(nano: Tensors, config: dict[str, Any]) -> None:
    wide = changed(nano[NORM].float(), 3.4e38, 2)
    assert refused({NORM: wide}, "overflows BF16", config=config) == []


@pytest.mark.parametrize("form", [lambda nano: nano, lambda nano: packed(nano, (3,))])
def test_one_wild_weight(
    nano: Tensors, config: dict[str, Any], form: Callable[[Tensors], Tensors]
) -> None:
    """As in a conversion: the other values of its group would become zero."""
    given = form(nano | {UP: changed(nano[UP], 3.39e38, 0, 0)})
    says = r"experts\.5\.gate_proj, .*up_proj: 1,023 of 1,024 blocks"
    names = refused(given, says, recipe="nvfp4", config=config)
    assert not any(name.startswith((GATE, UP)) for name in names)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"recipe": "nvfp4-gptq"}, RecipeError, "by activations .gptq., which a stream"),
        ({"recipe": "nvfp5"}, RecipeError, "no recipe named"),
        ({"recipe": "fp8", "input_scales": {}}, UsageError, "input_scales: FP8"),
        ({"input_scales": 3}, UsageError, "input_scales is 3"),
        ({"input_scales": "no-such-file"}, CalibrationError, "no-such-file"),
        ({"partial": "skip"}, UsageError, "partial is 'skip', expected error or hold"),
        ({"profile": "miles"}, UsageError, "profile is 'miles', expected beamq or skyrl-fp8-block"),
        ({"device": "tpu"}, UsageError, "device 'tpu'"),
        ({"device": "cuda:9"}, DeviceError, "device cuda:9"),
        ({"config": {"model_type": "llama"}}, ConfigError, "model_type"),
        ({"config": 3}, UsageError, "config is 3"),
        ({"named": 3}, UsageError, "named is 3"),
    ],
)
def test_a_call_that_cannot_work_is_refused_before_a_tensor_is_taken(
    config: dict[str, Any], options: dict[str, Any], kind: type[BeamqError], says: str
) -> None:
    def never() -> Iterable[tuple[str, torch.Tensor]]:
        raise AssertionError
        yield

    with pytest.raises(kind, match=says):
        beamq.quantize_tensors(**{"named": never(), "recipe": "nvfp4", "config": config, **options})


@pytest.mark.parametrize("given", [["abc"], [3], [("a",)], [(NORM, 3)], [(3, torch.ones(2))], "x"])
def test_what_holds_no_pairs(config: dict[str, Any], given: Any) -> None:
    assert refused(given, "expected pairs", UsageError, config=config) == []


def test_devices(nano: Tensors, config: dict[str, Any]) -> None:
    meta = {NORM: nano[NORM].to("meta")}
    assert refused(meta, "meta: .* not an NVIDIA GPU", DeviceError, config=config) == []
    assert refused(meta, "is on meta, expected cpu", device="cpu", config=config) == []


@pytest.mark.parametrize(
    ("scales", "says"),
    [
        ({}, "gate_proj is missing"),
        ({"up_proj": 1.0}, "gate_proj is missing"),
        ({"gate_proj": 1.0, "up_proj": 2.0}, r"are from 1\.0 to 2\.0; engines fuse"),
        ({"gate_proj": 0.0, "up_proj": 0.0}, r"is 0\.0, expected a positive number"),
        ({"gate_proj": float("nan"), "up_proj": 1.0}, "is nan"),
        ({"gate_proj": 1e-40, "up_proj": 1e-40}, "is 1e-40"),
        ({"gate_proj": 1e39, "up_proj": 1.0}, r"is 1e\+39"),
        ({"gate_proj": "x", "up_proj": 1.0}, "is 'x'"),
        ({"gate_proj": torch.ones(2), "up_proj": 1.0}, "is tensor"),
        ({"gate_proj": torch.ones((), device="meta"), "up_proj": 1.0}, "is on meta"),
    ],
)
def test_input_scales_that_do_not_fit(
    nano: Tensors, config: dict[str, Any], scales: dict[str, Any], says: str
) -> None:
    given = [(NORM, nano[NORM]), (GATE, nano[GATE]), (UP, nano[UP])]
    named = {f"{LAYER}.experts.5.{part}": value for part, value in scales.items()}
    names = refused(
        given, says, CalibrationError, recipe="nvfp4", config=config, input_scales=named
    )
    assert names == [NORM]


# A double of a GPU: the same kernels, whose counts may be looked at only when all is queued.


class Queued:
    """Kernels of another device: what they do there is no wait of the host."""

    @staticmethod
    def nvfp4_groups(*arguments: Any) -> Any:
        with _disable_current_modes():
            return CpuKernels.nvfp4_groups(*arguments)

    @staticmethod
    def fp8_quantize(rounding: str, w: torch.Tensor, *, counts: torch.Tensor) -> Any:
        with _disable_current_modes():
            return CpuKernels.fp8_quantize(rounding, w, counts=counts)


class NoWaiting(TorchDispatchMode):
    """Refuses what would make the host wait for a device."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert func.name() not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kernels", lambda device: Queued)


@pytest.mark.usefixtures("queued")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_waits_once(
    nano: Tensors, config: dict[str, Any], written: Callable[[str], Path], recipe: str
) -> None:
    stream, made = beamq.quantize_tensors(packed(nano, (3, 4)), recipe, config), []
    with NoWaiting():
        made = [next(stream) for _ in beamq.output_metadata(config, recipe)]
    assert_same(made, stored(written(recipe)))
    assert list(stream) == []


@pytest.mark.usefixtures("queued")
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
@pytest.mark.parametrize(
    ("name", "place", "says"),
    [
        (UP, (3, 7), f"^{UP} holds NaN"),
        (NORM, (0,), f"^{NORM} holds NaN"),
        ("model.layers.4.mlp.experts.gate_up_proj", (9, 1, 1), r"^\S*4\.\S*gate_up_proj holds NaN"),
        ("model.layers.4.mlp.experts.down_proj", (15, 1, 1), r"^\S*4\.\S*down_proj holds NaN"),
    ],
)
def test_values_are_looked_at_when_all_is_queued(
    nano: Tensors, config: dict[str, Any], recipe: str, name: str, place: tuple[int, ...], says: str
) -> None:
    given = packed(nano, (4,))
    given[name] = changed(given[name], float("nan"), *place)
    assert len(refused(given, says, recipe=recipe, config=config)) > len(given)
    if recipe == "nvfp4" and len(place) == 3:
        refused(
            given,
            rf"\(expert {place[0]}\); none of what was given out may be used",
            recipe=recipe,
            config=config,
        )
    given[DOWN] = changed(given[DOWN], float("inf"), 1, 1)
    refused(given, "1 more such group", recipe=recipe, config=config)


@pytest.mark.usefixtures("queued")
def test_a_wild_weight_of_a_stack_is_found_among_its_peers(
    nano: Tensors, config: dict[str, Any]
) -> None:
    given = packed(nano | {UP: changed(nano[UP], 3.39e38, 0, 0)}, (3,))
    refused(given, r"experts\.5\.gate_proj, .*1,023 of 1,024", recipe="nvfp4", config=config)


def test_recipes_are_keys() -> None:
    """Tables are kept by config and recipe."""
    assert len({load_recipe("nvfp4"), load_recipe("nvfp4"), load_recipe("nvfp4-max")}) == 2


def test_a_config_is_taken_in_every_form(beam_nano: Path, config: dict[str, Any]) -> None:
    wanted = beamq.output_metadata(config, "fp8")
    forms = (beam_nano, str(beam_nano), beam_nano / "config.json", BeamConfig.from_dict(config))
    for form in forms:
        assert beamq.output_metadata(form, load_recipe("fp8")) == wanted


def test_a_folder_without_a_config(tmp_path: Path, beam_nano: Path) -> None:
    shutil.copy(beam_nano / FILE, tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json"):
        beamq.quantization_config("fp8", tmp_path)
