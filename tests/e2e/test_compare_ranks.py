"""`compare`, and what `verify --level forward` runs, by several processes: to the bit those of one.

Each process runs the command itself, as torchrun would start it, and leaves a record of what it
read and wrote. The first rank's experts are read by no other, nor the other way round.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from beamq.convert.quantize import quantize
from beamq.io.checkpoint import open_checkpoint
from beamq.ranks import LOST
from tests.helpers import safetensors_edit
from tests.helpers.checkpoint_damage import find, flip
from tests.helpers.free_ports import free_port

EXPERT = "model.layers.{}.mlp.experts.{}.{}.weight"
DAMAGED = (EXPERT.format(4, 0, "up_proj"), EXPERT.format(6, 15, "gate_proj"), "model.norm.weight")
SIZE = ("--samples", "2", "--sequence-length", "64", "--device", "cpu")

# argv: the record to write, the folder to look at as `verify --level forward` does, the command.
RUN = """
import json, sys
from pathlib import Path
import torch.distributed as dist
import beamq.report.files as report
from beamq.io.checkpoint import Checkpoint, open_checkpoint
from beamq.cli import app
from beamq.eval.verify import forward as forward_check
from beamq.eval.compare import side_by_side as streams
from beamq.eval.verify.checks import Ledger

read, calls, forward = [], [], []
def noted(owner, name, note):
    inner = getattr(owner, name)
    def call(*args, **kwargs):
        note(*args)
        return inner(*args, **kwargs)
    setattr(owner, name, call)
noted(Checkpoint, "read_into", lambda self, spec, *_: read.append((self.label, spec.name)))
noted(report, "write_report", lambda *_: calls.append("report"))
noted(dist, "init_process_group", lambda *_: calls.append("join"))
streams.BATCH_TOKENS = 64  # a row each: more batches than one are on their way
forward_check.SAMPLES, forward_check.SEQUENCE_LENGTH = 2, 64

target, folders, command = sys.argv[1], sys.argv[2].split(), sys.argv[3:]
for folder in folders:
    ledger = Ledger()
    with open_checkpoint(folder) as opened, open_checkpoint(command[1]) as source:
        forward_check.check_forward(opened, source, None, ledger)
    results = ledger.results("forward", with_source=True)
    forward.append([(r.name, r.status, r.detail) for r in results if "forward." in r.name])
read.clear()
try:
    app(command, prog_name="beamq")
except SystemExit as left:
    record = {"code": left.code, "read": read, "calls": calls, "forward": forward}
    Path(target).write_text(json.dumps(record))
    raise
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One process: its record, what it printed, and its code."""

    record: dict[str, Any]
    out: str
    err: str
    code: int


def start(world: int, program: str, arguments: list[list[str]]) -> list[subprocess.Popen[str]]:
    """`program` in `world` processes, each with its own arguments; in one, as without torchrun."""
    port = free_port()
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments[rank]],
            env={
                **os.environ,
                **(meeting | {"RANK": str(rank)} if world > 1 else {}),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen[str]], seconds: int) -> list[tuple[str, str]]:
    """What each printed. None outlives the test, even if it waits for ever."""
    try:
        return [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def made(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders made from nano: `nvfp4`, `fp8`, `damaged`, one that cannot be read, and `tuned`,
    unquantized with one expert of its own."""
    root = tmp_path_factory.mktemp("made")
    quantize(beam_nano, root / "nvfp4", recipe="nvfp4", no_calibration=True)
    quantize(beam_nano, root / "fp8", recipe="fp8")
    for copy in ("damaged", "unreadable"):
        shutil.copytree(root / "nvfp4", root / copy)
    for name in DAMAGED:
        flip(root / "damaged", name)
    shutil.copytree(beam_nano, root / "tuned")
    flip(root / "tuned", EXPERT.format(4, 9, "down_proj"), at=101, mask=64)
    name = EXPERT.format(6, 14, "down_proj")

    def reshape(tensors: safetensors_edit.Tensors) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape[::-1], data)

    safetensors_edit.edit(root / "unreadable" / find(root / "unreadable", name).file, reshape)
    return root


@pytest.fixture(scope="module")
def ran(
    beam_nano: Path, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[Ran]]:
    """The same command by one, two and three processes; what each of them did."""
    found = {}
    candidates = [str(made / name) for name in ("nvfp4", "fp8", "damaged", "tuned")]
    forward = f"{made / 'nvfp4'} {made / 'unreadable'}"
    for world in (1, 2, 3):
        root = tmp_path_factory.mktemp(f"by{world}")
        command = ["compare", str(beam_nano), *candidates, *SIZE, "--json"]
        command += ["--report", str(root / "report")]
        records = [root / f"{rank}.json" for rank in range(world)]
        processes = start(world, RUN, [[str(path), forward, *command] for path in records])
        said = finish(processes, 120)
        found[world] = [
            Ran(record=json.loads(path.read_text()), out=out, err=err, code=process.returncode)
            for path, process, (out, err) in zip(records, processes, said, strict=True)
        ]
    return found


