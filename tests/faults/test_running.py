"""Faults of running: memory, descriptors, threads, locks, signals, and what a dry run promises."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from beamq.commands import outcome
from beamq.convert.quantize import quantize
from beamq.convert.resources import predicted_host_nbytes
from beamq.convert.run import Progress
from beamq.errors import Interrupted, OutputBusyError
from beamq.io.lock import LOCK_NAME, OutputLock, refuse_busy
from beamq.plan.plan import make_plan
from beamq.signals import interrupted
from tests.helpers.craft import Run, convert, light_verify, recipe, synthetic
from tests.helpers.harness import Zygote, digests
from tests.helpers.waiting import wait_for

MB = 1_000_000


@pytest.fixture(scope="module")
def torchless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Forks of a process that has never imported torch."""
    started = Zygote(tmp_path_factory.mktemp("torchless"))
    yield started
    started.close()


def args(source: Path, output: Path, *more: str) -> list[str]:
    return ["quantize", str(source), str(output), "--no-calibration", "-q", *more]


# Memory ----------------------------------------------------------------------------------------


SHAPES = {"4 experts": (2, 4), "64 experts": (2, 64), "20 layers": (20, 4)}


def test_the_peak_does_not_grow_with_the_model_MO2466(
    torchless: Zygote,
    memory_folder: Path,
) -> None:
    peaks: dict[str, int] = {}
    for name, (layers, experts) in SHAPES.items():
        folder = synthetic(
            memory_folder / name, layers=layers, experts=experts, hidden=512, width=512
        )
        ended = torchless.run(*args(folder, memory_folder / f"{name} out", "--workers", "2"),
                              limits={"RLIMIT_AS": 600 * MB})  # fmt: skip
        assert ended.code == 0, ended.err
        peaks[name] = ended.peak_bytes
    assert max(peaks.values()) - min(peaks.values()) < 6 * MB, peaks


def test_the_memory_allowed_is_the_memory_used(
    torchless: Zygote,
    memory_folder: Path,
) -> None:
    """Groups of 16.8 MB: the pool holds one or many, and never more than was predicted."""
    folder = synthetic(memory_folder / "wide", layers=1, experts=12, hidden=2048, width=2048)
    plan = make_plan(folder)
    group = plan.largest_group_nbytes
    assert group == 2 * 2048 * 2048 * 2
    peaks: dict[int, int] = {}
    for allowed in (group, 2 * group, 8 * group):
        ended = torchless.run(*args(folder, memory_folder / f"{allowed}", "--workers", "4",
                                    "--max-host-memory", str(allowed)))  # fmt: skip
        assert ended.code == 0, ended.err
        peaks[allowed] = ended.peak_bytes
        # 80 MB: the interpreter, its modules and the plan, which differ between machines.
        assert ended.peak_bytes < 80 * MB + predicted_host_nbytes(plan, 4, allowed)
    assert peaks[8 * group] - peaks[group] > 2 * group
    ended = torchless.run(*args(folder, memory_folder / "less", "--max-host-memory", "16MB"))
    assert ended.code == 4
    assert "largest group" in ended.err


@pytest.mark.parametrize("limit", [100, 200, 300, 350, 400, 450, 2000])
def test_too_little_address_space_is_a_line(
    torchless: Zygote,
    memory_folder: Path,
    limit: int,
) -> None:
    """Whatever call it is that finds no memory: a line and exit 4, or it was enough."""
    folder = synthetic(memory_folder / "s", layers=1, experts=4, hidden=2048, width=2048)
    ended = torchless.run(*args(folder, memory_folder / "out", "--workers", "2"),
                          limits={"RLIMIT_AS": limit * MB})  # fmt: skip
    assert ended.code in (0, 4), ended.err
    if ended.code:
        assert ended.err.startswith("error: ")
        assert ended.err.count("\n") == 1
        assert not (memory_folder / "out" / "beamq.json").exists()
    assert limit < 2000 or ended.code == 0


