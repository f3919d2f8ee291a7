"""`verify --level forward`: sound checkpoints pass; files that are whole and wrong do not.

Every damaged folder is signed again, so that its checksums, index and manifest fit: only what the
weights say can give it away.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from beamq.convert.quantize import quantize
from beamq.errors import UsageError
from beamq.eval.verify.checks import CHECKS, VerifyReport
from beamq.eval.verify.verify import verify
from beamq.io.safetensors_header import read_header
from tests.helpers.checkpoint_damage import find, poke, put_float, read, resign, shards, swap
from tests.helpers.safetensors_edit import Tensors, load, save

FORWARD = [name for name, check in CHECKS.items() if check.level == "forward"]
EXPERTS = "model.layers.{}.mlp.experts.{}.{}"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PARTS = ("weight", "weight_scale", "weight_scale_2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, beam_nano: Path) -> Callable[[str], Path]:
    """Good checkpoints by recipe, each made once, in several shards."""
    root = tmp_path_factory.mktemp("made")

    def make(recipe: str, source: Path = beam_nano) -> Path:
        output = root / f"{source.name}-{recipe}"
        if not output.exists():
            uncalibrated = recipe.startswith("nvfp4")
            quantize(
                source,
                output,
                recipe=recipe,
                no_calibration=uncalibrated,
                max_shard_bytes=800_000,
            )
        return output

    return make


def forward(folder: Path, source: Path) -> VerifyReport:
    return verify(folder, source=source, level="forward", sample=0)


def failed(report: VerifyReport) -> set[str]:
    return {check.name for check in report.failures if check.name.startswith("forward.")}


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_sound_checkpoints_pass(recipe: str, made: Callable[[str], Path], beam_nano: Path) -> None:
    report = forward(made(recipe), beam_nano)
    assert report.ok, report.failures
    assert [report.check(name).status for name in FORWARD] == ["pass"] * len(FORWARD)
    assert "nats" in report.check("forward.kld").detail


def test_a_source_has_no_bounds_to_be_held_to(beam_nano: Path) -> None:
    with pytest.raises(UsageError, match="not quantized, so level forward has no bounds"):
        forward(beam_nano, beam_nano)


def swapped_experts(folder: Path) -> None:
    for proj in PROJECTIONS:
        for part in PARTS:
            a, b = (f"{EXPERTS.format(4, expert, proj)}.{part}" for expert in (3, 9))
            swap(folder, a, b)


def transposed_scale(folder: Path) -> None:
    name = f"{EXPERTS.format(5, 7, 'up_proj')}.weight_scale"
    shape = find(folder, name).shape
    scales = np.frombuffer(read(folder, name), dtype=np.uint8).reshape(shape)
    poke(folder, name, scales.T.tobytes())


def exchanged_gate_and_up(folder: Path) -> None:
    for part in PARTS:
        gate, up = (f"{EXPERTS.format(6, 2, proj)}.{part}" for proj in PROJECTIONS[:2])
        swap(folder, gate, up)


def wrong_input_scale(folder: Path) -> None:
    """From layer 4 on all experts get activations 4,000 times too large for their grid.

    In all of them: how much one layer's do depends on the text, so on Python's version.
    """
    for layer, expert, proj in product(range(4, 8), range(16), PROJECTIONS):
        put_float(folder, f"{EXPERTS.format(layer, expert, proj)}.input_scale", 1.0 / 2**20)


def other_norm(folder: Path) -> None:
    name = "model.layers.6.post_attention_layernorm.weight"
    values = np.frombuffer(read(folder, name), dtype=np.uint16)
    poke(folder, name, np.roll(values, 1).tobytes())


def other_router(folder: Path) -> None:
    name = "model.layers.5.mlp.gate.weight"
    rows = np.frombuffer(read(folder, name), dtype=np.float32).reshape(find(folder, name).shape)
    poke(folder, name, np.roll(rows, 1, axis=0).tobytes())


def nan_norm(folder: Path) -> None:
    poke(folder, "model.layers.2.input_layernorm.weight", b"\xc0\x7f")


FAULTS = {
    "swapped experts": (swapped_experts, {"forward.weights"}, 4),
    "transposed scale": (transposed_scale, {"forward.weights"}, 5),
    "gate and up exchanged": (exchanged_gate_and_up, {"forward.weights"}, 6),
    "input scale": (wrong_input_scale, {"forward.kld", "forward.top"}, 4),
    "norm": (other_norm, {"forward.unquantized"}, 6),
    "not finite": (nan_norm, {"forward.runs", "forward.unquantized"}, 2),
    "router": (other_router, {"forward.unquantized", "forward.router", "forward.kld"}, 5),
}


def test_every_forward_check_has_a_case_in_which_it_fails() -> None:
    assert {check for _, checks, _ in FAULTS.values() for check in checks} == set(FORWARD)


@pytest.mark.parametrize("name", list(FAULTS))
def test_faults_are_named_by_their_layer(
    name: str, made: Callable[[str], Path], beam_nano: Path, tmp_path: Path
) -> None:
    damage, expected, layer = FAULTS[name]
    folder = Path(shutil.copytree(made("nvfp4"), tmp_path / "out"))
    damage(folder)
    resign(folder)
    report = forward(folder, beam_nano)
    assert expected <= failed(report), report.failures
    for check in report.failures:
        if check.name.startswith("forward."):
            assert check.detail.startswith(f"layer {layer}: "), check


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_a_shard_from_another_run(
    recipe: str, made: Callable[..., Path], beam_nano: Path, tmp_path: Path
) -> None:
    """The same model trained on: every name, shape and size fits, the values are others'."""
    other_source = Path(shutil.copytree(beam_nano, tmp_path / "other"))
    rng = np.random.default_rng(0)

    def train_on(tensors: Tensors) -> None:
        for name, (dtype, shape, raw) in tensors.items():
            if "proj.weight" in name and dtype == "BF16":
                bits = np.frombuffer(raw, dtype=np.uint16).astype(np.uint32) << 16
                values = bits.view(np.float32)
                values = values + 0.3 * values.std() * rng.standard_normal(values.size)
                rounded = values.astype(np.float32).view(np.uint32) + 0x8000 >> 16
                tensors[name] = (dtype, shape, rounded.astype(np.uint16).tobytes())

    path = shards(other_source)[0]
    tensors = load(path)
    train_on(tensors)
    save(path, tensors)
    folder = Path(shutil.copytree(made(recipe), tmp_path / "out"))
    shard = shards(folder)[-2]
    shutil.copy(made(recipe, other_source) / shard.name, shard)
    resign(folder)
    report = forward(folder, beam_nano)
    assert {"forward.weights", "forward.kld"} <= failed(report), report.failures
    names = [spec.name for spec in read_header(shard, shard.name)[0]]
    first = min(int(n.split(".")[2]) for n in names if n.endswith("proj.weight"))
    assert report.check("forward.weights").detail.startswith(f"layer {first}: ")


def test_a_checkpoint_that_does_not_run(
    made: Callable[[str], Path], beam_nano: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made("fp8"), tmp_path / "out"))
    shards(folder)[0].unlink()
    report = forward(folder, beam_nano)
    assert not report.ok
    assert report.check("forward.kld").status == "skip"


def test_it_needs_a_source(beam_nano: Path) -> None:
    with pytest.raises(UsageError, match="--source"):
        verify(beam_nano, level="forward")
