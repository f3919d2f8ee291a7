"""Sensitivity on nano: branches are what models with one quantized part would be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from beamq.beam.tensors import Role
from beamq.calib.calibrate import calibrate
from beamq.cli import app
from beamq.convert.quantize import quantize
from beamq.errors import TensorError, UsageError
from beamq.eval.compare.compare import compare
from beamq.eval.compare.sensitivity import sensitivity
from beamq.eval.verify.verify import verify

SMALL = {"samples": 4, "sequence_length": 128}
TEXT = {"samples": 6, "sequence_length": 96}


@pytest.fixture(scope="module")
def made(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with statistics and `all`, nano with all linears in NVFP4."""
    folder = tmp_path_factory.mktemp("sensitivity")
    calibrate(beam_nano, folder / "stats", **SMALL)
    quantize(beam_nano, folder / "all", recipe="nvfp4-all", calibration=folder / "stats")
    return folder


@pytest.mark.parametrize(
    ("layer", "role", "others"),
    [
        (0, Role.ATTENTION, r"re:(?!model\.layers\.0\.self_attn\.).*_proj"),
        (1, Role.DENSE_MLP, r"re:(?!model\.layers\.1\.mlp\.).*_proj"),
        (5, Role.EXPERT, r"re:(?!model\.layers\.5\.mlp\.).*_proj"),
    ],
)
def test_a_branch_is_the_model_with_that_part_quantized(
    made: Path, beam_nano: Path, tmp_path: Path, layer: int, role: Role, others: str
) -> None:
    found = sensitivity(beam_nano, made / "all", **TEXT)
    part = next(p for p in found.parts if (p.layer, p.part) == (layer, role))
    quantize(
        beam_nano,
        tmp_path / "one",
        recipe="nvfp4-all",
        calibration=made / "stats",
        exclude=[others],
    )
    both = compare(beam_nano, [tmp_path / "one", made / "all"], **TEXT).candidates
    assert part.mean_kld.value == pytest.approx(both[0].divergence.mean_kld.value, rel=1e-6)
    assert part.same_top.value == both[0].divergence.same_top.value
    assert found.mean_kld.value == pytest.approx(both[1].divergence.mean_kld.value, rel=1e-6)
    saved = both[0].model.memory.tensor_bytes - both[1].model.memory.tensor_bytes
    assert part.extra_bytes == sum(p.extra_bytes for p in found.parts) - saved


def test_parts_are_all_that_is_quantized(made: Path, beam_nano: Path) -> None:
    found = sensitivity(beam_nano, made / "all", **TEXT)
    units = {(p.layer, p.part) for p in found.parts}
    assert units == {
        *((layer, Role.ATTENTION) for layer in range(8)),
        *((layer, Role.DENSE_MLP) for layer in range(3)),
        *((layer, Role.EXPERT) for layer in range(3, 8)),
    }
    assert all(p.mean_kld.value > 0 and p.extra_bytes > 0 for p in found.parts)
    assert 0.5 < found.sum_of_parts / found.mean_kld.value < 2
    weights = sensitivity(beam_nano, made / "all", gemm="weights-only", **TEXT)
    assert weights.sum_of_parts < found.sum_of_parts


def test_an_unquantized_checkpoint_has_no_parts(beam_nano: Path) -> None:
    with pytest.raises(TensorError, match="nothing in it is quantized"):
        sensitivity(beam_nano, beam_nano, **TEXT)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["NANO"], 3, "nothing in it is quantized"),
        (["MADE", "--data", "nowhere.txt"], 3, "nowhere.txt"),
        (["MADE", "--device", "abacus"], 2, "abacus"),
    ],
)
def test_the_command_is_refused_before_it_says_anything(
    made: Path, beam_nano: Path, options: list[str], code: int, says: str
) -> None:
    places = {"NANO": str(beam_nano), "MADE": str(made / "all")}
    given = [places.get(option, option) for option in options]
    ran = CliRunner().invoke(app, ["sensitivity", str(beam_nano), *given])
    assert ran.exit_code == code
    assert ran.stderr.startswith("error: ")
    assert says in ran.stderr
    assert ran.stdout == ""