def result(ran: Ran) -> dict[str, Any]:
    """The comparison without what differs from run to run."""
    data: dict[str, Any] = json.loads(ran.out)
    assert data.pop("seconds") > 0
    assert data.pop("report")
    return data


@pytest.mark.parametrize("world", [2, 3])
def test_the_result_is_that_of_one_process(ran: dict[int, list[Ran]], world: int) -> None:
    (alone,) = ran[1]
    found, expected = result(ran[world][0]), result(alone)
    assert found == expected
    nvfp4, fp8, damaged, tuned = found["candidates"]
    assert damaged["damaged"] == sorted(DAMAGED)
    assert not nvfp4["damaged"] + fp8["damaged"] + tuned["damaged"]
    assert nvfp4["activations_only_kld"]["value"] > 0
    assert len(nvfp4["linears"]) == 5 * 16 * 3
    assert [linear["module"] for linear in tuned["linears"]] == [
        EXPERT.format(4, 9, "down_proj").removesuffix(".weight")
    ]
    assert {process.code for process in [alone, *ran[world]]} == {1}, "one of them is damaged"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_only_the_first_rank_speaks_and_writes(ran: dict[int, list[Ran]], world: int) -> None:
    first, *others = ran[world]
    joined = ["join"] if world > 1 else []
    assert first.record["calls"] == [*joined, "report"]
    assert first.err.count("Running") == 1
    for other in others:
        assert other.record["calls"] == joined
        assert (other.out, other.err) == ("", "")


def test_each_rank_reads_its_own_experts_and_no_others(
    ran: dict[int, list[Ran]], beam_nano: Path, made: Path
) -> None:
    folders = [beam_nano, *(made / name for name in ("nvfp4", "fp8", "damaged", "tuned"))]
    for folder in folders:
        with open_checkpoint(folder) as opened:
            sizes = {n: s.nbytes for n, s in opened.tensors.items() if s.numel > 1}
            assert len(opened.files) == 1
            last = max(opened.tensors.values(), key=lambda spec: spec.offset).name
        experts = {name for name in sizes if ".experts." in name}
        total = sum(sizes[name] for name in experts)
        for world, share in ((1, [16]), (2, [8, 8]), (3, [5, 5, 6])):
            seen = [
                [name for label, name in process.record["read"] if label == folder.name]
                for process in ran[world]
            ]
            for names, count in zip(seen, share, strict=True):
                own = [name for name in names if name in experts]
                if last in experts:  # every rank looks whether the file's end is zeros
                    own.remove(last)
                assert len(own) == len(set(own)), "each once"
                assert sum(sizes[name] for name in own) * 16 == total * count
                assert sizes.keys() - experts <= set(names), "and all of the rest"
            assert {name for names in seen for name in names} >= experts


@pytest.mark.parametrize("world", [2, 3])
def test_the_forward_check_is_that_of_one_process(ran: dict[int, list[Ran]], world: int) -> None:
    """For a checkpoint that one rank alone cannot read as well: all file what that rank says."""
    (alone,) = ran[1]
    sound, unreadable = alone.record["forward"]
    # 128 tokens are too few for the bound on the likeliest token: it may be broken by the text.
    assert {s for name, s, _ in sound if name != "forward.top"} == {"pass"}
    assert [s for name, s, _ in sound if name == "forward.top"] in (["pass"], ["fail"])
    (fault,) = [detail for _, status, detail in unreadable if status == "fail"]
    assert "experts.14.down_proj" in fault
    for process in ran[world]:
        assert process.record["forward"] == [sound, unreadable]


def test_a_rank_that_fails_leaves_nobody_waiting(beam_nano: Path, made: Path) -> None:
    """The second rank fails in the midst of a layer, where the first waits for its sums."""
    program = (
        "import os, sys\nfrom beamq.cli import app\n"
        "from beamq.eval.compare import side_by_side as streams\n"
        "inner = streams.weight_errors\n"
        "def failing(base, *rest):\n"
        "    return inner(base, *rest) if base.index < 5 or os.environ['RANK'] == '0' else 1 / 0\n"
        "streams.weight_errors = failing\n"
        "app(sys.argv[1:], prog_name='beamq')\n"
    )
    command = ["compare", str(beam_nano), str(made / "nvfp4"), *SIZE]
    processes = start(2, program, [command, command])
    said = finish(processes, 120)
    assert [process.returncode for process in processes] == [4, 1]
    assert said[0][1].splitlines()[-1] == f"error: {LOST}"
    assert said[1][1].startswith("rank 1: error: internal error: ZeroDivisionError")
    assert said[0][0] == said[1][0] == ""
