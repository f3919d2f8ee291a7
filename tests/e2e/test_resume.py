"""Kill it, stop it, split it over processes: the bytes at the end are always the same."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from beamq.convert.quantize import quantize
from beamq.convert.run import Progress
from beamq.errors import Interrupted, OutputBusyError, ResumeError
from beamq.io.lock import OutputLock
from beamq.io.shard_writer import ShardWriter
from tests.helpers import safetensors_edit as st
from tests.helpers.free_ports import free_port

RUN = (
    "import sys; from beamq.convert.quantize import quantize;"
    "quantize(sys.argv[1], sys.argv[2], no_calibration=True, max_shard_bytes=600_000,"
    " resume='resume' in sys.argv, workers=2)"
)
OPTIONS = {"no_calibration": True, "max_shard_bytes": 600_000, "workers": 2}


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def start(source: Path, output: Path, *extra: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RUN, str(source), str(output), *extra]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


@pytest.fixture(scope="session")
def whole(beam_mini: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An undisturbed conversion of mini in a process of its own, and the seconds it took."""
    output = tmp_path_factory.mktemp("whole") / "out"
    begun = time.monotonic()
    process = start(beam_mini, output)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return output, time.monotonic() - begun


def test_twenty_kills_at_random_moments_lose_nothing(
    beam_mini: Path, whole: tuple[Path, float], tmp_path: Path
) -> None:
    reference, seconds = digests(whole[0]), whole[1]
    chance = random.Random(20261129)
    output = tmp_path / "out"
    killed = finished = 0
    kept: dict[str, int] = {}
    while killed < 20:
        process = start(beam_mini, output, "resume")
        time.sleep(chance.uniform(0.1, 1.0) * seconds)
        process.kill()
        process.communicate()
        if process.returncode == 0:
            assert digests(output) == reference
            output, kept = tmp_path / f"out-{killed}-{finished}", {}
            finished += 1
            continue
        killed += 1
        if output.exists():
            finals = {path.name: path.stat().st_mtime_ns for path in output.glob("*.safetensors")}
            assert all(finals.get(name) == moment for name, moment in kept.items())
            names = set(reference) & set(finals)
            assert all(
                hashlib.sha256((output / name).read_bytes()).hexdigest() == reference[name]
                for name in names
            )
            kept = finals
    quantize(beam_mini, output, resume=True, **OPTIONS)  # type: ignore[arg-type]
    assert digests(output) == reference


