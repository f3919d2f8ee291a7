"""`quantize --only-changed PREVIOUS`: the bytes of a fresh run, whatever changed in between."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beamq.calib.calibrate import calibrate
from beamq.convert import open_shards
from beamq.convert.quantize import QuantizeResult, quantize
from beamq.errors import CheckpointError, DiskError, UsageError
from beamq.io.shard_writer import ShardWriter

SHARDS: dict[str, Any] = {"max_shard_bytes": 600_000, "workers": 2}
CONSTANT: dict[str, Any] = {**SHARDS, "no_calibration": True}
NEEDS_NO_CALIBRATION = (
    "nvfp4", "nvfp4-all", "nvfp4-max", "nvfp4-fp8", "fp8", "fp8-block", "mxfp8", "mxfp8-experts"
)  # fmt: skip


def files(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def changed_copy(source: Path, target: Path, names: Callable[[list[str]], list[str]]) -> Path:
    """A copy of the source in which one value of each tensor that `names` chooses is another."""
    shutil.copytree(source, target)
    for shard in sorted(target.glob("*.safetensors")):
        raw = bytearray(shard.read_bytes())
        begin = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:begin])
        header.pop("__metadata__", None)
        for name in names(sorted(header)):
            if name in header and header[name]["dtype"] in ("BF16", "F32"):
                at = begin + header[name]["data_offsets"][0]
                raw[at] ^= 1
        shard.write_bytes(raw)
    return target


def sample(count: int, seed: int) -> Callable[[list[str]], list[str]]:
    return lambda names: random.Random(seed).sample(names, min(count, len(names)))


def once_more(source: Path, output: Path, previous: Path, **options: Any) -> QuantizeResult:
    return quantize(source, output, only_changed=previous, **options)


@pytest.mark.parametrize("recipe", NEEDS_NO_CALIBRATION)
@pytest.mark.parametrize("count", [0, 1, 40, 10_000])
def test_the_bytes_are_those_of_a_fresh_run(
    beam_nano: Path, tmp_path: Path, recipe: str, count: int
) -> None:
    options = {**(CONSTANT if recipe.startswith("nvfp4") else SHARDS), "recipe": recipe}
    quantize(beam_nano, tmp_path / "previous", **options)
    source = changed_copy(beam_nano, tmp_path / "source", sample(count, seed=count))
    quantize(source, tmp_path / "fresh", **options)
    result = once_more(source, tmp_path / "out", tmp_path / "previous", **options)
    assert files(tmp_path / "out") == files(tmp_path / "fresh")
    copied, _, groups, *_ = result.unchanged.split()
    assert (int(copied) == int(groups)) == (count == 0)
    assert (int(copied) == 0) == (count == 10_000), result.unchanged


def test_with_statistics_and_with_a_calibration_in_the_run(beam_nano: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("All work and no play. " * 400)
    text: dict[str, Any] = {"data": [str(data)], "samples": 2, "sequence_length": 32}
    source = changed_copy(beam_nano, tmp_path / "source", sample(30, seed=7))
    for name in ("file", "pass"):
        options = {"earlier": text, "now": text}
        if name == "file":
            for key, model in (("earlier", beam_nano), ("now", source)):
                calibrate(model, tmp_path / f"{key}.safetensors", **text)
                options[key] = {"calibration": tmp_path / f"{key}.safetensors"}
        previous, fresh, out = (
            tmp_path / f"{each}-{name}" for each in ("previous", "fresh", "out")
        )
        quantize(beam_nano, previous, **SHARDS, **options["earlier"])
        quantize(source, fresh, **SHARDS, **options["now"])
        result = once_more(source, out, previous, **SHARDS, **options["now"])
        assert files(out) == files(fresh)
        assert 0 < int(result.unchanged.split()[0]) < int(result.unchanged.split()[2])


def test_other_input_scales_are_written_anew(beam_nano: Path, tmp_path: Path) -> None:
    stats = tmp_path / "stats.safetensors"
    calibrate(beam_nano, stats, samples=2, sequence_length=32)
    quantize(beam_nano, tmp_path / "previous", **CONSTANT)
    quantize(beam_nano, tmp_path / "fresh", **SHARDS, calibration=stats)
    result = once_more(
        beam_nano, tmp_path / "out", tmp_path / "previous", **SHARDS, calibration=stats
    )
    assert files(tmp_path / "out") == files(tmp_path / "fresh")
    assert result.unchanged.split()[0] == result.unchanged.split()[2]


def test_another_size_of_shards_is_copied_by_ranges(beam_nano: Path, tmp_path: Path) -> None:
    quantize(beam_nano, tmp_path / "previous", no_calibration=True)
    quantize(beam_nano, tmp_path / "fresh", **CONSTANT)
    result = once_more(beam_nano, tmp_path / "out", tmp_path / "previous", **CONSTANT)
    assert files(tmp_path / "out") == files(tmp_path / "fresh")
    assert "share" not in result.unchanged


def test_unchanged_shards_are_links_and_changed_ones_are_not(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beamq.io.shard_writer._clone", lambda whole, clone: False)
    previous = tmp_path / "previous"
    quantize(beam_nano, previous, **CONSTANT)
    before = files(previous)
    source = changed_copy(
        beam_nano, tmp_path / "source", lambda names: ["model.layers.3.input_layernorm.weight"]
    )
    result = once_more(source, tmp_path / "out", previous, **CONSTANT)
    shards = sorted(path.name for path in previous.glob("*.safetensors"))
    linked = [name for name in shards if os.path.samefile(previous / name, tmp_path / "out" / name)]
    assert len(linked) == len(shards) - 1
    assert f"{len(linked)} shards share" in result.unchanged
    # The links are never written into, also not by what replaces the new folder.
    quantize(source, tmp_path / "out", recipe="fp8", overwrite=True, **SHARDS)
    assert files(previous) == before


def test_damage_in_the_previous_folder_does_not_spread(beam_nano: Path, tmp_path: Path) -> None:
    quantize(beam_nano, tmp_path / "fresh", **CONSTANT)
    shutil.copytree(tmp_path / "fresh", tmp_path / "previous")
    shard = sorted((tmp_path / "previous").glob("*.safetensors"))[2]
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 16
    shard.write_bytes(raw)
    result = once_more(beam_nano, tmp_path / "out", tmp_path / "previous", **CONSTANT)
    assert files(tmp_path / "out") == files(tmp_path / "fresh")
    assert "1 damaged there, converted" in result.unchanged


def test_a_stopped_run_goes_on(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(beam_nano, tmp_path / "previous", **CONSTANT)
    source = changed_copy(beam_nano, tmp_path / "source", sample(20, seed=3))
    quantize(source, tmp_path / "fresh", **CONSTANT)
    shards = len(list((tmp_path / "fresh").glob("*.safetensors")))
    for stop in range(shards):
        left = [stop]

        def fail(writer: ShardWriter, left: list[int] = left, real: Any = ShardWriter.sync) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise DiskError("no")
            real(writer)

        output = tmp_path / f"out-{stop}"
        with monkeypatch.context() as patch:
            patch.setattr(open_shards.ShardWriter, "sync", fail)
            with pytest.raises(DiskError):
                once_more(source, output, tmp_path / "previous", **CONSTANT)
        # With or without the option: the bytes do not depend on it.
        kept = {"only_changed": tmp_path / "previous"} if stop % 2 else {}
        assert quantize(source, output, resume=True, **kept, **CONSTANT).resumed_shards == stop
        assert files(output) == files(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recipe": "nvfp4-all"}, "another recipe.*rules"),
        ({"exclude": ["model.layers.3.mlp.experts*"]}, "another recipe.*exclude"),
        ({"kv_cache": "fp8"}, "another recipe.*kv_cache"),
    ],
)
def test_what_differs_is_named(
    beam_nano: Path, tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    quantize(beam_nano, tmp_path / "previous", **CONSTANT)
    with pytest.raises(UsageError, match=text):
        once_more(beam_nano, tmp_path / "out", tmp_path / "previous", **CONSTANT, **options)
    assert not (tmp_path / "out").exists()


def test_refusals(beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    previous, out = tmp_path / "previous", tmp_path / "out"
    quantize(beam_nano, previous, **CONSTANT)
    with pytest.raises(UsageError, match="is the output"):
        once_more(beam_nano, previous, previous, overwrite=True, **CONSTANT)
    with pytest.raises(CheckpointError, match=r"no beamq\.json"):
        once_more(beam_nano, out, beam_nano, **CONSTANT)
    with pytest.raises(UsageError, match="rounds experts by activations"):
        once_more(beam_nano, out, previous, recipe="nvfp4-gptq", **SHARDS)
    with monkeypatch.context() as patch:
        patch.setattr("beamq.convert.only_changed.__version__", "99")
        with pytest.raises(UsageError, match="this is 99"):
            once_more(beam_nano, out, previous, **CONSTANT)
    manifest = json.loads((previous / "beamq.json").read_text())
    manifest["shards"][0]["sources"] = {}
    (previous / "beamq.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="was changed since it was written"):
        once_more(beam_nano, out, previous, **CONSTANT)
    assert not out.exists()
