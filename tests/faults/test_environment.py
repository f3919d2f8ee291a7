"""Faults of where beamq runs: kernels that refuse advice, no home, closed streams, no folder."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from beamq import limits
from beamq.convert.quantize import quantize
from beamq.convert.run import Progress
from beamq.errors import BeamqError, Interrupted, UsageError
from beamq.io.files import user_path
from beamq.io.lock import LOCK_NAME, OutputLock
from beamq.io.manifest import MANIFEST_NAME
from tests.helpers.craft import Run
from tests.helpers.harness import ROOT, digests

# A user that the machine has no name for, as in a container started with `--user 54321`.
NAMELESS = """
import os, pwd, sys
def unknown(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")
pwd.getpwuid = unknown
"""


def beamq(
    *words: str | Path, start: str = "", redirect: str = "", folder: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """A command line as a shell runs it, after the Python `start`; the caches of no user."""
    code = f"{start}\nimport sys\nfrom beamq.__main__ import main\nsys.argv[0] = 'beamq'\nmain()"
    unset = ("HOME", "HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "OMP_WAIT_POLICY")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", code, *map(str, words)],
        env={**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **env},
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


# Advice and limits -----------------------------------------------------------------------------


class Refusing(mmap.mmap):
    """Memory of a kernel without huge pages."""

    def madvise(self, *_: Any) -> NoReturn:
        raise OSError(22, "Invalid argument")


def test_advice_that_a_kernel_refuses_is_only_advice_sdc425(
    run: Run, beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> NoReturn:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    monkeypatch.setattr(os, "sched_getaffinity", refused)
    code, _, err = run("quantize", beam_nano, tmp_path / "out", "--no-calibration", "-q")
    assert code == 0, err


@pytest.mark.parametrize("room", [20_000, 1_000_000])
def test_a_container_with_too_little_memory_psutil2100(
    run: Run,
    beam_nano: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    room: int,
) -> None:
    """A calibration whose weights cannot fit is refused. One that may fit is said to be at risk,
    as is a conversion: their figures are upper bounds."""
    now = limits.MemoryLeft(total=1 << 30, available=room, swap=0)
    monkeypatch.setattr(limits, "memory", lambda: now)
    with caplog.at_level(logging.WARNING, logger="beamq"):
        code, _, err = run("calibrate", beam_nano, tmp_path / "stats", "--device", "cpu", "-q",
                           "--samples", "1", "--sequence-length", "16")  # fmt: skip
        assert code == (4 if room == 20_000 else 0), err
        assert ("--max-device-memory" in err) == (code == 4)
        code, _, err = run("quantize", beam_nano, tmp_path / "out", "--no-calibration", "-q",
                           "--workers", "2")  # fmt: skip
        assert code == 0, err
    warned = {"calibration" if "calibration" in said else "conversion" for said in caplog.messages}
    assert warned == {"conversion"} | ({"calibration"} if room == 1_000_000 else set())


def test_threads_that_wait_sleep_unless_the_user_says_otherwise() -> None:
    code = "import beamq, os, sys; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    for given, expected in ((None, "passive"), ("active", "active")):
        env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        if given is not None:
            env["OMP_WAIT_POLICY"] = given
        ended = subprocess.run(
            [sys.executable, "-c", code], env={**env, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert ended.stdout == f"{expected} False\n"


# No home ---------------------------------------------------------------------------------------


def test_a_user_without_home_and_name_vllm44548(beam_nano: Path, tmp_path: Path) -> None:
    """What libraries keep in a home goes to a folder that is deleted, and nothing else is said."""
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    env = {"TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}
    doctor = beamq("doctor", start=NAMELESS, folder=here, **env)
    assert doctor.returncode == 0, doctor.stderr
    assert not doctor.stderr
    hub = beamq("plan", "someone/some-beam", start=NAMELESS, folder=here, **env)
    assert hub.returncode == 4
    assert "internal error" not in hub.stderr
    assert "HF_HUB_OFFLINE" in hub.stderr
    small = ("--samples", "2", "--sequence-length", "64", "--device", "cpu", "-q")
    made = beamq("quantize", beam_nano, "out", *small, start=NAMELESS, folder=here, **env)
    assert made.returncode == 0, made.stderr
    report = beamq("compare", beam_nano, "out", *small, "--report", "report", start=NAMELESS,
                   folder=here, **env)  # fmt: skip
    assert report.returncode == 0, report.stderr
    assert not report.stderr
    assert sorted(path.name for path in here.iterdir()) == ["out", "report"]
    assert not list(temporary.iterdir())


def test_a_home_that_cannot_be_written(run: Run, beam_nano: Path, tmp_path: Path) -> None:
    """Containers often give `/` as home. matplotlib then explains where it keeps its fonts."""
    out = tmp_path / "out"
    assert run("quantize", beam_nano, out, "--no-calibration", "-q")[0] == 0
    small = ("--samples", "1", "--sequence-length", "16", "--device", "cpu", "-q")
    ended = beamq("compare", beam_nano, out, *small, "--report", tmp_path / "report",
                  HOME="/proc", TMPDIR=str(tmp_path))  # fmt: skip
    assert (tmp_path / "report" / "report.html").exists()
    assert not ended.stderr


def test_the_home_of_nobody(run: Run, beam_nano: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a path that can be used"):
        user_path("~no-such-user-here/beam")
    for words in (
        ("plan", "~no-such-user-here/beam"),
        ("calibrate", beam_nano, tmp_path / "stats", "--data", "~no-such-user-here/text.jsonl"),
        ("calibrate", beam_nano, "~no-such-user-here/stats"),
        ("push", "~no-such-user-here/beam", "someone/some-beam"),
    ):
        code, _, err = run(*words)
        assert code == 2
        assert "~no-such-user-here" in err


# Streams and folders ---------------------------------------------------------------------------


@pytest.mark.parametrize("redirect", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_a_silent_one_pytools15(
    beam_nano: Path, tmp_path: Path, redirect: str
) -> None:
    out = tmp_path / "out"
    assert beamq("plan", beam_nano, redirect=redirect).returncode == 0
    assert beamq("plan", tmp_path / "none", redirect=redirect).returncode == 3
    made = beamq("quantize", beam_nano, out, "--no-calibration", redirect=redirect)
    assert made.returncode == 0
    assert (out / MANIFEST_NAME).exists()
    assert beamq("verify", out, "--quick", redirect=redirect).returncode == 0


def test_what_a_closed_stream_is_told_reaches_no_file(beam_nano: Path, tmp_path: Path) -> None:
    """Files that the run opens must not get the number of a closed stream."""
    for name, redirect in (("open", ""), ("closed", ">&- 2>&-")):
        made = beamq("quantize", beam_nano, name, "--no-calibration", "--verbose",
                     redirect=redirect, folder=tmp_path)  # fmt: skip
        assert made.returncode == 0, made.stderr
    shards = [{name: digest for name, digest in digests(tmp_path / each).items()
               if name.endswith(".safetensors")} for each in ("open", "closed")]  # fmt: skip
    assert shards[0]
    assert shards[0] == shards[1]


@pytest.mark.parametrize("words", [("plan",), ("verify",), ("quantize", "out")])
def test_a_current_folder_that_was_removed(
    beam_nano: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """torch's MKL would end the process with a line about a library that cannot be loaded."""
    command, *more = words
    start = f"import os; os.chdir({str(tmp_path / 'gone')!r}); os.rmdir(os.getcwd())"
    (tmp_path / "gone").mkdir()
    ended = beamq(command, beam_nano, *more, start=start)
    assert ended.returncode == 4
    assert ended.stderr == (
        "error: the current folder was removed; change to another one and run this again\n"
    )


# Ctrl-C ----------------------------------------------------------------------------------------


def test_one_ctrl_c_ends_a_loop_over_models_marimo224(beam_nano: Path, tmp_path: Path) -> None:
    """A loop that logs every `Exception` and goes on to the next model."""
    begun: list[int] = []

    def stop(_: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def convert_all() -> None:
        for number in range(3):
            begun.append(number)
            try:
                quantize(beam_nano, tmp_path / f"{number}", no_calibration=True, on_progress=stop)
            except Exception as error:
                raise AssertionError("taken for a model that failed") from error

    with pytest.raises(KeyboardInterrupt) as ended:
        convert_all()
    assert begun == [0]
    assert isinstance(ended.value, Interrupted)
    assert not isinstance(ended.value, BeamqError)
    assert "--resume" in str(ended.value)


# Locks -----------------------------------------------------------------------------------------


def test_a_file_system_without_flock_hub2399(
    run: Run, beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, a second one meanwhile, and a calibration."""

    def refused(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    out = tmp_path / "out"
    words = ("quantize", beam_nano, out, "--no-calibration", "-q")
    code, _, err = run(*words)
    assert code == 0, err
    assert not [path.name for path in out.iterdir() if path.name.startswith(LOCK_NAME)]
    lock = OutputLock(out)
    code, _, err = run(*words, "--overwrite")
    assert code == 4
    assert f"another process is writing here (process {os.getpid()} on" in err
    lock.release()
    code, _, err = run(*words, "--overwrite")
    assert code == 0, err
    code, _, err = run("calibrate", beam_nano, tmp_path / "stats", "--samples", "1",
                       "--sequence-length", "16", "--device", "cpu", "-q")  # fmt: skip
    assert code == 0, err
