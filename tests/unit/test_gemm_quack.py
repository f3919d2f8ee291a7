"""The optional back end `quack` without its package or hardware: operands, calls, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gemm_double import BlockScaledOperand, QuackCalls

from beamq.errors import DeviceError
from beamq.model import gemm, gemm_check, gemm_probe
from beamq.model.gemm import ORDER, EngineGemm, backends, engine
from beamq.model.gemm_check import Verdict
from beamq.model.gemm_device import OPS, DeviceFacts
from beamq.model.gemm_operands import fp4_tokens, fp4_weight
from beamq.model.gemm_quack import Quack, tiles
from beamq.model.linear import (
    Fp8Weight,
    Nvfp4Weight,
    ReferenceGemm,
    nvfp4_operand,
    weight_operand,
)

CPU = torch.device("cpu")
RTX = DeviceFacts(
    kind="cuda",
    name="RTX PRO 6000",
    capability=(12, 0),
    torch="2.11.0",
    triton="3.6.0",
    quack="0.6.5",
    cutlass_dsl="4.8.1",
)


def on_double() -> tuple[EngineGemm, QuackCalls]:
    calls = QuackCalls()
    choices = {(op, CPU): "quack" for op in Quack.ops}
    return EngineGemm(name="quack", kernels={"quack": Quack(calls)}, choices=choices), calls


def experts(counts: list[int], n: int, k: int) -> tuple[torch.Tensor, Nvfp4Weight, list[int]]:
    """Tokens and experts that differ in their global scales; expert e has counts[e] rows."""
    torch.manual_seed(len(counts) + n + k)
    rows = sum(counts)
    x, weight, _ = gemm_check._problem(
        "nvfp4-grouped", CPU, experts=len(counts), rows=max(rows, 5), n=n, k=k
    )
    assert isinstance(weight, Nvfp4Weight)
    each = torch.arange(1, len(counts) + 1).view(-1, 1, 1)
    weight = dataclasses.replace(weight, global_scale=weight.global_scale * each)
    offsets = [sum(counts[:e]) for e in range(len(counts) + 1)]
    return x[:rows], weight, offsets


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
    assert error < gemm_check.TOLERANCE, f"relative error {error:.1e}"


def same_operands(
    call: tuple[tuple[torch.Tensor, torch.Tensor], ...], x: torch.Tensor, own: Nvfp4Weight
) -> None:
    """What the call was given is what the emulation multiplies, to the bit."""
    (a, scale_a), (b, scale_b) = call
    assert own.input_scale is not None
    assert torch.equal(a, nvfp4_operand(x, own.input_scale))
    operand, scale = weight_operand(own, torch.float32)
    assert torch.equal(b, operand)
    assert scale_a == own.input_scale
    assert torch.equal(scale_b.expand_as(scale), scale)


@pytest.mark.parametrize(("rows", "k"), [(1, 32), (128, 64), (130, 96), (300, 320)])
def test_tiles_are_the_swizzled_bytes_seen_otherwise(rows: int, k: int) -> None:
    """Against the place that the hardware's layout gives each scale, one by one."""
    x, weight, _ = gemm_check._problem("nvfp4-dense", CPU, experts=1, rows=rows, n=rows, k=k)
    assert isinstance(weight, Nvfp4Weight)
    for operand in (fp4_weight(weight), fp4_tokens(x, weight.input_scale)):
        seen = tiles(operand)
        assert seen.data_ptr() == operand.block_scale.data_ptr()
        assert seen.shape == (-(-rows // 128), -(-k // 64), 32, 4, 4)
        left = seen.view(torch.uint8).clone()
        if operand.codes is weight.codes:
            scales = weight.block_scale.view(torch.uint8)
            for r in range(rows):
                for c in range(k // 16):
                    place = (r // 128, c // 4, r % 32, r % 128 // 32, c % 4)
                    assert left[place] == scales[r, c]
                    left[place] = 0
            assert not left.any(), "padding"


@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 16, 32), (5, 48, 64), (129, 64, 96), (300, 16, 320)]
)
def test_dense_gives_the_call_what_the_emulation_multiplies(rows: int, n: int, k: int) -> None:
    x, weight, _ = gemm_check._problem("nvfp4-dense", CPU, experts=1, rows=rows, n=n, k=k)
    assert isinstance(weight, Nvfp4Weight)
    engine, calls = on_double()
    close(engine.linear(x, weight), ReferenceGemm().linear(x, weight))
    (call,) = calls.operands
    same_operands(call, x, weight)


COUNTS = [[0, 150], [1, 0, 0, 7], [128, 129, 0, 3, 127], [0, 0, 1]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("gathered", [True, False])
def test_experts_with_rows_are_multiplied_one_by_one(counts: list[int], gathered: bool) -> None:
    x, weight, offsets = experts(counts, n=64, k=96)
    engine, calls = on_double()
    rows = torch.randint(0, len(x), (len(x),)) if gathered else None
    got = engine.grouped(x, rows, weight, offsets)
    close(got, ReferenceGemm().grouped(x, rows, weight, offsets))
    busy = [e for e, count in enumerate(counts) if count]
    taken = x if rows is None else x[rows]
    for e, call in zip(busy, calls.operands, strict=True):
        same_operands(call, taken[offsets[e] : offsets[e + 1]], weight.expert(e))


def test_expert_mlps_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate_up, offsets = experts([40, 1, 0, 129, 30, 0], n=128, k=96)
    _, down, _ = experts([40, 1, 0, 129, 30, 0], n=96, k=64)
    engine, calls = on_double()
    rows = torch.randperm(len(x))
    wanted = ReferenceGemm().experts(x, rows, gate_up, down, offsets)
    whole = engine.experts(x, rows, gate_up, down, offsets)
    close(whole, wanted)
    assert len(calls.operands) == 8
    first = calls.operands.copy()
    calls.operands.clear()
    monkeypatch.setattr(gemm, "CHUNK_BYTES", 50 * 96 * 2)
    assert torch.equal(engine.experts(x, rows, gate_up, down, offsets), whole)
    # Ranges of experts: 0 and 1, 3, 4.
    order = [0, 1, 4, 5, 2, 6, 3, 7]
    for position, call in zip(order, calls.operands, strict=True):
        for (one, one_scale), (other, other_scale) in zip(first[position], call, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one_scale, other_scale)
    for e, (low, high) in enumerate(pairwise(offsets)):
        if e in (0, 1):
            same_operands(calls.operands[e], x[rows[low:high]], gate_up.expert(e))
    assert torch.equal(calls.operands[2][1][0], weight_operand(down.expert(0), torch.float32)[0])


def without(**changes: Any) -> DeviceFacts:
    return dataclasses.replace(RTX, **changes)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (RTX, None),
        (without(capability=(12, 1), quack="1.0"), None),
        (without(quack="0.6.10.post1"), None),
        (without(kind="cpu", capability=(0, 0)), "needs an NVIDIA GPU; this is cpu"),
        (without(kind="hip"), "needs an NVIDIA GPU; this is hip"),
        (without(capability=(9, 0)), "on sm_120 and sm_121; this is sm_90"),
        (without(capability=(10, 0)), "this is sm_100"),
        (without(capability=(11, 0), quack=None), "this is sm_110"),
        (without(quack=None), 'quack-kernels is not installed: pip install "beamq[quack]"'),
        (without(quack="0.6.4"), 'is 0.6.4, needs 0.6.5 or later: pip install "beamq[quack]"'),
        (without(quack="0.6"), "is 0.6, needs 0.6.5"),
    ],
)
def test_refusals_name_the_reason(device: DeviceFacts, reason: str | None) -> None:
    for op in Quack.ops:
        found = Quack().refusal(op, device)
        assert found is None if reason is None else reason in str(found)


