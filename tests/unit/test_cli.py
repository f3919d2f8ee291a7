"""The command line as others rely on it: names, options, exit codes, what goes to which stream."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

import beamq
from beamq.beam.tensors import Role
from beamq.cli import app
from beamq.commands import doctor, outcome
from beamq.commands.plan import describe_units, plan_blocks
from beamq.errors import DiskError, Interrupted, UsageError
from beamq.plan.plan import make_plan
from beamq.plan.recipe import BUILT_IN, load_recipe
from beamq.report.console import Screen
from tests.helpers import safetensors_edit

PLAN = {
    "--recipe -r", "--exclude", "--kv-cache", "--max-shard-size", "--max-host-memory",
    "--cache-budget", "--engine",
}  # fmt: skip
RUN = {"--max-shard-size", "--cache-budget", "--workers", "--resume", "--overwrite"}
TALK = {"--json", "--verbose -v", "--quiet -q", "--debug"}
CALIBRATION = {
    "--data", "--samples", "--sequence-length", "--seed", "--experts", "--dtype", "--device",
    "--max-device-memory",
}  # fmt: skip
PACKED = {"--expert-lora-layout", "--expert-lora-order"}
ADAPTER = PACKED | {"--adapter"}
MACHINE = {"--drafter", "--gpu", "--context", "--output", "--workers"}
VERIFY = {"--target", "--source", "--level", "--engine", "--quick", "--workers"}
SURFACE = {
    "plan": ("source", PLAN | TALK | ADAPTER | MACHINE),
    "calibrate": (
        "places",
        CALIBRATION | TALK | ADAPTER | {"--merge", "--output -o", "--resume", "--overwrite"},
    ),
    "quantize": (
        "source output",
        PLAN
        | RUN
        | TALK
        | CALIBRATION
        | ADAPTER
        | {"--calibration", "--no-calibration", "--statistics", "--base-model", "--dry-run"}
        | {"--activation-headroom", "--only-changed"},
    ),
    "verify": ("checkpoint", TALK | ADAPTER | VERIFY),
    "compare": (
        "source checkpoints",
        TALK
        | {"--data", "--samples", "--sequence-length", "--seed", "--dtype", "--device"}
        | {"--report", "--write-card", "--gemm"}
        | ADAPTER,
    ),
    "sensitivity": (
        "source checkpoint",
        TALK
        | {"--data", "--samples", "--sequence-length", "--seed", "--dtype", "--device", "--gemm"}
        | {"--exclude-worst", "--max-kl", "--target-bits", "--write-recipe", "--report"}
        | ADAPTER,
    ),
    "inspect": ("checkpoint", TALK - {"--verbose -v"} | PACKED | {"--source"}),
    "dequantize": ("checkpoint output", RUN | TALK - {"--verbose -v"}),
    "merge": ("source adapter output", RUN | PACKED | TALK - {"--verbose -v"}),
    "repair": (
        "checkpoint output",
        (RUN - {"--cache-budget"}) | TALK | {"--source", "--accept-bounded"},
    ),
    "push": (
        "checkpoint repo",
        TALK - {"--verbose -v"} | {"--private", "--revision", "--dry-run"},
    ),
    "doctor": ("", {"--json", "--debug"}),
}


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process."""

    def beamq_command(*arguments: str | Path) -> Ran:
        with pytest.raises(SystemExit) as left:
            app([str(argument) for argument in arguments], prog_name="beamq")
        captured = capsys.readouterr()
        return Ran(int(left.value.code or 0), captured.out, captured.err)

    return beamq_command


@pytest.fixture
def quantized(beam_nano: Path, tmp_path: Path, run: Run) -> Path:
    output = tmp_path / "nvfp4 out"
    assert run("quantize", beam_nano, output, "--no-calibration", "--quiet").code == 0
    return output


