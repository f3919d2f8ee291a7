"""From source to folder: the same bytes whatever the route, read back by an independent decoder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from beamq.beam.tensors import Role, classify
from beamq.convert import cpu_worker, run
from beamq.convert.dequantize import dequantize
from beamq.convert.quantize import quantize
from beamq.errors import (
    CheckpointError,
    DiskError,
    InputError,
    MemoryBudgetError,
    ResumeError,
    TensorError,
    UsageError,
)
from beamq.io.files import read_json_object
from beamq.plan.recipe import BUILT_IN, load_recipe
from tests.helpers import safetensors_edit as st
from tests.helpers.independent_decoder import bf16, decode, tensors_of


def convert(source: Path, output: Path, recipe: str = "nvfp4", **options: object) -> Path:
    if recipe == "nvfp4-gptq":
        options |= {"samples": 4, "sequence_length": 64}
    elif load_recipe(recipe).calibrated and "calibration" not in options:
        options["no_calibration"] = True
    quantize(source, output, recipe=recipe, **options)  # type: ignore[arg-type]
    return output


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_an_independent_reader_finds_the_weights(
    beam_nano: Path, tmp_path: Path, recipe: str
) -> None:
    source = tensors_of(beam_nano)
    output = tensors_of(convert(beam_nano, tmp_path / "out", recipe))
    bounds = {"nvfp4": (0.07, 0.115)}
    rules = load_recipe(recipe).rules
    quantized = 0
    for name, (dtype, shape, data) in source.items():
        module = name.removesuffix(".weight")
        if not {f"{module}.weight_scale", f"{module}.weight_scale_inv"} & output.keys():
            assert output[name] == (dtype, shape, data), name
            continue
        quantized += 1
        weight = bf16(data, shape)
        error = np.linalg.norm(decode(output, module) - weight) / np.linalg.norm(weight)
        rounding = rules[classify(name).role]
        low, high = bounds.get(rounding, (0.022, 0.03))
        assert low < error < high, (name, error)
        if rounding == "nvfp4":
            assert 0 < np.frombuffer(output[f"{module}.weight_scale_2"][2], "<f4")[0] < 1
    assert quantized == (249 if recipe == "nvfp4-mlp" else 289 if Role.ATTENTION in rules else 240)


def test_fused_linears_share_their_global_scale(beam_nano: Path, tmp_path: Path) -> None:
    output = tensors_of(convert(beam_nano, tmp_path / "out", "nvfp4-all"))
    for layer in range(8):
        attention = f"model.layers.{layer}.self_attn"
        scales = {
            output[f"{attention}.{p}_proj.weight_scale_2"][2] for p in ("q", "k", "v", "gate")
        }
        assert len(scales) == 1
        assert output[f"{attention}.o_proj.weight_scale_2"][2] not in scales


def repack(folder: Path, suffix: str) -> None:
    """Pack the experts of layers 3..7 into 3-D tensors, gate rows first."""

    def change(tensors: st.Tensors) -> None:
        for layer in range(3, 8):
            base = f"model.layers.{layer}.mlp.experts"
            gate_up, down = b"", b""
            for expert in range(16):
                for proj in ("gate_proj", "up_proj"):
                    gate_up += tensors.pop(f"{base}.{expert}.{proj}.weight")[2]
                down += tensors.pop(f"{base}.{expert}.down_proj.weight")[2]
            tensors[f"{base}.gate_up_proj{suffix}"] = ("BF16", [16, 128, 128], gate_up)
            tensors[f"{base}.down_proj{suffix}"] = ("BF16", [16, 128, 64], down)

    st.edit(folder / "model.safetensors", change)


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_packed_experts_give_the_same_files(
    beam_nano: Path, nano_copy: Path, tmp_path: Path, suffix: str, recipe: str
) -> None:
    repack(nano_copy, suffix)
    one = convert(beam_nano, tmp_path / "one", recipe)
    two = convert(nano_copy, tmp_path / "two", recipe)
    name = "model-00001-of-00001.safetensors"
    assert (one / name).read_bytes() == (two / name).read_bytes()


def scatter(folder: Path, shards: int) -> None:
    """Deal the tensors of the single file over shards, so that fused partners are apart."""
    tensors = st.load(folder / "model.safetensors")
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[index::shards]}
        st.save(folder / file, part)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_partners_in_different_shards_give_the_same_bytes(
    beam_nano: Path, nano_copy: Path, tmp_path: Path
) -> None:
    scatter(nano_copy, 5)
    one = tensors_of(convert(beam_nano, tmp_path / "one", "nvfp4-all"))
    two = tensors_of(convert(nano_copy, tmp_path / "two", "nvfp4-all", max_shard_bytes=300_000))
    assert one == two
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 5


@pytest.mark.parametrize(("workers", "memory"), [(1, 1_000_000), (7, 200_000)])
def test_workers_and_memory_change_no_byte(
    beam_nano: Path, tmp_path: Path, workers: int, memory: int
) -> None:
    one = convert(beam_nano, tmp_path / "one")
    two = convert(beam_nano, tmp_path / "two", workers=workers, max_host_memory=memory)
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-max", "fp8"])
def test_pieces_change_no_byte(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """Nor a checksum. Nano's tensors are smaller than a piece, so pieces are made smaller too."""
    one = convert(beam_nano, tmp_path / "one", recipe)
    monkeypatch.setattr(cpu_worker, "piece_bytes", lambda workers: 3000)
    two = convert(beam_nano, tmp_path / "two", recipe)
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_other_float_sources_are_quantized_from_their_own_values(
    beam_nano: Path, nano_copy: Path, tmp_path: Path, dtype: str
) -> None:
    kind = {"F32": "<f4", "F16": "<f2"}[dtype]

    def widen(tensors: st.Tensors) -> None:
        for name, (old, shape, data) in tensors.items():
            if old == "BF16":
                values = bf16(data, shape) if dtype == "F32" else bf16(data, shape).astype(kind)
                tensors[name] = (dtype, shape, values.astype(kind).tobytes())

    st.edit(nano_copy / "model.safetensors", widen)
    st.edit_config(nano_copy, dtype="float32" if dtype == "F32" else "float16")
    one = tensors_of(convert(beam_nano, tmp_path / "one"))
    two = tensors_of(convert(nano_copy, tmp_path / "two"))
    assert {name: entry[:2] for name, entry in one.items()} == {
        name: entry[:2] for name, entry in two.items()
    }
    config = read_json_object(tmp_path / "two" / "config.json", InputError)
    assert config["dtype"] == "bfloat16"
    if dtype == "F32":  # every BF16 value survives the trip through FP32, so bytes are equal
        assert one == two


