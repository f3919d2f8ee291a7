"""`verify` under torchrun: ranks share the reading, and report what one process reports.

Starting a process and importing torch takes longer than any case, so two launches, of two and of
three ranks, go through all cases; tests then look at what each rank wrote down.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from beamq.convert.dequantize import dequantize
from beamq.convert.quantize import quantize
from tests.helpers.checkpoint_damage import flip, poke, resign, rewrite, shards
from tests.helpers.free_ports import free_port
from tests.helpers.verifying_rank import observe

EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj"
GONE = EXPERT.format(3, 5, "up")
FORMATS = ("nvfp4", "fp8")
FOLDERS = (*FORMATS, "nvfp4 damaged", "fp8 damaged", "cut", "decoded")
THREE = ("nvfp4 damaged", "fp8 damaged", "quick damaged")
LARGEST = 2 * 524_288  # bytes of the largest item of beam-nano, its embedding, and of its source


@dataclass(frozen=True)
class Case:
    """One call of `verify`. `own` are arguments, `trouble` a fault, of one rank by its number."""

    arguments: dict[str, Any]
    own: dict[int, dict[str, Any]] = field(default_factory=dict)
    trouble: dict[int, str] = field(default_factory=dict)

    def record(self, port: int) -> dict[str, Any]:
        return {"arguments": self.arguments, "own": self.own, "trouble": self.trouble, "port": port}


def damage(folder: Path, fmt: str) -> None:
    """A tensor that is missing, codes and a router that are not what was written, a NaN scale."""
    rewrite(folder, f"{GONE}.weight", lambda tensors: tensors.pop(f"{GONE}.weight"))
    resign(folder)
    for layer in range(3, 8):
        for expert in (7, 2):
            flip(folder, f"{EXPERT.format(layer, expert, 'gate')}.weight", 40 + layer)
    flip(folder, "model.layers.6.mlp.gate.weight", 2)
    scale = f"{EXPERT.format(5, 1, 'down')}.weight_scale"
    poke(folder, scale, b"\x7f" if fmt == "nvfp4" else b"\x00\x00\xc0\x7f", at=0)


@pytest.fixture(scope="module")
def folders(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    made = {}
    for fmt in FORMATS:
        made[fmt] = root / fmt
        quantize(beam_nano, made[fmt], recipe=fmt, no_calibration=fmt != "fp8",
                 max_shard_bytes=700_000)  # fmt: skip
        made[f"{fmt} damaged"] = Path(shutil.copytree(made[fmt], root / f"{fmt}-damaged"))
        damage(made[f"{fmt} damaged"], fmt)
    made["cut"] = Path(shutil.copytree(made["fp8"], root / "cut"))
    shards(made["cut"])[1].unlink()
    made["decoded"] = root / "decoded"
    dequantize(made["fp8"], made["decoded"])
    assert set(made) == set(FOLDERS)
    return made


def same_told(folders: dict[str, Path], source: Path) -> dict[str, Case]:
    """Cases in which every rank must report what one process reports."""
    at = {name: str(path) for name, path in folders.items()}
    nano = str(source)
    return {
        "nvfp4": Case({"checkpoint": at["nvfp4"], "source": nano, "sample": 0}),
        "nvfp4 damaged": Case({"checkpoint": at["nvfp4 damaged"], "source": nano, "sample": 0}),
        "fp8": Case({"checkpoint": at["fp8"], "source": nano, "sample": 0, "workers": 3}),
        "fp8 damaged": Case({"checkpoint": at["fp8 damaged"], "source": nano, "sample": 0}),
        "no source": Case({"checkpoint": at["nvfp4 damaged"], "sample": 7}),
        "quick": Case({"checkpoint": at["fp8"], "level": "quick"}),
        "quick damaged": Case({"checkpoint": at["nvfp4 damaged"], "level": "quick"}),
        "cut": Case({"checkpoint": at["cut"], "source": nano}),
        "quick cut": Case({"checkpoint": at["cut"], "level": "quick"}),
        "decoded": Case({"checkpoint": at["decoded"], "source": at["fp8"]}),
        "structure": Case({"checkpoint": at["nvfp4 damaged"], "level": "structure"}),
    }


def other_cases(folders: dict[str, Path], nowhere: Path) -> dict[str, Case]:
    """Of two ranks: the command line, and ranks that fail. The last ends in a kill."""
    good, cut = str(folders["nvfp4"]), str(folders["cut"])
    line = ["beamq", "verify", "--json", "--quick"]
    lost = {1: {"line": [*line, str(nowhere)]}}
    return {
        "command": Case({"line": [*line, good]}),
        "command, damaged": Case({"line": [*line, str(folders["nvfp4 damaged"])]}),
        "command, lost": Case({"line": [*line, good]}, own=lost),
        "unreadable": Case({"checkpoint": good}, trouble={1: "unreadable"}),
        "both unreadable": Case({"checkpoint": good}, trouble={0: "unreadable", 1: "unreadable"}),
        "opinion": Case({"checkpoint": good}, trouble={0: "opinion"}),
        "others": Case({"checkpoint": good}, own={1: {"checkpoint": str(folders["fp8"])}}),
        "less": Case({"checkpoint": good}, own={1: {"checkpoint": cut}}),
        "quick, less": Case({"checkpoint": str(folders["fp8"]), "level": "quick"},
                            own={1: {"checkpoint": cut}}),
        "killed": Case({"checkpoint": good}, trouble={1: "killed"}),
    }  # fmt: skip


def launch(cases: dict[str, Case], world: int, root: Path, repo: Path) -> list[dict[str, Any]]:
    """What each rank wrote down, by case."""
    records = [case.record(int(free_port())) for case in cases.values()]
    (root / "cases.json").write_text(json.dumps(records))
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.helpers.verifying_rank",
                root / "cases.json",
                root / str(rank),
            ],
            env={**os.environ, **meeting, "RANK": str(rank)},
            cwd=repo,
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode in (0, -9), errors.decode()[-2000:]
    finally:
        for process in processes:
            process.kill()
    written = [(root / str(rank)).read_text().splitlines() for rank in range(world)]
    return [dict(zip(cases, map(json.loads, lines), strict=False)) for lines in written]


@pytest.fixture(scope="module")
def one(folders: dict[str, Path], beam_nano: Path) -> Callable[[str], dict[str, Any]]:
    """What one process reports, in the form of a rank's record."""
    cases = same_told(folders, beam_nano)
    found: dict[str, dict[str, Any]] = {}

    def tell(name: str) -> dict[str, Any]:
        if name not in found:
            found[name] = json.loads(json.dumps(observe(cases[name].arguments)))
        return found[name]

    return tell