def test_the_surface_is_frozen() -> None:
    group: Any = typer.main.get_command(app)
    found = {}
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        options = [p for p in command.params if p.param_type_name == "option"]
        arguments = [p.name for p in command.params if p.param_type_name == "argument"]
        found[name] = (
            " ".join(arguments),
            {" ".join(sorted(option.opts, key=len, reverse=True)) for option in options},
        )
    for name, expected in SURFACE.items():
        assert found[name] == expected, name
    assert list(found)[: len(SURFACE)] == list(SURFACE)


@pytest.mark.parametrize("command", ["", *SURFACE])
def test_help_is_frozen(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Order, names, metavars, defaults and texts of all options, as in tests/golden/help."""
    monkeypatch.setenv("COLUMNS", "100")
    shown = run(*[command] * bool(command), "--help")
    expected = Path(__file__).parents[1] / "golden" / "help" / f"{command or 'beamq'}.txt"
    assert shown.out == expected.read_text()


def test_a_command_brings_no_other_commands_module() -> None:
    code = (
        "import sys; from beamq.cli import app\n"
        "try: app(['doctor', '--help'], prog_name='beamq')\n"
        "except SystemExit: pass\n"
        "print(sorted(m for m in sys.modules if m.startswith('beamq.commands.')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = ["beamq.commands.doctor", "beamq.commands.options", "beamq.commands.outcome"]
    assert shown.stdout.splitlines()[-1] == str(expected)


def test_help_names_every_command_and_exit_code(run: Run) -> None:
    shown = run("--help")
    assert shown.code == 0
    assert all(name in shown.out for name in SURFACE)
    assert "130" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    assert run("--version").out == f"beamq {beamq.__version__}\n"


@pytest.mark.parametrize("command", ["quantize", "plan"])
def test_help_lists_every_built_in_recipe(command: str) -> None:
    group: Any = typer.main.get_command(app)
    recipe = next(p for p in group.get_command(None, command).params if p.name == "recipe")
    listed = recipe.help.split(", ")
    assert listed == [*BUILT_IN, "or a .yaml file."]


def test_help_says_which_recipe_takes_no_statistics() -> None:
    group: Any = typer.main.get_command(app)
    option = next(p for p in group.get_command(None, "quantize").params if p.name == "calibration")
    methods = [name for name in BUILT_IN if load_recipe(name).expert_method is not None]
    assert option.help.endswith(f"; {' and '.join(methods)} takes none.")


COMPLETE = """
beamq() { "$PYTHON" -m beamq "$@"; }
eval "$(_BEAMQ_COMPLETE=source_bash beamq)"
env() { while [[ $1 == *=* ]]; do local -x "$1"; shift; done; "$@"; }  # so that it finds `beamq`
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_beamq_completion beamq
echo "${COMPREPLY[@]}"
complete -p beamq
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("qu", "quantize"),
        ("", " ".join(SURFACE)),
        ("quantize a b --re", "--recipe --resume"),
        ("quantize a b --recipe fp", " ".join(each for each in BUILT_IN if each[:2] == "fp")),
        ("plan -r mine.y", ""),  # bash then offers files: `-o default`
        ("verify a --level t", "tensors"),
    ],
)
def test_bash_completes(repo: Path, typed: str, offered: str) -> None:
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", "beamq", *typed.split(" ")],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=repo, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == offered
    assert done.stdout.splitlines()[1] == "complete -o default -F _beamq_completion beamq"


@pytest.mark.parametrize(("shell", "says"), [("zsh", "#compdef beamq"), ("fish", "complete --")])
def test_other_shells_get_a_script(
    run: Run, monkeypatch: pytest.MonkeyPatch, shell: str, says: str
) -> None:
    monkeypatch.setenv("_BEAMQ_COMPLETE", f"source_{shell}")
    ran = run()
    assert (ran.code, says in ran.out, ran.err) == (0, True, "")