def test_configs_index_and_companions(beam_nano: Path, tmp_path: Path) -> None:
    source = json.loads((beam_nano / "config.json").read_text())
    nvfp4, fp8 = convert(beam_nano, tmp_path / "a"), convert(beam_nano, tmp_path / "b", "fp8")
    config = json.loads((nvfp4 / "config.json").read_text())
    block = config.pop("quantization_config")
    assert config == source
    other = json.loads((nvfp4 / "hf_quant_config.json").read_text())
    assert other["quantization"]["exclude_modules"] == block["ignore"]
    assert other["quantization"]["quant_algo"] == block["quant_algo"] == "NVFP4"
    assert not (fp8 / "hf_quant_config.json").exists()
    index = json.loads((fp8 / "model.safetensors.index.json").read_text())
    tensors = tensors_of(fp8)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (fp8 / name).read_bytes() == (beam_nano / name).read_bytes()
    left = {path.name for path in nvfp4.iterdir()}
    assert not {name for name in left if name.startswith(".") or name.endswith(".partial")}


def test_companions_keep_folders_and_leave_weights_behind(nano_copy: Path, tmp_path: Path) -> None:
    (nano_copy / "code").mkdir()
    for name in ("code/tool.py", "LICENSE", "README.md", "old.bin", "x.gguf", ".hidden"):
        (nano_copy / name).write_text(f"# {name}")
    output = convert(nano_copy, tmp_path / "out ä folder")
    assert (output / "code" / "tool.py").read_text() == "# code/tool.py"
    assert (output / "README.source.md").read_text() == "# README.md"
    assert (output / "README.md").read_text().startswith("---\n")
    assert not any((output / name).exists() for name in ("old.bin", "x.gguf", ".hidden"))


