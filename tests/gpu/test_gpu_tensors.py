"""Streams of tensors on a GPU: the bytes of the CPU, and a host that waits once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import beamq
from beamq.convert.tensors import CpuKernels
from beamq.errors import TensorError
from beamq.plan.recipe import BUILT_IN
from benchmarks.random_layer import REAL
from benchmarks.stream_gpu import BASE, experts

RECIPES = [name for name in BUILT_IN if name != "nvfp4-gptq"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def waiting_is_an_error() -> Iterator[Callable[[], None]]:
    """Call it, and whatever makes the host wait for the GPU raises."""
    yield partial(torch.cuda.set_sync_debug_mode, "error")
    torch.cuda.set_sync_debug_mode("default")


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(wanted)
    for name, tensor in got.items():
        assert (tensor.device.type, tensor.dtype) == ("cuda", wanted[name].dtype), name
        assert tensor.is_contiguous(), name
        ours, theirs = (each.cpu().reshape(-1).view(torch.uint8) for each in (tensor, wanted[name]))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_nano(beam_nano: Path, cuda: torch.device, recipe: str) -> None:
    source = load_file(beam_nano / "model.safetensors")
    there = {name: tensor.to(cuda) for name, tensor in source.items()}
    wanted = dict(beamq.quantize_tensors(source, recipe, beam_nano))
    assert_same(dict(beamq.quantize_tensors(there, recipe, beam_nano)), wanted)
    stream = torch.cuda.Stream(cuda)
    with torch.cuda.stream(stream):
        found = dict(beamq.quantize_tensors(there, recipe, beam_nano, device="cuda"))
    assert_same(found, wanted)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-max", "fp8-experts"])
def test_experts_of_the_real_width(cuda: torch.device, recipe: str) -> None:
    torch.manual_seed(5)
    config = replace(REAL, num_experts=8)
    for named in experts(config).values():
        here = {name: tensor.cpu() for name, tensor in named.items()}
        wanted = dict(beamq.quantize_tensors(here, recipe, config))
        assert_same(dict(beamq.quantize_tensors(named, recipe, config)), wanted)


@pytest.mark.parametrize("rule", ["max", "sweep"])
def test_groups_are_those_of_the_cpu(cuda: torch.device, rule: str) -> None:
    """Parts of any dtype side by side, odd sizes, zeros, and values that are not finite."""
    from beamq.formats.kernels import gpu

    torch.manual_seed(6)
    parts = [
        (torch.randn(5, n, 48) * 0.02).to(dtype)
        for n, dtype in zip((3, 7, 16), DTYPES, strict=True)
    ]
    parts[0][1], parts[1][1], parts[2][1] = 0.0, 0.0, 0.0
    parts[2][2, 0, 0] = 1e30
    parts[1][3, 2, 20] = torch.nan
    found = gpu.nvfp4_groups([part.to(cuda) for part in parts], 4, rule)
    wanted = CpuKernels.nvfp4_groups(parts, 4, rule)
    counts = found[2].cpu()
    assert torch.equal(counts[..., 3], wanted[2][..., 3])
    finite = [0, 1, 2, 4]  # the bytes and other counts of a group with a NaN mean nothing
    assert torch.equal(counts[:, finite], wanted[2][:, finite])
    assert torch.equal(found[1].cpu()[finite], wanted[1][finite])
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        assert torch.equal(ours.codes.cpu()[finite], theirs.codes[finite])
        one, two = (each.block_scale.view(torch.uint8).cpu()[finite] for each in (ours, theirs))
        assert torch.equal(one, two)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_host_waits_only_at_the_end(
    beam_nano: Path, cuda: torch.device, waiting_is_an_error: Callable[[], None], recipe: str
) -> None:
    source = load_file(beam_nano / "model.safetensors")
    there = {name: tensor.to(cuda) for name, tensor in source.items()}
    count = len(beamq.output_metadata(beam_nano, recipe))
    waiting_is_an_error()
    stream = beamq.quantize_tensors(there, recipe, beam_nano)
    assert len([next(stream) for _ in range(count)]) == count
    with pytest.raises(RuntimeError, match="synchroniz"):
        next(stream)  # and then it does


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-experts"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(cuda: torch.device, recipe: str, value: float) -> None:
    config: Any = replace(REAL, num_experts=8)
    for form, named in experts(config).items():
        name = f"{BASE}.down_proj" if form == "packed" else f"{BASE}.5.down_proj.weight"
        named[name][5 if form == "packed" else ..., 7, 9] = value
        stream = beamq.quantize_tensors(named, recipe, config)
        with pytest.raises(TensorError, match=rf"^{name} holds NaN .*may be used") as failure:
            list(stream)
        assert (recipe, form) != ("nvfp4", "packed") or "(expert 5)" in str(failure.value)


def test_tensors_that_the_kernels_cannot_read_as_they_are(
    beam_nano: Path, cuda: torch.device
) -> None:
    source = load_file(beam_nano / "model.safetensors")
    wanted = dict(beamq.quantize_tensors(source, "nvfp4-all", beam_nano))

    def odd(tensor: torch.Tensor) -> torch.Tensor:
        place = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=cuda)
        return place[1:].view(tensor.shape).copy_(tensor)

    given = {name: odd(tensor) for name, tensor in source.items()}
    assert_same(dict(beamq.quantize_tensors(given, "nvfp4-all", beam_nano)), wanted)
    given = {name: torch.stack([t, t], -1).to(cuda)[..., 0] for name, t in source.items()}
    assert_same(dict(beamq.quantize_tensors(given, "nvfp4-all", beam_nano)), wanted)