def test_importing_the_command_is_light(repo: Path) -> None:
    code = (
        "import sys, beamq, beamq.cli, beamq.plan.serving, beamq.plan.plan\n"
        "assert beamq.cli.Commands(name='beamq').get_command(None, 'every one of them') is None\n"
        "assert 'beamq.commands.push' in sys.modules\n"
        "print([m for m in ('torch', 'numpy', 'rich', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=repo
    )
    assert done.stdout == "[]\n"


def test_every_public_name_resolves() -> None:
    assert sorted(beamq.__all__) == beamq.__all__
    for name in beamq.__all__:
        assert getattr(beamq, name) is not None
    assert set(beamq.__all__) <= set(dir(beamq))
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = beamq.nothing_here  # type: ignore[attr-defined]


def test_no_submodule_hides_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(beamq.__path__)}
    assert not modules & set(beamq.__all__)
    importlib.import_module("beamq.convert.dequantize")
    assert callable(beamq.dequantize)


# Exit codes


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["plan", "NANO", "--recipe", "int3"], 3, "no recipe named 'int3'"),
        (["plan", "NANO", "--exclude", "nope"], 3, "--exclude 'nope' matches no module"),
        (["plan", "NOWHERE"], 3, "no such folder"),
        (["plan", "NANO", "--gpu", "a100:8"], 2, "unknown GPU"),
        (["plan", "NANO", "--max-shard-size", "5 apples"], 2, "--max-shard-size '5 apples'"),
        (["plan", "NANO", "--context", "0"], 2, "--context is 0, expected at least 1"),
        (["plan", "NANO", "--context", "many"], 2, "--context 'many': not a number of tokens"),
        (["plan", "NANO", "--colour"], 2, "--colour"),
        (["plan"], 2, "SOURCE"),
        (["plans"], 2, "plans"),
        (["quantize", "NANO", "OUT", "--no-calibration", "--data", "x"], 2, "--no-calibration and"),
        (["quantize", "NANO", "OUT", "--data", "nowhere.txt"], 3, "nowhere.txt"),
        (["calibrate", "NANO"], 2, "expected SOURCE STATS, found 1"),
        (["calibrate", "NANO", "OUT", "-o", "OUT"], 2, "--output goes with --merge"),
        (["calibrate", "--merge", "NOWHERE", "NOWHERE"], 2, "--merge needs --output"),
        (["calibrate", "--merge", "NOWHERE", "NOWHERE", "-o", "OUT"], 3, "no such statistics"),
        (["calibrate", "NANO", "OUT", "--device", "abacus"], 2, "abacus"),
        (["quantize", "NANO", "OUT", "--device", "tpu", "--dry-run"], 2, "cuda:N"),
        (["quantize", "NANO", "OUT", "--device", "cuda:x", "-r", "fp8"], 2, "cuda:N"),
        (["compare", "NANO", "NANO", "--device", "mps"], 2, "'mps'"),
        (["plan", "NANO", "--kv-cache", "fp4"], 2, "--kv-cache"),
        (["quantize", "NANO", "OUT", "--recipe", "int3", "--dry-run"], 3, "no recipe named"),
        (["quantize", "NANO", "OUT", "--exclude", "nope", "--dry-run"], 3, "matches no module"),
        (["quantize", "NANO", "OUT", "--recipe", "OUT.yaml"], 3, "OUT.yaml"),
        (["quantize", "NANO", "NANO", "--recipe", "fp8"], 2, "choose a separate folder"),
        (["quantize", "NANO", "OUT", "-r", "fp8", "--max-host-memory", "1kB", "--resume",
          "--overwrite"], 2, "contradict"),
        (["quantize", "NANO", "OUT", "--no-calibration", "--max-host-memory", "1kB"], 4,
         "--max-host-memory"),
        (["verify", "NOWHERE"], 3, "no such folder"),
        (["verify", "org/name@main"], 3, "hf download org/name --local-dir"),
        (["inspect", "NOWHERE"], 3, "no such folder"),
        (["dequantize", "NANO", "OUT"], 3, "nothing is quantized"),
    ],
)  # fmt: skip
def test_exit_codes_of_errors(
    run: Run, beam_nano: Path, tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    places = {"NANO": beam_nano, "OUT": tmp_path / "out", "NOWHERE": tmp_path / "nowhere"}
    ran = run(*(places.get(argument, argument) for argument in arguments))
    assert ran.code == code, ran.err
    assert says in ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert not (tmp_path / "out" / "beamq.json").exists()


def test_errors_as_json(run: Run, tmp_path: Path) -> None:
    ran = run("plan", tmp_path / "nowhere", "--json")
    assert ran.code == 3
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert ran.json() == {
        "error": ran.err.removeprefix("error: ").rstrip(),
        "kind": "CheckpointError",
        "exit_code": 3,
    }


def test_an_option_without_its_value_points_to_the_commands_help(run: Run) -> None:
    ran = run("quantize", "a", "b", "--recipe")
    assert (ran.code, "requires an argument; see `beamq quantize --help`" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "--colour"], "No such option: --colour"),
        (["plan"], "Missing argument 'SOURCE'"),
        (["plans"], "No such command 'plans'"),
        (["plan", "x", "--workers", "many"], "--workers"),
        (["verify", "x", "--level", "deep"], "'deep'"),
    ],
)
def test_options_that_cannot_be_read_are_errors_like_others(
    run: Run, arguments: list[str], says: str
) -> None:
    ran = run(*arguments, "--json")
    assert ran.code == 2
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert says in ran.err
    assert "--help`" in ran.err
    assert ran.json() == {
        "error": ran.err.removeprefix("error: ").rstrip(),
        "kind": "UsageError",
        "exit_code": 2,
    }
    assert run(*arguments).out == ""