def test_kv_cache_scheme_is_declared_without_scale_tensors(beam_nano: Path, tmp_path: Path) -> None:
    plain = tensors_of(convert(beam_nano, tmp_path / "a"))
    output = convert(beam_nano, tmp_path / "b", kv_cache="fp8")
    assert set(tensors_of(output)) == set(plain)
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    other = json.loads((output / "hf_quant_config.json").read_text())
    assert other["quantization"]["kv_cache_quant_algo"] == "FP8"


def poison(folder: Path, name: str, where: int, bits: bytes) -> None:
    def change(tensors: st.Tensors) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[:where] + bits + data[where + len(bits) :])

    st.edit(folder / "model.safetensors", change)


@pytest.mark.parametrize(
    ("name", "where", "bits"),
    [
        ("model.layers.6.mlp.experts.15.down_proj.weight", 130, b"\xc0\x7f"),
        ("model.layers.7.post_feedforward_layernorm.weight", 2, b"\x80\x7f"),
        ("model.layers.7.mlp.gate.e_score_correction_bias", 8, b"\x00\x00\xc0\x7f"),
        ("lm_head.weight", 4, b"\x80\xff"),
    ],
)
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_nan_and_infinity_stop_the_run_and_are_located(
    nano_copy: Path, tmp_path: Path, name: str, where: int, bits: bytes, recipe: str
) -> None:
    poison(nano_copy, name, where, bits)
    with pytest.raises(TensorError, match=name):
        convert(nano_copy, tmp_path / "out", recipe)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert not (tmp_path / "out" / "config.json").exists()


def test_fp32_values_beyond_bf16_are_refused(nano_copy: Path, tmp_path: Path) -> None:
    def enlarge(tensors: st.Tensors) -> None:
        shape = tensors["model.norm.weight"][1]
        values = np.full(shape, 3.4e38, "<f4")
        tensors["model.norm.weight"] = ("F32", shape, values.tobytes())

    st.edit(nano_copy / "model.safetensors", enlarge)
    with pytest.raises(TensorError, match=r"model\.norm\.weight holds values beyond BF16"):
        convert(nano_copy, tmp_path / "out", "fp8")


def test_a_nan_is_located_by_its_indices(nano_copy: Path, tmp_path: Path) -> None:
    poison(
        nano_copy, "model.layers.6.mlp.experts.15.down_proj.weight", 2 * (64 * 3 + 5), b"\xc0\x7f"
    )
    with pytest.raises(TensorError, match=r"first at \[3, 5\]"):
        convert(nano_copy, tmp_path / "out")


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("nvfp4", "model.layers.6.mlp.experts.15.down_proj"),
        ("fp8", "model.layers.6.mlp.experts.15.down_proj"),
        ("nvfp4", "lm_head"),
    ],
)
def test_a_nan_is_located_in_a_later_piece(
    nano_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, name: str
) -> None:
    """A large tensor passes in pieces of 1 MiB. Copied ones are looked at on the way only if they
    are larger than those that are looked at before any work, as the head of a real model is."""
    monkeypatch.setattr(cpu_worker, "piece_bytes", lambda workers: 512)
    monkeypatch.setattr(run, "SMALL_BYTES", 0)
    width = 64 if name.endswith("down_proj") else 128
    poison(nano_copy, f"{name}.weight", 2 * (width * 100 + 5), b"\xc0\x7f")
    with pytest.raises(TensorError, match=r"holds NaN or infinity \(at .* first at \[100, 5\]"):
        convert(nano_copy, tmp_path / "out", recipe)


@pytest.mark.parametrize(("recipe", "piece"), [("nvfp4-all", 700), ("fp8", 1500)])
def test_pieces_of_any_size_are_decoded_with_their_own_scales(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, piece: int
) -> None:
    quantized = convert(beam_nano, tmp_path / "quantized", recipe)
    dequantize(quantized, tmp_path / "whole")
    monkeypatch.setattr(cpu_worker, "piece_bytes", lambda workers: piece)
    dequantize(quantized, tmp_path / "pieces")
    assert tensors_of(tmp_path / "pieces") == tensors_of(tmp_path / "whole")


