"""What goes to a terminal, a pipe or a log, in which form, and what a broken stream ends in."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from typer.testing import CliRunner

from beamq.cli import app
from beamq.commands import outcome
from beamq.errors import DiskError, UsageError, counted
from beamq.report import console
from beamq.report.console import Command, Screen
from beamq.report.tables import Table
from beamq.units import parse_size, show_bytes, show_count, show_gib, show_seconds


def _command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "beamq", *map(str, arguments)]


def test_a_reader_that_leaves_is_no_error(beam_nano: Path, repo: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" | head -n 1; echo "${PIPESTATUS[0]}"', "-",
         *_command("plan", beam_nano, "--json")],
        capture_output=True, text=True, check=True, cwd=repo,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["{", "0"]
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_exit_4(beam_nano: Path, repo: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            _command("plan", beam_nano),
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=repo,
        )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr.startswith("error: <stdout>: writing failed")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_colour_unless_refused(
    beam_nano: Path, repo: Path, tmp_path: Path, no_color: bool
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {})
    text = _on_terminal(_command("plan", beam_nano), repo, environment)
    assert "KV cache" in text
    assert ("\x1b[" in text) is not no_color
    converting = _command("quantize", beam_nano, tmp_path / "out", "--no-calibration")
    assert "converting" in _on_terminal(converting, repo, environment)


def test_a_narrow_terminal_breaks_no_figure(beam_nano: Path, repo: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": "1"}
    environment.pop("COLUMNS", None)
    text = _on_terminal(_command("plan", beam_nano), repo, environment, columns=50)
    lines = text.replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 50
    for row in ("expert", "parameters +1.97 M", "becomes +NVFP4", "H100 80 GB", "x16 +"):
        assert any(re.search(row, line) for line in lines), row
    converting = _command("quantize", beam_nano, tmp_path / "out", "--no-calibration", "-q")
    assert "quantized" in _on_terminal(converting, repo, environment, columns=50)


def _on_terminal(
    command: list[str], folder: Path, environment: dict[str, str], columns: int = 0
) -> str:
    ours, theirs = pty.openpty()
    if columns:
        termios.tcsetwinsize(ours, (24, columns))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    )
    os.close(theirs)
    read = bytearray()
    try:
        while chunk := os.read(ours, 65536):
            read += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(timeout=120) == 0
    return read.decode()


def test_forced_colour_does_not_reach_a_pipe(
    beam_nano: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(SystemExit):
        app(["plan", str(beam_nano)], prog_name="beamq")
    shown = capsys.readouterr().out
    assert "KV cache" in shown
    assert "\x1b" not in shown


def test_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/a/" + "very-long-" * 12 + "path"
    table = Table(
        head=("name", "size"), align="lr", rows=[("[bold]x[/bold]", "1"), ("word " * 30, "22")]
    )
    screen = Screen()
    screen.say(f"prose with {path} and " + "words " * 20)
    screen.show(dict, lambda: [table, Table(head=("a",)), Command("next: " + "w " * 60)])
    captured = capsys.readouterr()
    assert path in captured.err.splitlines()
    lines = captured.out.splitlines()
    assert "[bold]x[/bold]" in lines[2]
    assert all(len(line) <= 80 for line in lines[:-1])
    assert len(lines[-1]) > 80
    Screen(quiet=True).say("nothing")
    Screen(as_json=True).show(lambda: {"a": float("nan"), "b": (1.5,)}, list)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out) == {"a": None, "b": [1.5]}
    with screen.progress("working") as advance:
        assert advance is not None
        advance(1, 2)
    assert capsys.readouterr().err == "", "nothing to say so soon"


def test_long_names_in_a_table_are_broken_behind_a_dot(capsys: pytest.CaptureFixture[str]) -> None:
    """51 characters are left beside the check: a name of 51 and its colon do not fit."""
    name = "model.layers.3.mlp.experts.1.down_proj.weight_scale"
    texts = (f"{name}: off", f"see {name[5:]}: off", f"x.{name}.{name}, at /a/b", "a" * 60)
    Screen().show(
        dict,
        lambda: [
            Table(
                head=("check", "", "found"),
                rows=[("values.second-opinion", "FAIL", text) for text in texts],
            )
        ],
    )
    shown = [line[29:] for line in capsys.readouterr().out.splitlines()[2:]]
    assert shown == [
        "model.layers.3.mlp.experts.1.down_proj.",
        "weight_scale: off",
        "see .layers.3.mlp.experts.1.down_proj.weight_scale:",
        "off",
        "x.model.layers.3.mlp.experts.1.down_proj.",
        "weight_scale.model.layers.3.mlp.experts.1.",
        "down_proj.weight_scale, at /a/b",
        "a" * 51,
        "a" * 9,
    ]


def test_a_log_shows_life(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no bar can be drawn: a line every half minute, none with --quiet or on other ranks."""
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with Screen(as_json=True).progress("converting") as advance:
        assert advance is not None
        for now in (0.0, 10.0, 29.0, 31.0, 40.0, 59.0, 65.0):
            advance(round(now * 1e9), 100_000_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "converting: 31% (31.00 GB of 100.00 GB) after 31.0 s, about 69.0 s left",
        "converting: 65% (65.00 GB of 100.00 GB) after 65.0 s, about 35.0 s left",
    ]
    now = 0.0
    with Screen().progress("converting") as advance:  # a resumed run: 60 GB are there already
        assert advance is not None
        for now in (0.0, 40.0):
            advance(round(now * 5e8) + 60_000_000_000, 100_000_000_000)
    assert capsys.readouterr().err.endswith("after 40.0 s, about 40.0 s left\n")
    with Screen(quiet=True).progress("converting") as advance:
        assert advance is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with Screen().progress("converting") as advance:
        assert advance is None