def test_nothing_at_all_is_answered_with_help(run: Run) -> None:
    ran = run()
    assert ran.code == 2
    assert "Commands" in ran.err


@pytest.mark.parametrize(
    "options", [["--dry-run"], ["--no-calibration"], [], ["-r", "nvfp4-gptq"], ["-r", "fp8"]]
)
def test_a_gpu_that_is_not_here_is_refused_before_anything_is_said(
    run: Run,
    beam_nano: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = run("quantize", beam_nano, tmp_path / "out", "--device", "cuda", *options)
    assert ran.code == 4
    assert ran.err.startswith("error: device cuda: no usable NVIDIA GPU")
    assert ran.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_dry_run_tells_of_too_little_disk(
    run: Run, beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from beamq.convert import output as output_folder

    usage = type("Usage", (), {"free": 1_234_567})
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda _: usage)
    ran = run("quantize", beam_nano, tmp_path / "out", "--no-calibration", "--dry-run")
    assert ran.code == 4
    assert "(1.23 MB free here: too little)" in " ".join(ran.err.split())
    assert ran.err.splitlines()[-1].startswith("error: ")
    assert ran.out == ""
    assert not list(tmp_path.iterdir())


def test_an_output_in_use_is_refused_before_anything_is_said(
    run: Run, beam_nano: Path, quantized: Path, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter.txt").write_text("dear")
    for command in (
        ["quantize", beam_nano, quantized],
        ["quantize", beam_nano, quantized, "--dry-run"],
        ["dequantize", quantized, full],
        ["dequantize", beam_nano, tmp_path / "bf16"],
    ):
        ran = run(*command)
        assert ran.code in (2, 3)
        assert ran.err.startswith("error: "), "no plan, no data, no announcement"
        assert ran.err.count("\n") == 1
    stats = tmp_path / "stats"
    stats.write_text("mine")
    ran = run("calibrate", beam_nano, stats)
    assert (ran.code, stats.read_text()) == (3, "mine")
    assert ran.err.startswith("error: ")


def test_debug_shows_a_traceback_and_the_line(run: Run, tmp_path: Path) -> None:
    ran = run("inspect", tmp_path / "nowhere", "--debug")
    assert "Traceback (most recent call last)" in ran.err
    assert ran.err.splitlines()[-1].startswith("error: ")


def test_an_output_that_exists_is_refused_then_replaced(
    run: Run, beam_nano: Path, quantized: Path
) -> None:
    arguments = ["quantize", beam_nano, quantized, "--no-calibration", "--quiet"]
    refused = run(*arguments)
    assert refused.code == 3
    assert "--overwrite" in refused.err
    assert run(*arguments, "--resume").code == 0
    assert run(*arguments, "--overwrite").code == 0


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 4, "--workers"),
        (ModuleNotFoundError("x", name="modelopt.torch"), 4, "modelopt is not installed"),
        (ModuleNotFoundError("x", name="beamq.nowhere"), 1, "internal error"),
        (UsageError("give one"), 2, "give one"),
        (ZeroDivisionError("by zero"), 1, "internal error: ZeroDivisionError: by zero; run with"),
    ],
)
def test_whatever_is_raised_is_told(
    capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, says: str
) -> None:
    def body(screen: Screen) -> None:
        raise raised

    assert outcome.run(body, as_json=True) == code
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert json.loads(captured.out)["exit_code"] == code
    assert outcome.run(body, debug=True) == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (UsageError("give one"), ""),
        (DiskError("disk full"), "rank 1: error: disk full\n"),
        (ZeroDivisionError(), "rank 1: error: internal error"),
        (KeyboardInterrupt(), ""),
        (Interrupted("interrupted; 1 layer of 2"), ""),
    ],
)
def test_other_ranks_tell_what_is_theirs_and_no_json(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    says: str,
) -> None:
    def body(screen: Screen) -> None:
        raise raised

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        code = outcome.run(body, as_json=True)
        told[rank] = capsys.readouterr()
        assert json.loads(told["0"].out)["exit_code"] == code
    assert told["0"].err.startswith("error: ")
    assert told["1"].out == ""
    assert told["1"].err.startswith(says)
    assert bool(told["1"].err) is bool(says)