# Many files, many tensors ------------------------------------------------------------------------


def test_a_thousand_shards_and_25000_tensors_with_few_descriptors(
    torchless: Zygote,
    memory_folder: Path,
) -> None:
    folder = synthetic(memory_folder / "many", layers=64, experts=128, hidden=16, width=16,
                       shards=1000)  # fmt: skip
    output = memory_folder / "out"
    # One shard for each 26 linears or so: about a thousand again.
    ended = torchless.run(*args(folder, output, "--max-shard-size", "5kB", "--workers", "4"),
                          limits={"RLIMIT_NOFILE": 128}, timeout=120)  # fmt: skip
    assert ended.code == 0, ended.err
    shards = len(list(output.glob("*.safetensors")))
    assert shards > 800
    assert ended.seconds < 60
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))  # by this process, before the call
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 100, hard))
    try:
        report = light_verify(output, source=folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert report.ok, report.failures
    assert report.tensors > 75_000
    assert report.seconds < 60


def test_descriptors_are_returned(beam_nano: Path, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        convert(beam_nano, tmp_path / f"{number}", max_shard_bytes=100_000)
        light_verify(tmp_path / f"{number}", source=beam_nano)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not [thread for thread in threading.enumerate() if "beamq" in thread.name]


# Threads, signals, locks -------------------------------------------------------------------------


SLOW = """
import os, sys, time, beamq.convert.open_shards
genuine = os.pwrite
def slowly(*arguments):
    time.sleep(0.008)
    return genuine(*arguments)
os.pwrite = slowly
from beamq.cli import main
print("go", flush=True)
main()
"""


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """The command line with slow writes, so that there is time to interrupt it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_one_line_and_resumable(
    beam_nano: Path, tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "out"
    command = args(beam_nano, output, "--max-shard-size", "600kB")
    process = start(*command)
    wait_for(lambda: list(output.glob("*.safetensors")), process)
    begun = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert time.monotonic() - begun < 60  # threads do not outlive it
    assert process.returncode == 130
    assert err.count("\n") == 1
    assert err.startswith("error: interrupted; ")
    assert "--resume" in err
    assert not (output / LOCK_NAME).exists()
    finished = {p.name: p.stat().st_mtime_ns for p in output.glob("*.safetensors")}
    quantize(beam_nano, output, no_calibration=True, max_shard_bytes=600_000, resume=True)
    convert(beam_nano, tmp_path / "whole", recipe="nvfp4", no_calibration=True,
            max_shard_bytes=600_000)  # fmt: skip
    assert digests(output) == digests(tmp_path / "whole")
    assert all((output / n).stat().st_mtime_ns == moment for n, moment in finished.items())


def test_a_second_ctrl_c_ends_it_at_once(beam_nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = start(*args(beam_nano, output, "--max-shard-size", "600kB"))
    wait_for(lambda: list(output.glob("*.partial")), process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    quantize(beam_nano, output, no_calibration=True, max_shard_bytes=600_000, resume=True)


@pytest.mark.parametrize("seconds", [0.03, 0.1, 0.3, 0.6])
@pytest.mark.parametrize("verb", ["verify", "plan"])
def test_ctrl_c_at_any_moment_is_one_line(beam_nano: Path, verb: str, seconds: float) -> None:
    """While the command line is imported, while options are read, while the command runs."""
    code = "from beamq.__main__ import main; print('go', flush=True); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, verb, str(beam_nano)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    # The last: a signal while Python itself is ending, when the command is done.
    assert process.returncode in (0, 1, 130, -signal.SIGINT), err
    assert process.returncode != 130 or err in ("", "error: interrupted\n")


def test_ctrl_c_is_not_lost_in_a_callback(tmp_path: Path) -> None:
    """Python drops what is raised there, and prints a traceback."""
    code = (
        "import signal, threading, beamq.__main__ as start\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background\n"
        "class Last:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "start._keep_interrupts()\n"
        "try:\n"
        "    Last()\n"
        "    print('goes on')\n"
        "    threading.Event().wait(60)\n"
        "except KeyboardInterrupt: print('kept')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("goes on\nkept\n", "")


def test_ctrl_c_is_seen_in_what_was_raised_from_it(capsys: pytest.CaptureFixture[str]) -> None:
    def body(_: object) -> int:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    assert outcome.run(body) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert not interrupted(RuntimeError("another"))


def test_two_runs_on_one_output(beam_nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    first = start(*args(beam_nano, output, "--max-shard-size", "600kB"))
    wait_for(lambda: list(output.glob("*.partial")), first)
    first.send_signal(signal.SIGSTOP)  # or a busy machine might let it end before the others look
    try:
        for more in ((), ("--resume",), ("--overwrite",)):
            second = subprocess.run(
                [sys.executable, "-m", "beamq", *args(beam_nano, output, *more)],
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert second.returncode == 4, second.stderr
            assert second.stderr.count("\n") == 1
            assert f"another process is writing here (process {first.pid} on " in second.stderr
            assert f"since {datetime.now(UTC):%Y-%m-%d}" in second.stderr
            assert "--overwrite" not in second.stderr, "it would spoil the first run"
    finally:
        first.send_signal(signal.SIGCONT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 0, err
    assert light_verify(output, source=beam_nano).ok


def test_a_look_at_the_lock_hinders_nobody(tmp_path: Path) -> None:
    refuse_busy(tmp_path)
    assert not list(tmp_path.iterdir()), "looking creates nothing"
    lock = OutputLock(tmp_path)
    with pytest.raises(OutputBusyError, match=rf"process {os.getpid()} on .*, since \d{{4}}-"):
        refuse_busy(tmp_path)
    (tmp_path / LOCK_NAME).write_text("of an older version")
    with pytest.raises(OutputBusyError, match="writing here; wait"):
        refuse_busy(tmp_path)
    lock.release()
    refuse_busy(tmp_path)
    (tmp_path / LOCK_NAME).touch()
    watching = os.open(tmp_path / LOCK_NAME, os.O_RDONLY)
    fcntl.flock(watching, fcntl.LOCK_SH)
    timer = threading.Timer(0.01, os.close, [watching])
    timer.start()
    OutputLock(tmp_path).release()  # one who looks is gone in a moment
    timer.join()


def test_the_lock_survives_its_own_removal(tmp_path: Path) -> None:
    """Found here: who opened the lock's file just before it was removed locked a ghost, and the
    next one locked a new file: two writers."""
    first = OutputLock(tmp_path)
    waiting = os.open(tmp_path / LOCK_NAME, os.O_RDWR)
    first.release()
    second = OutputLock(tmp_path)
    with pytest.raises(OutputBusyError):
        OutputLock(tmp_path)
    os.close(waiting)
    second.release()
    OutputLock(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_a_lock_left_by_a_dead_process_is_no_hindrance(beam_nano: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK_NAME).touch()
    convert(beam_nano, tmp_path / "out", "fp8")
    assert not (tmp_path / "out" / LOCK_NAME).exists()


def test_a_run_between_look_and_lock_is_noticed(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found here: a run that waited at the door emptied what another had finished meanwhile."""
    output = tmp_path / "out"
    genuine = OutputLock.__init__
    calls = 0

    def late(self: OutputLock, folder: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            convert(beam_nano, output, "fp8")
        genuine(self, folder)

    monkeypatch.setattr(OutputLock, "__init__", late)
    with pytest.raises(Exception, match="not empty"):
        convert(beam_nano, output, "fp8")
    assert light_verify(output, source=beam_nano).ok


# What is promised --------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
@pytest.mark.parametrize("limit", ["5GB", "700kB"])
def test_dry_run_and_plan_tell_the_bytes_AR1591(
    run: Run, beam_nano: Path, tmp_path: Path, fmt: str, limit: str
) -> None:
    output = tmp_path / "out"
    options = ["--recipe", fmt, "--max-shard-size", limit, "--json"]
    extra = [] if fmt == "fp8" else ["--no-calibration"]
    code, dry, _ = run("quantize", beam_nano, output, *options, *extra, "--dry-run", "-q")
    assert code == 0
    assert not output.exists()
    code, planned, _ = run("plan", beam_nano, *options)
    assert code == 0
    assert not list(tmp_path.iterdir())
    code, done, _ = run("quantize", beam_nano, output, *options, *extra, "-q")
    assert code == 0
    sizes = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    plan = make_plan(beam_nano, fmt, max_shard_bytes=5_000_000_000 if limit == "5GB" else 700_000)
    assert sum(shard.nbytes for shard in plan.shards) == sizes
    reports = [json.loads(text) for text in (dry, planned, done)]
    for key in set(reports[1]) - {"command", "needs", "serving", "source"}:
        assert reports[0][key] == reports[1][key] == reports[2][key], key


def test_no_gpu_no_nvml_LLMC1625(beam_nano: Path, tmp_path: Path) -> None:
    """A conversion imports no torch at all, and a machine without GPUs is a fine machine."""
    code = (
        "import sys; from beamq.cli import main; sys.argv[0] = 'beamq'\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, 'pynvml' in sys.modules)"
    )
    for arguments in (args(beam_nano, tmp_path / "out"), ["plan", str(beam_nano)]):
        ended = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines()[-1] == "False False"


def test_interruptions_in_python_are_errors_of_ours(beam_nano: Path, tmp_path: Path) -> None:
    def stop(_: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)  # ignored, where tests run in the background
    with pytest.raises(Interrupted):
        convert(beam_nano, tmp_path / "out", recipe=recipe("fp8"), on_progress=stop)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_calibration_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found here: saving a layer's state deleted the lock's file with what it replaced, and a
    second run with `--overwrite` emptied the state of the first before it asked for the lock."""
    from beamq.calib.state import RunState

    folder = tmp_path / "stats.state"
    state = RunState(folder, {"x": "y"})
    state.begin(resume=False)
    lock = OutputLock(folder)
    (folder / "stats-0001.safetensors").write_text("old")
    state.clear()
    assert [path.name for path in folder.iterdir()] == [LOCK_NAME]
    with pytest.raises(OutputBusyError):
        OutputLock(folder)
    lock.release()


@pytest.mark.parametrize("more", ["--overwrite", "--resume"])
def test_a_second_calibration_is_refused(
    run: Run, beam_nano: Path, tmp_path: Path, more: str
) -> None:
    stats = tmp_path / "stats"
    (tmp_path / "stats.state").mkdir()
    (tmp_path / "stats.state" / "identity.json").write_text("{}")
    lock = OutputLock(tmp_path / "stats.state")
    code, _, err = run("calibrate", beam_nano, stats, "--samples", "1", "--sequence-length", "16",
                       "--device", "cpu", "-q", more)  # fmt: skip
    assert code == 4
    assert "another process" in err
    assert (tmp_path / "stats.state" / "identity.json").exists()
    lock.release()


def test_an_empty_path_is_not_this_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["plan", ""], ["verify", ""], ["inspect", ""]):
        code, _, err = run(*arguments)
        assert code == 2
        assert "an empty path" in err
    assert not list(tmp_path.iterdir())


def test_a_calibration_refused_for_space_leaves_nothing(
    run: Run, beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from beamq.calib import state

    size = ["--samples", "2", "--sequence-length", "32", "--device", "cpu"]
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(state.shutil, "disk_usage", lambda _: usage)
    code, _, err = run("calibrate", beam_nano, tmp_path / "deep" / "stats", *size)
    assert code == 4
    assert "the state of the calibration needs 32.77 kB, the disk has 1.00 kB free" in err
    assert not list(tmp_path.iterdir())
