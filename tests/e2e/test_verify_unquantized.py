"""Folders that are not quantized, or not finished: checked as what they are, and said so."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from beamq.cli import app
from beamq.convert.dequantize import dequantize
from beamq.convert.quantize import quantize
from beamq.errors import CheckFailed, CheckpointError, UsageError
from beamq.eval.compare.compare import compare
from beamq.eval.verify.checks import NEEDS_QUANTIZED, VerifyReport
from beamq.eval.verify.inspect import inspect_checkpoint
from beamq.eval.verify.verify import verify
from beamq.io.journal import STATE_DIR
from beamq.io.lock import OutputLock
from beamq.publish import push
from tests.helpers import safetensors_edit
from tests.helpers.checkpoint_damage import edit_json, flip, pack_layer_3, resign, rewrite, shards

EXPERT = "model.layers.4.mlp.experts.7.up_proj.weight"


@pytest.fixture(scope="module", params=["nvfp4", "fp8"])
def pair(
    request: pytest.FixtureRequest, beam_nano: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A quantized folder, and what it decodes to."""
    root = tmp_path_factory.mktemp(str(request.param))
    source = root / "nano"
    shutil.copytree(beam_nano, source)
    (source / "README.md").write_text("# the source's own card\n")
    quantized, decoded = root / "quantized", root / "decoded"
    recipe = str(request.param)
    quantize(source, quantized, recipe=recipe, no_calibration=recipe == "nvfp4")
    dequantize(quantized, decoded, max_shard_bytes=2_000_000)
    return quantized, decoded


def by_status(report: VerifyReport, status: str) -> set[str]:
    return {check.name for check in report.checks if check.status == status}


def test_a_dequantized_folder_passes_as_what_it_is(pair: tuple[Path, Path]) -> None:
    quantized, decoded = pair
    report = verify(decoded, source=quantized)
    assert report.ok, report.failures
    assert (report.format, report.plain) == ("bf16", True)
    skipped = {check.name: check.detail for check in report.checks if check.status == "skip"}
    assert {skipped[name] for name in NEEDS_QUANTIZED} == {"not quantized"}
    passed = by_status(report, "pass")
    assert passed >= {
        "files.index", "files.total-size", "manifest.present", "config.dtype", "tensors.present",
        "tensors.shape", "tensors.dtype", "tensors.experts", "tensors.router", "checksums.tensors",
        "checksums.shards", "checksums.files", "values.finite", "source.config", "source.files",
        "source.accounted", "source.router", "source.copied",
    }  # fmt: skip
    assert report.check("source.copied").detail != "tensors: 0"
    assert verify(decoded).ok
    assert verify(decoded, level="structure").ok
    assert verify(decoded, level="quick").ok


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight": (lambda f: flip(f, EXPERT, 9), "checksums.tensors"),
    "a missing tensor": (lambda f: rewrite(f, EXPERT, lambda t: t.pop(EXPERT)), "tensors.present"),
    "a shape": (
        lambda f: rewrite(f, EXPERT, lambda t: t.update({EXPERT: ("BF16", [1], bytes(2))})),
        "tensors.shape",
    ),
    "a dtype": (
        lambda f: rewrite(
            f, EXPERT, lambda t: t.update({EXPERT: ("F16", t[EXPERT][1], t[EXPERT][2])})
        ),
        "tensors.dtype",
    ),
    "the config's dtype": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(dtype="float32")),
        "config.dtype",
    ),
    "a total": (
        lambda f: edit_json(
            f / "model.safetensors.index.json", lambda i: i["metadata"].update(total_size=1)
        ),
        "files.total-size",
    ),
}