# What the commands say


def test_plan_as_text(run: Run, beam_nano: Path) -> None:
    ran = run("plan", beam_nano)
    assert ran.code == 0
    assert ran.err == ""
    assert ran.out.isascii()
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "54.3% of the weights are quantized" in ran.out
    for label in ("expert", "router-bias", "NVFP4", "H100 80 GB", "KV cache", "Converting needs"):
        assert label in ran.out
    said = " ".join(ran.out.split())
    assert "multiple of 64 on each GPU: 300% more than an even share on 4 GPUs." in said
    assert "pad the width" not in run("plan", beam_nano, "--recipe", "fp8").out
    assert re.search(r"8,192 tokens: [\d.]+ MB \([\d.]+ MiB\) in BF16, [\d.]+ MB \(", said)
    assert not re.search(r"\b0\.00 GB", said)  # 70.00 GB may be free
    again = run("plan", beam_nano).out
    assert _without_free_space(again) == _without_free_space(ran.out)


def _without_free_space(text: str) -> str:
    """What else runs on this machine changes it from one moment to the next."""
    return re.sub(r"\([\d.]+ \w+ free here", "(", " ".join(text.split()))


def test_plan_as_json(run: Run, beam_nano: Path) -> None:
    data = run("plan", beam_nano, "--json", "--kv-cache", "fp8", "--context", "1000").json()
    plan = make_plan(beam_nano, kv_cache="fp8")
    assert data["command"] == "plan"
    assert data["digest"] == plan.digest()
    assert data["bytes"] == {
        "source": plan.source_nbytes,
        "tensors": plan.tensor_nbytes,
        "files": plan.output_nbytes,
    }
    assert sum(role["parameters"] for role in data["roles"]) == plan.total_parameters
    assert sum(role["output_bytes"] for role in data["roles"]) == plan.tensor_nbytes
    assert sum(role["source_bytes"] for role in data["roles"]) == plan.source_nbytes
    assert data["tensors"] == {"source": 358, "output": 1078}
    cache = data["serving"]["kv_cache"]
    assert cache["dtype"] == "fp8"
    assert cache["bytes"] == cache["bytes_fp8"] == cache["bytes_bf16"] // 2
    assert set(data["needs"]) == {
        "disk_bytes", "disk_free_bytes", "host_memory_bytes", "workers", "hub"
    }  # fmt: skip
    assert data["needs"]["hub"] is None
    assert plan.output_nbytes < data["needs"]["disk_bytes"] < 1.5 * plan.output_nbytes


