"""SIGKILL before and after every step that reaches the disk: resumed, the bytes are the same.

A step is a call that creates, fills, flushes, renames or removes a file or folder; every journal
transition is among them. Each test says how many kills it survived through `record_property`.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.harness import (
    RARE,
    Reference,
    Zygote,
    batches,
    check_left,
    dequantize_args,
    digests,
    quantize_args,
    times,
)

Record = Callable[[str, object], None]


def survive(
    zygote: Zygote,
    command: Callable[[Path], list[str | Path]],
    folder: Path,
    whole: dict[str, str],
    orders: Sequence[dict[str, Any]],
) -> int:
    """Run and kill by each of the orders, resume, compare; four at a time. Returns the kills.

    What a killed run left must be sound, finished shards must stay untouched, and the end must be
    what an undisturbed run leaves. Orders that end before their trap are not counted.
    """
    kills = 0
    for batch in batches(orders):
        outputs = [folder / f"out-{number}" for number in range(len(batch))]
        commands = [[str(arg) for arg in command(output)] for output in outputs]
        ended = zygote.run_all(
            [{"args": args, **order} for args, order in zip(commands, batch, strict=True)]
        )
        before = []
        for output, end in zip(outputs, ended, strict=True):
            assert end.killed or end.code == 0, end.err
            kills += end.killed
            check_left(output, whole)
            before.append(times(output) if output.exists() else {})
        for end in zygote.run_all([{"args": [*args, "--resume"]} for args in commands]):
            assert end.code == 0, end.err
        for output, moments in zip(outputs, before, strict=True):
            assert digests(output) == whole
            after = times(output)
            assert all(after[name] == moment for name, moment in moments.items())
            shutil.rmtree(output)
    return kills


@pytest.mark.parametrize("part", range(4))
def test_a_kill_at_every_step_of_quantize(
    zygote: Zygote, small: Path, quantized: Reference, memory_folder: Path, part: int,
    record_property: Record,
) -> None:  # fmt: skip
    steps = zygote.count(*quantize_args(small, memory_folder / "count"), kinds=RARE)
    orders = [
        {"at": step, "kinds": RARE, "action": "kill before"}
        for step in range(1 + part, steps + 1, 4)
    ]
    if part == 0:
        orders.append({"at": steps, "kinds": RARE, "action": "kill after"})
    kills = survive(zygote, partial(quantize_args, small), memory_folder, quantized[1], orders)
    assert kills == len(orders)
    record_property("kills", kills)


def test_kills_at_steps_of_dequantize(
    zygote: Zygote, quantized: Reference, decoded: Reference, memory_folder: Path,
    record_property: Record,
) -> None:  # fmt: skip
    """The same machinery, so every third step is enough."""
    command = partial(dequantize_args, quantized[0])
    steps = zygote.count(*command(memory_folder / "count"), kinds=RARE)
    orders = [
        {"at": step, "kinds": RARE, "action": "kill after"} for step in range(2, steps + 1, 3)
    ]
    kills = survive(zygote, command, memory_folder, decoded[1], orders)
    assert kills == len(orders)
    record_property("kills", kills)


def test_torn_writes_and_random_moments(
    zygote: Zygote, small: Path, quantized: Reference, memory_folder: Path,
    record_property: Record,
) -> None:  # fmt: skip
    command = partial(quantize_args, small)
    writes = zygote.count(*command(memory_folder / "count"), kinds=("pwrite",))
    seconds = zygote.run(*command(memory_folder / "timed")).seconds
    chance = random.Random(20261129)
    orders: list[dict[str, Any]] = [
        {"at": step, "kinds": ("pwrite",), "action": "tear"}
        for step in chance.sample(range(1, writes + 1), 12)
    ]
    orders += [{"kill_after": chance.uniform(0, 1.2 * seconds)} for _ in range(24)]
    kills = survive(zygote, command, memory_folder, quantized[1], orders)
    assert kills >= 20
    record_property("kills", kills)


def test_killed_again_and_again(
    zygote: Zygote, small: Path, quantized: Reference, memory_folder: Path, record_property: Record
) -> None:
    """The resumed run is killed as well, up to six times, at random steps."""
    chance = random.Random(7)
    kills = 0
    for number in range(6):
        output = memory_folder / f"out-{number}"
        command = quantize_args(small, output)
        kept: dict[str, int] = {}
        for _ in range(6):
            ended = zygote.run(
                *command, "--resume", at=chance.randint(1, 60), kinds=RARE, action="kill before"
            )
            if not ended.killed:
                break
            kills += 1
            check_left(output, quantized[1])
            now = times(output) if output.exists() else {}
            assert all(now[name] == moment for name, moment in kept.items())
            kept = now
        assert zygote.run(*command, "--resume").code == 0
        assert digests(output) == quantized[1]
    assert kills > 10
    record_property("kills", kills)


def test_kills_while_an_old_checkpoint_is_replaced(
    zygote: Zygote, small: Path, quantized: Reference, decoded: Reference, memory_folder: Path,
    record_property: Record,
) -> None:  # fmt: skip
    """`--overwrite` killed anywhere leaves old or new, never a folder that both refuse."""
    old = memory_folder / "old"
    shutil.copytree(decoded[0], old)
    count = memory_folder / "count"
    shutil.copytree(old, count)
    steps = zygote.count(*quantize_args(small, count, "--overwrite"), kinds=RARE)
    chosen = [*range(1, 30), *range(30, steps, 15)]
    for step in chosen:
        output = memory_folder / f"out-{step}"
        shutil.copytree(old, output, copy_function=os.link)
        command = quantize_args(small, output)
        ended = zygote.run(*command, "--overwrite", at=step, kinds=RARE, action="kill before")
        assert ended.killed
        left = {n: d for n, d in digests(output).items() if not n.startswith(".beamq")}
        loadable = {"config.json", "beamq.json"} <= left.keys()
        if loadable:
            assert left == decoded[1]
        elif "config.json" in left:  # all that engines ask for: weights are whole, old or new
            unmarked = [{n: d for n, d in each.items() if n != "beamq.json"}
                        for each in (decoded[1], quantized[1])]  # fmt: skip
            assert any(each.items() <= left.items() for each in unmarked), step
        resumed = zygote.run(*command, "--resume")
        if resumed.code:
            assert loadable  # still the old one: named as such, and replaced when asked again
            assert "started with" in resumed.err
            assert zygote.run(*command, "--overwrite").code == 0
        after = digests(output)
        # Companions of the old one that the new one lacks stay: nobody knows whose they are.
        assert {name: after[name] for name in quantized[1]} == quantized[1]
        assert not [name for name in after if name.endswith(".partial")]
        shards = {name for name in after if name.endswith(".safetensors")}
        assert shards == {name for name in quantized[1] if name.endswith(".safetensors")}
    record_property("kills", len(chosen))
