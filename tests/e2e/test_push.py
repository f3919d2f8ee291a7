"""`beamq push` against a small local server: what is sent, in which order, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from beamq.cli import app
from beamq.convert.quantize import quantize
from beamq.errors import CheckFailed, HubError, HubUnreachableError, UsageError
from beamq.io.checkpoint import open_checkpoint
from beamq.publish import LAST_NAMES, push
from tests.helpers.checkpoint_damage import edit_json, flip
from tests.helpers.hub_server import (
    Blob,
    Fault,
    HubServer,
    Repo,
    environment,
)
from tests.helpers.pushing import REPO, folder_to_push, hub_to_push_to, sent, there
from tests.helpers.waiting import wait_for


@pytest.fixture(scope="module")
def output(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_to_push(beam_nano, tmp_path_factory.mktemp("push"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_to_push_to(tmp_path, monkeypatch) as running:
        yield running


def test_everything_arrives_index_and_configs_last(hub: HubServer, output: Path) -> None:
    result = push(output, REPO, private=True)
    assert there(hub) == sent(output)
    assert hub.repos[REPO].private
    first, last = (added for added, _ in hub.commits)
    assert set(last) == {name for name in LAST_NAMES if (output / name).exists()}
    assert not set(last).intersection(first)
    assert result.commit == hub.repos[REPO].refs["main"]
    assert result.nbytes == sum(map(len, sent(output).values()))
    assert result.url == f"{hub.endpoint}/{REPO}/tree/main"
    assert not any(file.there for file in result.files)
    commits = len(hub.commits)
    again = push(output, REPO)
    assert again.withdrawn == ()
    assert all(file.there for file in again.files)
    assert len(hub.commits) == commits, "nothing changed, nothing committed"


@pytest.mark.parametrize("option", ["--quiet", "--json"])
def test_a_push_says_what_was_there_and_the_library_says_nothing_UEP51(
    hub: HubServer, output: Path, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    for sent_first in (True, False):
        with pytest.raises(SystemExit) as left:
            app(["push", str(output), REPO, option], prog_name="beamq")
        assert left.value.code == 0
        shown = capfd.readouterr()
        if option == "--json":
            assert shown.err.startswith("Note: the card lacks base_model")
            assert "modified" not in shown.err
            assert "LFS" not in shown.err
            files = json.loads(shown.out)["files"]
            assert [file["there"] for file in files] == [not sent_first] * len(files)
        else:
            assert shown.err == ""
            found = re.search(r"^sent +(.*)\nalready there +(.*)$", shown.out, re.MULTILINE)
            assert found is not None
            assert [part == "nothing" for part in found.groups()] == [not sent_first, sent_first]


def test_another_format_leaves_nothing_of_beamqs_and_names_the_rest(
    hub: HubServer,
    output: Path,
    beam_nano: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    earlier = Path(shutil.copytree(output, tmp_path / "earlier"))
    for name in ("beamq-coverage.txt", "USE_POLICY.md"):
        (earlier / name).write_text(name)
    push(earlier, REPO)
    quantize(beam_nano, tmp_path / "fp8", recipe="fp8", max_shard_bytes=690_000)
    names, others = ({p.name for p in f.glob("*.safetensors")} for f in (output, tmp_path / "fp8"))
    assert names == others
    with pytest.raises(SystemExit) as left:
        app(["push", str(tmp_path / "fp8"), REPO, "--quiet"], prog_name="beamq")
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "also has 2 files that are not in the folder: USE_POLICY.md, code/tool [1].py." in shown
    assert "beamq-coverage.txt" in shown.partition("Withdrawn first: ")[2]
    assert set(there(hub)) == {*sent(tmp_path / "fp8"), "USE_POLICY.md", "code/tool [1].py"}


def test_what_looks_like_a_secret_stays_here_and_gaps_are_said_first(
    hub: HubServer, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(output, tmp_path / "more"))
    for name in ("id_rsa", "old.pkl"):
        (folder / name).write_text(name)
    for options in (["--dry-run"], []):
        with pytest.raises(SystemExit) as left:
            app(["push", str(folder), REPO, *options], prog_name="beamq")
        assert left.value.code == 0
        captured = capsys.readouterr()
        said = " ".join((captured.out if options else captured.err).split())
        assert "Note: the card lacks base_model (" in said
        assert "license (" in said
        assert "model-index (" in said
        assert "id_rsa (may be a secret), old.pkl (pickles)" in said
    assert there(hub) == sent(output)
    (folder / "README.md").write_text("---\nbase_model: [\n---\n")
    assert "not valid YAML" in push(folder, REPO, dry_run=True).gaps[0]
    (folder / "README.md").write_text("---\nbase_model: a/b\nlicense: mit\nmodel-index: [x]\n---\n")
    assert push(folder, REPO, dry_run=True).gaps == ()


def test_failing_servers_and_cut_connections(hub: HubServer, output: Path) -> None:
    hub.faults += [
        Fault("POST", "/api/repos/create", status=503),
        Fault("POST", "/objects/batch", status=429),
        Fault("PUT", "/lfs/", status=500),
        Fault("PUT", "/lfs/", cut=1000, skip=2),
        Fault("POST", "/commit/", times=2, status=502),
    ]
    push(output, REPO)
    assert there(hub) == sent(output)
    assert not [fault for fault in hub.faults if fault.times], "each was met"
    assert len(hub.received) == len(set(hub.received)), "no file was sent twice"


def test_a_killed_push_goes_on(hub: HubServer, output: Path, tmp_path: Path) -> None:
    hub.faults.append(Fault("PUT", "/lfs/", times=99, wait=30, skip=3))
    code = "import sys; from beamq.publish import push; push(sys.argv[1], sys.argv[2])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(output), REPO], env=environment(hub, tmp_path / "hf")
    )
    wait_for(lambda: len(hub.received) == 3)
    process.kill()
    process.wait()
    assert len(hub.received) == 3
    assert not there(hub), "nothing is visible before all of it is there"
    hub.faults.clear()
    push(output, REPO)
    assert there(hub) == sent(output)
    assert len(hub.received) == len(set(hub.received)), "what had arrived was not sent again"


def test_an_older_checkpoint_is_withdrawn_before_its_weights_change(
    hub: HubServer, output: Path, tmp_path: Path
) -> None:
    old = {**sent(output), "config.json": b"{}", "beamq.json": b"{}"}
    shards = [name for name in old if name.endswith(".safetensors")]
    old[shards[0]] = bytes(len(old[shards[0]]))
    for name, data in old.items():
        path = tmp_path / "old" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    hub.add(REPO, tmp_path / "old")
    hub.faults.append(Fault("PUT", "/lfs/", times=99, status=403))
    with pytest.raises(HubError):
        push(output, REPO)
    assert not set(there(hub)).intersection(LAST_NAMES), "a mixture cannot be loaded"
    hub.faults.clear()
    push(output, REPO)
    assert there(hub) == sent(output)


def test_weights_that_are_only_there_are_refused_not_deleted(
    hub: HubServer, output: Path, tmp_path: Path
) -> None:
    other = tmp_path / "old"
    other.mkdir()
    (other / "model-00001-of-00099.safetensors").write_bytes(b"x")
    (other / "config.json").write_text("{}")
    hub.add(REPO, other)
    with pytest.raises(HubError, match=r"holds 1 weight files .*model-00001-of-00099"):
        push(output, REPO)
    assert set(there(hub)) == {"model-00001-of-00099.safetensors", "config.json"}
    hub.repos[REPO].commit("empty", {})
    push(output, REPO, revision="empty")
    assert there(hub, "empty") == sent(output)


def test_a_listing_that_differs_is_a_failed_check(
    hub: HubServer, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Repo.commit

    def losing(self: Repo, branch: str, files: dict[str, Blob]) -> str:
        kept = {name: blob for name, blob in files.items() if name != "tokenizer.json"}
        return commit(self, branch, kept)

    monkeypatch.setattr(Repo, "commit", losing)
    with pytest.raises(CheckFailed, match=r"tokenizer.json is missing; run the same push again"):
        push(output, REPO)


def test_what_is_refused_before_anything_is_sent(
    hub: HubServer, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("someone/public", tmp_path)
    with pytest.raises(HubError, match="exists and is public"):
        push(output, "someone/public", private=True)
    with pytest.raises(UsageError, match="expected a repository's name"):
        push(output, "beam")
    broken = Path(shutil.copytree(output, tmp_path / "broken"))
    shutil.rmtree(broken / ".beamq")
    (broken / "beamq.json").unlink()
    with pytest.raises(CheckFailed, match=r"cannot be published \(manifest.present"):
        push(broken, REPO)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubUnreachableError, match=r"needs a token with write access; set HF_TOKEN"):
        push(output, REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(HubError, match="no write access; the token needs write access to it"):
        push(output, REPO)
    assert REPO not in hub.repos


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_flipped_bit_is_refused_by_name_before_anything_is_sent(
    hub: HubServer,
    output: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    bad = Path(shutil.copytree(output, tmp_path / "bad"))
    shutil.rmtree(bad / ".beamq")
    names = ("model.layers.3.mlp.experts.1.up_proj.weight", "model.norm.weight")
    for name in names:
        flip(bad, name, 3)
    with pytest.raises(SystemExit) as left:
        app(["push", str(bad), REPO, *options], prog_name="beamq")
    assert left.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be published (checksums.tensors: " in said
    assert all(name in said for name in names)
    assert f"see `beamq verify {bad} --quick`" in said
    assert not hub.requests


def test_a_folder_whose_bytes_cannot_be_checked_is_refused(
    hub: HubServer, output: Path, tmp_path: Path
) -> None:
    odd = Path(shutil.copytree(output, tmp_path / "odd"))
    shutil.rmtree(odd / ".beamq")
    edit_json(odd / "beamq.json", lambda manifest: manifest.update(checksum="sum-of-tomorrow"))
    with pytest.raises(CheckFailed, match=r"cannot be published.*sum-of-tomorrow"):
        push(odd, REPO, dry_run=True)


def test_checking_tells_bytes_done_and_in_all_and_ends_before_sending(
    hub: HubServer, output: Path
) -> None:
    steps: list[tuple[int, int]] = []
    requests_at_end: list[int] = []

    @contextmanager
    def checking() -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: steps.append((done, total))
        requests_at_end.append(len(hub.requests))

    push(output, REPO, checking=checking)
    done, total = steps[-1]
    assert done == total == sum(spec.nbytes for spec in open_checkpoint(output).tensors.values())
    assert requests_at_end == [0]


def test_a_dry_run_refuses_what_no_push_could_reach(output: Path) -> None:
    for repo, revision in ((REPO, "no such branch"), (REPO, "a..b"), ("me/a--b", None)):
        with pytest.raises(UsageError, match=r"not the name of a branch|no such name"):
            push(output, repo, revision=revision, dry_run=True)


def test_a_dry_run_lists_and_sends_nothing(
    hub: HubServer, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        app(["push", str(output), REPO, "--dry-run", "--json"], prog_name="beamq")
    assert left.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert [file["path"] for file in data["files"] if file["last"]] == [
        name for name in sorted(LAST_NAMES) if (output / name).exists()
    ]
    assert {file["path"]: file["bytes"] for file in data["files"]} == {
        name: len(content) for name, content in sent(output).items()
    }
    assert data["commit"] is None
    assert not hub.requests
    with pytest.raises(SystemExit):
        app(["push", str(output), REPO, "--quiet"], prog_name="beamq")
    shown = capsys.readouterr().out
    assert f"repository     {REPO}" in shown
    assert hub.repos[REPO].refs["main"] in shown
