"""Reading strangers' files: every broken header, index or folder is named, none is believed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import expected_tensors
from beamq.errors import CheckpointError, ConfigError, TensorError
from beamq.io.checkpoint import open_checkpoint
from beamq.io.safetensors_header import read_header
from tests.helpers import safetensors_edit as st


def header_file(path: Path, header: object, data: bytes = b"", pad: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) + pad).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN = {
    "too short": (b"abc", "too short"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git-LFS"),
    "huge length": ((1 << 60).to_bytes(8, "little") + b"{}", "header says"),
    "length past end": ((100).to_bytes(8, "little") + b"{}", "header says"),
}


@pytest.mark.parametrize(("raw", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path, path.name)
    assert str(path) in str(caught.value)


HEADERS: dict[str, tuple[object, bytes, str]] = {
    "garbage": (b"{nope", b"", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', b"", "not valid JSON"),
    "deep nesting": (b"[" * 200_000, b"", "not valid JSON"),
    "a list": (b"[]", b"", "not a JSON object"),
    "same name twice": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        b"",
        "twice",
    ),
    "unknown dtype": ({"a": entry("F7")}, b"1234", "dtype"),
    "dtype not text": ({"a": entry(dtype=["U8"])}, b"1234", "dtype"),  # type: ignore[arg-type]
    "negative shape": ({"a": entry(shape=[-4])}, b"1234", "shape"),
    "float shape": ({"a": entry(shape=[4.0])}, b"1234", "shape"),
    "boolean shape": ({"a": entry(shape=[True])}, b"1", "shape"),
    "three offsets": ({"a": entry(offsets=[0, 4, 8])}, b"1234", "data_offsets"),
    "offsets backwards": ({"a": entry(offsets=[4, 0])}, b"1234", "spans"),
    "size is not dtype x shape": ({"a": entry("F32")}, b"1234", "takes 16"),
    "product overflows": ({"a": entry(shape=[1 << 40, 1 << 40])}, b"1234", "takes"),
    "overlap": ({"a": entry(), "b": entry(offsets=[2, 6])}, b"123456", "overlaps"),
    "hole": ({"a": entry(), "b": entry(offsets=[6, 10])}, b"1234567890", "hole"),
    "cut data": ({"a": entry()}, b"12", "2 bytes are missing"),
    "bytes behind": ({"a": entry()}, b"12345", "1 bytes after"),
    "entry is a number": ({"a": 7}, b"", "not an object"),
    "metadata not text": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
}


@pytest.mark.parametrize(("header", "data", "message"), HEADERS.values(), ids=HEADERS.keys())
def test_a_broken_header_is_refused(
    tmp_path: Path, header: object, data: bytes, message: str
) -> None:
    path = header_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message):
        read_header(path, path.name)


def test_names_shapes_and_bytes_are_those_of_the_safetensors_library(beam_nano: Path) -> None:
    reference = load_file(beam_nano / "model.safetensors")
    with open_checkpoint(beam_nano) as checkpoint:
        assert set(checkpoint.tensors) == set(reference)
        for name in list(reference)[::37]:
            assert checkpoint.tensor(name).equal(reference[name])
            assert checkpoint.tensor(name).dtype == reference[name].dtype


def test_the_fixtures_hold_exactly_the_expected_tensors(beam_nano: Path, beam_mini: Path) -> None:
    for folder in (beam_nano, beam_mini):
        with open_checkpoint(folder) as checkpoint:
            config = BeamConfig.from_dict(checkpoint.config)
            expected = {role.name: shape for role, shape in expected_tensors(config)}
            assert {name: spec.shape for name, spec in checkpoint.tensors.items()} == expected


def split(folder: Path) -> None:
    """Turn the single file of nano into two shards with an index."""
    tensors = st.load(folder / "model.safetensors")
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2],
             "model-00002-of-00002.safetensors": names[1::2]}  # fmt: skip
    for file, members in parts.items():
        st.save(folder / file, {name: tensors[name] for name in members})
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, members in parts.items() for name in members}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_missing_shard_is_named(nano_copy: Path) -> None:
    split(nano_copy)
    (nano_copy / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing: model-00002"):
        open_checkpoint(nano_copy)


def test_an_index_that_disagrees_with_the_shards_is_refused(nano_copy: Path) -> None:
    split(nano_copy)
    edit_index(nano_copy, lambda names: names.update(ghost="model-00001-of-00002.safetensors"))
    with pytest.raises(CheckpointError, match="ghost"):
        open_checkpoint(nano_copy)


def test_a_key_in_two_shards_is_refused(nano_copy: Path) -> None:
    split(nano_copy)
    first = nano_copy / "model-00001-of-00002.safetensors"
    name = next(iter(st.load(first)))
    entry_of_first = st.load(first)[name]
    st.edit(
        nano_copy / "model-00002-of-00002.safetensors",
        lambda tensors: tensors.update({name: entry_of_first}),
    )
    with pytest.raises(CheckpointError, match="stored twice"):
        open_checkpoint(nano_copy)


@pytest.mark.parametrize(
    "target",
    ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", ".safetensors"],
)
def test_an_index_may_not_leave_the_folder(nano_copy: Path, target: str) -> None:
    split(nano_copy)
    edit_index(nano_copy, lambda names: names.update(ghost=target))
    with pytest.raises(CheckpointError, match="same folder"):
        open_checkpoint(nano_copy)


def test_pickles_are_never_opened(nano_copy: Path) -> None:
    (nano_copy / "model.safetensors").rename(nano_copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never unpickles"):
        open_checkpoint(nano_copy)


def test_links_into_a_cache_work_and_dangling_ones_are_named(nano_copy: Path) -> None:
    blob = nano_copy / "blob"
    (nano_copy / "model.safetensors").rename(blob)
    os.symlink("blob", nano_copy / "model.safetensors")
    with open_checkpoint(nano_copy) as checkpoint:
        assert checkpoint.read("model.norm.weight")
    blob.unlink()
    with pytest.raises(CheckpointError, match="points nowhere"):
        open_checkpoint(nano_copy)


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error(nano_copy: Path) -> None:
    with open_checkpoint(nano_copy) as checkpoint:
        last = max(checkpoint.tensors.values(), key=lambda spec: spec.offset)
        os.truncate(nano_copy / "model.safetensors", 5_000)
        with pytest.raises(CheckpointError, match="changed after its header"):
            checkpoint.read(last.name)


def test_an_unknown_tensor_is_an_error(beam_nano: Path) -> None:
    with open_checkpoint(beam_nano) as checkpoint, pytest.raises(TensorError, match=r"foo\.bar"):
        checkpoint.tensor("foo.bar")


CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "another model": ({"model_type": "llama"}, "model_type"),
    "no layers": ({"num_hidden_layers": None}, "num_hidden_layers"),
    "absurd layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "layer_types too short": (
        {"layer_types": ["full_attention"]},
        "layer_types has 1 entry, expected 8, one for each layer",
    ),
    "layer_types too long": (
        {"layer_types": ["full_attention"] * 9},
        "layer_types has 9 entries, expected 8, one for each layer",
    ),
    "layer_types a number": ({"layer_types": 5}, "layer_types is 5, expected a list of 8"),
    "a negative number": ({"num_experts": -4}, "num_experts is -4, expected a whole number"),
    "unknown kind": ({"mlp_layer_types": ["wet"] * 8}, "dense or sparse"),
    "heads do not divide": ({"num_key_value_heads": 3}, "num_attention_heads"),
    "top-k over experts": ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
    "groups do not divide": ({"n_group": 7}, "n_group"),
    "groups chosen over groups": ({"topk_group": 9}, "topk_group"),
    "text for a number": ({"hidden_size": "128"}, "hidden_size is '128'"),
    "true for a number": ({"hidden_size": True}, "hidden_size is True"),
    "rope on full layers": ({"rope_parameters": {"full_attention": {}}}, "NoPE"),
    "scaled rope": (
        {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}, "full_attention": None}},
        "rope_type",
    ),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_config_that_cannot_be_a_beam_is_refused(
    nano_copy: Path, changes: dict[str, object], message: str
) -> None:
    st.edit_config(nano_copy, **changes)
    with pytest.raises(ConfigError, match=message):
        BeamConfig.from_dict(open_checkpoint(nano_copy).config)


def test_a_folder_without_config_says_so(nano_copy: Path) -> None:
    (nano_copy / "config.json").unlink()
    with pytest.raises(ConfigError, match="not found"):
        open_checkpoint(nano_copy)


def test_content_digest_ignores_sharding_and_sees_values(nano_copy: Path, beam_nano: Path) -> None:
    split(nano_copy)
    with open_checkpoint(beam_nano) as one, open_checkpoint(nano_copy) as two:
        assert one.content_digest() == two.content_digest()
        assert one.fingerprint() != two.fingerprint()

    def negate(tensors: st.Tensors) -> None:
        for name in tensors:
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, bytes(byte ^ 0x80 for byte in data))

    st.edit(nano_copy / "model-00001-of-00002.safetensors", negate)
    with open_checkpoint(beam_nano) as one, open_checkpoint(nano_copy) as two:
        assert one.content_digest() != two.content_digest()