def test_the_documented_order_is_the_order() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    table = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| ")]
    names = {
        "BF16 experts": "bf16-grouped",
        "FP8 linears": "fp8-dense",
        "FP8 experts": "fp8-grouped",
        "NVFP4 linears": "nvfp4-dense",
        "NVFP4 experts": "nvfp4-grouped",
    }
    documented = {names[row[0]]: row[1:] for row in table if row[0] in names}
    columns: list[tuple[tuple[int, int], ...]] = [((9, 0),), ((10, 0), (10, 3)), ((12, 0), (12, 1))]
    assert set(documented) == set(OPS)
    for op, cells in documented.items():
        for cell, capabilities in zip(cells, columns, strict=True):
            for capability in capabilities:
                device = without(capability=capability)
                kernels = [kernel for kernel in backends().values() if kernel.name in ORDER[op]]
                left = {kernel.name for kernel in kernels if kernel.refusal(op, device) is None}
                assert [*cell.split(", "), "reference"] == [
                    name for name in ORDER[op] if name in left or name == "reference"
                ]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """Pairs that were checked, all of them found usable; a cache folder of its own."""
    asked: list[tuple[str, str]] = []

    def child(device: torch.device, pairs: list[tuple[str, str]]) -> tuple[list[str], None]:
        asked.extend(pairs)
        found = [Verdict(op=op, backend=name, usable=True) for op, name in pairs]
        return [json.dumps(dataclasses.asdict(verdict)) for verdict in found], None

    monkeypatch.setattr(gemm_probe, "_child", child)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


