"""Kills while a model runs on text: alone, and while its weights are converted on the way."""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.harness import RARE, Zygote, batches, digests

SIZE = ("--samples", "2", "--sequence-length", "32", "--device", "cpu", "--quiet")
Record = Callable[[str, object], None]


def calibrate_args(source: Path, folder: Path, *more: str) -> list[str]:
    return ["calibrate", str(source), str(folder / "stats"), *SIZE, *more]


def one_pass_args(source: Path, folder: Path, *more: str) -> list[str]:
    output = str(folder / "out")
    return ["quantize", str(source), output, *SIZE, "--workers", "1", "--max-shard-size", "1.2MB",
            *more]  # fmt: skip


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def wordy(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nano with its tokenizer: these commands read text."""
    return Path(shutil.copytree(beam_nano, tmp_path_factory.mktemp("wordy") / "source"))


def chosen(steps: int, count: int) -> list[dict[str, Any]]:
    every = max(steps // count, 1)
    return [
        {"at": step, "kinds": RARE, "action": ("kill before", "kill after")[step % 2]}
        for step in range(1, steps + 1, every)
    ]


def test_kills_while_calibrating(
    torch_zygote: Zygote, wordy: Path, memory_folder: Path, record_property: Record
) -> None:
    whole = memory_folder / "whole"
    whole.mkdir()
    steps = torch_zygote.count(*calibrate_args(wordy, whole), kinds=RARE)
    kills = 0
    for batch in batches(chosen(steps, 9), 2):
        folders = [memory_folder / str(number) for number in range(len(batch))]
        for folder in folders:
            folder.mkdir()
        ended = torch_zygote.run_all(
            [{"args": calibrate_args(wordy, folder), **order}
             for folder, order in zip(folders, batch, strict=True)]
        )  # fmt: skip
        assert all(end.killed or end.code == 0 for end in ended)
        kills += sum(end.killed for end in ended)
        for folder in folders:
            if (folder / "stats").exists():  # under its name only when whole
                assert sha(folder / "stats") == sha(whole / "stats")
        for end in torch_zygote.run_all(
            [{"args": calibrate_args(wordy, folder, "--resume")} for folder in folders]
        ):
            assert end.code == 0, end.err
        for folder in folders:
            assert sha(folder / "stats") == sha(whole / "stats")
            left = {path.name for path in folder.iterdir()}
            assert not {name for name in left if name.endswith(".partial")}
            shutil.rmtree(folder)
    assert kills >= 3  # how often a state is saved depends on the time it takes
    record_property("kills", kills)


def test_kills_while_calibrating_and_converting(
    torch_zygote: Zygote, wordy: Path, memory_folder: Path, record_property: Record
) -> None:
    whole = memory_folder / "whole"
    whole.mkdir()
    steps = torch_zygote.count(*one_pass_args(wordy, whole), kinds=RARE)
    expected = digests(whole / "out")
    kills = 0
    for batch in batches(chosen(steps, 9), 2):
        folders = [memory_folder / str(number) for number in range(len(batch))]
        ended = torch_zygote.run_all(
            [{"args": one_pass_args(wordy, folder), **order}
             for folder, order in zip(folders, batch, strict=True)]
        )  # fmt: skip
        kills += sum(end.killed for end in ended)
        for folder in folders:
            left = digests(folder / "out") if (folder / "out").exists() else {}
            final = {n: d for n, d in left.items()
                     if not n.startswith(".beamq") and not n.endswith(".partial")}  # fmt: skip
            assert all(expected[name] == digest for name, digest in final.items())
        for end in torch_zygote.run_all(
            [{"args": one_pass_args(wordy, folder, "--resume")} for folder in folders]
        ):
            assert end.code == 0, end.err
        for folder in folders:
            assert digests(folder / "out") == expected
            shutil.rmtree(folder)
    assert kills >= 3  # how often a state is saved depends on the time it takes
    record_property("kills", kills)


def test_disks_that_fill_while_calibrating(
    torch_zygote: Zygote, wordy: Path, memory_folder: Path, record_property: Record
) -> None:
    """One line, exit 4, nothing unfinished under its final name; then on from there."""
    whole = memory_folder / "whole"
    whole.mkdir()
    kinds = ("open", "ftruncate", "pwrite", "fsync")
    steps = torch_zygote.count(*calibrate_args(wordy, whole), kinds=kinds)
    faults = 0
    for at in {2, 9, steps // 2, steps - 1}:
        folder = memory_folder / f"full-{at}"
        folder.mkdir()
        ended = torch_zygote.run(
            *calibrate_args(wordy, folder), at=at, kinds=kinds, action="error",
            errno=errno.ENOSPC, lasting=True,
        )  # fmt: skip
        if ended.code == 0:  # how often a state is saved depends on the time it takes
            continue
        faults += 1
        assert ended.code == 4, ended.err
        assert ended.err.startswith("error: ")
        assert ended.err.count("\n") == 1
        if (folder / "stats").exists():  # what failed came after the renaming
            assert sha(folder / "stats") == sha(whole / "stats")
        resumed = torch_zygote.run(*calibrate_args(wordy, folder, "--resume"))
        assert resumed.code == 0, resumed.err
        assert sha(folder / "stats") == sha(whole / "stats")
    assert faults > 1
    record_property("faults", faults)
