"""Every reader of a stranger's file, on some twenty thousand spoiled ones.

Only `BeamqError`s may come out, each a line of print; no case may hang, nor take memory beyond a
small multiple of the bytes it was given. Seeds are fixed: a failure here is a failure again.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import TensorRole, classify, expected_tensors
from beamq.calib.input_scales import input_scales
from beamq.calib.statistics import CalibrationStats, InputStats, load_stats, save_stats
from beamq.convert.dequantize import dequantize
from beamq.convert.quantize import quantize
from beamq.errors import ConfigError
from beamq.eval.verify.inspect import inspect_checkpoint
from beamq.eval.verify.verify import verify
from beamq.io.checkpoint import open_checkpoint
from beamq.io.companions import front_matter
from beamq.io.files import read_json_object
from beamq.io.journal import Identity, Journal, ShardRecord
from beamq.io.safetensors_header import parse_header
from beamq.io.source import INDEX_NAME
from beamq.plan.plan import apply_exclusion, make_plan
from beamq.plan.recipe import Recipe, load_recipe
from tests.helpers import safetensors_edit as st
from tests.helpers.craft import light_verify, synthetic
from tests.helpers.mutate import Watch, encode, spoil_bytes, spoil_tree

SEED = os.environ.get("BEAMQ_FUZZ_SEED", "0")  # another number: other cases
Record = Callable[[str, object], None]


def seeded(number: int) -> random.Random:
    return random.Random(f"{SEED} {number}")


Spoiler = Callable[[random.Random], bytes]


@pytest.fixture
def watch(record_property: Record) -> Iterator[Watch]:
    watched = Watch()
    yield watched
    record_property("cases", watched.cases)
    record_property("refused", watched.refused)


@pytest.fixture
def tiny(memory_folder: Path) -> Path:
    """The smallest sparse Beam, in three shards."""
    return synthetic(memory_folder / "tiny", layers=1, experts=2, hidden=16, width=16, shards=3)


@pytest.fixture
def tiny_nvfp4(tiny: Path, memory_folder: Path) -> Path:
    quantize(tiny, memory_folder / "q", recipe="nvfp4", no_calibration=True, max_shard_bytes=1500)
    return memory_folder / "q"


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return header, raw[8 + length :]


def with_length(text: bytes, data: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def test_headers(tiny: Path, watch: Watch) -> None:
    header, data = header_of(sorted(tiny.glob("*.safetensors"))[0])
    small = dict(list(header.items())[:4])
    chance = seeded(1)
    for number in range(8000):
        tree = spoil_tree(chance, small)
        raw = with_length(encode(chance, tree), data)
        if number % 3 == 0:
            raw = spoil_bytes(chance, with_length(json.dumps(small).encode(), data))
        stream = io.BytesIO(raw)
        watch.run(lambda: parse_header("x", "x", len(raw), stream.read), len(raw))  # noqa: B023
    assert watch.refused > 4000


def test_whole_files_of_weights(tiny: Path, watch: Watch) -> None:
    """Mutated real files through everything that opens a checkpoint's headers."""
    paths = sorted(tiny.glob("*.safetensors"))
    originals = {path: path.read_bytes() for path in paths}
    chance = seeded(2)
    for _ in range(1500):
        path = chance.choice(paths)
        header, data = header_of(path)
        raw = with_length(encode(chance, spoil_tree(chance, header)), data)
        path.write_bytes(raw)
        watch.run(lambda: make_plan(tiny), sum(map(len, originals.values())) + len(raw))
        path.write_bytes(originals[path])
    make_plan(tiny)


def test_indices(tiny: Path, watch: Watch) -> None:
    index = json.loads((tiny / INDEX_NAME).read_text())
    chance = seeded(3)
    for _ in range(2000):
        raw = encode(chance, spoil_tree(chance, index))
        (tiny / INDEX_NAME).write_bytes(raw)

        def read() -> None:
            with open_checkpoint(tiny):
                pass

        watch.run(read, len(raw) + 20_000)


def test_configs(tiny: Path, watch: Watch) -> None:
    config = json.loads((tiny / "config.json").read_text())
    chance = seeded(4)
    path = tiny / "config.json"
    for _ in range(3000):
        raw = encode(chance, spoil_tree(chance, config))
        path.write_bytes(raw)

        def read() -> None:
            built = BeamConfig.from_dict(read_json_object(path, ConfigError, 1 << 20))
            assert built.tensor_count <= 1 << 20
            if built.tensor_count < 2000:
                assert len(list(expected_tensors(built))) == built.tensor_count

        watch.run(read, len(raw))
        if watch.cases % 4 == 0:
            watch.run(lambda: make_plan(tiny), len(raw) + 20_000)


RECIPE = b"""name: mine
summary: a recipe of my own
rules: {expert: nvfp4, attention: nvfp4}
scales: max
kv_cache: fp8
exclude: ["model.layers.0.mlp*", 're:.*q_proj', gate]
"""


