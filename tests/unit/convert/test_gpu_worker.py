"""The GPU worker on a double of the GPU: the bytes, counts and errors of the CPU worker.

The double computes as late as it may, so a missing wait shows (the last test makes sure of that).
What a real GPU computes is compared in tests/gpu/test_gpu_convert.py.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beamq.convert import gpu_worker
from beamq.convert import quantize as conversion
from beamq.convert.cpu_worker import piece_bytes
from beamq.convert.open_shards import TensorSink
from beamq.convert.quantize import quantize
from beamq.errors import BeamqError, DeviceError, Interrupted, TensorError
from beamq.io.checkpoint import Checkpoint
from beamq.plan.recipe import BUILT_IN
from tests.helpers import safetensors_edit as st
from tests.helpers.adapters import made, pair
from tests.helpers.gpu_double import HostQueue, HostWorkerFactory

SMALL: dict[str, Any] = {"samples": 6, "sequence_length": 96}
Use = Callable[..., list[HostWorkerFactory]]


@pytest.fixture
def use_double(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Have conversions run on the double; gives the list of worker factories that were opened."""

    def use(**options: Any) -> list[HostWorkerFactory]:
        opened: list[HostWorkerFactory] = []

        def open_double(
            _: object, checkpoint: Checkpoint, *__: object, **___: object
        ) -> HostWorkerFactory:
            opened.append(HostWorkerFactory(checkpoint, **options))
            return opened[-1]

        monkeypatch.setattr(conversion, "open_workers", open_double)
        return opened

    return use


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor in several chunks, FP8 in several parts, chunks shared by tensors."""
    for module in (gpu_worker, gpu_worker):
        monkeypatch.setattr(module, "IN_BYTES", 3072)
        monkeypatch.setattr(module, "OUT_BYTES", 2048)
    monkeypatch.setattr(gpu_worker, "PART_BYTES", 5000)


def options_for(recipe: str) -> dict[str, Any]:
    if recipe == "nvfp4-gptq":
        return SMALL
    return {"no_calibration": True} if recipe.startswith("nvfp4") else {}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def assert_same(one: Path, two: Path) -> None:
    ours, theirs = files_of(one), files_of(two)
    assert ours.keys() == theirs.keys()
    for name, content in ours.items():
        assert content == theirs[name], name


def plain(source: Path, folder: Path, **options: Any) -> Path:
    quantize(source, folder, device="cpu", **options)
    return folder


@pytest.mark.parametrize("recipe", BUILT_IN)
@pytest.mark.parametrize("late", [True, False])
def test_the_bytes_of_the_cpu(
    beam_nano: Path, tmp_path: Path, use_double: Use, recipe: str, late: bool
) -> None:
    options = options_for(recipe)
    expected = plain(beam_nano, tmp_path / "cpu", recipe=recipe, **options)
    opened = use_double(late=late)
    quantize(beam_nano, tmp_path / "gpu", recipe=recipe, workers=3, **options)
    assert_same(tmp_path / "gpu", expected)
    assert recipe == "nvfp4-gptq" or opened[0].allocated


@pytest.mark.parametrize("recipe", ["nvfp4-all", "fp8"])
def test_in_small_chunks(
    beam_nano: Path, tmp_path: Path, use_double: Use, small_chunks: None, recipe: str
) -> None:
    options = {**options_for(recipe), "max_shard_bytes": 300_000}
    expected = plain(beam_nano, tmp_path / "cpu", recipe=recipe, **options)
    use_double()
    quantize(beam_nano, tmp_path / "gpu", recipe=recipe, workers=8, **options)
    assert_same(tmp_path / "gpu", expected)


def test_one_worker_waits_for_room_on_the_device(
    beam_nano: Path, tmp_path: Path, use_double: Use
) -> None:
    expected = plain(beam_nano, tmp_path / "cpu", no_calibration=True)
    opened = use_double(budget=1)
    quantize(beam_nano, tmp_path / "gpu", no_calibration=True, workers=4)
    assert_same(tmp_path / "gpu", expected)
    largest = max(opened[0].allocated)
    assert largest < 150_000  # granted alone, one at a time


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-all"])
def test_on_the_way_of_a_forward_pass(
    beam_nano: Path, tmp_path: Path, use_double: Use, small_chunks: None, locked: bool, recipe: str
) -> None:
    expected = plain(beam_nano, tmp_path / "cpu", recipe=recipe, **SMALL)
    opened = use_double(locked=locked)
    quantize(beam_nano, tmp_path / "gpu", recipe=recipe, device="cpu", **SMALL)
    assert_same(tmp_path / "gpu", expected)
    assert opened[0].allocated


def edited(source: Path, change: Callable[[st.Tensors], None]) -> Path:
    st.edit(source / "model.safetensors", change)
    return source


def with_value(name: str, place: int, value: bytes) -> Callable[[st.Tensors], None]:
    def change(tensors: st.Tensors) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = (dtype, shape, data[: 2 * place] + value + data[2 * place + 2 :])

    return change


EXPERT = "model.layers.4.mlp.experts.3"


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-max", "fp8"])
@pytest.mark.parametrize("value", [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"])  # NaN, +inf, -inf
@pytest.mark.parametrize("proj", ["gate_proj", "up_proj", "down_proj"])
def test_what_is_not_finite_is_refused_in_the_same_words(
    nano_copy: Path, tmp_path: Path, use_double: Use, recipe: str, value: bytes, proj: str
) -> None:
    edited(nano_copy, with_value(f"{EXPERT}.{proj}.weight", 777, value))
    options = options_for(recipe)
    with pytest.raises(TensorError) as on_cpu:
        plain(nano_copy, tmp_path / "cpu", recipe=recipe, **options)
    use_double()
    with pytest.raises(TensorError) as on_gpu:
        quantize(nano_copy, tmp_path / "gpu", recipe=recipe, **options)
    assert str(on_gpu.value) == str(on_cpu.value)
    assert f"{EXPERT}.{proj}.weight" in str(on_gpu.value)
    assert not (tmp_path / "gpu" / "beamq.json").exists()


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-max", "fp8"])
def test_counts_of_zeros_and_underflow(
    nano_copy: Path, tmp_path: Path, use_double: Use, recipe: str
) -> None:
    def change(tensors: st.Tensors) -> None:
        for proj in ("gate_proj", "up_proj"):
            dtype, shape, data = tensors[f"{EXPERT}.{proj}.weight"]
            tensors[f"{EXPERT}.{proj}.weight"] = (dtype, shape, bytes(len(data)))
        dtype, shape, data = tensors[f"{EXPERT}.down_proj.weight"]
        tiny = struct.pack("<16H", *[0x2000] * 16)  # 1e-19, which underflows
        huge = struct.pack("<H", 0x4300)  # 128
        rest = data[len(tiny) + 64 + 2 :]
        tensors[f"{EXPERT}.down_proj.weight"] = (dtype, shape, tiny + bytes(64) + huge + rest)

    edited(nano_copy, change)
    options = options_for(recipe)
    expected = plain(nano_copy, tmp_path / "cpu", recipe=recipe, **options)
    use_double()
    quantize(nano_copy, tmp_path / "gpu", recipe=recipe, **options)
    assert_same(tmp_path / "gpu", expected)
    counts = json.loads((tmp_path / "gpu" / "beamq.json").read_text())["counts"]
    if recipe == "fp8":
        assert counts["zero_rows"] >= 128
    else:
        assert counts["zero_groups"] == [f"{EXPERT}.gate_up"]
        assert counts["underflow_blocks"] >= 1
        assert counts["zero_blocks"] > 1000


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_dtypes_and_groups_that_mix_them(
    nano_copy: Path, tmp_path: Path, use_double: Use, dtype: str
) -> None:
    """All linears of layer 3 in `dtype`, of layer 4 only `up_proj`: the kernels take no such."""
    import numpy as np
    import torch

    def change(tensors: st.Tensors) -> None:
        for name, (was, shape, data) in list(tensors.items()):
            mixed = ".layers.4." in name and "up_proj" in name
            if was != "BF16" or not ((".layers.3." in name and ".experts." in name) or mixed):
                continue
            values = torch.from_numpy(np.frombuffer(data, np.int16).copy()).view(torch.bfloat16)
            wanted = {"F16": torch.float16, "F32": torch.float32}[dtype]
            tensors[name] = (dtype, shape, values.to(wanted).view(torch.uint8).numpy().tobytes())

    edited(nano_copy, change)
    expected = plain(nano_copy, tmp_path / "cpu", no_calibration=True)
    use_double()
    quantize(nano_copy, tmp_path / "gpu", no_calibration=True)
    assert_same(tmp_path / "gpu", expected)


def test_a_wrong_global_scale_stops_the_run(
    beam_nano: Path, tmp_path: Path, use_double: Use
) -> None:
    use_double(wrong=1 + 2**-22)
    with pytest.raises(DeviceError, match="global scale"):
        quantize(beam_nano, tmp_path / "gpu", no_calibration=True)


def test_a_stopped_run_goes_on_with_the_other_worker(
    beam_nano: Path, tmp_path: Path, use_double: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"no_calibration": True, "max_shard_bytes": 300_000, "workers": 2}
    expected = plain(beam_nano, tmp_path / "cpu", **options)
    monkeypatch.setattr("beamq.convert.run.REPORT_STEP_BYTES", 1)
    use_double()
    told: list[int] = []

    def stop(progress: Any) -> None:
        told.append(progress.done_nbytes)
        if len(told) < 20:
            return
        raise Interrupted("enough")

    with pytest.raises(Interrupted):
        quantize(beam_nano, tmp_path / "gpu", on_progress=stop, **options)
    assert told
    assert not (tmp_path / "gpu" / "beamq.json").exists()
    use_double()
    quantize(beam_nano, tmp_path / "gpu", resume=True, **options)
    assert_same(tmp_path / "gpu", expected)


def test_a_failure_leaves_no_copy_under_way(
    beam_nano: Path, tmp_path: Path, use_double: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that goes back to the pool is nobody's target any more."""
    drained: list[int] = []
    genuine = HostQueue.drain

    def drain(self: HostQueue) -> None:
        drained.append(self.queued)
        genuine(self)

    genuine_append = TensorSink.append
    appended: list[int] = []

    def full(sink: TensorSink, data: memoryview) -> None:
        appended.append(data.nbytes)
        if len(appended) < 100:  # beyond the copied tensors
            return genuine_append(sink, data)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HostQueue, "drain", drain)
    use_double()
    monkeypatch.setattr(TensorSink, "append", full)
    with pytest.raises(OSError, match="No space"):
        quantize(beam_nano, tmp_path / "gpu", no_calibration=True, workers=1)
    assert drained


