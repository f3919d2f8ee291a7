"""Calibration of real models: exact, the same by every route, and right where experts are odd."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import beamq.calib.run as device
from beamq.beam.config import BeamConfig
from beamq.calib import run, state
from beamq.calib.calibrate import calibrate, merge_statistics
from beamq.calib.collector import Collector
from beamq.calib.data import CalibrationData, ids_digest, load_calibration_data
from beamq.calib.input_scales import MIN_SCALE, coverage, input_scales
from beamq.calib.options import CalibrationOptions
from beamq.calib.run import DevicePlan, LayerDone, plan_device
from beamq.calib.statistics import CalibrationStats, layer_of, load_stats
from beamq.cli import app
from beamq.errors import (
    AlreadyQuantizedError,
    CalibrationError,
    Interrupted,
    MemoryBudgetError,
    OutputBusyError,
    ResumeError,
    UsageError,
)
from beamq.io.checkpoint import open_checkpoint
from beamq.io.lock import OutputLock
from beamq.model.layer_stream import activation_bytes, layer_bytes
from beamq.model.logits import logits
from beamq.ranks import Ranks
from tests.helpers import safetensors_edit as st
from tests.helpers.free_ports import free_port
from tests.helpers.model_fixtures import hf_logits, hf_model, random_beam

SMALL: dict[str, Any] = {"samples": 6, "sequence_length": 96}
FP32 = torch.float32


@pytest.fixture(scope="module")
def config(beam_nano: Path) -> BeamConfig:
    return BeamConfig.from_dict(json.loads((beam_nano / "config.json").read_text()))


@pytest.fixture(scope="module")
def plain(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed calibration of nano."""
    path = tmp_path_factory.mktemp("plain") / "stats"
    calibrate(beam_nano, path, **SMALL)
    return path


def small_data(folder: Path) -> CalibrationData:
    return load_calibration_data((), folder, samples=6, sequence_length=96, seed=0)


def rows_of(data: CalibrationData, rows: slice) -> CalibrationData:
    ids = np.ascontiguousarray(data.input_ids[rows])
    return replace(data, input_ids=ids, digest=ids_digest(list(ids)))


def use(monkeypatch: pytest.MonkeyPatch, data: CalibrationData) -> None:
    """Calibrate on exactly these rows."""
    monkeypatch.setattr(run, "load_text", lambda *_, **__: data)


