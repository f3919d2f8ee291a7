"""Conversion by a GPU: the bytes, counts and errors of the CPU, for every recipe and width."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from beamq.convert import quantize as conversion
from beamq.convert.cpu_worker import CpuWorkerFactory
from beamq.convert.quantize import quantize
from beamq.errors import DeviceError, TensorError
from beamq.plan.recipe import BUILT_IN
from benchmarks.make_slice import Slice, make_slice
from benchmarks.merge import make_adapter
from tests.helpers import safetensors_edit as st

SMALL: dict[str, Any] = {"samples": 6, "sequence_length": 96}
EXPERT = "model.layers.4.mlp.experts.3"
MINI = Slice(
    experts=32, dense_layers=3, sparse_layers=6, hidden=384, dense_width=1024, expert_width=64,
    heads=6, kv_heads=2, head_dim=64, vocab=4096, shard_bytes=20_000_000,
)  # fmt: skip
REAL = Slice(experts=4, shard_bytes=500_000_000)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory, where there is such a place."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="beamq-gpu-", dir=parent))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def sources(beam_nano: Path, folder: Path) -> dict[str, Path]:
    """nano; random weights of mini's and of the real model's widths."""
    for name, what in (("mini", MINI), ("real", REAL)):
        make_slice(folder / name, what)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(beam_nano / file, folder / name / file)
    return {"nano": beam_nano, "mini": folder / "mini", "real": folder / "real"}


def options_for(recipe: str) -> dict[str, Any]:
    return {"no_calibration": True} if recipe.startswith("nvfp4") else {}


def assert_same(one: Path, two: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.fixture
def both(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Places for the CPU's output and the GPU's."""
    places = folder / "cpu", folder / "gpu"
    yield places
    for place in places:
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize("recipe", [r for r in BUILT_IN if r != "nvfp4-gptq"])
@pytest.mark.parametrize("source", ["nano", "mini", "real"])
def test_the_bytes_of_the_cpu(
    sources: dict[str, Path], both: tuple[Path, Path], source: str, recipe: str
) -> None:
    options = {"recipe": recipe, "max_shard_bytes": 300_000_000, **options_for(recipe)}
    quantize(sources[source], both[0], device="cpu", **options)
    found = quantize(sources[source], both[1], device="cuda", **options)
    assert found.engine.startswith("cuda:0")
    assert_same(both[1], both[0])


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "nvfp4-all"])
@pytest.mark.parametrize(("source", "rank"), [("real", 16), ("real", 5), ("mini", 32)])
def test_an_adapter_is_merged_with_the_bytes_of_the_cpu(
    sources: dict[str, Path], both: tuple[Path, Path], source: str, rank: int, recipe: str
) -> None:
    """Attention and packed experts; given input scales, so that the kernel on the device merges."""
    adapter = sources[source].parent / f"adapter-{source}-{rank}"
    make_adapter(adapter, REAL if source == "real" else MINI, rank)
    how = {"recipe": recipe, "adapter": adapter, **options_for(recipe)}
    quantize(sources[source], both[0], device="cpu", **how)
    quantize(sources[source], both[1], device="cuda", **how)
    assert_same(*both)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-all", "nvfp4-gptq"])