def test_the_double_finds_a_missing_wait(
    beam_nano: Path, tmp_path: Path, use_double: Use, small_chunks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    expected = plain(beam_nano, tmp_path / "cpu", recipe="nvfp4-all", no_calibration=True)
    use_double()
    ring = gpu_worker.Ring.next

    def hasty(self: gpu_worker.Ring) -> gpu_worker.Chunk:
        for chunk in self._chunks:
            chunk._marked = False
        return ring(self)

    monkeypatch.setattr(gpu_worker.Ring, "next", hasty)
    try:
        quantize(beam_nano, tmp_path / "gpu", recipe="nvfp4-all", no_calibration=True, workers=1)
    except BeamqError:
        return
    ours, theirs = files_of(tmp_path / "gpu"), files_of(expected)
    assert ours["model-00001-of-00001.safetensors"] != theirs["model-00001-of-00001.safetensors"]


@pytest.mark.parametrize(
    ("recipe", "piece"), [("nvfp4-all", 700), ("nvfp4-all", 5000), ("fp8", 130), ("fp8", 5000)]
)
def test_pieces_of_any_size_give_the_cpu_the_same_bytes(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, piece: int
) -> None:
    options = options_for(recipe)
    expected = plain(beam_nano, tmp_path / "plain", recipe=recipe, **options)
    assert [piece_bytes(workers) >> 20 for workers in (1, 4, 5, 16, 32, 200)] == [1, 1, 8, 8, 4, 1]
    monkeypatch.setattr("beamq.convert.cpu_worker.piece_bytes", lambda workers: piece)
    assert_same(plain(beam_nano, tmp_path / "pieces", recipe=recipe, **options), expected)


def test_the_library_is_left_as_it_was(beam_nano: Path, tmp_path: Path) -> None:
    """`device="cpu"` makes no GPU worker, and says what converted."""
    result = quantize(
        beam_nano,
        tmp_path / "out",
        recipe="nvfp4-all",
        no_calibration=True,
        device="cpu",
        workers=2,
    )
    assert result.engine == "2 threads"
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("name", ["usual-seven-0.21.2", "dora-attention", "router-saved"])
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4-all"])
def test_adapters_are_merged_on_the_device(
    name: str, recipe: str, beam_nano: Path, adapters: Path, tmp_path: Path, use_double: Use,
    small_chunks: None,
) -> None:  # fmt: skip
    """Low-rank updates are added there, part by part; DoRA and replaced tensors while reading."""
    how = {"recipe": recipe, "adapter": adapters / name, **options_for(recipe)}
    plain(beam_nano, tmp_path / "cpu", **how)
    opened = use_double()
    quantize(beam_nano, tmp_path / "gpu", **how)
    assert_same(tmp_path / "cpu", tmp_path / "gpu")
    merged = sum(worker._queue.merged for made in opened for worker in made.made)  # type: ignore[attr-defined]
    assert (merged > 0) == (name != "dora-attention")


def test_a_merge_that_overflows_on_the_device_is_refused_by_name(
    beam_nano: Path, tmp_path: Path, use_double: Use
) -> None:
    module = "model.layers.2.self_attn.q_proj"
    tensors = {key: tensor * 1e30 for key, tensor in pair(module, 128, 128).items()}
    adapter = made(tmp_path / "adapter", tensors)
    use_double()
    with pytest.raises(TensorError, match=rf"{module}\.weight: the merged weight holds NaN"):
        quantize(beam_nano, tmp_path / "out", recipe="fp8", adapter=adapter)