def test_plan_for_one_machine(run: Run, beam_nano: Path) -> None:
    text = run("plan", beam_nano, "--gpu", "h200:4", "--context", "9000").out
    assert "Each H200 141 GB" in text
    assert "is more than the model's 8,192" in text
    (gpu,) = run("plan", beam_nano, "--gpu", "h200:4", "--json").json()["serving"]["gpus"]
    assert [fit["layout"] for fit in gpu["fits"]] == ["tensor", "expert"]
    assert "cannot be divided over 3 GPUs" in run("plan", beam_nano, "--gpu", "h100:3").out


def test_exclusions_are_told_before_work(run: Run, beam_nano: Path, tmp_path: Path) -> None:
    arguments = ["quantize", beam_nano, tmp_path / "out", "--no-calibration", "--dry-run"]
    ran = run(*arguments, "--exclude", "gate", "--exclude", "model.layers.3.mlp.experts.1.*")
    assert ran.code == 0
    assert not (tmp_path / "out").exists()
    assert ran.out == "Dry run: nothing was written.\n"
    said = ran.err
    assert "no change" in said
    assert "gate matches model.layers.3.mlp.gate, model.layers.4.mlp.gate, ..." in said
    assert "expert of layer 3" in said
    assert "widened from 3" in said
    assert "BF16" in said
    assert max(map(len, ran.err.splitlines())) <= 80
    excluded = run(*arguments, "--exclude", "gate", "--json").json()["exclusions"]
    assert excluded[0]["pattern"] == "gate"
    assert len(excluded[0]["matched"]) == 5
    assert excluded[0]["left_precise"] == []