@pytest.mark.parametrize("source", ["nano", "real"])
def test_on_the_way_of_a_forward_pass(
    sources: dict[str, Path],
    both: tuple[Path, Path],
    source: str,
    recipe: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same pass on the GPU with either worker: its statistics are the same, so all bytes."""
    if source == "real" and recipe == "nvfp4-gptq":
        pytest.skip("minutes of rounding, in which no worker takes part")
    options = {"recipe": recipe, "device": "cuda", "max_shard_bytes": 300_000_000, **SMALL}
    found = quantize(sources[source], both[1], **options)
    assert found.engine.startswith("cuda:0")

    def on_cpu(_: object, checkpoint: Any, __: object, **memory: int) -> CpuWorkerFactory:
        return CpuWorkerFactory(checkpoint, **memory)

    monkeypatch.setattr(conversion, "open_workers", on_cpu)
    quantize(sources[source], both[0], **options)
    assert_same(both[1], both[0])


def edited(source: Path, change: Callable[[st.Tensors], None]) -> Path:
    st.edit(source / "model.safetensors", change)
    return source


@pytest.mark.parametrize("dtype", ["F16", "F32"])
@pytest.mark.parametrize("recipe", ["nvfp4-all", "fp8"])
def test_other_dtypes(nano_copy: Path, both: tuple[Path, Path], dtype: str, recipe: str) -> None:
    def change(tensors: st.Tensors) -> None:
        for name, (was, shape, data) in list(tensors.items()):
            if was != "BF16" or "proj" not in name:
                continue
            values = torch.from_numpy(np.frombuffer(data, np.int16).copy()).view(torch.bfloat16)
            wanted = {"F16": torch.float16, "F32": torch.float32}[dtype]
            tensors[name] = (dtype, shape, values.to(wanted).view(torch.uint8).numpy().tobytes())

    edited(nano_copy, change)
    options = {"recipe": recipe, **options_for(recipe)}
    quantize(nano_copy, both[0], device="cpu", **options)
    quantize(nano_copy, both[1], device="cuda", **options)
    assert_same(both[1], both[0])


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-max", "fp8"])
@pytest.mark.parametrize("value", [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"])  # NaN, +inf, -inf
@pytest.mark.parametrize("proj", ["up_proj", "down_proj"])
def test_what_is_not_finite_is_refused_in_the_same_words(
    nano_copy: Path, both: tuple[Path, Path], recipe: str, value: bytes, proj: str
) -> None:
    def change(tensors: st.Tensors) -> None:
        dtype, shape, data = tensors[f"{EXPERT}.{proj}.weight"]
        tensors[f"{EXPERT}.{proj}.weight"] = (dtype, shape, data[:1554] + value + data[1556:])

    edited(nano_copy, change)
    words = []
    for device, output in zip(("cpu", "cuda"), both, strict=True):
        with pytest.raises(TensorError) as refused:
            quantize(nano_copy, output, device=device, recipe=recipe, **options_for(recipe))
        words.append(str(refused.value))
        assert not (output / "beamq.json").exists()
    assert words[0] == words[1]


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-max", "fp8"])
def test_zeros_and_underflow_are_counted_alike(
    nano_copy: Path, both: tuple[Path, Path], recipe: str
) -> None:
    def change(tensors: st.Tensors) -> None:
        for proj in ("gate_proj", "up_proj"):
            dtype, shape, data = tensors[f"{EXPERT}.{proj}.weight"]
            tensors[f"{EXPERT}.{proj}.weight"] = (dtype, shape, bytes(len(data)))
        dtype, shape, data = tensors[f"{EXPERT}.down_proj.weight"]
        odd = b"\x00\x20" * 16 + bytes(64) + b"\x00\x41"  # a tiny block, two of zeros, an 8.0
        tensors[f"{EXPERT}.down_proj.weight"] = (dtype, shape, odd + data[len(odd) :])

    edited(nano_copy, change)
    options = {"recipe": recipe, **options_for(recipe)}
    quantize(nano_copy, both[0], device="cpu", **options)
    quantize(nano_copy, both[1], device="cuda", **options)
    assert_same(both[1], both[0])  # beamq.json has the counts


RUN = (
    "import os, signal, sys; from beamq.convert import run as runner;"
    "from beamq.convert.quantize import quantize; runner.REPORT_STEP_BYTES = 1 << 20;"
    "far = lambda p: p.done_nbytes > 0.6 * p.total_nbytes;"
    "kill = lambda p: far(p) and os.kill(os.getpid(), signal.SIGKILL);"
    "quantize(sys.argv[1], sys.argv[2], recipe='nvfp4-all', no_calibration=True, device='cuda',"
    " max_shard_bytes=60_000_000, workers=4, on_progress=kill)"
)


def test_killed_it_goes_on_to_the_same_bytes(
    sources: dict[str, Path], both: tuple[Path, Path]
) -> None:
    options: dict[str, Any] = {
        "recipe": "nvfp4-all", "no_calibration": True, "max_shard_bytes": 60_000_000
    }  # fmt: skip
    quantize(sources["real"], both[0], device="cpu", **options)
    killed = subprocess.run([sys.executable, "-c", RUN, str(sources["real"]), str(both[1])])
    assert killed.returncode == -signal.SIGKILL
    assert not (both[1] / "beamq.json").exists()
    found = quantize(sources["real"], both[1], device="cuda", resume=True, **options)
    assert 0 < found.resumed_shards < len(found.plan.shards)
    assert_same(both[1], both[0])


def test_a_gpu_that_is_not_there(beam_nano: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cuda:99"):
        quantize(beam_nano, tmp_path / "out", recipe="fp8", device="cuda:99")


def test_too_little_memory_is_an_error_with_a_remedy(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0001)
    try:
        with pytest.raises(DeviceError, match=r"out of memory.*--device cpu"):
            quantize(
                sources["real"], tmp_path / "out", device="cuda",
                recipe="nvfp4-all", no_calibration=True,
            )  # fmt: skip
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not (tmp_path / "out" / "beamq.json").exists()