@pytest.fixture(scope="module")
def two(
    folders: dict[str, Path], beam_nano: Path, repo: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:  # fmt: skip
    root = tmp_path_factory.mktemp("two")
    cases = same_told(folders, beam_nano) | other_cases(folders, root / "nowhere")
    return launch(cases, 2, root, repo)


@pytest.fixture(scope="module")
def three(
    folders: dict[str, Path], beam_nano: Path, repo: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:  # fmt: skip
    cases = same_told(folders, beam_nano)
    chosen = {name: cases[name] for name in THREE}
    return launch(chosen, 3, tmp_path_factory.mktemp("three"), repo)


def check_told(found: dict[str, Any], ranks: list[dict[str, Any]], name: str) -> None:
    """The same report at every rank, and every range of bytes read by one of them."""
    for rank in ranks:
        # As text, in which NaN equals NaN.
        assert json.dumps(rank[name]["report"]) == json.dumps(found["report"])
    reads = [read for rank in ranks for read in rank[name]["reads"]]
    assert sorted(reads) == sorted(found["reads"])
    total = sum(nbytes for *_, nbytes in reads)
    for rank in ranks:
        nbytes = sum(nbytes for *_, nbytes in rank[name]["reads"])
        assert nbytes <= total / len(ranks) + LARGEST


TOLD = tuple(same_told(dict.fromkeys(FOLDERS, Path()), Path()))


@pytest.mark.parametrize("name", TOLD)
def test_two_ranks_are_told_what_one_process_is(
    two: list[dict[str, Any]], one: Callable[[str], dict[str, Any]], name: str
) -> None:
    assert "RANK" not in os.environ
    found = one(name)
    check_told(found, two, name)
    assert found["report"]["ok"] is (name in ("nvfp4", "fp8", "quick", "decoded"))
    if found["reads"]:
        assert all(rank[name]["reads"] for rank in two)
        steps = [rank[name]["steps"][0] for rank in two]
        assert [sum(both) for both in zip(*steps, strict=True)] == found["steps"][0]
    asked = int(name not in ("cut", "structure") and "quick" not in name)
    assert (found["asked"], *(rank[name]["asked"] for rank in two)) == (asked, asked, 0)


@pytest.mark.parametrize("name", THREE)
def test_three_ranks_are_told_what_one_process_is(
    three: list[dict[str, Any]], one: Callable[[str], dict[str, Any]], name: str
) -> None:
    check_told(one(name), three, name)


def test_the_cases_are_what_they_are_called(one: Callable[[str], dict[str, Any]]) -> None:
    """A tensor that is missing, faults enough that their order shows, errors to add up."""
    for fmt, scales in (("nvfp4", "values.block-scales"), ("fp8", "values.row-scales")):
        found = one(f"{fmt} damaged")["report"]
        counts = {each["name"]: each["count"] for each in found["checks"] if each["count"]}
        assert counts == {
            "tensors.present": 1, "tensors.experts": 1, "checksums.tensors": 12,
            "checksums.shards": {"nvfp4": 3, "fp8": 4}[fmt], scales: 1,
            "source.router": 1, "source.bound": 11,
        }  # fmt: skip
        assert sum(error["linears"] for error in one(fmt)["report"]["errors"]) >= 240
    opinion = "values.second-opinion"
    checks = {each["name"]: each for each in one("no source")["report"]["checks"]}
    assert (checks[opinion]["status"], checks[opinion]["count"]) == ("fail", 7)


def test_the_first_rank_prints(two: list[dict[str, Any]], folders: dict[str, Path]) -> None:
    for name, code in (("command", 0), ("command, damaged", 1)):
        first, second = (rank[name] for rank in two)
        assert (first["code"], second["code"]) == (code, code)
        assert json.loads(first["out"])["ok"] is (code == 0)
        assert (second["out"], first["errors"], second["errors"]) == ("", "", "")


def test_a_folder_that_one_rank_lacks(two: list[dict[str, Any]]) -> None:
    first, second = (rank["command, lost"] for rank in two)
    assert (first["code"], second["code"]) == (3, 3)
    assert "nowhere: no such folder" in first["errors"]
    assert json.loads(first["out"])["exit_code"] == 3
    assert (second["out"], second["errors"]) == ("", "")


OTHER = r"another rank failed \(rank 0: TypeError"
UNLIKE = "the ranks do not see the same files"


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("unreadable", "CheckpointError: the disk has gone", "CheckpointError: the disk has gone"),
        ("both unreadable", "CheckpointError: the disk", "CheckpointError: the disk"),
        ("opinion", "TypeError", f"EnvironmentFault: {OTHER}"),
        ("others", f"EnvironmentFault: {UNLIKE}", f"EnvironmentFault: {UNLIKE}"),
        ("less", f"EnvironmentFault: {UNLIKE}", f"EnvironmentFault: {UNLIKE}"),
        ("quick, less", f"EnvironmentFault: {UNLIKE}", f"EnvironmentFault: {UNLIKE}"),
        ("killed", "EnvironmentFault: another process of this run was lost", None),
    ],
)
def test_a_rank_that_fails_leaves_nobody_waiting(
    two: list[dict[str, Any]], name: str, first: str, second: str | None
) -> None:
    """That `launch` has returned is the better half of it."""
    for rank, words in zip(two, (first, second), strict=True):
        if words is None:
            assert name not in rank
        else:
            assert re.match(words, f"{rank[name]['error']}: {rank[name]['text']}")


def test_one_process_needs_no_torch(folders: dict[str, Path], beam_nano: Path) -> None:
    code = (
        "import sys; from beamq import verify\n"
        "assert verify(sys.argv[1], source=sys.argv[2], sample=0).ok\n"
        "assert verify(sys.argv[1], level='quick').ok\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, folders["nvfp4"], beam_nano], check=True)