def test_the_command_writes_a_recipe_that_keeps_its_word(
    made: Path, beam_nano: Path, tmp_path: Path
) -> None:
    recipe, report = tmp_path / "spared.yaml", tmp_path / "report"
    given = ["sensitivity", str(beam_nano), str(made / "all"), "--samples", "6",
             "--sequence-length", "96", "--exclude-worst", "4"]  # fmt: skip
    ran = CliRunner().invoke(
        app, [*given, "--json", "--write-recipe", str(recipe), "--report", str(report)]
    )
    assert ran.exit_code == 0, ran.output
    shown = json.loads(ran.stdout)
    assert shown["recipe_file"] == str(recipe)
    assert len(shown["choice"]["spared"]) == 4
    written = json.loads((report / "sensitivity.json").read_text())
    assert written["choice"] == shown["choice"]
    assert written["parts"] == shown["parts"]
    page = (report / "sensitivity.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "attention of layer" in (report / "sensitivity.md").read_text()

    output = tmp_path / "spared"
    quantize(beam_nano, output, recipe=str(recipe), calibration=made / "stats")
    assert verify(output, source=beam_nano, sample=0).ok
    found = compare(beam_nano, [output], **TEXT).candidates[0]
    predicted = shown["choice"]["predicted_kld"]
    assert found.divergence.mean_kld.value == pytest.approx(predicted, rel=0.3)
    assert found.model.memory.tensor_bytes == shown["choice"]["tensor_bytes"]
    text = CliRunner().invoke(app, given)
    assert text.exit_code == 0
    assert " ".join(text.stderr.split()).startswith(f"Running {beam_nano} with one ")
    assert "Kept in high precision: " in text.stdout
    assert "nats per GB" in text.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--write-recipe", "x.yaml"], "needs --exclude-worst"),
        (["--exclude-worst", "1", "--max-kl", "1"], "give one of"),
        (["--exclude-worst", "1", "--write-recipe", "x.json"], "ends in .yaml"),
        (["--exclude-worst", "99"], "from 1 to 15"),
    ],
)
def test_faulty_options(made: Path, beam_nano: Path, options: list[str], message: str) -> None:
    base = ["sensitivity", str(beam_nano), str(made / "all"), "--samples", "1",
            "--sequence-length", "16"]  # fmt: skip
    ran = CliRunner().invoke(app, [*base, *options])
    assert ran.exit_code == 2
    assert message in " ".join(ran.stderr.split())


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("missing/x.yaml", "missing is not a folder; choose another --write-recipe"),
        ("file/x.yaml", "file is not a folder; choose another --write-recipe"),
        ("folder.yaml", "folder.yaml: is a folder; choose another --write-recipe"),
        pytest.param(
            "locked/x.yaml",
            "locked may not be written to; choose another --write-recipe",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere"),
        ),
    ],
)
def test_a_recipe_that_cannot_be_written_is_refused_before_the_run(
    made: Path, beam_nano: Path, tmp_path: Path, place: str, says: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "locked").mkdir(mode=0o500)
    before = sorted(tmp_path.rglob("*"))
    ran = CliRunner().invoke(
        app,
        ["sensitivity", str(beam_nano), str(made / "all"), "--exclude-worst", "1",
         "--write-recipe", str(tmp_path / place)],
    )  # fmt: skip
    assert ran.exit_code == 4
    assert ran.stderr.startswith("error: "), "the run has not begun"
    assert says in " ".join(ran.stderr.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_it_runs_in_one_process(
    made: Path, beam_nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match="one process, and torchrun started 2"):
        sensitivity(beam_nano, made / "all", **TEXT)