class Hooks:
    """Largest inputs of transformers' linears, by plain `abs().max()`, and a collector beside."""

    def __init__(self, model: Any, config: BeamConfig) -> None:
        self.amax: dict[str, np.ndarray] = {}
        self.collector = Collector(config, torch.device("cpu"))
        self.experts = config.num_experts
        for layer, block in enumerate(model.model.layers):
            attention, mlp = block.self_attn, block.mlp
            self._linear(attention.q_proj, layer, "self_attn.qkv_gate", "qkv_gate")
            self._linear(attention.o_proj, layer, "self_attn.o", "o_proj")
            if hasattr(mlp, "experts"):
                self._sparse(mlp.experts, layer)
            else:
                self._linear(mlp.gate_proj, layer, "mlp.gate_up", "gate_up")
                self._linear(mlp.down_proj, layer, "mlp.down", "down_proj")

    def _linear(self, module: Any, layer: int, name: str, group: str) -> None:
        def before(_: Any, args: tuple[torch.Tensor]) -> None:
            x = args[0].flatten(0, -2)
            self.amax[f"layers.{layer}.{name}"] = x.abs().max().numpy()
            self.collector.linear_input(layer, group, x)

        module.register_forward_pre_hook(before)

    def _sparse(self, module: Any, layer: int) -> None:
        """The experts loop over those that are hit, in ascending order."""
        inner, hit = module._apply_gate, []

        def before(_: Any, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            x, chosen, weights = args
            self.collector.routing(layer, x, chosen, weights)
            name = f"layers.{layer}.experts"
            self.amax[f"{name}.gate_up"] = np.zeros(self.experts, np.float32)
            self.amax[f"{name}.down"] = np.zeros(self.experts, np.float32)
            rows = [x[(chosen == e).any(-1)] for e in range(self.experts)]
            for expert, part in enumerate(rows):
                if len(part):
                    hit.append(expert)
                    self.amax[f"{name}.gate_up"][expert] = part.abs().max()
            ends = [0, *np.cumsum([len(part) for part in rows]).tolist()]
            self.collector.expert_input(layer, "gate_up", torch.cat(rows), 0, ends)

        def gate(gate_up: torch.Tensor) -> torch.Tensor:
            out, expert = inner(gate_up), hit.pop(0)
            self.amax[f"layers.{layer}.experts.down"][expert] = out.abs().max()
            self.collector.expert_input(layer, "down_proj", out, expert, (0, len(out)))
            return out

        module.register_forward_pre_hook(before)
        module._apply_gate = gate


def test_amax_equals_hooks_on_transformers(
    beam_nano: Path, config: BeamConfig, tmp_path: Path
) -> None:
    """What passes a hook is recorded to the bit; our own pass differs by its FP32 rounding only."""
    data = small_data(beam_nano)
    model = hf_model(beam_nano, FP32, experts_implementation="eager")
    hooks = Hooks(model, config)
    hf_logits(model, torch.from_numpy(data.input_ids))
    recorded = hooks.collector.take(0).inputs
    assert recorded.keys() == hooks.amax.keys()
    for name, amax in hooks.amax.items():
        assert np.array_equal(recorded[name].amax, amax), name
    stats = calibrate(beam_nano, tmp_path / "stats", dtype="float32", **SMALL)
    assert stats.inputs.keys() == hooks.amax.keys()
    for name, amax in hooks.amax.items():
        assert np.array_equal(stats.inputs[name].rows, recorded[name].rows), name
        np.testing.assert_allclose(stats.inputs[name].amax, amax, rtol=2e-6, err_msg=name)
    exact = [np.array_equal(stats.inputs[name].amax, amax) for name, amax in hooks.amax.items()]
    assert sum(exact) >= len(exact) // 3, "many of them to the bit"


def test_what_is_recorded(beam_nano: Path, plain: Path, config: BeamConfig) -> None:
    stats = load_stats(plain)
    data = small_data(beam_nano)
    assert stats.total_tokens == 6 * 96
    assert stats.data_digests == (data.digest,)
    assert stats.data[0]["activations"] == "bfloat16"
    assert set(stats.versions) == {"beamq", "python", "torch"}
    assert stats.dropped_rows == 0
    assert stats.routed_tokens.keys() == {3, 4, 5, 6, 7}
    for layer in config.sparse_layers:
        routed = stats.routed_tokens[layer]
        assert routed.sum() == 6 * 96 * config.top_k
        for group in ("gate_up", "down"):
            assert np.array_equal(stats.inputs[f"layers.{layer}.experts.{group}"].rows, routed)
    assert len(stats.inputs) == 8 * 2 + 8 * 2
    assert not plain.with_name("stats.state").exists()
    with open_checkpoint(beam_nano) as checkpoint:
        stats.check_model(checkpoint.content_digest(), "nano")


def edit(folder: Path, change: Callable[[str, list[int]], np.ndarray | None]) -> None:
    """Replace values of tensors for which `change` returns FP32 values."""

    def rewrite(tensors: st.Tensors) -> None:
        for name, (dtype, shape, data) in tensors.items():
            values = change(name, shape)
            if values is not None:
                tensor = torch.from_numpy(values.astype(np.float32))
                if dtype == "BF16":
                    data = tensor.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
                else:
                    data = tensor.numpy().tobytes()
                tensors[name] = (dtype, shape, data)

    st.edit(folder / "model.safetensors", rewrite)


def test_an_expert_that_is_never_routed(
    nano_copy: Path, tmp_path: Path, config: BeamConfig
) -> None:
    name = "model.layers.4.mlp.gate.e_score_correction_bias"
    with open_checkpoint(nano_copy) as checkpoint:
        bias = checkpoint.tensor(name).numpy().copy()
    bias[3] = -100.0
    edit(nano_copy, lambda found, _: bias if found == name else None)
    stats = calibrate(nano_copy, tmp_path / "stats", **SMALL)
    assert stats.routed_tokens[4][3] == 0
    scales = input_scales(stats, config, 1)
    module = "model.layers.4.mlp.experts.{}.{}"
    for proj, group in (("gate_proj", "gate_up"), ("up_proj", "gate_up"), ("down_proj", "down")):
        largest = stats.inputs[f"layers.4.experts.{group}"].amax.max()
        assert scales.scale(module.format(3, proj)) == largest / np.float32(2688) > 0
    reached = coverage(stats, config)
    layer = next(each for each in reached.layers if each.layer == 4)
    # Groups of two: its neighbour is hardly ever chosen any more, since the group scores low.
    assert layer.uncalibrated == layer.unrouted == (2, 3)
    assert any("uncalibrated 2 3" in line for line in reached.lines())
    assert reached.percent < 100
    every = calibrate(nano_copy, tmp_path / "all", experts="all", **SMALL)
    assert every.inputs["layers.4.experts.down"].rows.tolist() == [6 * 96] * 16
    assert every.inputs["layers.4.experts.down"].amax[3] > 0
    assert every.routed_tokens[4][3] == 0
    assert coverage(every, config).percent == 100


def test_an_expert_that_overflows_where_no_token_goes(
    nano_copy: Path, tmp_path: Path, config: BeamConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all experts, whose outputs are not used: no hidden state shows what is not finite."""
    name = "model.layers.4.mlp.gate.e_score_correction_bias"
    with open_checkpoint(nano_copy) as checkpoint:
        bias = checkpoint.tensor(name).numpy().copy()
    bias[6:8] = -100.0
    changed = {name: bias, "model.layers.4.mlp.experts.7.up_proj.weight": np.full((64, 128), 3e38)}
    edit(nano_copy, lambda found, _: changed.get(found))
    stats = calibrate(nano_copy, tmp_path / "stats", experts="all", **SMALL)
    (said,) = stats.dropped_names
    place = "model.layers.4.mlp.experts.7.down_proj"
    wanted = f"of 576 tokens at the input of {place}: not finite; check its weights"
    assert re.fullmatch(rf"5\d\d {re.escape(wanted)}", said)
    assert stats.dropped_rows == 0
    command = ["calibrate", str(nano_copy), str(tmp_path / "again"), "--experts", "all"]
    with pytest.raises(SystemExit) as left:
        app([*command, "--samples", "6", "--sequence-length", "96"], prog_name="beamq")
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"Left out: {said}." in shown


@pytest.mark.parametrize("size", [0.0, 1e-36])
def test_an_expert_whose_down_input_is_zero(
    nano_copy: Path, tmp_path: Path, config: BeamConfig, size: float
) -> None:
    zeroed = ("model.layers.4.mlp.experts.2.up_proj.weight",)
    edit(nano_copy, lambda name, shape: np.full(shape, size) if name in zeroed else None)
    stats = calibrate(nano_copy, tmp_path / "stats", **SMALL)
    assert stats.inputs["layers.4.experts.gate_up"].amax[2] > 1
    assert stats.inputs["layers.4.experts.down"].amax[2] < 1e-30
    scales = input_scales(stats, config, 1)
    down = scales.scale("model.layers.4.mlp.experts.2.down_proj")
    assert down == stats.inputs["layers.4.experts.down"].amax.max() / np.float32(2688)
    layer = next(each for each in coverage(stats, config).layers if each.layer == 4)
    assert layer.zero_amax == {"gate_up": (), "down": (2,)}


@pytest.mark.parametrize("size", [0.0, 1e-36])
def test_a_layer_whose_down_inputs_are_all_zero(
    nano_copy: Path, tmp_path: Path, config: BeamConfig, size: float
) -> None:
    def change(name: str, shape: list[int]) -> np.ndarray | None:
        hit = name.startswith("model.layers.4.mlp.experts.") and ".up_proj." in name
        return np.full(shape, size) if hit else None

    edit(nano_copy, change)
    scales = input_scales(calibrate(nano_copy, tmp_path / "stats", **SMALL), config, 1)
    scale = scales.scale("model.layers.4.mlp.experts.2.down_proj")
    assert scale == MIN_SCALE
    assert np.isfinite(np.float32(1) / scale)
    assert scales.floored == ("layers.4.experts.down",)


def test_all_experts_mode_changes_no_bit_that_flows_on(beam_nano: Path, config: BeamConfig) -> None:
    ids = torch.from_numpy(small_data(beam_nano).input_ids)
    watcher = Collector(config, torch.device("cpu"), experts="all")
    assert torch.equal(logits(beam_nano, ids, observers=[watcher]), logits(beam_nano, ids))


def test_two_halves_merged_are_the_whole(
    beam_nano: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_data(beam_nano)
    for name, rows in (("a", slice(0, 2)), ("b", slice(2, 6))):
        use(monkeypatch, rows_of(data, rows))
        calibrate(beam_nano, tmp_path / name)
    merged = merge_statistics([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    whole = load_stats(plain)
    assert merged.total_tokens == whole.total_tokens
    for name, entry in whole.inputs.items():
        assert np.array_equal(merged.inputs[name].amax, entry.amax), name
        assert np.array_equal(merged.inputs[name].rows, entry.rows), name
    with pytest.raises(ResumeError, match="exists"):
        merge_statistics([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    with pytest.raises(CalibrationError, match="at least two"):
        merge_statistics([tmp_path / "a"], tmp_path / "d")


def test_a_budget_changes_no_byte(beam_nano: Path, config: BeamConfig, plain: Path,
                                  tmp_path: Path) -> None:  # fmt: skip
    with open_checkpoint(beam_nano) as checkpoint:
        sizes = layer_bytes(checkpoint, config, torch.bfloat16)
        fixed = activation_bytes(config, 6 * 96, torch.bfloat16) + 2 * sizes.base
        budget = fixed + 6 * sizes.expert

        def planned(limit: int | None, device: str = "cpu") -> DevicePlan:
            options = CalibrationOptions(max_device_memory=limit)
            where = torch.device(device)
            return plan_device(checkpoint, options, Ranks(), where, samples=6, length=96)

        plan = planned(budget)
        assert (plan.slice_experts, plan.resident_nbytes) == (3, 0)
        whole = planned(fixed + 32 * sizes.expert + 100)
        assert (whole.slice_experts, whole.resident_nbytes) == (None, 100)
        rich = planned(1 << 40)
        assert rich == planned(None)
        on_gpu = planned(budget, "cuda")
        assert plan.device_nbytes == 0
        assert plan.host_nbytes < rich.host_nbytes
        assert on_gpu.device_nbytes <= budget
    calibrate(beam_nano, tmp_path / "stats", max_device_memory=budget, **SMALL)
    assert (tmp_path / "stats").read_bytes() == plain.read_bytes()
    with pytest.raises(MemoryBudgetError, match="at least"):
        calibrate(beam_nano, tmp_path / "none", max_device_memory=1000, **SMALL)


class Stop(Exception):
    """Raised by a test in the middle of a run."""


def stop_after(layer: int) -> Callable[[LayerDone], None]:
    def after(done: LayerDone) -> None:
        if done.layer == layer:
            raise Stop

    return after


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_a_run_that_broke_off_is_resumed_with_the_same_bytes(
    beam_nano: Path, plain: Path, tmp_path: Path, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "COST_SHARE", 0)  # a layer of nano is quicker than a save
    target = tmp_path / "stats"
    with pytest.raises(Stop):
        calibrate(beam_nano, target, on_layer=stop_after(layer), **SMALL)
    assert not target.exists()
    with pytest.raises(ResumeError, match="--resume continues it"):
        calibrate(beam_nano, target, **SMALL)
    layers: list[int] = []
    calibrate(
        beam_nano, target, resume=True, on_layer=lambda done: layers.append(done.layer), **SMALL
    )
    assert layers == list(range(layer, 8)), "the layer before was saved"
    assert target.read_bytes() == plain.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stats"]


def test_another_run_is_refused_by_name(beam_nano: Path, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "stats"
    with pytest.raises(Stop):
        calibrate(beam_nano, target, on_layer=stop_after(2), **SMALL)
    (tmp_path / "text.txt").write_text("another text " * 400)
    text = str(tmp_path / "text.txt")
    samples, length = SMALL["samples"], SMALL["sequence_length"]
    for change, words in (
        ({"seed": 1}, "--seed 0, not 1"),
        ({"samples": samples - 1}, f"--samples {samples}, not {samples - 1}"),
        ({"sequence_length": 32}, f"--sequence-length {length}, not 32"),
        ({"data": [text]}, r"other text \(--data\)"),
        ({"data": [text], "samples": 4}, f"--samples {samples}, not 4"),
        ({"dtype": "float32"}, "--dtype bfloat16, not float32"),
        ({"experts": "all"}, "--experts routed, not all"),
    ):
        with pytest.raises(ResumeError, match=f": started with {words}; use the same options"):
            calibrate(beam_nano, target, resume=True, **{**SMALL, **change})
    identity = tmp_path / "stats.state" / "identity.json"
    recorded = json.loads(identity.read_text())
    older = {key: value for key, value in recorded.items() if key != "--samples"}
    identity.write_text(json.dumps({**older, "version of torch": "2.0"}))
    with pytest.raises(
        ResumeError, match="started with another version of torch, another --samples;"
    ):
        calibrate(beam_nano, target, resume=True, **SMALL)
    identity.write_text(json.dumps(recorded))
    lock = OutputLock(tmp_path / "stats.state")
    with pytest.raises(OutputBusyError, match="another process"):
        calibrate(beam_nano, target, resume=True, **SMALL)
    lock.release()
    calibrate(beam_nano, target, overwrite=True, **SMALL)
    assert target.read_bytes() == plain.read_bytes()


def test_a_finished_file_is_not_replaced_unasked(
    beam_nano: Path, plain: Path, tmp_path: Path
) -> None:
    before = plain.stat().st_mtime_ns
    with pytest.raises(ResumeError, match="give --overwrite"):
        calibrate(beam_nano, plain, **SMALL)
    (tmp_path / "text.txt").write_text("another text " * 400)
    for change, words in (
        ({"seed": 5}, "--seed 0, not 5;"),
        ({"samples": 7}, "--samples 6, not 7;"),
        ({"dtype": "float32", "sequence_length": 64}, "--sequence-length 96, not 64, --dtype bfl"),
        ({"experts": "all"}, "--experts routed, not all;"),
        ({"data": [str(tmp_path / "text.txt")]}, r"other text \(--data\);"),
    ):
        with pytest.raises(ResumeError, match=f"made with {words}"):
            calibrate(beam_nano, plain, resume=True, **{**SMALL, **change})
    again = calibrate(beam_nano, plain, resume=True, **SMALL)
    assert again.data_digests == load_stats(plain).data_digests
    assert plain.stat().st_mtime_ns == before


RUN = (
    "import os, signal, sys; from beamq.calib.calibrate import calibrate;"
    "kill = lambda done: done.layer == int(sys.argv[3]) and os.kill(os.getpid(), signal.SIGKILL);"
    "calibrate(sys.argv[1], sys.argv[2], samples=6, sequence_length=96, on_layer=kill,"
    " resume=True, device='cpu')"
)


def start(source: Path, target: Path, layer: int, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(source), str(target), str(layer)],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
    )


def test_a_killed_run_is_resumed_with_the_same_bytes(
    beam_nano: Path, plain: Path, tmp_path: Path
) -> None:
    target = tmp_path / "stats"
    process = start(beam_nano, target, 4)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not target.exists()
    calibrate(beam_nano, target, resume=True, **SMALL)
    assert target.read_bytes() == plain.read_bytes()


def test_a_stop_signal_says_how_far_it_came(beam_nano: Path, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "stats"

    def stop(done: LayerDone) -> None:
        if done.layer == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match=r"3 of 8 layers are calibrated\. .* --resume"):
        calibrate(beam_nano, target, on_layer=stop, **SMALL)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    calibrate(beam_nano, target, resume=True, **SMALL)
    assert target.read_bytes() == plain.read_bytes()


def ranks(source: Path, target: Path, layer: int) -> list[subprocess.Popen[bytes]]:
    port = free_port()
    return [
        start(source, target, layer if rank == 1 else 99, RANK=str(rank), WORLD_SIZE="2",
              MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in (0, 1)
    ]  # fmt: skip


def test_two_ranks_give_the_bytes_of_one(beam_nano: Path, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "stats"
    for process in ranks(beam_nano, target, 99):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()[-500:]
    assert target.read_bytes() == plain.read_bytes()
    assert not (tmp_path / "stats.state").exists()


def test_ranks_with_batches_of_their_own(
    beam_nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six batches and three ranks, which see two batches each; two texts, counted apart."""
    (tmp_path / "own.txt").write_text("the quick brown fox\n" * 500)
    options = {**SMALL, "data": ["stdlib:2", str(tmp_path / "own.txt")]}
    program = (
        "import sys\nfrom pathlib import Path\nimport beamq.calib.run as device\n"
        "from beamq import calibrate\ndevice.BATCH_TOKENS['cpu'] = 96\n"
        f"calibrate(Path(sys.argv[1]), Path(sys.argv[2]), **{options!r})\n"
    )
    monkeypatch.setitem(device.BATCH_TOKENS, "cpu", 96)
    found = calibrate(beam_nano, tmp_path / "one", **options)
    for layer, counts in found.domain_tokens.items():
        assert counts.sum(axis=1).tolist() == [4 * 384, 4 * 192]  # four experts for each token
        assert (counts.sum(axis=0) == found.routed_tokens[layer]).all()
    assert list(found.domain_tokens) == list(found.routed_tokens)
    port = free_port()
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(beam_nano), str(tmp_path / "three")],
            env={**os.environ, **meeting, "RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()[-500:]
    assert (tmp_path / "three").read_bytes() == (tmp_path / "one").read_bytes()


def test_a_rank_that_fails_leaves_nobody_waiting(nano_copy: Path, tmp_path: Path) -> None:
    """The second rank's experts cannot be read; the first waits for its sums."""
    path = nano_copy / "model.safetensors"

    def cut(tensors: st.Tensors) -> None:
        tensors["zzz"] = ("U8", [1 << 20], bytes(1 << 20))

    st.edit(path, cut)
    code = RUN.replace(
        "calibrate(sys",
        "import beamq.model.loader as load; whole = load.LayerLoader._experts;"
        "load.LayerLoader._experts = lambda self, fill, index, first, count: whole(self, fill,"
        " index, first, count) if first == 0 or index < 5 else 1 / 0;"
        "calibrate(sys",
    )
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(nano_copy), str(tmp_path / "stats"), "99"],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": port},
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    errors = [process.communicate(timeout=120)[1].decode() for process in started]
    assert all(process.returncode for process in started)
    assert "another process of this run was lost" in errors[0]
    assert "ZeroDivisionError" in errors[1]


def with_bad_token(folder: Path, token: int) -> None:
    """Give one token an embedding that overflows in layer 0."""
    with open_checkpoint(folder) as checkpoint:
        table = checkpoint.tensor("model.embed_tokens.weight").float().numpy().copy()
    table[token] = np.inf
    edit(folder, lambda name, _: table if name == "model.embed_tokens.weight" else None)


def test_a_sequence_that_is_not_finite_is_left_out_and_named(
    nano_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load_calibration_data((), nano_copy, samples=128, sequence_length=64, seed=0)
    rare = next(t for t in range(2048) if t not in data.input_ids)
    with_bad_token(nano_copy, rare)
    use(monkeypatch, data)
    clean = calibrate(nano_copy, tmp_path / "clean")
    data.input_ids[100, 60] = rare
    stats = calibrate(nano_copy, tmp_path / "stats")
    # One sequence of 128 is lost, as a whole: attention spreads NaN over the blocks it computes.
    assert stats.dropped_rows == 64
    assert stats.dropped_names == ("sequence 100, position 60: not finite in its embedding",)
    for name, entry in stats.inputs.items():
        assert np.isfinite(entry.amax).all()
        assert (entry.amax <= clean.inputs[name].amax).all()
        if ".experts." not in name and layer_of(name) > 1:
            assert entry.rows == 127 * 64
    data.input_ids[5:7, 0] = rare
    with pytest.raises(CalibrationError, match=r"of 8,192 tokens .*: sequence .*, position"):
        calibrate(nano_copy, tmp_path / "many")
    assert not (tmp_path / "many").exists()


def test_odd_models_are_calibrated(tmp_path: Path) -> None:
    """All dense, all sparse, one group; FP32 weights. The tokenizer plays no part here."""
    for name, over in (
        ("dense", {"mlp_layer_types": ["dense"] * 3}),
        ("sparse", {"mlp_layer_types": ["sparse"] * 3, "n_group": 1, "topk_group": 1}),
    ):
        source = random_beam(tmp_path / name, dtype=FP32, **over)
        ids = np.arange(80, dtype=np.int64).reshape(4, 20) % 96
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "load_text", lambda *_, ids=ids, **__: fake(ids))
            stats = calibrate(source, tmp_path / f"{name}.stats", dtype="float32")
        assert len(stats.routed_tokens) == (3 if name == "sparse" else 0)
        assert len(stats.inputs) == 12


def fake(ids: np.ndarray) -> CalibrationData:
    return CalibrationData(
        input_ids=ids, digest=ids_digest(list(ids)), samples_asked=len(ids), seed=0, sources=(),
        notes=(), domains=("x",), domain_ST=np.zeros(ids.shape, np.uint16),
    )  # fmt: skip


def test_refusals_before_any_work(beam_nano: Path, nano_copy: Path, tmp_path: Path) -> None:
    from beamq.convert.quantize import quantize

    for options, error, words in (
        ({"data": ["nowhere.txt"]}, CalibrationError, "nowhere.txt"),
        ({"sequence_length": 9000}, UsageError, "max_position_embeddings"),
        ({"device": "abacus"}, UsageError, "expected auto, cpu"),
        ({"gemm": "fast-and-wrong"}, UsageError, "gemm 'fast-and-wrong'"),
    ):
        with pytest.raises(error, match=words):
            calibrate(beam_nano, tmp_path / "stats", **{**SMALL, **options})
        assert not (tmp_path / "stats").exists()
    quantize(beam_nano, tmp_path / "fp8", recipe="fp8")
    with pytest.raises(AlreadyQuantizedError):
        calibrate(tmp_path / "fp8", tmp_path / "stats", **SMALL)
    (nano_copy / "tokenizer.json").unlink()
    with pytest.raises(CalibrationError, match=r"tokenizer\.json"):
        calibrate(nano_copy, tmp_path / "stats", **SMALL)


def test_statistics_know_their_model(beam_nano: Path, plain: Path, nano_copy: Path,
                                     tmp_path: Path) -> None:  # fmt: skip
    stats: CalibrationStats = load_stats(plain)
    name = "model.layers.5.self_attn.q_proj.weight"
    edit(nano_copy, lambda found, shape: np.full(shape, 0.01) if found == name else None)
    with (
        open_checkpoint(nano_copy) as changed,
        pytest.raises(CalibrationError, match="calibrate this checkpoint"),
    ):
        stats.check_model(changed.content_digest(), "changed")