def test_a_conversion_tells_what_it_does(run: Run, beam_nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "it's out"
    ran = run("quantize", beam_nano, output, "--no-calibration")
    assert ran.code == 0
    assert "not calibrated: every input_scale is the constant 1.0" in ran.err
    assert "Recipe nvfp4" in ran.err
    assert "54.3% of the weights" in ran.out
    assert ran.out.splitlines()[-1].startswith("next: beamq verify '")
    assert "Calibration is missing" in ran.out
    assert "The card names no base model" in ran.out
    assert ran.out.splitlines()[-1].endswith(f"--source {beam_nano}")
    assert "\x1b" not in ran.out + ran.err
    again = run("quantize", beam_nano, output, "--no-calibration", "--resume", "--json", "-q")
    assert again.err == ""
    assert again.json()["resumed_shards"] == 1
    assert again.json()["input_scales"]["description"].startswith("not calibrated")


def test_calibrating_tells_the_data_and_the_coverage(
    run: Run, beam_nano: Path, tmp_path: Path
) -> None:
    size = ["--samples", "6", "--sequence-length", "96"]
    ran = run("calibrate", beam_nano, tmp_path / "a.stats", *size, "--verbose")
    assert ran.code == 0, ran.err
    assert "Calibrating on 6 x 96 = 576 tokens of Python" in ran.err
    assert "layer 8 of 8 done" in ran.err
    assert "experts reached" in ran.out
    assert max(map(len, [*ran.out.splitlines(), *ran.err.splitlines()])) <= 80
    other = run("calibrate", beam_nano, tmp_path / "b.stats", *size, "--seed", "1", "--json", "-q")
    assert other.err == ""
    assert other.json()["tokens"] == 576
    assert len(other.json()["coverage"]["layers"]) == 5
    both = ["calibrate", "--merge", tmp_path / "a.stats", tmp_path / "b.stats"]
    merged = run(*both, "-o", tmp_path / "c.stats", "--json")
    assert merged.json()["tokens"] == 1152
    assert len(merged.json()["data"]) == 2
    one, two = tmp_path / "one", tmp_path / "two"
    assert run("quantize", beam_nano, two, "--calibration", tmp_path / "a.stats", "-q").code == 0
    ran = run("quantize", beam_nano, one, *size)
    assert ran.code == 0, ran.err
    assert "Calibrating on 6 x 96" in ran.err
    assert "experts with few tokens" in ran.err
    assert "calibrated on 576 tokens" in ran.out
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


def test_verify_tells_and_fails(run: Run, beam_nano: Path, quantized: Path) -> None:
    arguments = ["verify", quantized, "--level", "structure", "--source", beam_nano]
    good = run(*arguments)
    assert good.code == 0, good.out
    assert good.out.splitlines()[-1].startswith("ok: ")
    assert "skip " not in good.out
    assert "skip " in run(*arguments, "--verbose").out
    (quantized / "tokenizer.json").write_text("{}")
    bad = run(*arguments)
    assert bad.code == 1
    assert "FAILED: 1 of " in bad.out
    report = run(*arguments, "--json")
    assert report.code == 1
    assert report.json()["ok"] is False
    assert max(map(len, bad.out.splitlines())) <= 80


def test_inspect_tells(run: Run, beam_nano: Path, quantized: Path) -> None:
    text = run("inspect", quantized).out
    assert "NVFP4" in text
    assert "54.3% of 3.62 M parameters" in text
    assert re.search(r"expert .* NVFP4 \(U8\)\n", text)
    assert run("inspect", quantized, "--json").json()["format"] == "nvfp4"
    assert run("inspect", beam_nano).code == 0


def test_dequantize_tells(run: Run, quantized: Path, tmp_path: Path) -> None:
    ran = run("dequantize", quantized, tmp_path / "bf16")
    assert ran.code == 0
    assert "240 linears to BF16" in ran.out
    refused = run("dequantize", quantized, tmp_path / "bf16", "--json")
    assert refused.code == 3
    assert refused.json()["kind"] == "ResumeError"


def test_verify_names_the_repair_and_repair_makes_it(
    run: Run, quantized: Path, tmp_path: Path
) -> None:
    for name in ("beamq.json", "README.md", "model.safetensors.index.json"):
        (quantized / name).unlink()
    shard = next(quantized.glob("*.safetensors"))
    shard.rename(quantized / "model.safetensors")
    linear = "model.layers.4.mlp.experts.7.up_proj"
    half = {"weight_scale_2": ("F32", [], b"\0\0\0:"), "weight": ("U8", [64, 64], b"1" * 4096)}
    safetensors_edit.edit(
        quantized / "model.safetensors",
        lambda t: t.update({f"{linear}.{suffix}": value for suffix, value in half.items()}),
    )
    hint = run("verify", quantized).out.splitlines()[-1]
    mended = f"{quantized}-repaired"
    assert hint == f"next: beamq repair '{quantized}' '{mended}' --accept-bounded"
    refused = run("repair", quantized, mended)
    assert (refused.code, refused.out) == (3, "")
    assert "give --accept-bounded" in refused.err
    assert "global-scale-differs" in refused.err.splitlines()[2]
    told = run("repair", quantized, mended, "--accept-bounded", "-v")
    assert told.code == 0
    assert "\nok: " in told.out
    assert "model.layers.4.mlp.experts.7.gate_up" in told.err
    nothing = run("repair", mended, tmp_path / "third")
    assert (nothing.code, nothing.out.split(":")[0]) == (0, "nothing to do")
    assert not (tmp_path / "third").exists()
    (quantized / "config.json").write_text("{}")
    assert run("verify", quantized).out.splitlines()[-1].startswith("FAILED")


def test_repair_speaks_json(run: Run, quantized: Path, tmp_path: Path) -> None:
    (quantized / "hf_quant_config.json").unlink()
    told = run("repair", quantized, tmp_path / "mended", "--json", "-q").json()
    assert told["verify"]["ok"] is True
    assert [change["repair"] for change in told["changes"]] == ["configs"]
    again = run("repair", tmp_path / "mended", tmp_path / "third", "--json", "-q").json()
    assert (again["output"], again["changes"], again["verify"]) == (None, [], None)


def test_dequantize_notes_bytes_that_nothing_tells_the_soundness_of(
    run: Run, quantized: Path, tmp_path: Path
) -> None:
    note = "has no beamq.json with checksums"
    assert note not in " ".join(run("dequantize", quantized, tmp_path / "checked").err.split())
    (quantized / "beamq.json").unlink()
    ran = run("dequantize", quantized, tmp_path / "unchecked")
    assert ran.code == 0
    assert " ".join(ran.err.split()).count(note) == 1
    assert note not in ran.out


def test_doctor_on_this_machine(run: Run) -> None:
    data = run("doctor", "--json").json()
    assert data["command"] == "doctor"
    assert data["kernels"]["cpu"] in ("c", "torch")
    assert data["packages"]["torch"]
    assert data["cpu"]["workers"] >= 1
    text = run("doctor")
    assert text.code == 0
    assert "CPU kernels" in text.out
    assert "not been run on Blackwell" in data["gemm"]["note"]
    assert "sm_120" in data["gemm"]["note"]
    assert "quack" in text.out
    told = [b for device in data["gemm"]["devices"] for op in device["ops"] for b in op["backends"]]
    assert {b["backend"] for b in told if b["reason"] or b["usable"]} >= {"quack", "reference"}


def test_doctor_where_much_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    monkeypatch.setattr(doctor, "_cpu_kernels", lambda: (None, "ImportError: no compiler", None))
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: None)
    data = doctor.doctor_data()
    assert data["gpus"] == []
    assert data["gpu_note"] == "unknown: torch is not installed"
    hints = " ".join(data["hints"])
    assert "no CPU kernels" in hints
    assert "not installed: torch, numpy" in hints
    assert "quack-kernels" not in hints
    found = {"capability": "12.0", "fp8": True}
    assert "quack-kernels" in " ".join(doctor._hints(data | {"gpus": [found]}))
    assert "quack-kernels" not in str(
        doctor._hints(data | {"gpus": [found | {"capability": "9.0"}]})
    )
    assert any("no compiler" in str(block) for block in doctor.doctor_blocks(data))
    monkeypatch.setattr(doctor, "_cpu_kernels", lambda: ("torch", None, "the kernels are slow"))
    assert doctor.doctor_data()["hints"][0] == "the kernels are slow"


def test_units_are_described_by_ranges() -> None:
    units = [(0, Role.ATTENTION), (7, Role.EXPERT), (3, Role.EXPERT), (4, Role.EXPERT)]
    assert describe_units(units) == "attention of layer 0; expert of layers 3-4, 7"


def test_verbose_lists_every_matched_module(beam_nano: Path) -> None:
    plan = make_plan(beam_nano, exclude=["model.layers.3.mlp.experts*"])
    short, long = (str(plan_blocks(plan, verbose=verbose)) for verbose in (False, True))
    module = "model.layers.3.mlp.experts.9.up_proj"
    assert module not in short
    assert module in long
