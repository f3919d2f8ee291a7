"""Several machines: two agents of torchrun on this one, each with a temporary folder of its own, on
a file system without flock; a node that is lost; folders that the machines do not share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import beamq
from beamq.ranks import LOST
from tests.helpers.free_ports import free_port
from tests.helpers.harness import digests

# Imported by Python at its start: no locks, and an agent that dies with its rank at a given rename.
SITE = """
import errno, fcntl, os, signal

def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")

fcntl.flock = flock
replace, renames = os.replace, []

def counted(*args, **keywords):
    renames.append(args)
    if len(renames) == int(os.environ["LOST_AT"]):
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*args, **keywords)

if os.environ.get("LOST_AT") and "RANK" in os.environ:
    os.replace = counted
"""
OPTIONS = ["--samples", "4", "--max-shard-size", "600kB"]
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for node in 0 1; do
  mkdir "$TMPDIR/$node"
  SLURM_NODEID=$node TMPDIR=$TMPDIR/$node "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit ${code:-0}
"""


class Node:
    """One machine: a command with a temporary folder of its own."""

    def __init__(self, folder: Path, *command: str | Path, **env: str) -> None:
        for each in ("tmp", "site", "bin"):
            (folder / each).mkdir(parents=True)
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        package = os.environ.get("PYTHONPATH") or str(Path(beamq.__file__).parents[1])
        self.tmp = folder / "tmp"
        self._process = subprocess.Popen(
            list(map(str, command)),
            env={**os.environ, "TMPDIR": str(self.tmp),
                 "PYTHONPATH": f"{folder / 'site'}:{package}",
                 "PATH": f"{Path(sys.executable).parent}:{folder / 'bin'}:{os.environ['PATH']}",
                 **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        try:
            out, err = self._process.communicate(timeout=240)
        finally:
            self._process.kill()
        return self._process.returncode, out, err


@pytest.fixture(scope="module")
def whole(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one process makes of it."""
    output = tmp_path_factory.mktemp("whole") / "out"
    beamq.quantize(beam_nano, output, samples=4, max_shard_bytes="600kB")
    return digests(output)


def documented(repo: Path, language: str, source: Path, output: Path) -> str:
    """The block of docs/clusters.md in that language that runs on two nodes: one rank on each, and
    with a small Beam."""
    page = (repo / "docs" / "clusters.md").read_text()
    blocks = [block.partition("\n```")[0] for block in page.split(f"```{language}\n")[1:]]
    (text,) = (block for block in blocks if "--node-rank" in block)
    for theirs, ours in (
        ("/shared/my-beam-nvfp4", str(output)),
        ("/shared/my-beam", str(source)),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("--resume", " ".join(["--resume", *OPTIONS])),
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    return text


def test_the_slurm_script_gives_the_bytes_of_one_process(
    repo: Path, beam_nano: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "shared" / "out"
    script = documented(repo, "sh", beam_nano, output)
    assert script.startswith("#!/bin/bash\n#SBATCH")
    job = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": str(os.getpid())}
    node = Node(tmp_path / "node", "bash", "-c", script, **job)
    code, out, errors = node.end()
    assert code == 0, errors
    assert out.count("2 processes") == 1
    assert digests(output) == whole
    left = [path.name for path in node.tmp.glob("*/*")]
    assert left
    assert all(name.startswith("torchelastic") for name in left), "only torchrun's own"


def test_the_kubernetes_job_loses_a_node_and_three_ranks_resume(
    repo: Path, beam_nano: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "shared" / "out"
    service, job = yaml.safe_load_all(documented(repo, "yaml", beam_nano, output))
    pod = job["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    name = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert command[:2] == ["bash", "-c"]
    assert f"--master-addr {name} --master-port 29500" in command[2]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert pod["subdomain"] == service["metadata"]["name"]
    command[2] = command[2].replace(name, "127.0.0.1").replace("29500", free_port())
    nodes = [
        Node(tmp_path / rank, *command, JOB_COMPLETION_INDEX=rank, LOST_AT=lost_at)
        for rank, lost_at in (("0", ""), ("1", "4"))
    ]
    first, second = [node.end() for node in nodes]
    assert second[0] == -9
    assert first[0] == 1  # torchrun's own; it names the rank's
    assert LOST in first[2]
    assert "exitcode  : 4" in first[2]
    finished = {path: path.stat().st_mtime_ns for path in output.glob("*.safetensors")}
    assert 0 < len(finished) < sum(name.endswith(".safetensors") for name in whole)
    assert not (output / "config.json").exists()
    three = ["torchrun", "--standalone", "--nproc-per-node", "3", "--no-python", "beamq"]
    again = Node(tmp_path / "2", *three, "quantize", beam_nano, output, "--resume", *OPTIONS)
    code, _, errors = again.end()
    assert code == 0, errors
    assert digests(output) == whole
    assert all(path.stat().st_mtime_ns == moment for path, moment in finished.items())


UNSHARED = """
import sys
from beamq.cli import app
from beamq.io import lock

lock.SEEN_SECONDS = 0.5
app(sys.argv[1:], prog_name="beamq")
"""


@pytest.mark.parametrize("command", ["quantize", "calibrate"])
def test_folders_that_the_machines_do_not_share_are_refused_at_once(
    beam_nano: Path, tmp_path: Path, command: str
) -> None:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", UNSHARED, command, beam_nano, "here", "--samples", "4"],
                env={**os.environ, **meeting, "RANK": rank, "LOCAL_RANK": "0"},
                cwd=tmp_path / rank, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [4, 4], errors
    assert "rank 1 on" in errors[0]
    assert "does not see what rank 0 on" in errors[0]
    assert "error" not in errors[1]
    assert not list(tmp_path.glob("*/*"))
