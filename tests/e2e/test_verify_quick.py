"""`verify --quick`: checksums alone, and that no single bit of a folder can flip unseen."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from beamq.convert.dequantize import dequantize
from beamq.convert.quantize import quantize
from beamq.errors import ConfigError, UsageError
from beamq.eval.verify.verify import verify
from beamq.io.manifest import seal_of
from beamq.io.safetensors_header import read_header
from tests.helpers.checkpoint_damage import edit_json, flip, read_json, resign
from tests.helpers.craft import light_verify

SUMS = {"checksums.tensors", "checksums.shards", "checksums.files"}


@pytest.fixture(scope="module")
def made(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """One checkpoint of each format, in several shards."""
    root = tmp_path_factory.mktemp("quick")

    def make(recipe: str) -> Path:
        output = root / recipe
        if not output.exists():
            quantize(beam_nano, output, recipe=recipe, no_calibration=recipe != "fp8",
                     max_shard_bytes=1_500_000)  # fmt: skip
        return output

    return make


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_a_good_folder_passes(made: Callable[[str], Path], recipe: str) -> None:
    steps: list[tuple[int, int]] = []
    report = verify(
        made(recipe), level="quick", workers=3, progress=lambda *step: steps.append(step)
    )
    assert report.ok
    assert report.bytes_read == steps[-1][0] == steps[-1][1] > 2_000_000
    passed = {check.name for check in report.checks if check.status == "pass"}
    assert passed >= SUMS | {"manifest.present", "files.index"}
    others = {check.detail for check in report.checks if check.name.startswith("engine")}
    assert others == {"left out by --quick"}


class Flipper:
    """Flips bits of files in place, and says where a flip must be found."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._chance = chance
        self._files = [p for p in sorted(folder.rglob("*"))
                       if p.is_file() and p.name != "README.md"]  # fmt: skip
        self._weights = [path.stat().st_size for path in self._files]
        self._specs = {p: read_header(p, p.name)[0] for p in self._files if p.suffix[1:2] == "s"}
        self._folder = folder

    def flip(self) -> tuple[Path, int, int, str]:
        """Flip one random bit. Returns (file, byte, mask, what must be named)."""
        if self._chance.random() < 0.9:  # by size: nearly always tensor data
            path = self._chance.choices(self._files, self._weights)[0]
        else:
            path = self._chance.choice(self._files)
        size = path.stat().st_size
        specs = self._specs.get(path, [])
        at = self._chance.randrange(size)
        if specs and self._chance.random() < 0.05:
            at = self._chance.randrange(specs[0].offset)  # in the header
        mask = 1 << self._chance.randrange(8)
        self.toggle(path, at, mask)
        place = path.relative_to(self._folder).as_posix()
        for spec in specs:
            if spec.offset <= at < spec.offset + spec.nbytes:
                place = spec.name
        return path, at, mask, place

    @staticmethod
    def toggle(path: Path, at: int, mask: int) -> None:
        with path.open("r+b") as stream:
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ mask]))


def findings(folder: Path, level: str) -> str:
    """Everything that is named, be it in a report or because there can be none."""
    try:
        report = verify(folder, level="quick") if level == "quick" else light_verify(folder)
    except ConfigError as fault:  # config.json is no Beam's any more
        return str(fault)
    return " ".join(f"{check.detail} {' '.join(check.where)}" for check in report.failures)


