"""`--device`: what converts, and when a GPU is worth its start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from beamq import devices
from beamq.convert import gpu_worker, resources
from beamq.convert.gpu_worker import SLOT_BYTES
from beamq.convert.resources import (
    START_SECONDS,
    choose_conversion_device,
    open_workers,
    saved_seconds,
    warn_of_slow_kernels,
    worker_sentence,
)
from beamq.errors import DeviceError, UsageError
from beamq.plan.plan import JobKind
from beamq.ranks import Ranks

GB = 1_000_000_000
ALONE = Ranks()


def work(nbytes: int, kind: str = "nvfp4", scales: str = "sweep") -> Any:
    spec = SimpleNamespace(dtype="BF16")
    rows = nbytes // (2 * 1024)
    source = SimpleNamespace(spec=spec, shape=(rows, 1024), nbytes=rows * 2048)
    job = SimpleNamespace(
        kind=JobKind(kind), source_nbytes=nbytes, members=[SimpleNamespace(source=source)]
    )
    return SimpleNamespace(jobs=[job], scales=scales)


def test_what_a_gpu_saves() -> None:
    assert saved_seconds(work(10 * GB), 2) == pytest.approx(4.5)
    assert saved_seconds(work(10 * GB, scales="max"), 2) == pytest.approx(0.75)
    assert saved_seconds(work(10 * GB, kind="fp8"), 1) == pytest.approx(1.5)
    assert saved_seconds(work(1000 * GB, kind="copy"), 1) == 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with a GPU called H200; gives the names that were asked for."""
    asked: list[str] = []

    def choose(name: str, ranks: Ranks) -> torch.device:
        asked.append(name)
        return torch.device("cuda", 0 if ":" not in name else int(name[5:]))

    monkeypatch.setattr(devices, "driver_sees_a_gpu", lambda: True)
    monkeypatch.setattr(devices, "choose_device", choose)
    monkeypatch.setattr(devices, "refusal", lambda device, least: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    return asked


def choose(asked: str, made: Any, **options: Any) -> resources.DeviceChoice:
    return choose_conversion_device(asked, made, workers=2, ranks=ALONE, **options)


def test_auto_takes_a_gpu_that_pays(gpu: list[str]) -> None:
    enough = int(START_SECONDS / 0.9 * 2 * GB)
    assert choose("auto", work(enough - GB)).device == "cpu"
    assert gpu == []  # nobody looked for it
    found = choose("auto", work(enough + GB))
    assert (found.device, found.name, found.note) == ("cuda:0", "H200", "")
    assert found.text(3) == "cuda:0 (H200), 3 threads"
    assert choose("auto", work(GB), calibrates=True).device == "cuda:0"


def test_orders_are_followed(gpu: list[str]) -> None:
    assert choose("cpu", work(10_000 * GB)).device == "cpu"
    assert choose("cuda:3", work(1)).device == "cuda:3"
    assert choose("cuda", work(1)).device == "cuda:0"


def test_a_gpu_that_cannot(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "refusal", lambda device, least: "compute capability 8.0")
    with pytest.raises(DeviceError, match=r"cuda:0: compute capability 8.0; use --device cpu"):
        choose("cuda", work(1))
    for asked, more in (("auto", {}), ("cuda", {"calibrates": True})):
        found = choose(asked, work(1000 * GB), **more)
        assert found.device == "cpu"
        assert "compute capability 8.0" in found.note
        assert "compute capability" in worker_sentence(
            found, open_workers(found, None, None, memory=1, workers=2), 2
        )  # type: ignore[arg-type]


def test_no_gpu_for_this_rank(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(name: str, ranks: Ranks) -> torch.device:
        raise DeviceError("rank 1 has no GPU of its own")

    monkeypatch.setattr(devices, "choose_device", none_left)
    assert "rank 1" in choose("auto", work(1000 * GB)).note
    with pytest.raises(DeviceError, match="rank 1"):
        choose("cuda", work(1000 * GB))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_there_is_none() -> None:
    with pytest.raises(DeviceError, match="no usable NVIDIA GPU"):
        choose("cuda", work(1))
    assert choose("auto", work(1000 * GB)).device == "cpu"
    with pytest.raises(UsageError):
        choose("abacus", work(1))


def test_small_and_ordered_runs_import_no_torch(beam_nano: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from beamq.convert.quantize import quantize;"
        "found = quantize(sys.argv[1], sys.argv[2], no_calibration=True, device=sys.argv[3]);"
        "assert 'torch' not in sys.modules and found.engine.endswith('threads'), found.engine"
    )
    for device in ("auto", "cpu"):
        target = str(tmp_path / device)
        command = [sys.executable, "-c", code, str(beam_nano), target, device]
        subprocess.run(command, check=True)


class TestGpuWorkerFactory:
    """Bounds, on a machine that says it has a GPU of so many bytes."""

    def opened(
        self, monkeypatch: pytest.MonkeyPatch, free: int, made: Any, memory: int = 10 * GB
    ) -> gpu_worker.GpuWorkerFactory:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
        return gpu_worker.GpuWorkerFactory(None, made, torch.device("cuda", 0), memory, 16)  # type: ignore[arg-type]

    def test_workers_within_the_memory_allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        factory = self.opened(monkeypatch, 100 * GB, work(GB // 10), memory=5 * SLOT_BYTES + 7)
        assert [factory.count(asked) for asked in (1, 5, 16)] == [1, 5, 5]
        assert self.opened(monkeypatch, 100 * GB, work(1 << 20), memory=1).count(16) == 1

    def test_memory_of_the_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.opened(monkeypatch, 100 * GB, work(GB)).device_nbytes
        assert found == pytest.approx(2 * 1.28125 * GB, rel=1e-5)  # source, codes, block scales
        assert self.opened(monkeypatch, 100 * GB, work(GB // 10)).device_nbytes == 2 << 30
        assert self.opened(monkeypatch, 2 * GB, work(GB // 10)).device_nbytes == GB
        with pytest.raises(DeviceError, match=r"0\.50 GB are free, and one group .* 1\.28 GB"):
            self.opened(monkeypatch, GB // 2, work(GB))

    def test_the_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        factory = self.opened(monkeypatch, 100 * GB, work(GB // 10), memory=2 * SLOT_BYTES)
        choice = resources.DeviceChoice(device="cuda:0", name="H200")
        text = worker_sentence(choice, factory, 16)
        assert text == (
            "On cuda:0 (H200), 2 threads: at most 100.66 MB of page-locked memory and 2.15 GB of"
            " the GPU's."
        )
        text = worker_sentence(choice, factory, 16, processes=4)
        assert text.startswith("In 4 processes, each on a GPU (H200), 2 threads: at most 100.66 MB")


@pytest.mark.parametrize(
    ("processes", "text"), [(1, "On 1 thread."), (2, "In 2 processes, each on 1 thread.")]
)
def test_the_sentence_tells_of_several_processes(processes: int, text: str) -> None:
    choice = resources.DeviceChoice(device="cpu")
    factory = open_workers(choice, None, None, memory=1, workers=1)  # type: ignore[arg-type]
    assert worker_sentence(choice, factory, 1, processes=processes) == text


def test_a_long_conversion_without_compiled_kernels_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    factory = open_workers(resources.DeviceChoice(device="cpu"), None, None, memory=1, workers=1)  # type: ignore[arg-type]
    warn_of_slow_kernels(work(GB), factory)
    monkeypatch.setattr(resources.cpu, "LACK", "they are not built")
    warn_of_slow_kernels(work(GB // 10), factory)
    warn_of_slow_kernels(work(GB), object())  # type: ignore[arg-type]  # a GPU's
    assert not caplog.messages
    warn_of_slow_kernels(work(GB), factory)
    assert caplog.messages == ["warning: they are not built"]
