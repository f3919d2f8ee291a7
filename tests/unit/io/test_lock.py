"""Locks where the file system has no flock; with flock see `tests/faults/test_running.py`."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from beamq.errors import DiskError, OutputBusyError
from beamq.io import lock as locks
from beamq.io.lock import HELD, LOCK_NAME, Lock, OutputLock, holder, refuse_busy
from tests.helpers.waiting import wait_for

MARK = LOCK_NAME + HELD


@pytest.fixture(params=["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def flockless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(errno, request.param)

    def refused(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)


def sign(folder: Path, *, age: float = 0.0, **said: Any) -> None:
    """The files of a lock whose holder touched it `age` seconds ago; this process's signature but
    for `said`."""
    (folder / LOCK_NAME).touch()
    mark = folder / MARK
    mark.write_text(json.dumps({**json.loads(locks._signature()), **said}) + "\n")
    moment = mark.stat().st_mtime - age
    os.utime(mark, (moment, moment))


def held_by_another(folder: Path) -> bool:
    """Whether both the look and the attempt are refused."""
    looked = holder(folder)
    try:
        OutputLock(folder).release()
    except OutputBusyError:
        assert looked is not None
        with pytest.raises(OutputBusyError):
            refuse_busy(folder)
        return True
    assert looked is None
    assert not list(folder.iterdir())
    return False


def test_one_process_at_a_time_hub2399(flockless: None, tmp_path: Path) -> None:
    refuse_busy(tmp_path)
    assert not list(tmp_path.iterdir()), "looking creates nothing"
    first = OutputLock(tmp_path)
    words = (
        rf"writing here \(process {os.getpid()} on .*, since \d{{4}}-.*; if it was lost, for 5 min"
    )
    with pytest.raises(OutputBusyError, match=words):
        OutputLock(tmp_path)
    with pytest.raises(OutputBusyError, match=words):
        refuse_busy(tmp_path)
    first.release()
    assert not held_by_another(tmp_path)


def test_a_killed_process_holds_nothing(flockless: None, tmp_path: Path) -> None:
    """As soon as it is dead, also while its parent has not awaited it, nor after its number went
    to another process."""
    code = f"""
import fcntl, os, pathlib
from beamq.io.lock import Lock
def refused(*_):
    raise OSError({errno.ENOLCK}, "No locks available")
fcntl.flock = refused
Lock(pathlib.Path({str(tmp_path / LOCK_NAME)!r}))
os.kill(os.getpid(), {signal.SIGKILL})
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert (tmp_path / MARK).exists()
    assert not held_by_another(tmp_path)
    assert child.wait() == -signal.SIGKILL
    sign(tmp_path, pid=child.pid)
    assert not held_by_another(tmp_path)
    sign(tmp_path, start="1")
    assert not held_by_another(tmp_path)


def test_a_stopped_process_keeps_its_lock(flockless: None, tmp_path: Path) -> None:
    sign(tmp_path, age=10_000)
    assert held_by_another(tmp_path)


@pytest.mark.parametrize("said", [{"place": "other-host", "host": "other-host"}, {"place": None}])
def test_a_process_elsewhere_is_judged_by_its_heartbeat(
    flockless: None, tmp_path: Path, said: dict[str, Any]
) -> None:
    sign(tmp_path, age=200, **said)
    assert held_by_another(tmp_path)
    sign(tmp_path, age=400, **said)
    assert not held_by_another(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pid": "x"}', '{"place": 7, "pid": 1e400}'])
def test_a_mark_that_says_nothing_is_judged_by_its_age(
    flockless: None, tmp_path: Path, text: str
) -> None:
    """Of a process that was killed before it had signed, for instance."""
    for age, held in ((0, True), (400, False)):
        sign(tmp_path)
        (tmp_path / MARK).write_text(text)
        os.utime(tmp_path / MARK, (os.stat(tmp_path / MARK).st_mtime - age,) * 2)
        assert held_by_another(tmp_path) == held


def test_a_process_that_proc_hides_is_judged_by_its_heartbeat(
    flockless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = locks._process(os.getpid())

    def refused(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(locks, "_process", lambda pid: (here, None))
    monkeypatch.setattr(os, "kill", refused)
    sign(tmp_path, pid=1)
    assert held_by_another(tmp_path)
    sign(tmp_path, pid=1, age=400)
    assert not held_by_another(tmp_path)


def test_the_heart_beats_until_the_end(
    flockless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.01)
    lock = OutputLock(tmp_path)
    os.utime(tmp_path / MARK, (1, 1))
    wait_for(lambda: (tmp_path / MARK).stat().st_mtime > 1)
    lock.release()
    wait_for(lambda: "beamq-heartbeat" not in {each.name for each in threading.enumerate()})


def test_of_two_that_find_a_dead_mark_one_gets_it(
    flockless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one moves the first one's new file away, sees that, and puts it back."""
    sign(tmp_path, start="1")
    genuine = locks._is_void
    others: list[Lock] = []

    def slow(path: Path) -> bool:
        found = genuine(path)
        if not others:
            others.append(None)  # type: ignore[arg-type]  # the one that is quicker comes here too
            others[0] = Lock(path)
        return found

    monkeypatch.setattr(locks, "_is_void", slow)
    with pytest.raises(BlockingIOError):
        Lock(tmp_path / LOCK_NAME)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_NAME, MARK]
    others[0].release()
    assert not held_by_another(tmp_path)


def test_where_even_that_fails_the_file_system_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    genuine = os.open

    def choosy(path: Any, flags: int, *more: Any, **words: Any) -> int:
        if flags & os.O_EXCL:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return genuine(path, flags, *more, **words)

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(os, "open", choosy)
    said = (
        r"taking the lock failed: Operation not supported, and the file system \(\w.* at /.*\) has"
    )
    with pytest.raises(DiskError, match=said):
        OutputLock(tmp_path)


def test_a_failure_of_flock_that_is_none_of_these_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> NoReturn:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(DiskError, match=r"taking the lock failed: I/O error"):
        OutputLock(tmp_path)
