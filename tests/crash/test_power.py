"""Power loss: only what was flushed survives, and what has its final name is whole all the same.

A traced run yields every step with a listing of the output behind it. From that, two extremes of
what a disk may hold after the lights go out are worked out for every moment:

    lazy    a name is there only if its folder was flushed after it was made
    eager   names are there at once, as a journaling file system may have it

and in both a file has the bytes it had when it was last flushed, zeros for the rest. What POSIX
promises lies between. Then a run resumes from such a state and must end with the same bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.harness import Reference, Zygote, digests, quantize_args

State = dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Events of one run, and what a disk may hold behind each of them."""

    events: list[dict[str, Any]]
    lazy: list[State]
    eager: list[State]


@pytest.fixture(scope="module")
def trace(zygote: Zygote, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    root = tmp_path_factory.mktemp("trace")
    ended = zygote.run(
        *quantize_args(small, root / "out"), trace=str(root), events=str(root / "events")
    )
    assert ended.code == 0, ended.err
    events = json.loads((root / "events").read_text())
    for event in events:
        event["tree"] = {
            str(Path(path).relative_to(root)): (inode, folder, size)
            for path, inode, folder, size in event["tree"]
            if path != str(root / "events")
        }
        for key in ("path", "to"):
            if key in event and Path(event[key]).is_relative_to(root):
                event[key] = str(Path(event[key]).relative_to(root))
    return Trace(events=events, **_states(events))


def _states(events: list[dict[str, Any]]) -> dict[str, list[State]]:
    """Replay the events on two model disks."""
    flushed: dict[int, bytes] = {}  # by inode
    names: dict[str, dict[str, int]] = {".": {}}  # by folder: what its last flush made durable
    kinds: dict[int, bool] = {}  # whether an inode is a folder
    lazy, eager = [], []
    for event in events:
        tree, path = event["tree"], event["path"]
        if event["step"] == "open" and path in tree:
            flushed[tree[path][0]] = b""  # new, or cut to nothing
        if event["step"] == "fsync":
            if "content" in event:
                flushed[tree[path][0]] = base64.b64decode(event["content"])
            else:
                inside = {n: e for n, e in tree.items() if str(Path(n).parent) == path}
                names[path] = {Path(n).name: entry[0] for n, entry in inside.items()}
        kinds.update({inode: folder for inode, folder, _ in tree.values()})
        lazy.append(_reachable(names, flushed, kinds))
        eager.append(
            {
                name: flushed.get(inode, b"").ljust(size, b"\0")[:size]
                for name, (inode, folder, size) in tree.items()
                if not folder
            }
        )
    return {"lazy": lazy, "eager": eager}


def _reachable(
    names: dict[str, dict[str, int]], flushed: dict[int, bytes], kinds: dict[int, bool]
) -> State:
    """Files whose every folder is durable, with their flushed bytes."""
    state: State = {}

    def walk(folder: str) -> None:
        for name, inode in names.get(folder, {}).items():
            path = name if folder == "." else f"{folder}/{name}"
            if kinds.get(inode):
                walk(path)
            else:
                state[path] = flushed.get(inode, b"")

    walk(".")
    return state


def is_final(name: str) -> bool:
    return not name.endswith((".partial", ".beamq.lock")) and "/.beamq/" not in f"/{name}"


@pytest.mark.parametrize("kind", ["lazy", "eager"])
def test_what_has_its_name_is_whole_at_every_moment(
    trace: Trace, quantized: Reference, kind: str, record_property: Callable[[str, object], None]
) -> None:
    whole = {f"out/{p.relative_to(quantized[0])}": p.read_bytes()
             for p in quantized[0].rglob("*") if p.is_file()}  # fmt: skip
    states: list[State] = getattr(trace, kind)
    for moment, state in enumerate(states):
        for name, content in state.items():
            if is_final(name):
                assert content == whole[name], (moment, name)
    assert {name: content for name, content in states[-1].items() if is_final(name)} == whole
    record_property("moments", len(states))


def test_the_last_state_is_durable_without_further_ado(trace: Trace) -> None:
    """When the command returns, even the laziest disk has everything but the state folder's end."""
    assert set(trace.eager[-1]) == {name for name in trace.lazy[-1] if is_final(name)}


def test_order_of_steps(trace: Trace) -> None:
    """Flush, record, rename, flush the folder; what makes it loadable comes after all weights."""
    steps = [(event["step"], event["path"]) for event in trace.events]
    renames = {event["to"]: n for n, event in enumerate(trace.events) if event["step"] == "replace"}
    journal = "out/.beamq/journal-0.jsonl"
    records = [n for n, step in enumerate(steps) if step == ("fsync", journal)]
    shards = [name for name in renames if name.endswith(".safetensors")]

    def next_step(at: int) -> tuple[str, str]:
        """Of the same thread: another one may open its shard in between."""
        thread = trace.events[at]["thread"]
        return next(
            step
            for step, event in zip(steps[at + 1 :], trace.events[at + 1 :], strict=True)
            if event["thread"] == thread
        )

    assert len(shards) > 2
    for name in shards:
        at = renames[name]
        flush = max(n for n in range(at) if steps[n] == ("fsync", f"{name}.partial"))
        assert any(flush < record < at for record in records)
        assert next_step(at) == ("fsync", "out")
    last_shard = max(renames[name] for name in shards)
    for name in ("config.json", "model.safetensors.index.json", "hf_quant_config.json"):
        assert renames[f"out/{name}"] > last_shard
    for name, at in renames.items():
        if name != "out/beamq.json" and not name.startswith("out/.beamq"):
            assert at <= renames["out/config.json"] < renames["out/beamq.json"], name
        flushed = [n for n in range(at) if steps[n] == ("fsync", trace.events[at]["path"])]
        assert flushed, name
        assert next_step(at) == ("fsync", str(Path(name).parent))


@pytest.mark.parametrize("kind", ["lazy", "eager"])
def test_resuming_after_the_lights_went_out(
    zygote: Zygote, trace: Trace, small: Path, quantized: Reference, memory_folder: Path,
    kind: str, record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    states: list[State] = getattr(trace, kind)
    chosen = range(2 if kind == "lazy" else 5, len(states), 6)
    outputs = []
    for moment in chosen:
        folder = memory_folder / f"{moment}"
        for name, content in states[moment].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        outputs.append(folder / "out")
    for begin in range(0, len(outputs), 4):
        batch = outputs[begin : begin + 4]
        orders = [{"args": [str(a) for a in quantize_args(small, output, "--resume")]}
                  for output in batch]  # fmt: skip
        for output, ended in zip(batch, zygote.run_all(orders), strict=True):
            assert ended.code == 0, (output, ended.err)
            assert digests(output) == quantized[1]
    record_property("resumes", len(outputs))
