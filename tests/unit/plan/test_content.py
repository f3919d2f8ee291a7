"""Zeros where no Beam has any are found from a few samples; zeros that may be are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from beamq.errors import TensorError
from beamq.io.checkpoint import open_checkpoint
from beamq.plan.content import SAMPLE_BYTES, refuse_zeros, zero_faults
from beamq.plan.plan import make_plan
from tests.helpers import safetensors_edit as st
from tests.helpers.craft import convert, light_verify

EXPERT = "model.layers.7.mlp.experts.15"


def faults(folder: Path) -> list[str]:
    with open_checkpoint(folder) as checkpoint:
        return [f"{where} {what}" for where, what in zero_faults(checkpoint)]


def fill(name: str, share: float = 1.0) -> Callable[[st.Tensors], None]:
    """Zero the last `share` of a tensor, which becomes the last of the file."""

    def change(tensors: st.Tensors) -> None:
        dtype, shape, data = tensors.pop(name)
        kept = int(len(data) * (1 - share))
        tensors[name] = (dtype, shape, data[:kept] + bytes(len(data) - kept))

    return change


def test_one_value_is_enough(nano_copy: Path) -> None:
    """Samples alone do not decide: the tensor is read whole before it is refused."""

    def change(tensors: st.Tensors) -> None:
        dtype, shape, data = tensors["lm_head.weight"]
        one = bytearray(len(data))
        one[3 * SAMPLE_BYTES] = 1
        tensors["lm_head.weight"] = (dtype, shape, bytes(one))

    st.edit(nano_copy / "model.safetensors", change)
    assert faults(nano_copy) == []


def test_the_second_half_of_a_shard_is_missing(nano_copy: Path) -> None:
    """A download that was allocated in advance: the file has its length, its end is zeros."""
    path = nano_copy / "model.safetensors"
    whole = path.read_bytes()
    for share in (0.5, 0.9, 0.02):
        start = int(len(whole) * share)
        path.write_bytes(whole[:start] + bytes(len(whole) - start))
        with open_checkpoint(nano_copy) as checkpoint, pytest.raises(TensorError, match="and all"):
            refuse_zeros(checkpoint)
        with pytest.raises(TensorError, match=r"is the download whole\?"):
            make_plan(nano_copy)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_last_tensor_is_zero_in_part(nano_copy: Path, share: float) -> None:
    name = f"{EXPERT}.down_proj.weight"
    st.edit(nano_copy / "model.safetensors", fill(name, share))
    assert faults(nano_copy) == [
        f"model.safetensors: {name} and all after it in the file (1 tensor) are zero"
    ]


def test_a_part_of_an_expert_is_zero_at_the_end(nano_copy: Path) -> None:
    name = f"{EXPERT}.down_proj.weight"
    st.edit(nano_copy / "model.safetensors", fill(name))
    assert len(faults(nano_copy)) == 1


def test_what_may_be_zero(nano_copy: Path) -> None:
    """A pruned expert, at the end of the file too, biases, and what is not Beam's."""

    def change(tensors: st.Tensors) -> None:
        for name in (
            "model.layers.4.mlp.gate.e_score_correction_bias",
            "model.layers.4.self_attn.gate_bias",
            "model.layers.5.mlp.experts.3.up_proj.weight",
        ):
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, bytes(len(data)))
        for proj in ("gate", "up", "down"):
            fill(f"{EXPERT}.{proj}_proj.weight")(tensors)
        tensors["extra.zeros"] = ("BF16", [64], bytes(128))

    st.edit(nano_copy / "model.safetensors", change)
    assert faults(nano_copy) == []


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_rows_of_unused_tokens_may_be_zero(nano_copy: Path, name: str) -> None:
    """A vocabulary that is filled up to a round number, at the end of a file too."""
    st.edit(nano_copy / "model.safetensors", fill(name, 0.5))
    assert faults(nano_copy) == []


@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_verify_says_it_of_an_output(beam_nano: Path, tmp_path: Path, fmt: str) -> None:
    output = convert(beam_nano, tmp_path / "out", fmt).output
    assert light_verify(output).check("values.zeros").status == "pass"

    def change(tensors: st.Tensors) -> None:
        for name in ("model.norm.weight", "model.layers.4.mlp.gate.weight"):
            dtype, shape, data = tensors[name]
            tensors[name] = (dtype, shape, bytes(len(data)))

    (path,) = output.glob("*.safetensors")
    st.edit(path, change)
    found = light_verify(output).check("values.zeros")
    assert (found.status, found.count) == ("fail", 2)
    assert "model.norm.weight is all zero" in found.detail or "gate.weight" in found.detail
