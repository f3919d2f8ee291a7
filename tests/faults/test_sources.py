"""Faults of sources: named from the headers, in the first second, before anything is written."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from beamq.beam.config import BeamConfig
from beamq.errors import (
    AlreadyQuantizedError,
    BeamqError,
    CheckpointError,
    ConfigError,
    RecipeError,
    TensorError,
    UsageError,
)
from beamq.io.checkpoint import open_checkpoint
from beamq.io.source import INDEX_NAME
from beamq.plan.plan import make_plan
from tests.helpers import safetensors_edit as st
from tests.helpers.checkpoint_damage import edit_json
from tests.helpers.craft import (
    SINGLE,
    Run,
    convert,
    deal,
    light_verify,
    put,
    read_json,
    recipe,
    source,
    values_of,
)
from tests.helpers.independent_decoder import tensors_of

EXPERT = "model.layers.5.mlp.experts.15"


@pytest.fixture
def sharded(nano_copy: Path) -> Path:
    """Nano in twenty shards, partners apart."""
    deal(nano_copy, 20)
    return nano_copy


def refused(run: Run, folder: Path, output: Path, *says: str) -> str:
    """Quantizing ends with one line, exit 3 and nothing written."""
    code, out, err = run("quantize", folder, output, "--no-calibration", "--quiet")
    assert code == 3, err
    assert out == ""
    assert err.count("\n") == 1
    assert not output.exists()
    for words in says:
        assert words in err
    return err


# Shards and index ------------------------------------------------------------------------------


def test_twenty_shards_give_the_bytes_of_one_LLMC2566(
    beam_nano: Path, sharded: Path, tmp_path: Path
) -> None:
    convert(beam_nano, tmp_path / "one")
    convert(sharded, tmp_path / "two")
    assert tensors_of(tmp_path / "one") == tensors_of(tmp_path / "two")


def test_one_file_needs_no_index(beam_nano: Path) -> None:
    with open_checkpoint(beam_nano) as checkpoint:
        assert not checkpoint.has_index
    assert make_plan(beam_nano).jobs


def index_of(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((folder / INDEX_NAME).read_text())
    return found


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = index_of(folder)
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def lose_shards(folder: Path) -> None:
    for number in (3, 20):
        (folder / f"model-{number:05d}-of-00020.safetensors").unlink()


def lose_key(folder: Path) -> None:
    st.edit(folder / "model-00020-of-00020.safetensors", lambda tensors: tensors.popitem())


def double_key(folder: Path) -> None:
    first = st.load(folder / "model-00001-of-00020.safetensors")
    st.edit(folder / "model-00020-of-00020.safetensors",
            lambda tensors: tensors.update([next(iter(first.items()))]))  # fmt: skip


INDEX_FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing shards": (lose_shards, ("2 of 20 shards are missing", "model-00003", "model-00020")),
    "key absent from its shard": (lose_key, ("1 entry disagrees", "not there")),
    "key in two shards": (double_key, ("stored twice", "model-00001", "model-00020")),
    "key not in the index": (
        lambda f: edit_index(f, lambda names: names.pop("model.norm.weight")),
        ("model.norm.weight", "not in the index"),
    ),
    "index names another shard": (
        lambda f: edit_index(f, lambda names: names.update(
            {"model.norm.weight": "model-00001-of-00020.safetensors"})),
        ("model.norm.weight", "model-00001"),
    ),
    "index names a shard twice over": (
        lambda f: shutil.copy(f / "model-00001-of-00020.safetensors", f / "copy.safetensors")
        and edit_index(f, lambda names: names.update(ghost="copy.safetensors")),
        ("stored twice",),
    ),
    "index without shards": (lambda f: (f / INDEX_NAME).write_text("{}"), ("weight_map",)),
    "index cut off": (
        lambda f: os.truncate(f / INDEX_NAME, 1000), ("not valid JSON",)
    ),
    "index is a link to nowhere": (
        lambda f: ((f / INDEX_NAME).unlink(), os.symlink("nowhere", f / INDEX_NAME)),
        ("not found",),
    ),
    "no index": (lambda f: (f / INDEX_NAME).unlink(), ("20 safetensors files", "restore")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"), INDEX_FAULTS.values(), ids=[f"{name} LC9397" for name in INDEX_FAULTS]
)
def test_index_and_shards_that_disagree(
    run: Run, sharded: Path, tmp_path: Path, change: Callable[[Path], object], says: tuple[str, ...]
) -> None:
    change(sharded)
    refused(run, sharded, tmp_path / "out", *says)


LAST = "model-00020-of-00020.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def cut(nbytes: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        size = path.stat().st_size
        os.truncate(path, size - nbytes if nbytes > 0 else -nbytes)

    return change


def with_header(text: bytes, data: bytes = b"") -> Callable[[Path], object]:
    return lambda path: path.write_bytes(len(text).to_bytes(8, "little") + text + data)


FILE_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut by 100 bytes": (cut(100), "100 bytes are missing"),
    "cut by one byte": (cut(1), "1 bytes are missing"),
    "one byte too many": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "1 bytes after"),
    "cut in the header": (cut(-2000), "header says"),
    "cut in the length": (cut(-5), "too short"),
    "empty": (cut(-0), "too short"),
    "JSON garbage": (with_header(b"{not json}"), "not valid JSON"),
    "not text": (with_header(b"\xff\xfe\x00"), "not valid JSON"),
    "git-LFS pointer": (lambda p: p.write_text(POINTER), "git lfs pull"),
    "HTML error page": (lambda p: p.write_text("<!DOCTYPE html><title>404</title>"), "header says"),
    "zeros": (lambda p: p.write_bytes(bytes(10_000)), "not valid JSON"),
    "a pickle": (lambda p: p.write_bytes(b"\x80\x04\x95" + bytes(100)), "header says"),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "a folder, not a file"),
    "a pipe": (lambda p: (p.unlink(), os.mkfifo(p)), "not a file"),
    "a device": (lambda p: (p.unlink(), p.symlink_to("/dev/zero")), "not a file"),
    "dangling link": (lambda p: (p.unlink(), p.symlink_to("blobs/none")), "points nowhere"),
    "link to itself": (lambda p: (p.unlink(), p.symlink_to(p.name)), "cannot be read"),
    "mostly brackets": (with_header(b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}"), "brackets"),
    "name of half a surrogate pair": (
        with_header(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), "UTF-8"
    ),
    "the same name a million times": (
        with_header(b"{" + b",".join([b'"a":0'] * 1_000_000) + b"}"), "twice"
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    FILE_FAULTS.values(),
    ids=[f"{name} safetensors601 LLMC2371" for name in FILE_FAULTS],
)
def test_a_defect_in_the_last_of_twenty_shards(
    run: Run, sharded: Path, tmp_path: Path, change: Callable[[Path], object], says: str
) -> None:
    change(sharded / LAST)
    if says == "points nowhere":
        says = "shards are missing" if not os.path.lexists(sharded / LAST) else says
    refused(run, sharded, tmp_path / "out", LAST, says)


# Links and paths -------------------------------------------------------------------------------


@pytest.fixture
def cache(beam_nano: Path, tmp_path: Path) -> Path:
    """Nano as the Hub's cache has it: snapshots of links into blobs."""
    repo = tmp_path / "models--org--beam"
    snapshot = repo / "snapshots" / "0123abcd"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(beam_nano.iterdir())):
        shutil.copy(path, repo / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_hub_cache_gives_real_files(cache: Path, beam_nano: Path, tmp_path: Path) -> None:
    convert(cache, tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_symlink()
    tokenizer = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert tokenizer == (beam_nano / "tokenizer.json").read_bytes()
    assert light_verify(tmp_path / "out", source=cache).ok


@pytest.mark.parametrize("name", ["tokenizer.json", SINGLE, "config.json"])
def test_dangling_links_are_an_error(run: Run, cache: Path, tmp_path: Path, name: str) -> None:
    (cache / name).resolve().unlink()
    refused(run, cache, tmp_path / "out", name)


@pytest.mark.parametrize("target", ["/etc/hostname", "../../../secret", "loop", ".", "/etc"])
def test_a_link_may_not_lead_out_of_the_folder(
    run: Run, nano_copy: Path, tmp_path: Path, target: str
) -> None:
    """A checkpoint cloned from a stranger must not carry the reader's own files to the Hub."""
    (tmp_path / "secret").write_text("mine")
    (nano_copy / "notes.txt").symlink_to(tmp_path / "secret" if "secret" in target else target)
    if target == "loop":
        (nano_copy / "notes.txt").unlink()
        (nano_copy / "notes.txt").symlink_to("notes.txt")
    refused(run, nano_copy, tmp_path / "out", "notes.txt", "link")


def test_links_within_the_folder_are_files(nano_copy: Path, tmp_path: Path) -> None:
    (nano_copy / "again.json").symlink_to("tokenizer.json")
    convert(nano_copy, tmp_path / "out")
    assert not (tmp_path / "out" / "again.json").is_symlink()
    assert (tmp_path / "out" / "again.json").read_bytes() == (
        nano_copy / "tokenizer.json"
    ).read_bytes()


HOSTILE = ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "a\\x.safetensors",
           "x\0.safetensors", ".hidden.safetensors", "x.bin", "", 7, None, ["x"], "..",
           "x" * 300 + ".safetensors", "\ud800.safetensors"]  # fmt: skip


@pytest.mark.parametrize("entry", HOSTILE, ids=lambda entry: repr(entry)[:30])
def test_index_entries_stay_in_the_folder(sharded: Path, entry: object) -> None:
    edit_index(sharded, lambda names: names.update({"ghost": entry}))  # type: ignore[dict-item]
    with pytest.raises(CheckpointError):
        open_checkpoint(sharded)


@pytest.mark.parametrize("name", ["with space", "ünïcödé ∑", "-dash", "a;b $(c) `d`", "trailing/"])
def test_odd_paths_work(
    run: Run, beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = shutil.copytree(beam_nano, tmp_path / "in" / name)
    (folder / os.fsdecode(b"not-utf8-\xff.txt")).write_text("x")
    monkeypatch.chdir(tmp_path / "in")
    code, out, err = run("quantize", "--recipe", "fp8", "--json", "--", name, f"../out {name}")
    assert code == 0, err
    assert json.loads(out)["output"] == f"../out {name}".rstrip("/")
    output = tmp_path / f"out {name}"
    assert (output / os.fsdecode(b"not-utf8-\xff.txt")).read_text() == "x"
    assert light_verify(output, source=folder).ok


@pytest.mark.parametrize("text", ["x" * 5000, "~nosuchuser/x", "a\0b"])
def test_paths_that_cannot_be(tmp_path: Path, beam_nano: Path, text: str) -> None:
    for call in (
        lambda: make_plan(text),
        lambda: convert(beam_nano, text),  # type: ignore[arg-type]
        lambda: light_verify(text),  # type: ignore[arg-type]
    ):
        with pytest.raises(BeamqError):
            call()


def test_places_that_overlap_are_refused(run: Run, nano_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(nano_copy)
    for output in (
        nano_copy, nano_copy / "in", nano_copy.parent, tmp_path / "alias" / "in",
        nano_copy / ".." / nano_copy.name,
    ):  # fmt: skip
        code, _, err = run("quantize", nano_copy, output, "--no-calibration", "-q")
        assert code == 2
        assert "choose a separate folder" in err
    assert {p.name for p in nano_copy.iterdir()} >= {SINGLE}


# What the tensors are --------------------------------------------------------------------------


def quantized(nano: Path, folder: Path, fmt: str, claim: str) -> Path:
    """An output of ours, declared in both files, in hf_quant_config.json alone, or nowhere."""
    convert(nano, folder, fmt)
    if claim in ("hf only", "nowhere"):
        st.edit_config(folder, quantization_config=None)
    if claim == "nowhere":
        (folder / "hf_quant_config.json").unlink(missing_ok=True)
    return folder


@pytest.mark.parametrize(
    ("fmt", "claim"),
    [("nvfp4", "both"), ("nvfp4", "hf only"), ("nvfp4", "nowhere"), ("fp8", "both"),
     ("fp8", "nowhere")],
)  # fmt: skip
def test_already_quantized_sources_are_refused_mlx_lm1192(
    run: Run, beam_nano: Path, tmp_path: Path, fmt: str, claim: str
) -> None:
    folder = quantized(beam_nano, tmp_path / "q", fmt, claim)
    name = {"nvfp4": "NVFP4", "fp8": "float-quantized" if claim == "both" else "FP8"}[fmt]
    refused(run, folder, tmp_path / "out", name, "dequantize")


CODES = [("F8_E4M3", "FP8"), ("F8_E5M2", "FP8"), ("I8", "INT8"), ("U8", "NVFP4")]
FP8_LIKE: list[tuple[str, str, str]] = [
    ("F32", "weight_scale_inv", "FP8"), ("F32", "weight_global_scale", "FP8"),
    ("U8", "weight_packed", "NVFP4"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "suffix", "kind"), FP8_LIKE, ids=lambda value: str(value))
def test_quantized_tensors_without_a_config_are_refused_mlx_lm1192(
    beam_nano: Path, tmp_path: Path, dtype: str, suffix: str, kind: str
) -> None:
    def change(tensors: st.Tensors) -> None:
        item = 4 if dtype == "F32" else 1
        tensors[f"{EXPERT}.up_proj.{suffix}"] = (dtype, [64, 128], bytes(64 * 128 * item))

    with pytest.raises(AlreadyQuantizedError, match=rf"{kind}.*dequantize"):
        make_plan(source(beam_nano, tmp_path / "x", change))


@pytest.mark.parametrize("sign", ["nothing", "a scale", "config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(("dtype", "kind"), CODES)
def test_codes_are_quantized_where_a_scale_or_the_config_says_so_mlx_lm1192(
    beam_nano: Path, tmp_path: Path, dtype: str, kind: str, sign: str
) -> None:
    """A tensor of an odd dtype and nothing else is no quantized model: its dtype is wrong."""

    def change(tensors: st.Tensors) -> None:
        tensors[f"{EXPERT}.up_proj.weight"] = (dtype, [64, 128], bytes(64 * 128))
        if sign == "a scale":
            tensors[f"{EXPERT}.up_proj.weight_scale"] = ("F32", [64, 1], bytes(64 * 4))

    folder = source(beam_nano, tmp_path / "x", change)
    if sign == "config.json":
        st.edit_config(folder, quantization_config={"quant_method": "x"})
    elif sign == "hf_quant_config.json":
        (folder / sign).write_text('{"quantization": {}}')
    says = rf"already quantized \({kind}; .*up_proj.weight is {dtype}\)"
    if sign == "nothing":
        says = rf"^{EXPERT}\.up_proj\.weight: dtype is {dtype}, expected BF16, F16 or F32"
    with pytest.raises(TensorError if sign == "nothing" else AlreadyQuantizedError, match=says):
        make_plan(folder)


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_a_false_claim_is_dropped_with_a_note_mlx_lm1192(
    nano_copy: Path, tmp_path: Path, where: str
) -> None:
    if where == "config.json":
        st.edit_config(nano_copy, quantization_config={"quant_method": "fp8"})
    else:
        (nano_copy / where).write_text('{"quantization": {"quant_algo": "FP8"}}')
    result = convert(nano_copy, tmp_path / "out", "fp8")
    assert any(
        "declares a quantization that its tensors do not have" in note for note in result.plan.notes
    )
    block = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    assert block["quant_method"] == "compressed-tensors"  # type: ignore[index]
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()


def narrow(nano: Path, target: Path, width: int) -> Path:
    """Nano with experts of another width."""

    def change(tensors: st.Tensors) -> None:
        for name in list(tensors):
            if ".experts." in name:
                rows, columns = (128, width) if "down" in name else (width, 128)
                put(tensors, name, np.full((rows, columns), 0.5, np.float32))

    folder = source(nano, target, change)
    st.edit_config(folder, moe_intermediate_size=width)
    return folder


@pytest.mark.parametrize(("width", "outcome"), [(40, "refused"), (8, "refused"), (48, "1;"),
                                                (96, "1, 2;"), (64, "1, 2, 4;")])  # fmt: skip
def test_widths_and_blocks_of_sixteen_MO1552(
    run: Run, beam_nano: Path, tmp_path: Path, width: int, outcome: str
) -> None:
    folder = narrow(beam_nano, tmp_path / "narrow", width)
    if outcome == "refused":
        with pytest.raises(RecipeError, match=rf"{width} is not a multiple of 16"):
            make_plan(folder, "nvfp4")
        convert(folder, tmp_path / "out", recipe="fp8")
        return
    assert f"one of {outcome}" in " ".join(make_plan(folder, "nvfp4").notes)
    convert(folder, tmp_path / "out", recipe=recipe("nvfp4", "expert"))
    assert light_verify(tmp_path / "out", source=folder).ok


def drop(*names: str) -> Callable[[st.Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def shaped(name: str, shape: list[int], dtype: str = "BF16") -> Callable[[st.Tensors], object]:
    size = {"BF16": 2, "F32": 4, "I64": 8, "F64": 8, "BOOL": 1}[dtype]
    return lambda t: t.update({name: (dtype, shape, bytes(math.prod(shape) * size))})


ATTENTION = "model.layers.1.self_attn"
TENSOR_FAULTS: dict[str, tuple[Callable[[st.Tensors], object], str]] = {
    "expert gone": (drop(*(f"{EXPERT}.{p}_proj.weight" for p in ("gate", "up", "down"))),
                    rf"3 tensors .* missing: {EXPERT}"),
    "one up_proj gone": (drop(f"{EXPERT}.up_proj.weight"),
                         rf"1 tensor that .* is missing: {EXPERT}\.up_proj"),
    "one layer gone": (lambda t: [t.pop(n) for n in list(t) if ".layers.7." in n], r"missing"),
    "norm gone": (drop("model.norm.weight"), r"model\.norm\.weight"),
    "head gone": (drop("lm_head.weight"), r"lm_head\.weight"),
    "router bias gone": (drop("model.layers.3.mlp.gate.e_score_correction_bias"), r"e_score"),
    "router rows": (shaped("model.layers.3.mlp.gate.weight", [15, 128], "F32"),
                    r"layers\.3\.mlp\.gate\.weight: shape \[15, 128\].*\[16, 128\]"),
    "router bias length": (shaped("model.layers.3.mlp.gate.e_score_correction_bias", [15], "F32"),
                           r"\[15\].*\[16\]"),
    "q_proj of three heads": (shaped(f"{ATTENTION}.q_proj.weight", [96, 128]),
                              r"q_proj.*\[96, 128\].*\[128, 128\]"),
    "k_proj of three heads": (shaped(f"{ATTENTION}.k_proj.weight", [96, 128]), r"\[64, 128\]"),
    "gate_bias of three": (shaped(f"{ATTENTION}.gate_bias", [3]), r"gate_bias: shape \[3\].*\[4\]"),
    "gate_bias 2-D": (shaped(f"{ATTENTION}.gate_bias", [4, 1]), r"\[4, 1\].*\[4\]"),
    "weight transposed": (shaped(f"{EXPERT}.down_proj.weight", [64, 128]), r"\[128, 64\]"),
    "weight 1-D": (shaped(f"{EXPERT}.down_proj.weight", [8192]), r"\[8192\]"),
    "I64 weight": (shaped("model.layers.0.mlp.up_proj.weight", [512, 128], "I64"), r"dtype is I64"),
    "F64 weight": (shaped("model.layers.0.mlp.up_proj.weight", [512, 128], "F64"), r"dtype is F64"),
    "BOOL norm": (shaped("model.norm.weight", [128], "BOOL"), r"dtype is BOOL"),
    "other vocabulary": (shaped("model.embed_tokens.weight", [2047, 128]), r"\[2048, 128\]"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"), TENSOR_FAULTS.values(), ids=[f"{name} reap127" for name in TENSOR_FAULTS]
)
def test_tensors_that_do_not_fit_the_config(
    beam_nano: Path, tmp_path: Path, change: Callable[[st.Tensors], object], says: str
) -> None:
    folder = source(beam_nano, tmp_path / "x", change)
    with pytest.raises(TensorError, match=says):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


CONFIG_FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "fewer experts than stored": ({"num_experts": 8, "n_group": 4}, "layers.3.mlp.gate.weight"),
    "more experts than stored": ({"num_experts": 24}, "gate.weight"),
    "a layer fewer": ({"num_hidden_layers": 7}, "layer_types"),
    "sparse where dense": ({"mlp_layer_types": ["sparse"] * 8}, "missing"),
    "dense where sparse": ({"mlp_layer_types": ["dense"] * 8}, "missing"),
    "a billion experts": ({"num_experts": 10**9}, "num_experts"),
    "more tensors than memory": (
        {"num_experts": 65536, "num_hidden_layers": 64, "layer_types": ["full_attention"] * 64,
         "mlp_layer_types": ["sparse"] * 64}, "tensors"),
    "layer_types a number": ({"layer_types": 5, "rope_parameters": {"sliding_attention": None}},
                             "layer_types"),
    "NaN": ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
    "a list for a number": ({"hidden_size": [128]}, "hidden_size"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"), CONFIG_FAULTS.values(), ids=[f"{name} reap127" for name in CONFIG_FAULTS]
)
def test_configs_that_do_not_fit_the_tensors(
    nano_copy: Path, changes: dict[str, object], says: str
) -> None:
    st.edit_config(nano_copy, **changes)
    with pytest.raises((ConfigError, TensorError), match=says):
        make_plan(nano_copy)


def refusal(raw: dict[str, object]) -> str | None:
    """What is wrong with a config, if anything."""
    try:
        BeamConfig.from_dict(raw)
    except ConfigError as fault:
        return str(fault)
    return None


def test_a_config_without_a_key_is_the_same_model_or_refused(beam_nano: Path) -> None:
    """Engines fill a gap with defaults of their own: transformers takes 8 groups and keeps 4."""
    from transformers import BeamConfig as TheirConfig

    raw = json.loads((beam_nano / "config.json").read_text())
    whole = BeamConfig.from_dict(raw)
    keys = [(raw, key) for key in raw]
    keys += [(raw["rope_parameters"], key) for key in raw["rope_parameters"]]
    keys += [(raw["rope_parameters"]["sliding_attention"], key) for key in ("rope_theta",)]
    refused = set()
    for holder, key in keys:
        value = holder.pop(key)
        if (message := refusal(raw)) is not None:
            assert f"{key} is " in message
            refused.add(key)
        else:
            theirs = {**TheirConfig(**raw).to_dict(), "dtype": raw.get("dtype")}
            assert BeamConfig.from_dict(raw) == BeamConfig.from_dict(theirs) == whole, key
        holder[key] = value
    fields = set(BeamConfig.__annotations__) & set(raw)
    assert refused >= fields - {"dtype"} | {"rope_parameters", "full_attention", "rope_theta"}


FOREIGN_KEYS: dict[str, tuple[object, object]] = {
    "attention_bias": (True, False), "hidden_act": ("gelu", "silu"), "mlp_bias": (True, None),
    "n_shared_experts": (1, 0), "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "noaux_tc"), "rope_scaling": ({"type": "yarn"}, None),
    "rope_theta": (1e6, 10000.0), "partial_rotary_factor": (0.5, 1.0), "q_lora_rank": (64, None),
    "n_routed_experts": (8, 16), "first_k_dense_replace": (1, 3),
    "use_sliding_window": (False, True),
    "mlp_only_layers": ([1], []), "attn_logit_softcapping": (50.0, None),
    "sliding_window": (None, 64), "n_group": (None, 8), "final_logit_softcapping": (0, None),
}  # fmt: skip


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_a_key_that_would_change_the_forward_pass_is_refused(nano_copy: Path, key: str) -> None:
    bad, harmless = FOREIGN_KEYS[key]
    path = nano_copy / "config.json"
    raw = read_json(path)
    path.write_text(json.dumps({**raw, key: harmless}))
    assert not any("not Beam's" in note for note in make_plan(nano_copy).notes)
    path.write_text(json.dumps({**raw, key: bad}))
    with pytest.raises(ConfigError, match=f"config.json: {key} is "):
        make_plan(nano_copy)


def test_keys_of_rope_and_keys_that_nobody_knows(nano_copy: Path) -> None:
    st.edit_config(nano_copy, colour="red")
    assert any("1 key that is not Beam's" in note and "colour" in note
               for note in make_plan(nano_copy).notes)  # fmt: skip
    rope = {"full_attention": None, "sliding_attention": {"rope_theta": 1e4, "factor": 8.0}}
    st.edit_config(nano_copy, rope_parameters=rope)
    with pytest.raises(
        ConfigError, match=r"sliding_attention\.factor is 8.0, expected no such key"
    ):
        make_plan(nano_copy)


HEADS: dict[str, tuple[bool, Callable[[st.Tensors], object], str]] = {
    "tied, no head": (True, drop("lm_head.weight"), "absent"),
    "tied, head equal": (True, lambda t: t.update(
        {"lm_head.weight": t["model.embed_tokens.weight"]}), "kept"),
    "tied, head differs": (True, lambda t: None, "refused"),
    "tied, head of another dtype": (True, lambda t: put(
        t, "lm_head.weight", values_of(t, "model.embed_tokens.weight"), "F32"), "refused"),
    "untied, head": (False, lambda t: None, "kept"),
    "untied, no head": (False, drop("lm_head.weight"), "refused"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("tied", "change", "outcome"), HEADS.values(), ids=[f"{name} VL45543" for name in HEADS]
)
def test_heads_are_kept_or_refused_never_invented(
    beam_nano: Path, tmp_path: Path, tied: bool, change: Callable[[st.Tensors], object],
    outcome: str,
) -> None:  # fmt: skip
    folder = source(beam_nano, tmp_path / "x", change)
    st.edit_config(folder, tie_word_embeddings=tied)
    if outcome == "refused":
        with pytest.raises(TensorError, match="head"):
            convert(folder, tmp_path / "out")
        return
    convert(folder, tmp_path / "out")
    before, after = st.load(folder / SINGLE), tensors_of(tmp_path / "out")
    assert after.get("lm_head.weight") == before.get("lm_head.weight")
    assert ("lm_head.weight" in after) == (outcome == "kept")
    assert read_json(tmp_path / "out" / "config.json")["tie_word_embeddings"] is tied


def test_pickles_are_never_opened_nor_copied(run: Run, nano_copy: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "optimizer.pt", "x.PTH", "a.ckpt", "b.H5", "c.Safetensors"):
        (nano_copy / name).write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    (nano_copy / "pytorch_model.bin.index.json").write_text("{}")
    (nano_copy / "model.safetensors.partial").write_text("x")
    convert(nano_copy, tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "README.md", "beamq.json", "chat_template.jinja", "config.json", "generation_config.json",
        "hf_quant_config.json", "model-00001-of-00001.safetensors", INDEX_NAME, "tokenizer.json",
        "tokenizer_config.json", "training.json",
    }  # fmt: skip
    (nano_copy / SINGLE).unlink()
    refused(run, nano_copy, tmp_path / "none", "never unpickles", "pytorch_model.bin")


def test_files_beside_the_model_are_named(nano_copy: Path) -> None:
    shutil.copy(nano_copy / SINGLE, nano_copy / "adapter_model.safetensors")
    assert any("adapter_model.safetensors" in note for note in make_plan(nano_copy).hints)


def test_both_contradicting_options_are_usage(beam_nano: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        convert(beam_nano, tmp_path / "x", resume=True, overwrite=True)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.5.mlp.gate.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.2.self_attn.q_norm.weight",
        "model.layers.6.self_attn.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ],
)
def test_a_tensor_of_zeros_is_named_before_any_work(
    run: Run, nano_copy: Path, tmp_path: Path, name: str
) -> None:
    def change(tensors: st.Tensors) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, bytes(len(data)))

    st.edit(nano_copy / "model.safetensors", change)
    for command in ("plan S", "quantize S OUT -r fp8", "compare S S --samples 1"):
        words = [{"S": nano_copy, "OUT": tmp_path / "out"}.get(w, w) for w in command.split()]
        code, _, err = run(*words)
        assert code == 3, command
        assert f"{name} is all zero; is the download whole?" in " ".join(err.split())
    assert not (tmp_path / "out").exists()
    code, out, _ = run("inspect", nano_copy)
    assert f"{name} is all zero" in " ".join(out.split())


NAMES: dict[str, tuple[Callable[[str], str | None], str]] = {
    "an adapter beside a whole base": (
        lambda name: f"{name[:-7]}.lora_A.weight" if name.endswith("q_proj.weight") else None,
        "8 tensors of an adapter beside the model (model.layers.0.self_attn.q_proj.lora_A.weight",
    ),
    "one module under two names": (
        lambda name: f"base_model.model.{name}" if "layers.4.mlp.experts.1." in name else None,
        "are the same tensor under two names (3 such pairs)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("also", "words"), NAMES.values(), ids=NAMES.keys())
def test_names_beside_the_models_peft(
    run: Run, nano_copy: Path, tmp_path: Path, also: Callable[[str], str | None], words: str
) -> None:
    def change(tensors: st.Tensors) -> None:
        tensors.update({new: each for name, each in [*tensors.items()] if (new := also(name))})

    st.edit(nano_copy / "model.safetensors", change)
    code, _, err = run("quantize", nano_copy, tmp_path / "out", "-r", "fp8")
    assert code == 3
    assert words in " ".join(err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefix", ["base_model.model.", "model.language_model.", "_orig_mod."])
def test_names_that_a_wrapper_has_prefixed(nano_copy: Path, prefix: str) -> None:
    def change(tensors: st.Tensors) -> None:
        for name in list(tensors):
            plain = name.removeprefix("model.") if prefix == "model.language_model." else name
            tensors[prefix + plain] = tensors.pop(name)

    st.edit(nano_copy / "model.safetensors", change)
    with pytest.raises(TensorError, match=f"names begin with '{prefix}', which a trainer"):
        make_plan(nano_copy)


def test_dtypes_that_disagree_are_said(nano_copy: Path) -> None:
    edit_json(nano_copy / "config.json", lambda c: c.update(dtype="float32", torch_dtype="float16"))
    notes = " ".join(make_plan(nano_copy).notes)
    assert "config.json says dtype float32 and torch_dtype float16, but most tensors are" in notes

    def change(tensors: st.Tensors) -> None:
        name = "model.layers.5.mlp.gate.weight"
        _, shape, data = tensors[name]
        half = np.frombuffer(data, "<u4").astype("<u4") >> 16
        tensors[name] = ("BF16", shape, half.astype("<u2").tobytes())
        _, shape, data = tensors["model.norm.weight"]
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        tensors["model.norm.weight"] = ("F32", shape, wide.tobytes())

    st.edit(nano_copy / "model.safetensors", change)
    notes = " ".join(make_plan(nano_copy).notes)
    assert (
        "1 router tensor is not FP32 in the source (a cast before saving? model.layers.5" in notes
    )
    assert "1 tensor is F32 in the source (model.norm.weight); what is not quantized" in notes


def test_a_folder_of_the_hubs_cache_names_its_snapshots(
    run: Run, beam_nano: Path, tmp_path: Path
) -> None:
    cached = tmp_path / "models--org--name"
    (cached / "snapshots" / "abc").parent.mkdir(parents=True)
    (cached / "snapshots" / "abc").symlink_to(beam_nano)
    for command, folder in (
        ("plan", cached), ("inspect", cached), ("verify", cached), ("plan", cached / "snapshots")
    ):  # fmt: skip
        code, _, err = run(command, folder)
        assert code == 3
        assert "give one of its snapshots: snapshots/abc" in err
    assert run("plan", cached / "snapshots" / "abc")[0] == 0