@pytest.mark.parametrize(("damage", "check"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_of_a_dequantized_folder_is_found(
    pair: tuple[Path, Path], tmp_path: Path, damage: Callable[[Path], object], check: str
) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "damaged")
    damage(folder)
    assert check in by_status(verify(folder), "fail")


def test_a_value_that_the_source_does_not_decode_to_is_found(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """A folder whose checksums are right, and which is another conversion's."""
    quantized, decoded = pair
    other = shutil.copytree(decoded, tmp_path / "other")
    flip(other, EXPERT, 9)
    resign(other)
    assert verify(other).ok
    report = verify(other, source=quantized)
    assert by_status(report, "fail") == {"source.copied"}
    assert EXPERT in report.check("source.copied").detail
    (other / "tokenizer.json").write_text("{}")
    (other / "README.md").unlink()
    found = verify(other, source=quantized, level="structure").check("source.files")
    assert found.count == 2


def test_what_a_plain_folder_is_not_held_against(pair: tuple[Path, Path], beam_nano: Path) -> None:
    _, decoded = pair
    with pytest.raises(UsageError, match="give the quantized folder that it was decoded from"):
        verify(decoded, source=beam_nano)
    with pytest.raises(UsageError, match="beamq compare"):
        verify(decoded, source=beam_nano, level="forward")


def test_a_source_has_nothing_but_structure_to_verify(
    beam_nano: Path, nano_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = verify(beam_nano)
    assert report.ok, report.failures
    assert report.plain
    assert report.check("manifest.present").detail.startswith("not quantized, and no beamq.json")
    with pytest.raises(SystemExit) as left:
        app(["verify", str(beam_nano)], prog_name="beamq")
    assert left.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Not quantized: a plain BF16 Beam. What was checked: structure." in said
    assert "FAIL" not in said
    quick = verify(beam_nano, level="quick")
    assert by_status(quick, "fail") == {"manifest.present"}, "there is nothing to compare with"
    safetensors_edit.edit(shards(nano_copy)[0], lambda tensors: tensors.pop(EXPERT))
    assert by_status(verify(nano_copy), "fail") >= {"tensors.present", "tensors.experts"}


def test_packed_experts_are_a_sources_right(nano_copy: Path, pair: tuple[Path, Path]) -> None:
    safetensors_edit.edit(shards(nano_copy)[0], pack_layer_3)
    report = verify(nano_copy)
    assert report.ok, report.failures
    name = "model.layers.3.mlp.experts.down_proj"
    safetensors_edit.edit(
        shards(nano_copy)[0], lambda t: t.update({name: ("BF16", [2, 2], b"\x80?" * 4)})
    )
    assert by_status(verify(nano_copy), "fail") == {"tensors.shape"}


def test_the_verdict_of_a_dequantized_folder_is_plain_too(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    quantized, decoded = pair
    with pytest.raises(SystemExit):
        app(["verify", str(decoded), "--source", str(quantized)], prog_name="beamq")
    said = " ".join(capsys.readouterr().out.split())
    assert "structure and checksums, and compared with its source." in said


def test_push_takes_a_dequantized_folder_and_no_other_plain_one(
    pair: tuple[Path, Path], beam_nano: Path, tmp_path: Path
) -> None:
    _, decoded = pair
    result = push(decoded, "someone/beam-bf16", dry_run=True)
    assert {file.path for file in result.files} == {
        path.relative_to(decoded).as_posix() for path in decoded.rglob("*") if path.is_file()
    }
    with pytest.raises(CheckFailed, match=r"no beamq\.json, so beamq did not make it"):
        push(beam_nano, "someone/beam-bf16", dry_run=True)
    broken = shutil.copytree(decoded, tmp_path / "broken")
    rewrite(broken, EXPERT, lambda tensors: tensors.pop(EXPERT))
    with pytest.raises(CheckFailed, match="cannot be published"):
        push(broken, "someone/beam-bf16", dry_run=True)


# Unfinished --------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def begun(convert: Callable[..., object], source: Path, output: Path, **options: object) -> None:
    """Leave a folder as a crash would, half-way."""
    done = 0

    def stop(_: object) -> None:
        nonlocal done
        done += 1
        if done == 3:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("beamq.convert.run.REPORT_STEP_BYTES", 1 << 18)
        with pytest.raises(Stop):
            convert(source, output, on_progress=stop, workers=1, **options)
    assert (output / STATE_DIR).is_dir()


LOOKS = {
    "verify": verify,
    "inspect": inspect_checkpoint,
    "push": lambda folder: push(folder, "a/b"),
    "dequantize": lambda folder: dequantize(folder, folder.parent / "decoded"),
    "compare": lambda folder: compare("examples/beam-nano", [folder]),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_an_unfinished_output_is_named_with_the_way_on(
    beam_nano: Path, tmp_path: Path, look: Callable[[Path], object]
) -> None:
    output = tmp_path / "it's out"
    begun(quantize, beam_nano, output, no_calibration=True, max_shard_bytes=300_000)
    with pytest.raises(CheckpointError) as raised:
        look(output)
    assert "was not finished" in str(raised.value)
    assert f"beamq quantize SOURCE '{tmp_path}/it'\"'\"'s out' --resume" in str(raised.value)
    lock = OutputLock(output)
    with pytest.raises(CheckpointError, match=rf"is writing .*\(process {os.getpid()} on .*; wait"):
        look(output)
    lock.release()
    quantize(beam_nano, output, no_calibration=True, max_shard_bytes=300_000, resume=True)
    assert verify(output, level="structure").ok


def test_an_unfinished_decoding_is_named_as_such(pair: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    begun(dequantize, pair[0], output, max_shard_bytes=300_000)
    finished = len(list(output.glob("*.safetensors")))
    with pytest.raises(CheckpointError, match=r"beamq dequantize SOURCE .* --resume") as raised:
        verify(output)
    assert not finished or f"({finished} of " in str(raised.value)


def test_states_that_tell_little(beam_nano: Path, tmp_path: Path) -> None:
    """A journal that is empty, damaged, or of a source on the Hub; a partial download."""
    state = tmp_path / "out" / STATE_DIR
    state.mkdir(parents=True)
    journal = state / "journal-0.jsonl"
    for text, said in (
        (None, "beamq quantize SOURCE "),
        ("", "beamq quantize SOURCE "),
        ("{cut", "beamq quantize SOURCE "),
        (json.dumps({"source": "hub:org/name@abc", "recipe": "x"}), "beamq quantize org/name@abc "),
    ):
        if text is not None:
            journal.write_text(text + "\n")
        with pytest.raises(CheckpointError, match=said):
            verify(state.parent)
    part = tmp_path / "part"
    part.mkdir()
    (part / "model.safetensors.partial").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds model\.safetensors\.partial"):
        inspect_checkpoint(part)


def test_a_state_folder_beside_a_whole_checkpoint_is_no_hindrance(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(pair[0], tmp_path / "whole")
    (folder / STATE_DIR).mkdir()
    assert verify(folder, level="structure").ok
    assert inspect_checkpoint(folder).format in ("nvfp4", "fp8")
