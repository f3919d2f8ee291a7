"""A push that is killed at any stage leaves nothing that could be loaded half, and goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from beamq.publish import LAST_NAMES, push
from tests.helpers.hub_server import Fault, HubServer, environment
from tests.helpers.pushing import REPO, folder_to_push, hub_to_push_to, sent, there
from tests.helpers.waiting import wait_for

STAGES = {
    "the repository is looked up": Fault("POST", "/api/repos/create", times=99, wait=30),
    "no shard has arrived": Fault("PUT", "/lfs/", times=99, wait=30),
    "two shards have arrived": Fault("PUT", "/lfs/", times=99, wait=30, skip=2),
    "all shards have arrived": Fault("POST", "/commit/", times=99, wait=30),
    "shards are committed, configs are not": Fault("POST", "/commit/", times=99, wait=30, skip=1),
}


@pytest.fixture(scope="module")
def output(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_to_push(beam_nano, tmp_path_factory.mktemp("push"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_to_push_to(tmp_path, monkeypatch) as running:
        yield running


@pytest.mark.parametrize("fault", STAGES.values(), ids=STAGES.keys())
def test_a_push_that_is_killed(
    hub: HubServer,
    output: Path,
    tmp_path: Path,
    fault: Fault,
    record_property: Callable[[str, object], None],
) -> None:
    stalled = Fault(fault.method, fault.path, times=99, wait=30, skip=fault.skip)
    hub.faults.append(stalled)
    code = "import sys; from beamq.publish import push; push(sys.argv[1], sys.argv[2])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(output), REPO], env=environment(hub, tmp_path / "hf")
    )
    wait_for(lambda: stalled.times < 99 or process.poll() is not None)
    process.kill()
    process.wait()
    left = set(there(hub)) if REPO in hub.repos else set()
    if set(LAST_NAMES) & left:
        assert left == set(sent(output)), "what makes it loadable comes with all it names"
    hub.faults.clear()
    push(output, REPO)
    assert there(hub) == sent(output)
    record_property("kills", 1)