def test_installed_later_it_is_checked_then(checked: list[tuple[str, str]]) -> None:
    cuda = torch.device("cuda", 0)

    def choice(device: DeviceFacts) -> str:
        found = gemm_probe._all_verdicts(cuda, device, fresh=False)
        return next(v.backend for v in found if v.op == "nvfp4-grouped" and v.usable)

    assert choice(without(quack=None, cutlass_dsl=None)) == "triton"
    assert [name for _, name in checked if name == "quack"] == []
    assert choice(RTX) == "quack"
    assert [(op, name) for op, name in checked if name == "quack"] == [
        ("nvfp4-dense", "quack"),
        ("nvfp4-grouped", "quack"),
    ]
    count = len(checked)
    assert choice(RTX) == "quack"
    assert len(checked) == count
    choice(without(cutlass_dsl="4.9.0"))  # which compiles its kernels
    assert len(checked) > count


def test_its_check_passes_on_the_double_and_fails_on_wrong_calls() -> None:
    def verdict(op: str, calls: Any) -> Verdict:
        return gemm_check.check_one(op, "quack", CPU, kernels={"quack": Quack(calls)})

    class Swapped(QuackCalls):
        """Takes block scales row by row where they are in tiles."""

        def gemm(self, A: Any, B: Any, **more: Any) -> torch.Tensor:
            rows, columns = A.scale.shape[0] * 128, A.scale.shape[1] * 4
            linear = A.scale.reshape(rows, columns).view(torch.uint8)
            blocks = linear.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
            scale = blocks.contiguous().view(torch.float8_e4m3fn)
            return super().gemm(dataclasses.replace(A, scale=scale), B, **more)

    class NothingAbove512Rows(QuackCalls):
        def gemm(self, A: Any, B: Any, **more: Any) -> torch.Tensor:
            out = super().gemm(A, B, **more)
            return out if len(out) <= 512 else out.zero_()

    class NoGlobalScale(QuackCalls):
        def gemm(self, A: Any, B: Any, **more: Any) -> torch.Tensor:
            one = torch.ones(1)
            return super().gemm(dataclasses.replace(A, per_tensor_scale=one), B, **more)

    for op in Quack.ops:
        assert verdict(op, QuackCalls()).usable
        for wrong in (Swapped(), NothingAbove512Rows(), NoGlobalScale()):
            found = verdict(op, wrong)
            assert not found.usable
            assert "differs from the emulation" in str(found.reason)


def test_the_package_is_imported_at_the_first_product(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = QuackCalls()
    for name in ("quack", "quack.blockscaled", "quack.gemm_interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(
        sys.modules["quack.blockscaled"], "BlockScaledOperand", BlockScaledOperand, raising=False
    )
    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm", calls.gemm, raising=False)
    monkeypatch.setattr(os, "environ", {**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    os.environ.pop("QUACK_CACHE_DIR", None)
    kernel = backends()["quack"]
    assert kernel.calls is None
    x, weight, _ = gemm_check._problem("nvfp4-dense", CPU, experts=1, rows=3, n=16, k=32)
    close(kernel.dense(x, weight, fast=False), ReferenceGemm().linear(x, weight))
    assert len(calls.operands) == 1
    assert os.environ["QUACK_CACHE_DIR"] == str(tmp_path / "beamq" / "quack")


def test_a_missing_package_is_the_reason_of_its_check() -> None:
    """Facts can be out of date: then the check says so."""
    lines, death = gemm_probe._child(CPU, [("nvfp4-dense", "quack")])
    assert death is None
    found = Verdict(**json.loads(lines[0]))
    assert not found.usable
    assert "ModuleNotFoundError: No module named 'quack'" in str(found.reason)


def test_by_name_on_a_cpu() -> None:
    x, weight, _ = gemm_check._problem("nvfp4-dense", CPU, experts=1, rows=3, n=16, k=32)
    with pytest.raises(DeviceError, match=r"'quack' cannot do nvfp4-dense on cpu: needs an NVIDIA"):
        engine("quack").linear(x, weight)
    fp8 = gemm_check._problem("fp8-dense", CPU, experts=1, rows=3, n=16, k=32)
    assert isinstance(fp8[1], Fp8Weight)
    wanted = ReferenceGemm().linear(*fp8[:2])
    assert torch.equal(engine("quack").linear(*fp8[:2]), wanted)


def test_every_device_is_told_of_it() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    (device,) = gemm_probe.probe()["devices"]
    told = {op["op"] for op in device["ops"] for b in op["backends"] if b["backend"] == "quack"}
    assert told == set(Quack.ops) < set(OPS)