def test_a_stop_signal_leaves_a_resumable_state(
    beam_mini: Path, whole: tuple[Path, float], tmp_path: Path
) -> None:
    output = tmp_path / "out"

    def stop_halfway(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    said = r"interrupted; \d+ of \d+ shards are finished\. Run the same command with --re"
    with pytest.raises(Interrupted, match=said):
        quantize(beam_mini, output, on_progress=stop_halfway, **OPTIONS)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not (output / "config.json").exists()
    with pytest.raises(ResumeError, match="--resume continues it"):
        quantize(beam_mini, output, **OPTIONS)  # type: ignore[arg-type]
    result = quantize(beam_mini, output, resume=True, **OPTIONS)  # type: ignore[arg-type]
    assert result.manifest is not None
    assert digests(output) == digests(whole[0])


def test_resuming_a_finished_run_changes_nothing(
    beam_mini: Path, whole: tuple[Path, float]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole[0].iterdir()}
    result = quantize(beam_mini, whole[0], resume=True, **OPTIONS)  # type: ignore[arg-type]
    assert result.resumed_shards == len(result.plan.shards)
    assert {path: path.stat().st_mtime_ns for path in whole[0].iterdir()} == before


def half_done(source: Path, output: Path) -> None:
    """Leave an interrupted run behind."""

    def stop(_: Progress) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        quantize(source, output, on_progress=stop, **OPTIONS)  # type: ignore[arg-type]


def test_another_recipe_source_or_plan_is_refused_by_name(nano_copy: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    half_done(nano_copy, output)
    with pytest.raises(ResumeError, match="another recipe"):
        quantize(nano_copy, output, recipe="fp8", resume=True, max_shard_bytes=600_000)
    with pytest.raises(ResumeError, match="another --max-shard-size"):
        quantize(nano_copy, output, resume=True, no_calibration=True, max_shard_bytes=700_000)
    os.utime(nano_copy / "model.safetensors", (1, 1))
    with pytest.raises(ResumeError, match="a source that has changed"):
        quantize(nano_copy, output, resume=True, **OPTIONS)  # type: ignore[arg-type]
    quantize(nano_copy, output, overwrite=True, **OPTIONS)  # type: ignore[arg-type]


def test_a_damaged_journal_is_refused_and_a_cut_line_forgiven(
    beam_nano: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    half_done(beam_nano, output)
    journal = output / ".beamq" / "journal-0.jsonl"
    text = journal.read_bytes()
    journal.write_bytes(text + b'{"name": "model-000')
    quantize(beam_nano, output, resume=True, **OPTIONS)  # type: ignore[arg-type]
    other = tmp_path / "other"
    half_done(beam_nano, other)
    journal = other / ".beamq" / "journal-0.jsonl"
    for damage, message in ((b"nonsense\n", "damaged"), (b'{"name": 3}\n', "not a shard's record")):
        journal.write_bytes(text.split(b"\n")[0] + b"\n" + damage)
        with pytest.raises(ResumeError, match=message):
            quantize(beam_nano, other, resume=True, **OPTIONS)  # type: ignore[arg-type]


def test_a_resumed_run_leaves_no_config_of_an_earlier_checkpoint(
    beam_nano: Path, tmp_path: Path
) -> None:
    """Killed just after `--overwrite` removed beamq.json: the old config.json is still there, and
    engines would load new shards by it while the resumed run writes them."""
    output = tmp_path / "out"
    quantize(beam_nano, output, recipe="fp8")
    (output / "beamq.json").unlink()
    (output / ".beamq").mkdir()

    def stop(_: Progress) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        quantize(beam_nano, output, resume=True, on_progress=stop, **OPTIONS)  # type: ignore[arg-type]
    for name in ("config.json", "model.safetensors.index.json"):
        assert not (output / name).exists()
    quantize(beam_nano, output, resume=True, **OPTIONS)  # type: ignore[arg-type]
    quantize(beam_nano, tmp_path / "whole", **OPTIONS)  # type: ignore[arg-type]
    assert digests(output) == digests(tmp_path / "whole")


def test_a_crash_between_journal_and_rename_is_finished(beam_nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    quantize(beam_nano, tmp_path / "whole", **OPTIONS)  # type: ignore[arg-type]

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    patch = pytest.MonkeyPatch()
    patch.setattr("beamq.io.shard_writer.ShardWriter.publish", crash)
    with pytest.raises(KeyboardInterrupt):
        quantize(beam_nano, output, **OPTIONS)  # type: ignore[arg-type]
    patch.undo()
    assert not list(output.glob("*.safetensors"))
    result = quantize(beam_nano, output, resume=True, **OPTIONS)  # type: ignore[arg-type]
    assert result.resumed_shards == 1
    assert digests(output) == digests(tmp_path / "whole")


def one_shard_done(source: Path, output: Path) -> Path:
    """Leave a run behind that broke off at its second rename; the shard that it finished."""
    genuine, calls = ShardWriter.publish, itertools.count()

    def crash(writer: ShardWriter) -> None:
        if next(calls):
            raise KeyboardInterrupt
        genuine(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "publish", crash)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, output, **OPTIONS)  # type: ignore[arg-type]
    (done,) = output.glob("*.safetensors")
    return done


@pytest.mark.parametrize("change", [-1, 1, None])
def test_a_finished_shard_of_another_size_is_refused(
    beam_nano: Path, tmp_path: Path, change: int | None
) -> None:
    """Cut, grown or gone since the journal recorded it."""
    done = one_shard_done(beam_nano, tmp_path / "out")
    if change is None:
        done.unlink()
    else:
        os.truncate(done, done.stat().st_size + change)
    with pytest.raises(ResumeError, match=f"{done.name}: recorded as finished but missing or of"):
        quantize(beam_nano, tmp_path / "out", resume=True, **OPTIONS)  # type: ignore[arg-type]
    assert not (tmp_path / "out" / "beamq.json").exists()


def test_a_record_of_other_tensors_is_refused(beam_nano: Path, tmp_path: Path) -> None:
    done = one_shard_done(beam_nano, tmp_path / "out")
    journal = tmp_path / "out" / ".beamq" / "journal-0.jsonl"
    lines = journal.read_text().splitlines()
    for number, line in enumerate(lines):
        record = json.loads(line)
        if record.get("name") == done.name:
            record["tensors"].pop(next(iter(record["tensors"])))
            lines[number] = json.dumps(record)
    journal.write_text("\n".join([*lines, ""]))
    with pytest.raises(ResumeError, match=f"record of {done.name} does not fit this plan"):
        quantize(beam_nano, tmp_path / "out", resume=True, **OPTIONS)  # type: ignore[arg-type]


def test_a_second_writer_is_refused(beam_nano: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    lock = OutputLock(output)
    with pytest.raises(OutputBusyError, match="another process"):
        quantize(beam_nano, output, **OPTIONS)  # type: ignore[arg-type]
    lock.release()
    quantize(beam_nano, output, **OPTIONS)  # type: ignore[arg-type]


def test_two_processes_under_torchrun_give_the_same_bytes(
    beam_mini: Path, whole: tuple[Path, float], tmp_path: Path
) -> None:
    port = free_port()
    output = tmp_path / "out"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(beam_mini), str(output)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()[-500:]
    assert digests(output) == digests(whole[0])


def test_a_rank_that_fails_stops_the_other(nano_copy: Path, tmp_path: Path) -> None:
    def poison(tensors: st.Tensors) -> None:
        for layer in range(3, 8):
            name = f"model.layers.{layer}.mlp.experts.0.up_proj.weight"
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, b"\x80\x7f" + data[2:])

    st.edit(nano_copy / "model.safetensors", poison)
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(nano_copy), str(tmp_path / "out")],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    errors = [process.communicate(timeout=120)[1].decode() for process in ranks]
    assert all(process.returncode for process in ranks)
    assert any("holds NaN or infinity" in text for text in errors)
    assert not list((tmp_path / "out").glob("config.json"))