def test_zero_experts_are_noted_and_finite(nano_copy: Path, tmp_path: Path) -> None:
    def change(tensors: st.Tensors) -> None:
        for proj in ("gate_proj", "up_proj"):
            name = f"model.layers.4.mlp.experts.2.{proj}.weight"
            tensors[name] = (*tensors[name][:2], bytes(len(tensors[name][2])))

    st.edit(nano_copy / "model.safetensors", change)
    output = convert(nano_copy, tmp_path / "out")
    tensors = tensors_of(output)
    module = "model.layers.4.mlp.experts.2.up_proj"
    assert not any(tensors[f"{module}.weight"][2])
    assert 0 < np.frombuffer(tensors[f"{module}.weight_scale_2"][2], "<f4")[0] < 1
    assert set(tensors[f"{module}.weight_scale"][2]) == {0x38}
    manifest = json.loads((output / "beamq.json").read_text())
    assert manifest["counts"]["zero_groups"] == ["model.layers.4.mlp.experts.2.gate_up"]
    assert manifest["counts"]["zero_blocks"] == 2 * 64 * 128 // 16
    fp8 = convert(nano_copy, tmp_path / "fp8", "fp8")
    assert json.loads((fp8 / "beamq.json").read_text())["counts"]["zero_rows"] == 128


