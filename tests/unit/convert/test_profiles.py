"""Profiles: other frameworks' FP8 bytes.

Each rule is stated here again, value by value in NumPy's FP32. On 2026-12-01 SkyRL's
`blockwise_cast_to_fp8` (power_2_scale false), `channel_fp8` of Miles's tool at commit 31f1ca9 and
Miles's block kernel in Triton's interpreter (its cast to E4M3 by torch) gave the same 901,632 codes
and the same scales as the profiles, for BF16 and for F32, `edges` among them.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import beamq
from beamq.convert.profiles import PROFILES
from beamq.errors import RecipeError, TensorError

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def nano(beam_nano: Path) -> Tensors:
    return load_file(beam_nano / "model.safetensors")


@pytest.fixture(scope="module")
def config(beam_nano: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((beam_nano / "config.json").read_text())
    return found


def edges(dtype: torch.dtype) -> torch.Tensor:
    """[300, 384]: zeros, subnormal values, the largest, ties of the MX rule and their neighbours,
    rows and columns that are no multiple of 128 or fill it."""
    draw = torch.Generator().manual_seed(3)
    w = torch.randn(300, 384, generator=draw) * torch.logspace(-6, 3, 300)[:, None]
    w[:128, :128] = 0
    w[[5, 200]] = 0
    w[128:256, 128:256] = 1e-40
    w[260, 3], w[261, 300] = torch.finfo(dtype).max, -torch.finfo(dtype).max
    w[270, :32], w[271, :32] = 1.75, math.nextafter(1.75, 2)
    w[272, :32], w[273] = math.nextafter(1.75, 1), -0.0
    return w.to(dtype)


def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
    draws = [torch.Generator().manual_seed(seed) for seed in range(4)]
    return [
        (torch.randn(200, 320, generator=draw) * 10.0 ** (3 * place - 6)).to(dtype)
        for place, draw in enumerate(draws)
    ]


def e4m3(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The nearest of the 253 values of E4M3, ties to the even code, as code bytes."""
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    size = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    above = np.searchsorted(table, size)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - size, size - table[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def stated(name: str, w: torch.Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The rule of an FP8 profile, one block or row at a time."""
    values, (n, k) = w.float().numpy(), w.shape
    rows, columns = (1, k) if name == "miles-fp8-channel" else (128, 128)
    floor = np.float32(1e-10)
    if name == "miles-fp8-channel":
        floor = torch.tensor(1e-12, dtype=w.dtype).float().numpy()
    codes = np.zeros((n, k), np.uint8)
    scales = np.zeros((-(-n // rows), -(-k // columns)), np.float32)
    for i, j in np.ndindex(scales.shape):
        place = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scale = np.maximum(np.abs(values[place]).max(), floor) / np.float32(448)
        scales[i, j] = scale
        divides = name in ("skyrl-fp8-block", "miles-fp8-channel")
        part = values[place] / scale if divides else values[place] * (np.float32(1) / scale)
        codes[place] = e4m3(part)
    return codes, scales


FP8 = [name for name in PROFILES if "mx" not in name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FP8)
def test_the_bytes_are_those_of_the_rule(name: str, dtype: torch.dtype) -> None:
    for w in [edges(dtype), *drawn(dtype)]:
        codes, scales = PROFILES[name].quantize(w[None])
        expected_codes, expected_scales = stated(name, w)
        assert np.array_equal(scales[0].numpy(), expected_scales)
        assert np.array_equal(codes[0].view(torch.uint8).numpy(), expected_codes)


def test_dividing_and_multiplying_differ() -> None:
    """So that a profile that took the other one would be found."""
    w = torch.cat([each[None] for each in drawn(torch.bfloat16)])
    divided, scales = PROFILES["skyrl-fp8-block"].quantize(w)
    multiplied, same = PROFILES["miles-fp8-block"].quantize(w)
    assert torch.equal(scales, same)
    share = (divided.view(torch.uint8) != multiplied.view(torch.uint8)).float().mean().item()
    assert 0 < share < 0.001


@pytest.mark.parametrize("name", ["skyrl-mxfp8", "miles-mxfp8"])
def test_mxfp8_is_the_least_power_of_two_that_holds_the_block(name: str) -> None:
    w = edges(torch.float32)
    codes, scales = PROFILES[name].quantize(w[None])
    values = w.numpy().astype(np.float64)
    for i, j in np.ndindex(300, 12):
        part = values[i, j * 32 : (j + 1) * 32]
        byte = int(scales[0, i, j])
        assert np.abs(part).max() <= 448 * 2.0 ** (byte - 127)
        assert byte == 0 or np.abs(part).max() > 448 * 2.0 ** (byte - 128)
        found = codes[0, i, j * 32 : (j + 1) * 32].view(torch.uint8).numpy()
        assert np.array_equal(found, e4m3(part * 2.0 ** (127 - byte)))


GOLDEN = {
    "skyrl-fp8-block": "88df29a1e76943ab",
    "miles-fp8-block": "c176478170bfd901",
    "verl-fp8-block": "b95a76b16585029a",
    "skyrl-mxfp8": "66bd86f0e8c7fb88",
    "miles-mxfp8": "5104b217cc259a6e",
    "miles-fp8-channel": "30610b4ef418325e",
}


def digest(stream: Any) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(stream, key=lambda pair: str(pair[0])):
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode() + bytes(raw.numpy()))
    return found.hexdigest()[:16]


def packed(nano: Tensors, layer: int) -> Tensors:
    base, found = f"model.layers.{layer}.mlp.experts", dict(nano)
    parts = {
        part: torch.stack([found.pop(f"{base}.{e}.{part}_proj.weight") for e in range(16)])
        for part in ("gate", "up", "down")
    }
    found[f"{base}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
    found[f"{base}.down_proj"] = parts["down"]
    return found


@pytest.mark.parametrize("name", PROFILES)
def test_a_model_has_the_same_bytes_packed_and_one_by_one(
    nano: Tensors, config: dict[str, Any], name: str
) -> None:
    made = digest(beamq.quantize_tensors(nano, "fp8", config, profile=name))
    assert made == GOLDEN[name]
    assert made == digest(beamq.quantize_tensors(packed(nano, 4), "fp8", config, profile=name))


def test_names_of_scales(nano: Tensors, config: dict[str, Any]) -> None:
    expert, attention = "model.layers.4.mlp.experts.3.up_proj", "model.layers.0.self_attn.gate_proj"
    for name, of_expert, of_attention in (
        ("skyrl-fp8-block", "weight_scale_inv", "weight_scale_inv"),
        ("verl-fp8-block", "weight_scale_inv", "weight_scale"),
        ("skyrl-mxfp8", "weight_scale", "weight_scale"),
        ("miles-mxfp8", "weight_scale_inv", "weight_scale_inv"),
    ):
        made = dict(beamq.quantize_tensors(nano, "fp8", config, profile=name))
        assert made[f"{expert}.weight"].dtype == torch.float8_e4m3fn
        assert {f"{expert}.{of_expert}", f"{attention}.{of_attention}"} <= set(made)
        assert all(tensor.is_contiguous() for tensor in made.values())


def test_refusals(nano: Tensors, config: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="profile miles-mxfp8 is FP8, and recipe nvfp4"):
        beamq.quantize_tensors(nano, "nvfp4", config, profile="miles-mxfp8")
    bad = dict(nano)
    name = "model.layers.4.mlp.experts.3.up_proj.weight"
    bad[name] = nano[name].clone()
    bad[name][1, 2] = math.nan
    with pytest.raises(TensorError, match=f"{name} holds NaN"):
        list(beamq.quantize_tensors(bad, "fp8", config, profile="skyrl-fp8-block"))