def test_only_the_first_rank_shows_and_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, printed in (("0", ('{\n  "a": 1\n}\nshown\n', "said\n")), ("1", ("", ""))):
        monkeypatch.setenv("RANK", rank)
        Screen(as_json=True).show(lambda: {"a": 1}, list)
        Screen().show(dict, lambda: ["shown"])
        Screen().say("said")
        assert capsys.readouterr() == printed


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_push_runs_in_one_process(
    beam_nano: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", **meeting}.items():
        monkeypatch.setenv(name, value)
    ran = CliRunner().invoke(app, ["push", str(beam_nano / "nowhere"), "org/name", *more])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: push runs in one process, and torchrun started 2")


def test_a_log_that_is_full_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        name = "<full>"

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def isatty(self) -> bool:
            return False

        def fileno(self) -> int:
            raise OSError("no file")

    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", Full())
    with Screen().progress("converting") as advance:
        assert advance is not None
        advance(1, 2)


def test_errors_are_broken_into_lines_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/a/" + "very-long-" * 12 + "path"
    error = UsageError(f"{path}: what is wrong " * 2 + "and what to do about it, in many words")
    outcome.report_error(error)
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    outcome.report_error(error)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines) == f"error: {error}"
    assert all(len(line) <= 80 for line in lines if path not in line)
    assert sum(path in line for line in lines) == 2, "paths stay whole"


def test_a_stream_that_fails_is_an_environment_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        name = "<full>"

        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def isatty(self) -> bool:
            return False

        def fileno(self) -> int:
            raise OSError("no file")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(DiskError, match="<full>: writing failed: No space left"):
        Screen().show(dict, lambda: ["text"])


# Sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5_000_000_000),
        ("500MB", 500_000_000),
        ("4GiB", 4 << 30),
        ("1.5 GB", 1_500_000_000),
        ("0.1GB", 100_000_000),
        ("64k", 64_000),
        ("2tib", 2 << 40),
        ("123", 123),
        ("7B", 7),
    ],
)
def test_sizes_read(text: str, nbytes: int) -> None:
    assert parse_size(text, "--size") == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "5 XB", "1e9", "0", "0.1B", "5iB", "nan", "٥GB"]
)
def test_sizes_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--size"):
        parse_size(text, "--size")


def test_sizes_shown() -> None:
    assert [show_bytes(n) for n in (999, 7_250_000, 1_002_663_700_352)] == [
        "999 B", "7.25 MB", "1,002.66 GB",
    ]  # fmt: skip
    assert [show_gib(n) for n in (4_921_999_360, 90_177_536)] == ["4.58 GiB", "86.00 MiB"]
    assert [show_count(n) for n in (12, 3_620_000, 501_267_612_352)] == [
        "12", "3.62 M", "501.27 B",
    ]  # fmt: skip
    assert [show_seconds(s) for s in (0.421, 37.12, 725, 8040)] == [
        "0.42 s", "37.1 s", "12 min 5 s", "2 h 14 min",
    ]  # fmt: skip
    assert [counted(n, "tensor") for n in (0, 1, 1152)] == [
        "0 tensors",
        "1 tensor",
        "1,152 tensors",
    ]
    assert [counted(n, "shard is", "shards are") for n in (1, 2)] == ["1 shard is", "2 shards are"]


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "; disk full; free space"), (errno.EIO, "; check the disk")]
)
def test_a_stream_that_fails_is_explained_by_what_happened(
    monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    class Failing(io.StringIO):
        name = "<stdout>"

        def flush(self) -> None:
            raise OSError(number, "It failed")

    monkeypatch.setattr(sys, "stdout", Failing())
    with pytest.raises(DiskError, match=f"^<stdout>: writing failed: It failed{said}"):
        console.write_json({})