@pytest.mark.parametrize(
    ("recipe", "level", "count"),
    [
        ("nvfp4", "quick", 250),
        ("fp8", "quick", 130),
        ("nvfp4", "tensors", 60),
        ("fp8", "tensors", 60),
    ],
)
def test_any_single_flipped_bit_is_found_and_located(
    made: Callable[[str], Path], recipe: str, level: str, count: int,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    folder = made(recipe)
    flipper = Flipper(folder, random.Random(f"{recipe} {level}"))
    for _ in range(count):
        path, at, mask, place = flipper.flip()
        try:
            named = findings(folder, level)
        finally:
            flipper.toggle(path, at, mask)
        assert place in named, (path.name, at, mask, place)
    assert verify(folder, level="quick").ok
    record_property("flips", count)


def test_what_is_left_to_people(made: Callable[[str], Path], tmp_path: Path) -> None:
    """The card may be edited; everything else is reported; a manifest cannot be edited unseen."""
    folder = Path(shutil.copytree(made("fp8"), tmp_path / "x"))
    (folder / "README.md").write_text("my own")
    (folder / "notes.txt").write_text("mine")
    assert verify(folder, level="quick").ok
    (folder / "chat_template.jinja").write_text("mine")
    assert verify(folder, level="quick").check("checksums.files").where == ("chat_template.jinja",)
    resign(folder)
    assert verify(folder, level="quick").ok
    edit_json(folder / "beamq.json", lambda manifest: manifest.update(beamq="9.9"))
    assert verify(folder, level="quick").check("checksums.files").where == ("beamq.json",)


@pytest.mark.parametrize(
    "files",
    [{"../x": "0"}, {"/etc/passwd": "0"}, {"a\0b": "0"}, {"sub/../../x": "0"}, {"": "0"}, {".": ""},
     {"x" * 5000: "0"}, {"pipe": "0"}, {"tokenizer.json": 7}],
    ids=lambda files: repr(files)[:24],
)  # fmt: skip
def test_hostile_lists_of_files_are_findings(
    made: Callable[[str], Path], tmp_path: Path, files: dict[str, object]
) -> None:
    folder = Path(shutil.copytree(made("fp8"), tmp_path / "x"))
    os.mkfifo(folder / "pipe")

    def change(manifest: dict[str, object]) -> None:
        manifest["files"] = files
        manifest["seal"] = seal_of(manifest)

    edit_json(folder / "beamq.json", change)
    report = verify(folder, level="quick")
    assert [check.name for check in report.failures] == ["checksums.files"]


def test_older_manifests_list_no_files(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made("fp8"), tmp_path / "x"))
    edit_json(folder / "beamq.json", lambda manifest: (manifest.pop("files"), manifest.pop("seal")))
    report = verify(folder, level="quick")
    assert report.ok
    assert report.check("checksums.files").status == "skip"


@pytest.mark.parametrize("manifest", ["{}", "[", None, '{"format": 1, "checksum": "crc"}'])
def test_without_a_manifest_there_is_nothing_to_compare_with(
    made: Callable[[str], Path], tmp_path: Path, manifest: str | None
) -> None:
    folder = Path(shutil.copytree(made("fp8"), tmp_path / "x"))
    (folder / "beamq.json").unlink()
    if manifest is not None:
        (folder / "beamq.json").write_text(manifest)
    report = verify(folder, level="quick")
    assert not report.ok
    assert report.check("checksums.tensors").status == "skip"


def test_a_swapped_shard_is_named_with_its_tensors(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made("nvfp4"), tmp_path / "x"))
    flip(folder, "model.layers.4.mlp.experts.7.up_proj.weight", 9)
    report = verify(folder, level="quick")
    assert {check.name for check in report.failures} == {"checksums.tensors", "checksums.shards"}
    assert "model-0000" in report.check("checksums.tensors").detail


def test_decoded_folders_have_checksums_too(made: Callable[[str], Path], tmp_path: Path) -> None:
    dequantize(made("fp8"), tmp_path / "bf16")
    assert "config.json" in read_json(tmp_path / "bf16" / "beamq.json")["files"]
    assert verify(tmp_path / "bf16", level="quick").ok
    flip(tmp_path / "bf16", "model.norm.weight", 3)
    assert not verify(tmp_path / "bf16", level="quick").ok


def test_options_that_contradict(made: Callable[[str], Path], beam_nano: Path) -> None:
    with pytest.raises(UsageError, match="--source"):
        verify(made("fp8"), level="quick", source=beam_nano)
    assert json.loads(json.dumps(verify(made("fp8"), level="quick").to_dict()))["level"] == "quick"
