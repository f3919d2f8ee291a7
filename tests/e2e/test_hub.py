"""Sources on the Hub, against a small local server: what is read, what is fetched, what is kept."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from beamq.adapter.inspect import inspect_adapter
from beamq.convert.dequantize import dequantize
from beamq.convert.quantize import quantize
from beamq.errors import (
    AdapterError,
    BeamqError,
    CheckpointError,
    DiskError,
    HubError,
    HubUnreachableError,
    ResumeError,
)  # fmt: skip
from beamq.eval.compare.compare import compare
from beamq.eval.verify.inspect import inspect_checkpoint
from beamq.eval.verify.verify import verify
from beamq.io.checkpoint import open_checkpoint
from beamq.io.shard_cache import largest_job, traffic_nbytes
from beamq.plan.plan import make_plan
from beamq.units import show_bytes
from tests.helpers import safetensors_edit as st
from tests.helpers.hub_server import TOKEN, Fault, HubServer, client_of, environment, hub_server
from tests.helpers.waiting import wait_for

NANO = "reflection/beam-nano"
SHARDS = 8
SHARD = r"model-0000\d-of-00008\.safetensors"
OPTIONS: dict[str, Any] = {"no_calibration": True, "max_shard_bytes": 500_000, "workers": 2}
RUN = (
    "import sys; from beamq.convert.quantize import quantize;"
    "quantize(sys.argv[1], sys.argv[2], no_calibration=True, max_shard_bytes=500_000, workers=2,"
    " resume='resume' in sys.argv, cache_bytes=3_000_000)"
)


def split(source: Path, target: Path, *, scattered: bool) -> Path:
    """beam-nano in eight shards: in the model's order, or with fused partners dealt apart."""
    shutil.copytree(source, target)
    tensors = st.load(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names = [m.source.spec.name for job in make_plan(source).jobs for m in job.members]
    total = sum(len(tensors[name][2]) for name in names)
    parts: list[st.Tensors] = [{} for _ in range(SHARDS)]
    begin = 0
    for index, name in enumerate(names):
        part = index % SHARDS if scattered else begin * SHARDS // total
        parts[part][name] = tensors[name]
        begin += len(tensors[name][2])
    weight_map = {}
    for index, part in enumerate(parts):
        file = f"model-{index + 1:05d}-of-{SHARDS:05d}.safetensors"
        st.save(target / file, part)
        weight_map.update(dict.fromkeys(part, file))
    index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    (target / "model.safetensors.index.json").write_text(index_text)
    (target / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Nano\n")
    return target


@pytest.fixture(scope="module")
def source(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(beam_nano, tmp_path_factory.mktemp("source") / "nano", scattered=False)


@pytest.fixture(scope="module")
def running(
    source: Path, beam_nano: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HubServer]:
    apart = split(beam_nano, tmp_path_factory.mktemp("apart") / "nano", scattered=True)
    with hub_server() as hub:
        hub.add(NANO, source)
        hub.add("reflection/apart", apart)
        hub.add("reflection/secret", source, private=True)
        hub.add("reflection/gated", source, gated=True)
        yield hub


@pytest.fixture
def hub(running: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server with nothing broken, and a client that knows, and can reach, only it."""
    with client_of(running, tmp_path / "hf", monkeypatch):
        yield running


def digests(folder: Path) -> dict[str, str]:
    """Of everything whose bytes do not tell where the source was."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("README.md", "beamq.json")
    }


def whole_shards(hub: HubServer) -> Counter[str]:
    """How often each shard was asked for without a range."""
    return Counter(
        path.rpartition("/")[2]
        for method, path, ranged in hub.requests
        if method == "GET" and "/cdn/" in path and not ranged and re.search(SHARD, path)
    )


@pytest.fixture(scope="module")
def local(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same conversion from the folder."""
    output = tmp_path_factory.mktemp("local") / "out"
    quantize(source, output, **OPTIONS)
    return output


def test_plan_and_inspect_read_headers_only(hub: HubServer, source: Path) -> None:
    plan, there = make_plan(NANO), make_plan(source)
    assert plan.digest() == there.digest()
    assert plan.output_nbytes == there.output_nbytes
    assert plan.source_fingerprint == f"hub:{NANO}@{hub.repos[NANO].refs['main']}"
    assert len(plan.remote_shards) == SHARDS
    found = inspect_checkpoint(f"{NANO}@main")
    assert (found.format, found.files, found.checkpoint) == ("bf16", 8, f"{NANO}@main")
    assert found.notes == inspect_checkpoint(source).notes
    ranges = [r for _, path, r in hub.requests if "/cdn/" in path and path.endswith(".safetensors")]
    assert len(ranges) == 2 * SHARDS
    assert set(ranges) == {"bytes=0-131071"}


def test_a_git_lfs_pointer_on_the_hub_is_refused(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    bad = Path(shutil.copytree(source, tmp_path / "bad"))
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 900\n"
    (bad / "tokenizer.json").write_text(pointer)
    hub.add("reflection/pointer", bad)
    with pytest.raises(CheckpointError, match=r"1 file is not there.*\(tokenizer.json\)"):
        make_plan("reflection/pointer")


def test_quantize_streams_shards_within_the_budget(
    hub: HubServer, local: Path, tmp_path: Path
) -> None:
    output, budget, seen = tmp_path / "out", 3_000_000, [0]
    place = output / ".beamq" / "source-0"
    real = open_checkpoint(NANO)
    assert sum(real.source.missing_nbytes().values()) > 2 * budget
    real.close()

    def look(_: object) -> None:
        sizes = [path.stat().st_size for path in place.rglob("*.safetensors") if path.exists()]
        seen.append(sum(sizes))

    hub.faults.append(Fault("GET", "/cdn/.*" + SHARD, times=99, wait=0.05, whole=True))
    hub.requests.clear()
    result = quantize(NANO, output, cache_bytes=budget, on_progress=look, **OPTIONS)
    assert 0 < max(seen) <= budget
    assert digests(output) == digests(local)
    jobs = [job.files for job in result.plan.jobs]
    fetched = whole_shards(hub)
    sizes = result.plan.remote_shards
    assert sum(sizes[name] * times for name, times in fetched.items()) <= traffic_nbytes(
        jobs, sizes, budget
    )
    assert set(fetched) == set(sizes)
    assert not (output / ".beamq").exists()
    assert not list((tmp_path / "hf").rglob("model-*.safetensors"))
    assert result.manifest is not None
    commit = hub.repos[NANO].refs["main"]
    assert result.manifest["source"] == {"base_model": NANO, "repo": NANO, "commit": commit}
    card = (output / "README.md").read_text()
    assert f"base_model: {NANO}\nbase_model_relation: quantized\nlicense: apache-2.0" in card
    report = verify(output, source=NANO, sample=0)
    assert report.ok, report.failures
    assert not list((tmp_path / "hf").rglob("model-*.safetensors"))


def test_scattered_partners_need_their_shards_together(hub: HubServer, tmp_path: Path) -> None:
    plan = make_plan("reflection/apart", "nvfp4-all")
    need, count = largest_job([job.files for job in plan.jobs], plan.remote_shards)
    assert count == 4
    output = tmp_path / "out"
    options = {**OPTIONS, "recipe": "nvfp4-all"}
    with pytest.raises(DiskError, match=rf"too small for the 4 shards .* {show_bytes(need)}$"):
        quantize("reflection/apart", output, cache_bytes=need - 1, **options)
    assert not output.exists()
    quantize("reflection/apart", output, cache_bytes=2 * need - 1, **options)
    assert verify(output, level="structure").ok


def test_failing_servers_and_cut_connections_cost_time_only(
    hub: HubServer, local: Path, tmp_path: Path
) -> None:
    hub.faults += [
        Fault("GET", r"/api/models/[^/]+/[^/]+/tree", status=429),
        Fault("GET", r"/api/models/[^/]+/[^/]+$", times=2, status=503),
        Fault("GET", "/cdn/.*" + SHARD, cut=1000),  # a header's range
        Fault("GET", "/cdn/.*00003-of", cut=200_000, whole=True),
        Fault("HEAD", "00005-of", status=500),
        Fault("GET", "/cdn/.*00006-of", status=503, whole=True),
        Fault("GET", r"resolve/\w+/chat_template.jinja", status=502),
    ]
    output = tmp_path / "out"
    quantize(NANO, output, cache_bytes=4_000_000, **OPTIONS)
    assert digests(output) == digests(local)
    assert not [fault for fault in hub.faults if fault.times], "each was met"


def test_a_killed_run_goes_on_with_the_shards_it_has(
    hub: HubServer, local: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    place = output / ".beamq" / "source-0" / "ahead"
    hub.faults.append(Fault("GET", "/cdn/.*00004-of", times=99, wait=60, whole=True))
    command = [sys.executable, "-c", RUN, NANO, str(output)]
    process = subprocess.Popen(command, env=environment(hub, tmp_path / "hf"))
    wait_for(
        lambda: list(output.glob("*.safetensors")) and len(list(place.glob("*.safetensors"))) > 1
    )
    process.kill()
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in output.glob("*.safetensors")}
    here = {path.name for path in place.glob("*.safetensors")}
    assert kept
    assert here
    hub.faults.clear()
    hub.requests.clear()
    result = quantize(NANO, output, resume=True, cache_bytes=3_000_000, **OPTIONS)
    assert result.resumed_shards >= len(kept)
    assert digests(output) == digests(local)
    assert all(path.stat().st_mtime_ns == moment for path, moment in kept.items())
    assert not here.intersection(whole_shards(hub)), "fetched again"


def test_a_revision_that_moved_is_refused_by_name(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    name, output = "reflection/moving", tmp_path / "out"
    first = hub.add(name, source)
    hub.faults.append(Fault("GET", "/cdn/.*00008-of", times=99, status=403, whole=True))
    with pytest.raises(HubError, match=r"fetching model-00008-of-00008.safetensors was refused"):
        quantize(name, output, **OPTIONS)
    hub.faults.clear()
    moved = hub.repos[name].commit("main", dict(hub.repos[name].trees[first]))
    assert moved != first
    wanted = rf"started with the source {name}@{first} \(given now: {name}@{moved}\)"
    with pytest.raises(ResumeError, match=wanted):
        quantize(name, output, resume=True, **OPTIONS)
    result = quantize(f"{name}@{first}", output, resume=True, **OPTIONS)
    assert result.manifest is not None
    assert result.manifest["source"]["commit"] == first


@pytest.mark.parametrize(
    ("name", "error", "code", "said"),
    [
        ("reflection/none", HubError, 3, "no such folder here and no such repository"),
        ("reflection/secret", HubError, 3, r"private and no token is set \(HF_TOKEN\)"),
        ("reflection/gated", HubError, 3, r"gated; ask for access at http.*/reflection/gated"),
        (f"{NANO}@v9", HubError, 3, "no such branch, tag or commit; check the part after @"),
        ("re..flection/a--b", BeamqError, 2, "not a repository's name"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(
    hub: HubServer, name: str, error: type[BeamqError], code: int, said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        make_plan(name)
    assert raised.value.exit_code == code
    assert len(str(raised.value)) < 250
    assert "\n" not in str(raised.value)


def test_a_token_opens_private_and_gated_repositories(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert make_plan("reflection/secret").digest() == make_plan("reflection/gated").digest()


def test_a_hub_that_is_down_or_absent(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults.append(Fault("GET", "/api/models", times=99, status=503))
    with pytest.raises(HubUnreachableError, match=r"answers 503 \(6 attempts\); run again later"):
        make_plan(NANO)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachableError, match=r"127\.0\.0\.1:9 cannot be reached") as raised:
        make_plan(NANO)
    assert raised.value.exit_code == 4


def test_offline_serves_what_the_hub_cache_has(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, snapshot_download

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE is set and the Hub cache does"):
        make_plan(NANO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    online = make_plan(NANO).source_fingerprint
    snapshot = Path(snapshot_download(NANO))
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    plan = make_plan(NANO)
    assert plan.source_fingerprint == online
    assert not plan.remote_shards
    result = quantize(NANO, tmp_path / "out", recipe="fp8", max_shard_bytes=500_000)
    assert not hub.requests
    assert result.manifest is not None
    assert result.manifest["source"]["repo"] == NANO
    assert all((snapshot / shard.name).is_file() for shard in source.glob("model*")), "kept"


def test_a_folder_wins_over_a_repository_of_that_name(
    hub: HubServer, beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(beam_nano, tmp_path / NANO)
    monkeypatch.chdir(tmp_path)
    with open_checkpoint(NANO) as opened:
        assert opened.files == ("model.safetensors",)
    assert not hub.requests


def test_dequantize_and_content_digest_from_the_hub(
    hub: HubServer, local: Path, source: Path, tmp_path: Path
) -> None:
    hub.add("someone/quantized", local)
    dequantize("someone/quantized", tmp_path / "there", cache_bytes=1_500_000)
    dequantize(local, tmp_path / "here")
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    with open_checkpoint(NANO) as far, open_checkpoint(source) as near:
        assert far.content_digest() == near.content_digest()
        assert far.label == NANO
        assert (far.root / "tokenizer.json").read_bytes() == (
            source / "tokenizer.json"
        ).read_bytes()


def test_both_sides_of_a_comparison_from_the_hub(hub: HubServer, local: Path, source: Path) -> None:
    hub.add("someone/quantized", local)
    text: dict[str, Any] = {"samples": 2, "sequence_length": 64}
    far, near = compare(NANO, "someone/quantized", **text), compare(source, local, **text)
    ours, theirs = (found.to_dict()["candidates"][0] for found in (far, near))
    assert ours | {"name": ""} == theirs | {"name": ""}
    assert (far.source.name, ours["name"]) == (NANO, "someone/quantized")


def test_calibrating_on_the_way_fetches_each_shard_once(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "samples": 2, "sequence_length": 64, "device": "cpu", "max_shard_bytes": 500_000
    }  # fmt: skip
    quantize(source, tmp_path / "here", **options)
    quantize(NANO, tmp_path / "there", cache_bytes=3_000_000, **options)
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert set(whole_shards(hub).values()) == {1}
    assert not list((tmp_path / "hf").rglob("model-*.safetensors"))


# An adapter on the Hub

SHARDED: dict[str, Any] = {"max_shard_bytes": 500_000, "workers": 2}


def test_an_adapter_and_its_source_on_the_hub(
    hub: HubServer, beam_nano: Path, adapters: Path, tmp_path: Path
) -> None:
    """Both on the Hub give the bytes of both in folders."""
    adapter = adapters / "usual-seven-0.21.2"
    hub.add("someone/adapter", adapter)
    quantize(NANO, tmp_path / "hub", recipe="fp8", adapter="someone/adapter", **SHARDED)
    quantize(beam_nano, tmp_path / "local", recipe="fp8", adapter=adapter, **SHARDED)
    for path in sorted((tmp_path / "local").glob("*.safetensors")):
        assert (tmp_path / "hub" / path.name).read_bytes() == path.read_bytes()
    record = json.loads((tmp_path / "hub" / "beamq.json").read_text())["adapter"]
    assert record["name"] == "someone/adapter"
    seen = inspect_adapter("someone/adapter", source=NANO)
    assert seen.refused is None
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        quantize(beam_nano, tmp_path / "x", recipe="fp8", adapter=NANO)
