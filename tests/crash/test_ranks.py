"""Two ranks, one of which is killed or fails: the other ends too, and both can resume."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beamq.ranks import LOST
from tests.helpers.harness import RARE, Reference, Zygote, check_left, digests, quantize_args, times

KILLS: list[tuple[int, str, int]] = [
    *((0, "journal", n) for n in (1, 2, 3, 4)), *((1, "journal", n) for n in (1, 2, 3)),
    (0, "replace", 3), (1, "replace", 1), (1, "replace", 2), (1, "pwrite", 100), (0, "pwrite", 50),
    (0, "fsync", 4), (1, "fsync", 3), (0, "replace", 9),
]  # fmt: skip


def trap(kind: str, at: int) -> dict[str, Any]:
    """`journal` is the flush of a record: the last of a journal's transitions before a rename."""
    if kind == "journal":
        return {"at": at, "kinds": ["fsync"], "match": ".jsonl", "action": "kill after"}
    return {"at": at, "kinds": [kind], "action": "kill before"}


@pytest.mark.parametrize(("rank", "kind", "at"), KILLS)
def test_a_rank_that_is_killed(
    torch_zygote: Zygote, small: Path, quantized: Reference, memory_folder: Path, rank: int,
    kind: str, at: int, record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    output = memory_folder / "out"
    orders: list[dict[str, Any]] = [{}, {}]
    orders[rank] = trap(kind, at)
    ended = torch_zygote.two_ranks(quantize_args(small, output), orders)
    assert ended[rank].killed, ended
    other = ended[1 - rank]
    if other.code:  # else it had done its part when the first rank was killed finalising
        assert other.code == 4, other
        assert LOST in other.err
    assert other.code or (rank, kind, at) == KILLS[-1]
    check_left(output, quantized[1])
    before = times(output)
    for end in torch_zygote.two_ranks(quantize_args(small, output, "--resume")):
        assert end.code == 0, end.err
    assert digests(output) == quantized[1]
    assert all(times(output)[name] == moment for name, moment in before.items())
    record_property("kills", 1)


def test_a_rank_whose_disk_is_full(
    torch_zygote: Zygote, zygote: Zygote, small: Path, quantized: Reference, memory_folder: Path
) -> None:
    """What it was from both, each in its words; the run may be resumed by one process alone."""
    output = memory_folder / "out"
    fault = {"at": 40, "kinds": ["pwrite"], "action": "error", "errno": errno.ENOSPC}
    first, second = torch_zygote.two_ranks(quantize_args(small, output), [{}, fault])
    assert (first.code, second.code) == (4, 4)
    assert first.err.startswith("error: another rank failed (rank 1: ")
    assert "disk full" in first.err
    assert second.err.startswith("rank 1: error: ")
    assert "disk full" in second.err
    check_left(output, quantized[1])
    assert zygote.run(*quantize_args(small, output, "--resume")).code == 0
    assert digests(output) == quantized[1]


def test_one_process_stops_and_two_go_on(
    torch_zygote: Zygote, zygote: Zygote, small: Path, quantized: Reference, memory_folder: Path
) -> None:
    output = memory_folder / "out"
    ended = zygote.run(*quantize_args(small, output), at=60, kinds=RARE, action="kill before")
    assert ended.killed
    for end in torch_zygote.two_ranks(quantize_args(small, output, "--resume")):
        assert end.code == 0, end.err
    assert digests(output) == quantized[1]


def test_a_source_that_only_one_rank_can_read(
    torch_zygote: Zygote, small: Path, memory_folder: Path
) -> None:
    output = memory_folder / "out"
    source = Path(shutil.copytree(small, memory_folder / "source"))
    fault = {"at": 3, "kinds": ["preadv"], "action": "error", "errno": errno.EIO}
    first, second = torch_zygote.two_ranks(quantize_args(source, output), [{}, fault])
    assert first.code == second.code == 4
    assert not (output / "config.json").exists()