def test_recipes(tiny: Path, watch: Watch) -> None:
    path = tiny / "mine.yaml"
    plain = load_recipe("nvfp4").to_dict()

    def excluded(recipe: Recipe, roles: list[TensorRole]) -> None:
        for pattern in recipe.exclude:
            apply_exclusion(pattern, recipe, roles)

    with open_checkpoint(tiny) as checkpoint:
        roles = [classify(name) for name in checkpoint.tensors]
    chance = seeded(5)
    for number in range(2500):
        raw = encode(chance, spoil_tree(chance, plain)) if number % 3 else b""
        raw = raw or spoil_bytes(chance, RECIPE)
        path.write_bytes(raw)
        watch.run(lambda: excluded(load_recipe(str(path)), roles), len(raw))


BOMBS = [
    b"a: &a [x]\n" + b"".join(b"b%d: &b%d [*a, *a]\n" % (n, n) for n in range(100)),
    b"&a [*a]", b"? " * 3000, b"- " * 3000, b"[" * 3000, b"{" * 3000, b"!!binary " + b"A" * 9000,
    b"name: " + b"9" * 5000, b"x: 0x" + b"f" * 9000, b"x: 1:" + b"1:" * 9000 + b"1",
    b"rules: {expert: !!set {" + b"a, " * 3000 + b"}}", b"%YAML 9.9\n---\n", b"\0" * 5000,
    b"a: &a {k: v}\nb: {<<: [" + b"*a, " * 300 + b"]}", "\u2028".encode() * 900,
]  # fmt: skip


@pytest.mark.parametrize("raw", BOMBS, ids=lambda raw: repr(raw[:12]))
def test_recipes_that_are_bombs(tmp_path: Path, watch: Watch, raw: bytes) -> None:
    (tmp_path / "x.yaml").write_bytes(raw)
    watch.cases = 15  # so that it is weighed
    watch.run(lambda: load_recipe(str(tmp_path / "x.yaml")), len(raw))
    (tmp_path / "README.md").write_bytes(b"---\n" + raw + b"\n---\n")
    watch.run(lambda: front_matter(tmp_path / "README.md"), len(raw))


def some_stats(folder: Path) -> tuple[Path, BeamConfig]:
    config = BeamConfig.from_dict(json.loads((folder / "config.json").read_text()))
    one, many = np.array(1.5, np.float32), np.array([1.0, 2.0], np.float32)
    inputs = {
        "layers.0.self_attn.qkv_gate": InputStats(amax=one, rows=np.array(3)),
        "layers.0.self_attn.o": InputStats(amax=one, rows=np.array(3)),
        "layers.0.experts.gate_up": InputStats(amax=many, rows=np.array([1, 2])),
        "layers.0.experts.down": InputStats(amax=many, rows=np.array([1, 2])),
    }
    stats = CalibrationStats(
        model_name="tiny", model_fingerprint="0" * 64, experts="routed", total_tokens=3,
        inputs=inputs, routed_tokens={0: np.array([1, 2])}, data=({"digest": "0"},),
        versions={"beamq": "0"},
    )  # fmt: skip
    save_stats(stats, folder / "stats")
    return folder / "stats", config


