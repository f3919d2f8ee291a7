"""The plan accounts for every source key and places every output byte, from headers alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from beamq.beam.tensors import Role
from beamq.errors import AlreadyQuantizedError, RecipeError, TensorError
from beamq.io.checkpoint import open_checkpoint
from beamq.io.safetensors_header import ITEMSIZE
from beamq.plan.plan import Plan, make_plan
from beamq.plan.recipe import BUILT_IN, load_recipe
from tests.helpers import safetensors_edit as st


def plan_of(folder: Path, recipe: str = "nvfp4", exclude: tuple[str, ...] = (), **kw: int) -> Plan:
    with open_checkpoint(folder) as checkpoint:
        return make_plan(checkpoint, load_recipe(recipe).with_options(exclude=exclude), **kw)


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_every_source_tensor_is_read_once_and_every_output_byte_is_placed(
    beam_mini: Path, recipe: str
) -> None:
    plan = plan_of(beam_mini, recipe, max_shard_bytes=4_000_000)
    with open_checkpoint(beam_mini) as checkpoint:
        read = [member.source.spec.name for job in plan.jobs for member in job.members]
        assert sorted(read) == sorted(checkpoint.tensors)
    written = [out.name for job in plan.jobs for member in job.members for out in member.outputs]
    assert len(set(written)) == len(written)
    assert sorted(written) == sorted(t.name for shard in plan.shards for t in shard.tensors)
    for shard in plan.shards:
        position = len(shard.header)
        for tensor in shard.tensors:
            assert tensor.offset == position
            assert tensor.offset % ITEMSIZE[tensor.dtype] == 0
            assert tensor.nbytes == math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]
            position += tensor.nbytes
        assert position == shard.nbytes
        assert int.from_bytes(shard.header[:8], "little") == len(shard.header) - 8


def test_shards_keep_jobs_whole_and_respect_the_limit(beam_mini: Path) -> None:
    plan = plan_of(beam_mini, max_shard_bytes=4_000_000)
    assert len(plan.shards) > 5
    for shard in plan.shards:
        assert shard.nbytes - len(shard.header) <= 4_000_000 or len(shard.tensors) == 1
    places = {t.name: shard.name for shard in plan.shards for t in shard.tensors}
    for job in plan.jobs:
        outs = [places[out.name] for member in job.members for out in member.outputs]
        assert len(set(outs)) == 1


def test_the_same_input_gives_the_same_plan(beam_nano: Path) -> None:
    assert plan_of(beam_nano).digest() == plan_of(beam_nano).digest()
    assert plan_of(beam_nano).digest() != plan_of(beam_nano, "nvfp4-mlp").digest()


def test_another_source_of_any_job_is_another_plan(beam_nano: Path) -> None:
    """The outputs are the same: BF16 or F16, the weight becomes four tensors of the same sizes."""
    plan = plan_of(beam_nano)
    for place in (0, len(plan.jobs) // 2, len(plan.jobs) - 1):
        jobs = list(plan.jobs)
        member = jobs[place].members[-1]
        spec = replace(member.source.spec, dtype="F16")
        other = replace(member, source=replace(member.source, spec=spec))
        jobs[place] = replace(jobs[place], members=(*jobs[place].members[:-1], other))
        assert replace(plan, jobs=tuple(jobs)).digest() != plan.digest(), place


def test_tensors_after_one_of_odd_length_are_aligned(nano_copy: Path) -> None:
    """Tensors of the fixtures take multiples of 4 bytes; what is not Beam's may take any number."""

    def add(tensors: st.Tensors) -> None:
        for name, dtype, nbytes in (("a", "U8", 3), ("b", "F32", 4), ("c", "F8_E4M3", 5)):
            tensors[f"model.extra.{name}"] = (
                dtype,
                [1 if dtype == "F32" else nbytes],
                bytes(nbytes),
            )

    st.edit(nano_copy / "model.safetensors", add)
    plan = plan_of(nano_copy)
    tensors = [tensor for shard in plan.shards for tensor in shard.tensors]
    assert {"U8", "BF16", "F32"} <= {tensor.dtype for tensor in tensors}
    for tensor in tensors:
        assert tensor.offset % ITEMSIZE[tensor.dtype] == 0, tensor.name


