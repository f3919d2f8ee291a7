"""Ranks that wait for one that does not come: Ctrl-C, what they say, and when they give up."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.free_ports import free_port

# argv: seconds until it is told, and until it is given up; then the command.
RUN = """
import sys
from beamq import ranks as rendezvous
from beamq.cli import app
rendezvous.NOTICE_SECONDS, rendezvous.PATIENCE_SECONDS = map(float, sys.argv[1:3])
app(sys.argv[3:], prog_name="beamq")
"""


def start(folder: Path, seconds: tuple[float, float], **environment: str) -> subprocess.Popen[str]:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *map(str, seconds), "verify", "--quick", str(folder)],
        env={**os.environ, **meeting, "TORCH_CPP_LOG_LEVEL": "ERROR", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job has it ignored, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("rank", ["0", "1"])
def test_waiting_is_told_and_ctrl_c_obeyed(nano_copy: Path, rank: str) -> None:
    process = start(nano_copy, (0.3, 600), RANK=rank)
    try:
        assert process.stderr is not None
        told = process.stderr.readline()
        assert told.startswith("waiting for 2 processes at 127.0.0.1:")
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)  # its own patience is 600 seconds
        assert process.returncode == 130
        assert (out, "Traceback" in errors) == ("", False)
    finally:
        process.kill()


def test_a_rank_that_never_comes_is_given_up(nano_copy: Path) -> None:
    process = start(nano_copy, (60, 1.2), RANK="0")
    try:
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out) == (4, "")
    assert errors.startswith("error: waited 0 minutes for 2 processes at 127.0.0.1:")
    assert errors.count("\n") == 1


def test_a_host_that_is_not_known_is_told_at_once(nano_copy: Path) -> None:
    process = start(nano_copy, (60, 60), RANK="0", MASTER_ADDR="nowhere.invalid")
    try:
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 4
    assert "MASTER_ADDR 'nowhere.invalid' cannot be resolved" in errors


def test_a_port_that_is_taken_is_told_in_plain_words(nano_copy: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(nano_copy, (60, 60), RANK="0", MASTER_PORT=str(taken.getsockname()[1]))
        try:
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 4
    assert "another process has that port" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("command", ["quantize", "dequantize", "calibrate"])
def test_a_source_that_is_not_there_is_told_once(tmp_path: Path, command: str) -> None:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "beamq", command, tmp_path / "nowhere", tmp_path / "out"],
            env={**os.environ, **meeting, "LOCAL_RANK": rank, "RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [3, 3]
    assert said[0].startswith(f"error: {tmp_path / 'nowhere'}: no such folder")
    assert said[0].count("\n") == 1
    assert said[1] == ""
