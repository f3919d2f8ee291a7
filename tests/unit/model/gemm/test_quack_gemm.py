"""The optional back end `quack` without its package or hardware: what its calls are given."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch

from beamq.model.gemm import check
from beamq.model.gemm import select as gemm
from beamq.model.gemm.backend import BackendCheck, Groups, Nvfp4Weight
from beamq.model.gemm.library_gemm import Quack, tiles
from beamq.model.gemm.operands import fp4_tokens, fp4_weight
from beamq.model.gemm.reference import ReferenceGemm, nvfp4_operand, weight_operand
from beamq.model.gemm.select import SelectedGemm
from tests.helpers.gemm_double import QuackCalls

CPU = torch.device("cpu")
QUACK_OPS = ("nvfp4-dense", "nvfp4-grouped")


def on_double() -> tuple[SelectedGemm, QuackCalls]:
    calls = QuackCalls()
    choices = {(op, CPU): "quack" for op in QUACK_OPS}
    return SelectedGemm(name="quack", backends={"quack": Quack(calls)}, choices=choices), calls


def experts(counts: list[int], n: int, k: int) -> tuple[torch.Tensor, Nvfp4Weight, list[int]]:
    """Tokens and experts that differ in their global scales; expert e has counts[e] rows."""
    torch.manual_seed(len(counts) + n + k)
    rows = sum(counts)
    x, weight, _ = check.random_problem(
        "nvfp4-grouped", CPU, experts=len(counts), rows=max(rows, 5), n=n, k=k
    )
    assert isinstance(weight, Nvfp4Weight)
    each = torch.arange(1, len(counts) + 1).view(-1, 1, 1)
    weight = dataclasses.replace(weight, global_scale=weight.global_scale * each)
    offsets = [sum(counts[:e]) for e in range(len(counts) + 1)]
    return x[:rows], weight, offsets


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
    assert error < check.TOLERANCE, f"relative error {error:.1e}"


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
    x, weight, _ = check.random_problem("nvfp4-dense", CPU, experts=1, rows=rows, n=rows, k=k)
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
    x, weight, _ = check.random_problem("nvfp4-dense", CPU, experts=1, rows=rows, n=n, k=k)
    assert isinstance(weight, Nvfp4Weight)
    selected, calls = on_double()
    close(selected.linear(x, weight), ReferenceGemm().linear(x, weight))
    (call,) = calls.operands
    same_operands(call, x, weight)


COUNTS = [[0, 150], [1, 0, 0, 7], [128, 129, 0, 3, 127], [0, 0, 1]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("gathered", [True, False])
def test_experts_with_rows_are_multiplied_one_by_one(counts: list[int], gathered: bool) -> None:
    x, weight, offsets = experts(counts, n=64, k=96)
    selected, calls = on_double()
    rows = torch.randint(0, len(x), (len(x),)) if gathered else None
    got = selected.grouped(x, weight, Groups(offsets, rows))
    close(got, ReferenceGemm().grouped(x, weight, Groups(offsets, rows)))
    busy = [e for e, count in enumerate(counts) if count]
    taken = x if rows is None else x[rows]
    for e, call in zip(busy, calls.operands, strict=True):
        same_operands(call, taken[offsets[e] : offsets[e + 1]], weight.expert(e))


def test_expert_mlps_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate_up, offsets = experts([40, 1, 0, 129, 30, 0], n=128, k=96)
    _, down, _ = experts([40, 1, 0, 129, 30, 0], n=96, k=64)
    selected, calls = on_double()
    rows = torch.randperm(len(x))
    wanted = ReferenceGemm().experts(x, gate_up, down, Groups(offsets, rows))
    whole = selected.experts(x, gate_up, down, Groups(offsets, rows))
    close(whole, wanted)
    assert len(calls.operands) == 8
    first = calls.operands.copy()
    calls.operands.clear()
    monkeypatch.setattr(gemm, "CHUNK_BYTES", 50 * 96 * 2)
    assert torch.equal(selected.experts(x, gate_up, down, Groups(offsets, rows)), whole)
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


def test_its_check_passes_on_the_double_and_fails_on_wrong_calls() -> None:
    def verdict(op: str, calls: Any) -> BackendCheck:
        return check.check_backend(op, Quack(calls), CPU)

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

    for op in QUACK_OPS:
        assert verdict(op, QuackCalls()).usable
        for wrong in (Swapped(), NothingAbove512Rows(), NoGlobalScale()):
            found = verdict(op, wrong)
            assert not found.usable
            assert "differs from the emulation" in str(found.reason)