@pytest.mark.parametrize(
    ("recipe", "groups"),
    [
        ("nvfp4", {"gate_up": 80, "down": 80}),
        ("nvfp4-all", {"gate_up": 83, "down": 83, "qkv_gate": 8, "o": 8}),
    ],
)
def test_linears_that_share_a_scale_are_one_job(
    beam_nano: Path, recipe: str, groups: dict[str, int]
) -> None:
    found: dict[str, int] = {}
    for job in plan_of(beam_nano, recipe).jobs:
        if job.kind == "nvfp4":
            kind = job.group.rsplit(".", 1)[-1]
            found[kind] = found.get(kind, 0) + 1
            assert len(job.members) == {"gate_up": 2, "qkv_gate": 4}.get(kind, 1)
    assert found == groups


def test_router_norms_embeddings_and_head_are_never_quantized(beam_nano: Path) -> None:
    for recipe in BUILT_IN:
        for job in plan_of(beam_nano, recipe).jobs:
            role = job.members[0].role.role
            if job.kind != "copy":
                assert role in (Role.EXPERT, Role.DENSE_MLP, Role.ATTENTION)
            elif role in (Role.ROUTER, Role.ROUTER_BIAS):
                assert job.members[0].outputs[0].dtype == "F32"


MISSING = [
    "model.layers.5.mlp.experts.15.up_proj.weight",
    "model.layers.3.mlp.gate.e_score_correction_bias",
    "lm_head.weight",
    "model.layers.0.self_attn.gate_bias",
]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_tensor_is_named(nano_copy: Path, name: str) -> None:
    st.edit(nano_copy / "model.safetensors", lambda tensors: tensors.pop(name) and None)
    with pytest.raises(
        TensorError, match=f"1 tensor that config.json calls for is missing: {name}"
    ):
        plan_of(nano_copy)


RESHAPED: dict[str, tuple[str, list[int], str]] = {
    "router rows": ("model.layers.3.mlp.gate.weight", [8, 128], "F32"),
    "heads": ("model.layers.0.self_attn.q_proj.weight", [96, 128], "BF16"),
    "gate_bias": ("model.layers.0.self_attn.gate_bias", [3], "BF16"),
    "integers": ("model.layers.0.mlp.up_proj.weight", [512, 128], "I64"),
}


@pytest.mark.parametrize(("name", "shape", "dtype"), RESHAPED.values(), ids=RESHAPED.keys())
def test_a_misshapen_or_mistyped_tensor_is_named(
    nano_copy: Path, name: str, shape: list[int], dtype: str
) -> None:
    data = bytes(math.prod(shape) * ITEMSIZE[dtype])
    st.edit(
        nano_copy / "model.safetensors",
        lambda tensors: tensors.update({name: (dtype, shape, data)}),
    )
    with pytest.raises(TensorError, match=name):
        plan_of(nano_copy)


def test_extras_are_copied_and_derived_buffers_dropped_with_a_reason(nano_copy: Path) -> None:
    extras = {
        "model.layers.8.input_layernorm.weight": ("BF16", [2], b"1234"),
        "mtp.layers.0.mlp.down_proj.weight": ("F32", [1, 1], b"1234"),
        "foo.bar": ("I64", [1], b"12345678"),
        "vision_tower.x.weight": ("F16", [1, 2], b"1234"),
        "model.rotary_emb.inv_freq": ("F32", [1], b"1234"),
    }
    st.edit(nano_copy / "model.safetensors", lambda tensors: tensors.update(extras))
    plan = plan_of(nano_copy)
    outputs = {t.name: t.dtype for shard in plan.shards for t in shard.tensors}
    for name, (dtype, _, _) in extras.items():
        assert outputs.get(name) == (None if "inv_freq" in name else dtype)
    assert [name for name, _ in plan.dropped] == ["model.rotary_emb.inv_freq"]
    assert any("3 tensors are not Beam's" in note for note in plan.notes)
    assert any("1 tensor is of further layers" in note for note in plan.notes)
    assert "vision_tower.x" in plan.ignore
    assert "mtp.layers.0.mlp.down_proj" in plan.ignore


def test_quantized_sources_are_refused_and_false_claims_dropped(nano_copy: Path) -> None:
    st.edit_config(nano_copy, quantization_config={"quant_algo": "NVFP4"})
    assert any(
        "declares a quantization that its tensors do not have" in note
        for note in plan_of(nano_copy).notes
    )
    extra = {"model.layers.3.mlp.experts.0.up_proj.weight_scale": ("F8_E4M3", [1], b"1")}
    st.edit(nano_copy / "model.safetensors", lambda tensors: tensors.update(extra))
    with pytest.raises(AlreadyQuantizedError, match=r"NVFP4.*dequantize"):
        plan_of(nano_copy)


