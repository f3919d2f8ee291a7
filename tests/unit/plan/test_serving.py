"""Serving memory from a config alone: the design's table, how servers divide, what fits."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import Role, expected_tensors
from beamq.errors import UsageError
from beamq.io.checkpoint import open_checkpoint
from beamq.plan import serving
from beamq.plan.plan import make_plan, quantized_units
from beamq.plan.recipe import BUILT_IN, load_recipe
from beamq.plan.serving import COUNTS, GPUS, fit, kv_cache_nbytes, model_weights, parse_gpu
from benchmarks.make_full_size import full_size_config

GB = 1e9
GIB = 2**30


@pytest.fixture(scope="module")
def full_size() -> BeamConfig:
    return BeamConfig.from_dict(full_size_config())


@pytest.fixture
def nano(beam_nano: Path) -> BeamConfig:
    return BeamConfig.from_dict(json.loads((beam_nano / "config.json").read_text()))


def weights_of(config: BeamConfig, recipe_name: str) -> serving.Weights:
    if recipe_name == "bf16":
        return model_weights(config)
    recipe = load_recipe(recipe_name)
    units = quantized_units(config, recipe, ())
    return model_weights(config, {unit: recipe.weight_format(unit[1]) for unit in units})


def gpu(name: str) -> serving.Gpu:
    return parse_gpu(name)[0]


def test_parameters_of_the_full_size_model(full_size: BeamConfig) -> None:
    weights = model_weights(full_size)
    assert round(weights.parameters / GB, 2) == 501.27
    assert round(weights.of(Role.EXPERT)[0] / GB, 2) == 493.25
    assert round(weights.of(Role.ATTENTION)[0] / GB, 3) == 5.453
    assert round(weights.of(Role.DENSE_MLP)[0] / GB, 3) == 0.944
    assert round(weights.of(Role.ROUTER)[0] / GB, 3) == 0.064
    assert round(weights.of(Role.EMBEDDING, Role.HEAD)[0] / GB, 3) == 1.556
    assert round(weights.of(Role.EXPERT)[0] / weights.parameters, 3) == 0.984


@pytest.mark.parametrize(
    ("recipe", "gigabytes"),
    [("bf16", 1002.7), ("nvfp4", 293.6), ("nvfp4-mlp", 292.3), ("nvfp4-all", 284.4)],
)
def test_bytes_of_the_full_size_model(full_size: BeamConfig, recipe: str, gigabytes: float) -> None:
    assert round(weights_of(full_size, recipe).nbytes / GB, 1) == gigabytes


def test_bytes_in_gib_and_fp8_with_and_without_row_scales(full_size: BeamConfig) -> None:
    assert round(weights_of(full_size, "nvfp4").nbytes / GIB, 1) == 273.5
    assert round(weights_of(full_size, "nvfp4-all").nbytes / GIB, 1) == 264.9
    fp8 = weights_of(full_size, "fp8")
    assert round((fp8.nbytes - fp8.scale_nbytes) / GB, 1) == 503.0
    assert round(fp8.scale_nbytes / GB, 2) == 0.52  # FP32, one for each output row
    assert round(fp8.nbytes / GIB, 1) == 469.0


def test_expert_parallel_leaves_everything_but_experts_whole(full_size: BeamConfig) -> None:
    weights = model_weights(full_size)
    _, experts = weights.of(Role.EXPERT)
    assert round((weights.nbytes - experts) / GB) == 16
    assert weights.per_gpu("expert", 16) == weights.nbytes - experts + experts // 16
    assert (weights.per_gpu("expert", 16) or 0) // 10**9 == 77
    assert (weights.per_gpu("expert", 8) or 0) // 10**9 == 139


@pytest.mark.parametrize(
    ("tokens", "gibibytes", "all_full"),
    [(32_768, 1.2, 6.5), (131_072, 4.6, 26), (1 << 20, 36, 208)],
)
def test_kv_cache(full_size: BeamConfig, tokens: int, gibibytes: float, all_full: float) -> None:
    digits = 1 if gibibytes < 10 else 0
    assert round(kv_cache_nbytes(full_size, tokens) / GIB, digits) == gibibytes
    assert kv_cache_nbytes(full_size, tokens, windowed=False) == all_full * GIB
    assert 2 * kv_cache_nbytes(full_size, tokens, itemsize=1) == kv_cache_nbytes(full_size, tokens)


def test_kv_cache_is_36_kib_a_token_and_a_few_tens_of_mib_of_windows(
    full_size: BeamConfig,
) -> None:
    one, two = (kv_cache_nbytes(full_size, tokens) for tokens in (100_000, 100_001))
    assert two - one == 36 * 1024
    windows = kv_cache_nbytes(full_size, 512) - 512 * 36 * 1024
    assert windows == 43 * 512 * 4096
    assert kv_cache_nbytes(full_size, 10) == 52 * 10 * 4096  # shorter than the window


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_weights_equal_the_plan_to_the_byte(beam_nano: Path, recipe: str) -> None:
    plan = make_plan(beam_nano, recipe)
    weights = model_weights(plan.config, plan.formats)
    assert weights.nbytes == plan.tensor_nbytes
    assert weights.parameters == plan.total_parameters


def test_weights_follow_exclusions(beam_nano: Path) -> None:
    plan = make_plan(beam_nano, "nvfp4-all", exclude=["model.layers.4.mlp.experts*", "self_attn"])
    weights = model_weights(plan.config, plan.formats)
    assert weights.nbytes == plan.tensor_nbytes
    assert weights.blocked == {Role.DENSE_MLP: 16, Role.EXPERT: 16}


def test_source_weights_equal_the_expected_tensors(nano: BeamConfig, beam_nano: Path) -> None:
    with open_checkpoint(beam_nano) as checkpoint:
        assert model_weights(nano).nbytes == sum(s.nbytes for s in checkpoint.tensors.values())
    tied = dataclasses.replace(nano, tie_word_embeddings=True)
    assert model_weights(tied).parameters == sum(
        shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape in expected_tensors(tied)
    )


def test_tensor_parallel_divides_linears_and_replicates_the_rest(full_size: BeamConfig) -> None:
    weights = model_weights(full_size)
    shares = {count: weights.per_gpu("tensor", count) or 0 for count in COUNTS}
    assert shares[1] == weights.nbytes
    routers = weights.of(Role.ROUTER, Role.ROUTER_BIAS)[1]
    whole = routers + weights.of(Role.NORM, Role.ATTENTION_EXTRA)[1]
    padding = 2 * 2 * 64 * full_size.hidden_size  # at most one step of rows, twice, BF16
    for count in (2, 4, 8):
        even = (weights.nbytes - whole) // count + whole
        assert 0 <= shares[count] - even <= padding
    # 8 KV heads over 16 GPUs: each holds one head, twice its even share.
    kv = 52 * 2 * full_size.kv_dim * full_size.hidden_size * 2
    even = (weights.nbytes - whole) // 16 + whole
    assert 0 <= shares[16] - even - kv // 16 <= padding


def test_nvfp4_experts_are_padded_to_64_on_each_gpu(full_size: BeamConfig) -> None:
    experts = [part for part in weights_of(full_size, "nvfp4").parts if part.role is Role.EXPERT]
    (part,) = experts
    assert part.share(8) == part.nbytes // 8  # 320 is a multiple of 64
    assert part.share(16) == part.nbytes * 192 // 2560  # 160 is not


def test_padding_is_told_as_a_part_of_an_even_share(
    full_size: BeamConfig, nano: BeamConfig
) -> None:
    weights = weights_of(full_size, "nvfp4")
    assert [round(weights.expert_padding(count), 3) for count in COUNTS] == [0, 0, 0, 0, 0.2]
    assert weights_of(full_size, "fp8").expert_padding(16) == 0
    assert weights_of(nano, "nvfp4").expert_padding(4) == 3  # 16 of 64 columns are padded to 64


def test_impossible_divisions_are_none(nano: BeamConfig) -> None:
    nvfp4 = weights_of(nano, "nvfp4")  # 4 heads, 16 experts of width 64
    assert nvfp4.per_gpu("tensor", 4) is not None
    assert nvfp4.per_gpu("tensor", 8) is None  # heads
    narrow = dataclasses.replace(nano, num_heads=16)
    assert weights_of(narrow, "nvfp4").per_gpu("tensor", 8) is None  # blocks of 16
    assert weights_of(narrow, "fp8").per_gpu("tensor", 8) is not None
    assert nvfp4.per_gpu("expert", 3) is None
    assert fit(nvfp4, gpu("h200"), 8, "tensor", context=100) is None


def test_fits_adds_up(full_size: BeamConfig) -> None:
    weights = weights_of(full_size, "nvfp4")
    found = fit(weights, gpu("b200"), 4, "tensor", context=131_072)
    assert found is not None
    budget = 180e9 * 0.9 - serving.RUNTIME_NBYTES - serving.activation_nbytes(full_size)
    assert found.room_nbytes == budget - found.weight_nbytes
    assert found.kv_nbytes == kv_cache_nbytes(full_size, 131_072, heads=2)
    assert found.sequences == found.room_nbytes // found.kv_nbytes > 0
    longest = found.max_context
    assert longest == full_size.max_position_embeddings
    tight = fit(weights, gpu("b200"), 2, "tensor", context=131_072)
    assert tight is not None
    assert tight.fits
    longest = tight.max_context
    assert longest < full_size.max_position_embeddings
    assert kv_cache_nbytes(full_size, longest, heads=4) <= tight.room_nbytes
    assert kv_cache_nbytes(full_size, longest + 1, heads=4) > tight.room_nbytes
    assert not dataclasses.replace(tight, sequences=0).fits


def test_expert_parallel_sequences_are_not_divided(full_size: BeamConfig) -> None:
    weights = weights_of(full_size, "nvfp4")
    found = fit(weights, gpu("h200"), 8, "expert", context=131_072)
    assert found is not None
    assert found.kv_nbytes == kv_cache_nbytes(full_size, 131_072)
    assert found.sequences == 8 * (found.room_nbytes // found.kv_nbytes)


def test_smallest_counts(full_size: BeamConfig) -> None:
    counts = {
        recipe: [
            serving.smallest_count(weights_of(full_size, recipe), gpu, context=131_072)
            for gpu in GPUS
        ]
        for recipe in ("bf16", "nvfp4", "fp8")
    }
    # H100 80, H200 141, B200 180, B300 288, RTX PRO 6000 96
    assert counts == {"bf16": [16, 16, 8, 4, 16], "nvfp4": [8, 4, 2, 2, 4], "fp8": [8, 8, 4, 2, 8]}
    wide = dataclasses.replace(full_size, num_experts=2048)
    assert serving.smallest_count(model_weights(wide), GPUS[0], context=1) is None


def test_fp8_cache_holds_twice_the_sequences(full_size: BeamConfig) -> None:
    weights = weights_of(full_size, "nvfp4")
    a, b = (
        fit(weights, gpu("b300"), 4, "tensor", context=131_072, kv_itemsize=size) for size in (2, 1)
    )
    assert a is not None
    assert b is not None
    assert b.sequences in (2 * a.sequences, 2 * a.sequences + 1)


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("h200:8", "h200", 8),
        ("H100", "h100", None),
        ("gb300:4", "b300", 4),
        ("RTX_PRO_6000:2", "rtx-pro-6000", 2),
        ("rtx6000", "rtx-pro-6000", None),
        ("rtx6000x8", "rtx-pro-6000", 8),
        ("8xh100", "h100", 8),
        ("8 x H100", "h100", 8),
        ("h100 x 8", "h100", 8),
    ],
)
def test_gpu_names(text: str, name: str, count: int | None) -> None:
    found, number = parse_gpu(text)
    assert (found.name, number) == (name, count)


@pytest.mark.parametrize(
    ("text", "name", "label", "count"),
    [
        ("mygpu=96GB:8", "mygpu", "mygpu 96 GB", 8),
        ("MyGPU=1.5TB", "mygpu", "mygpu 1500 GB", None),
        ("96GB:8", "96gb", "96 GB", 8),
        ("96GBx8", "96gb", "96 GB", 8),
        ("4x96GB", "96gb", "96 GB", 4),
    ],
)
def test_gpus_by_memory(text: str, name: str, label: str, count: int | None) -> None:
    found, number = parse_gpu(text)
    assert (found.name, found.label, number) == (name, label, count)
    assert found.nbytes == (1_500_000_000_000 if "TB" in text else 96_000_000_000)


@pytest.mark.parametrize("text", ["mygpu=96:2", "96MB", "mine=0.5GB:8"])
def test_memory_that_no_gpu_has(text: str) -> None:
    with pytest.raises(UsageError, match=r"below 1 GB; write a GPU's memory as in 96GB"):
        parse_gpu(text)


def test_an_unknown_gpu_is_answered_with_what_is_known() -> None:
    with pytest.raises(UsageError, match=r"gb300.*rtx6000.*did you mean 'h200'"):
        parse_gpu("h210:8")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a100",
        "h200:",
        "h200:0",
        "h200:x",
        "h200:-1",
        "h200:9999",
        "8xh100:8",
        "8x",
        "x=",
        "x=y",
    ],
)
def test_unknown_gpus_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError, match="--gpu"):
        parse_gpu(text)


def test_nothing_heavy_is_imported(repo: Path) -> None:
    code = (
        "import sys, beamq.plan.serving; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repo
    )
    assert done.stdout.strip() == "[]"