def test_statistics(tiny: Path, watch: Watch) -> None:
    path, config = some_stats(tiny)
    header, data = header_of(path)
    key = next(iter(header["__metadata__"]))
    record = json.loads(header["__metadata__"][key])
    original = path.read_bytes()
    chance = seeded(6)
    for number in range(2500):
        if number % 3 == 0:
            raw = spoil_bytes(chance, original)
        elif number % 3 == 1:
            changed = spoil_tree(chance, record)
            text = encode(chance, changed).decode(errors="replace")
            raw = with_length(json.dumps({**header, "__metadata__": {key: text}}).encode(), data)
        else:
            values = bytearray(data)
            at = chance.randrange(0, len(values), 4)
            values[at : at + 4] = chance.choice(
                (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff" * 4, b"\0" * 4, b"\1\0\0\0")
            )
            raw = with_length(encode(chance, spoil_tree(chance, header)), bytes(values))
        path.write_bytes(raw)
        watch.run(lambda: input_scales(load_stats(path), config, 2), len(raw))


IDENTITY = Identity(version="1", source="s", recipe="r", input_scales="i", plan="p", checksum="c")


def test_journals(tmp_path: Path, watch: Watch) -> None:
    journal = Journal(tmp_path, IDENTITY)
    journal.open()
    for number in range(3):
        journal.append(
            ShardRecord(name=f"model-{number}", nbytes=7, tensors={"a": "0" * 32, "b": "1" * 32},
                        counts={"zero_rows": 3, "zero_groups": ["g"]})
        )  # fmt: skip
    journal.close()
    path = tmp_path / ".beamq" / "journal-0.jsonl"
    original = path.read_bytes()
    lines = [json.loads(line) for line in original.splitlines()]
    chance = seeded(7)
    for number in range(2500):
        raw = spoil_bytes(chance, original)
        if number % 2:
            at = chance.randrange(len(lines))
            changed = [*lines[:at], spoil_tree(chance, lines[at]), *lines[at + 1 :]]
            raw = b"".join(encode(chance, line) + b"\n" for line in changed)
        path.write_bytes(raw)

        def read() -> None:
            fresh = Journal(tmp_path, IDENTITY)
            fresh.load()
            for record in fresh.done.values():
                assert isinstance(record, ShardRecord)

        watch.run(read, len(raw))


def test_journals_met_by_a_resumed_run(tiny: Path, memory_folder: Path, watch: Watch) -> None:
    """Whatever the journal says, the output is whole or the run is refused."""
    options: dict[str, Any] = {"recipe": "fp8", "max_shard_bytes": 900, "workers": 1}
    whole = memory_folder / "whole"
    quantize(tiny, whole, **options)
    output = memory_folder / "out"
    chance = seeded(8)
    patch = pytest.MonkeyPatch()
    patch.setattr("beamq.convert.run.Journal.remove", lambda self: self.close())
    quantize(tiny, output, **options)
    patch.undo()
    journal = output / ".beamq" / "journal-0.jsonl"
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
    kept = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    expected = {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()}
    for _ in range(150):
        shutil.rmtree(output)
        for path, content in kept.items():
            if path.name != "beamq.json":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        at = chance.randrange(len(lines))
        changed = [*lines[:at], spoil_tree(chance, lines[at]), *lines[at + 1 :]]
        journal.write_bytes(b"".join(encode(chance, line) + b"\n" for line in changed))

        def resume() -> None:
            quantize(tiny, output, resume=True, **options)
            found = {path.name: path.read_bytes() for path in output.iterdir() if path.is_file()}
            assert set(found) == set(expected)
            for name, content in expected.items():
                if name != "beamq.json":  # its checksums are the journal's word
                    assert found[name] == content, name

        watch.run(resume, 100_000)


SMALL = ("beamq.json", "config.json", "hf_quant_config.json", INDEX_NAME)


def test_manifests_and_configs_of_outputs(
    tiny: Path, tiny_nvfp4: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify`, `inspect` and a resumed run on outputs whose small files are spoiled."""
    monkeypatch.setitem(__import__("sys").modules, "compressed_tensors.quantization", None)
    originals = {name: (tiny_nvfp4 / name).read_bytes() for name in SMALL}
    chance = seeded(9)
    size = sum(path.stat().st_size for path in tiny_nvfp4.iterdir() if path.is_file()) + 20_000
    for number in range(900):
        name = chance.choice(SMALL)
        raw = encode(chance, spoil_tree(chance, json.loads(originals[name])))
        (tiny_nvfp4 / name).write_bytes(raw)
        steps: list[Callable[[], object]] = [
            lambda: verify(tiny_nvfp4, level="structure"),
            lambda: verify(tiny_nvfp4, level="quick", workers=1),
            lambda: verify(tiny_nvfp4, source=tiny, sample=0, workers=1),
            lambda: inspect_checkpoint(tiny_nvfp4),
            lambda: quantize(tiny, tiny_nvfp4, recipe="nvfp4", no_calibration=True,
                             max_shard_bytes=1500, resume=True),
        ]  # fmt: skip
        watch.run(steps[number % 5], size)
        if number % 5 == 4:
            for other in SMALL:
                (tiny_nvfp4 / other).write_bytes(originals[other])
        (tiny_nvfp4 / name).write_bytes(originals[name])


def test_shards_of_outputs(tiny: Path, tiny_nvfp4: Path, watch: Watch) -> None:
    """`verify` with and without the source, and `dequantize`, on spoiled shards."""
    paths = sorted(tiny_nvfp4.glob("*.safetensors"))
    originals = {path: path.read_bytes() for path in paths}
    chance = seeded(10)
    target = tiny_nvfp4.parent / "decoded"
    size = sum(map(len, originals.values())) + 20_000
    for number in range(600):
        path = chance.choice(paths)
        header, data = header_of(path)
        if chance.random() < 0.6:
            raw = with_length(encode(chance, spoil_tree(chance, header)), data)
        else:
            raw = with_length(json.dumps(header).encode(), b"") + bytes(
                byte ^ (1 << chance.randrange(8)) if chance.random() < 0.05 else byte
                for byte in data
            )
        path.write_bytes(raw)
        steps: list[Callable[[], object]] = [
            lambda: light_verify(tiny_nvfp4, source=tiny),
            lambda: light_verify(tiny_nvfp4),
            lambda: dequantize(tiny_nvfp4, target, overwrite=target.exists(), workers=1),
            lambda: inspect_checkpoint(tiny_nvfp4),
        ]
        watch.run(steps[number % 4], size)
        path.write_bytes(originals[path])
    assert watch.refused > 50


def test_what_was_not_spoiled_still_passes(tiny: Path, tiny_nvfp4: Path) -> None:
    """Else all of the above might refuse everything."""
    assert st.load(sorted(tiny.glob("*.safetensors"))[0])
    assert light_verify(tiny_nvfp4, source=tiny).ok