def test_fp8_tensors_without_any_config_are_refused(nano_copy: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    fp8 = {
        name: ("F8_E4M3", [512, 128], bytes(512 * 128)),
        f"{name}_scale": ("F32", [512, 1], bytes(512 * 4)),
    }
    st.edit(nano_copy / "model.safetensors", lambda tensors: tensors.update(fp8))
    with pytest.raises(AlreadyQuantizedError, match="FP8"):
        plan_of(nano_copy)


def test_exclusion_widens_to_whole_parts_and_a_miss_is_an_error(beam_nano: Path) -> None:
    plan = plan_of(beam_nano, "nvfp4-all", ("model.layers.3.self_attn.q_proj",))
    (exclusion,) = plan.exclusions
    assert exclusion.widened
    assert exclusion.would_quantize == 1
    assert exclusion.units == ((3, Role.ATTENTION),)
    assert "model.layers.3.self_attn*" in plan.ignore
    with pytest.raises(RecipeError, match="matches no module"):
        plan_of(beam_nano, "nvfp4", ("model.layers.99",))
    whole = plan_of(beam_nano, "nvfp4", ("model.layers.7.mlp.experts*",))
    assert not whole.exclusions[0].widened
    assert "model.layers.7.mlp.experts*" in whole.ignore


def test_excluding_the_router_changes_nothing_but_is_shown(beam_nano: Path) -> None:
    for pattern in ("gate", "*gate", r"re:.*mlp\.gate$"):
        plan = plan_of(beam_nano, "nvfp4", (pattern,))
        assert plan.exclusions[0].matched == tuple(
            f"model.layers.{n}.mlp.gate" for n in range(3, 8)
        )
        assert plan.exclusions[0].would_quantize == 0
        assert plan.units == plan_of(beam_nano).units


def test_excluding_everything_is_refused(beam_nano: Path) -> None:
    with pytest.raises(RecipeError, match="nothing is left"):
        plan_of(beam_nano, "nvfp4", ("experts",))


def test_widths_that_nvfp4_cannot_block_are_refused_and_odd_ones_warned(tmp_path: Path) -> None:
    for width, outcome in ((40, "refused"), (48, "warned")):
        folder = synthetic(tmp_path / str(width), width)
        if outcome == "refused":
            with pytest.raises(RecipeError, match="input width 40 is not a multiple of 16"):
                plan_of(folder)
            assert plan_of(folder, "fp8-experts").units
        else:
            assert any("one of 1;" in note for note in plan_of(folder).notes)


def synthetic(folder: Path, width: int) -> Path:
    """Nano's config with another expert width and zero weights."""
    from beamq.beam.config import BeamConfig
    from beamq.beam.tensors import expected_tensors

    nano = Path(__file__).parents[3] / "examples" / "beam-nano" / "config.json"
    config = json.loads(nano.read_text())
    config["moe_intermediate_size"] = width
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    st.save(
        folder / "model.safetensors",
        {
            role.name: ("BF16", list(shape), b"\x80\x3f" * math.prod(shape))
            for role, shape in expected_tensors(BeamConfig.from_dict(config))
        },
    )
    return folder


def test_a_bf16_router_is_accepted_and_said(tmp_path: Path) -> None:
    plan = plan_of(synthetic(tmp_path / "x", 64))
    assert any("router tensors are not FP32" in note for note in plan.notes)
    dtypes = {t.name: t.dtype for shard in plan.shards for t in shard.tensors}
    assert dtypes["model.layers.3.mlp.gate.weight"] == "F32"


def test_f16_among_bf16_is_said_and_f16_throughout_is_not(nano_copy: Path) -> None:
    odd = "model.layers.4.mlp.experts.3.up_proj.weight"
    every = [odd]

    def relabel(tensors: st.Tensors) -> None:
        for name in every:
            dtype, shape, data = tensors[name]
            tensors[name] = ("F16" if dtype == "BF16" else dtype, shape, data)

    st.edit(nano_copy / "model.safetensors", relabel)
    assert f"1 tensor is F16, the others BF16 ({odd})" in " ".join(plan_of(nano_copy).notes)
    every = list(st.load(nano_copy / "model.safetensors"))
    st.edit(nano_copy / "model.safetensors", relabel)
    assert not any("among" in note for note in plan_of(nano_copy).notes)