def test_tied_heads_that_differ_are_refused(nano_copy: Path, tmp_path: Path) -> None:
    st.edit_config(nano_copy, tie_word_embeddings=True)
    with pytest.raises(TensorError, match="ties the embeddings"):
        convert(nano_copy, tmp_path / "a")

    def tie(tensors: st.Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    st.edit(nano_copy / "model.safetensors", tie)
    assert "lm_head.weight" in tensors_of(convert(nano_copy, tmp_path / "b"))
    st.edit(nano_copy / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight") and None)
    assert "lm_head.weight" not in tensors_of(convert(nano_copy, tmp_path / "c"))


def test_options_about_scales_that_contradict_each_other(beam_nano: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contradict"):
        quantize(beam_nano, tmp_path / "out", calibration="x", no_calibration=True)
    for how, says in (
        ({"recipe": "nvfp4", "no_calibration": True}, "sets them to 1.0; leave"),
        ({"recipe": "fp8"}, "FP8 .* per token"),
    ):
        with pytest.raises(UsageError, match=f"--activation-headroom widens.* {says}"):
            quantize(beam_nano, tmp_path / "out", activation_headroom=4, **how)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="headroom is 3, expected one of 1, 2, 4"):
        quantize(beam_nano, tmp_path / "out", activation_headroom=3)
    with pytest.raises(UsageError, match="per token"):
        quantize(beam_nano, tmp_path / "out", recipe="fp8", calibration="x")
    assert not (tmp_path / "out").exists()


def test_places_that_overlap_and_full_outputs_are_refused(
    beam_nano: Path, nano_copy: Path, tmp_path: Path
) -> None:
    for output in (nano_copy, nano_copy / "inside", nano_copy.parent):
        with pytest.raises(UsageError, match="choose a separate folder"):
            convert(nano_copy, output)
    output = convert(beam_nano, tmp_path / "out")
    with pytest.raises(ResumeError, match="not empty"):
        convert(beam_nano, output)
    with pytest.raises(UsageError, match="contradict"):
        convert(beam_nano, output, resume=True, overwrite=True)
    stranger = tmp_path / "letters"
    stranger.mkdir()
    (stranger / "letter.txt").write_text("dear")
    with pytest.raises(ResumeError, match="will not delete anything"):
        convert(beam_nano, stranger, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResumeError, match="not a folder"):
        convert(beam_nano, tmp_path / "file")


def test_overwrite_leaves_no_weight_file_of_before(beam_nano: Path, tmp_path: Path) -> None:
    output = convert(beam_nano, tmp_path / "out", "fp8", max_shard_bytes=200_000)
    convert(beam_nano, output, "nvfp4", overwrite=True)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert {path.name for path in output.glob("*.safetensors")} == set(index["weight_map"].values())
    fresh = convert(beam_nano, tmp_path / "fresh", "nvfp4")
    for path in fresh.iterdir():
        assert path.read_bytes() == (output / path.name).read_bytes(), path.name
    assert (
        convert(beam_nano, output, "fp8", overwrite=True) / "hf_quant_config.json"
    ).exists() is False


def test_a_dry_run_writes_nothing_and_predicts_the_bytes(beam_nano: Path, tmp_path: Path) -> None:
    dry = quantize(beam_nano, tmp_path / "out", no_calibration=True, dry_run=True)
    assert not (tmp_path / "out").exists()
    output = convert(beam_nano, tmp_path / "out")
    sizes = {path.name: path.stat().st_size for path in output.glob("*.safetensors")}
    assert {shard.name: shard.nbytes for shard in dry.plan.shards} == sizes


def test_a_small_disk_is_predicted(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from beamq.convert import output as output_folder

    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda _: usage)
    for options in ({}, {"resume": True}, {"dry_run": True}):
        with pytest.raises(DiskError, match=r"needs \d\.\d\d MB, the disk has 1\.00 MB free"):
            convert(beam_nano, tmp_path / "deep" / "out", **options)
        assert not list(tmp_path.iterdir()), "a refused run leaves nothing"
    monkeypatch.undo()
    convert(beam_nano, tmp_path / "deep" / "out")


def test_a_checkpoint_stays_where_another_has_no_room(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found here: `--overwrite` removed the old weights, then found the disk too small."""
    from beamq.convert import output as output_folder

    output = convert(beam_nano, tmp_path / "out", "fp8")
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    usage = SimpleNamespace(free=0)
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DiskError, match="the disk has"):
        convert(beam_nano, output, "fp8", overwrite=True, max_shard_bytes=1_000_000)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    usage.free = 3_000_000
    with pytest.raises(DiskError, match="the disk has"):
        convert(beam_nano, tmp_path / "other", "fp8")
    convert(beam_nano, output, "fp8", overwrite=True)  # what goes makes room for it


def test_a_memory_limit_below_one_group_is_refused(beam_nano: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="largest group"):
        convert(beam_nano, tmp_path / "out", max_host_memory=1000)


def test_a_cut_source_is_found_before_work(nano_copy: Path, tmp_path: Path) -> None:
    path = nano_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="100 bytes are missing"):
        convert(nano_copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sweep_changes_codes_and_block_scales_only(beam_nano: Path, tmp_path: Path) -> None:
    plain = tensors_of(convert(beam_nano, tmp_path / "max", "nvfp4-max"))
    swept = tensors_of(convert(beam_nano, tmp_path / "sweep", "nvfp4"))
    assert [*plain] == [*swept]
    changed = {name for name in plain if plain[name] != swept[name]}
    assert {name.rpartition(".")[2] for name in changed} == {"weight", "weight_scale"}
    assert {name.rpartition(".")[0] for name in changed} == {
        name.removesuffix(".weight_scale") for name in plain if name.endswith(".weight_scale")
    }
    assert all(plain[name][:2] == swept[name][:2] for name in plain)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_group_that_one_weight_turns_to_zeros_is_refused(
    nano_copy: Path, tmp_path: Path, workers: int
) -> None:
    """The shared scale of gate and up follows one wild weight, and the rest would decode to 0."""
    name = "model.layers.4.mlp.experts.6.up_proj.weight"

    def change(tensors: st.Tensors) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, b"\x7f\x7f" + data[2:])  # 3.39e38

    st.edit(nano_copy / "model.safetensors", change)
    with pytest.raises(TensorError, match=r"experts\.6\.gate_up: 1,023 of 1,024 blocks would"):
        convert(nano_copy, tmp_path / "out", workers=workers)
    convert(nano_copy, tmp_path / "out", overwrite=True, exclude=("layers.4.mlp.experts",))


@pytest.mark.parametrize("tiny", [921, 922])
def test_nine_tenths_of_a_group_may_become_zero(nano_copy: Path, tmp_path: Path, tiny: int) -> None:
    """Of 1,024 blocks: a pruned expert has many, and one wild weight all but a few."""
    one, small = b"\x80\x3f", b"\x80\x35"  # 1 and 2^-20, which is below half a step
    data = one * 16 * (1024 - tiny) + small * 16 * tiny

    def change(tensors: st.Tensors) -> None:
        for place, proj in enumerate(("gate", "up")):
            name = f"model.layers.4.mlp.experts.6.{proj}_proj.weight"
            dtype, shape, old = tensors[name]
            tensors[name] = (dtype, shape, data[place * len(old) :][: len(old)])

    st.edit(nano_copy / "model.safetensors", change)
    if tiny == 922:
        with pytest.raises(TensorError, match=r"gate_up: 922 of 1,024 blocks would become zero"):
            convert(nano_copy, tmp_path / "out")
        return
    output = convert(nano_copy, tmp_path / "out")
    assert json.loads((output / "beamq.json").read_text())["counts"]["underflow_blocks"] >= 921
