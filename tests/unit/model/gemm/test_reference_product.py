"""Products widened to FP32 against torch's BF16 ones: equal where sums are exact, else as close."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from beamq.model.gemm import reference
from beamq.model.gemm.backend import DenseWeight, Groups
from beamq.model.gemm.reference import GRAIN, MANY_ROWS, cpu_lacks_bf16, product
from beamq.model.gemm.select import select_gemm


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "cpu_lacks_bf16", lambda: True)


def whole_numbers(*shape: int) -> torch.Tensor:
    """BF16 operands whose products and sums are exact in FP32, but not in BF16."""
    return torch.randint(-9, 10, shape).bfloat16()


@pytest.mark.parametrize("rows", [0, 1, GRAIN - 1, GRAIN, 3 * GRAIN])
@pytest.mark.parametrize("block", [1, 64 * 5, 1 << 24])
def test_the_twin_where_sums_are_exact(
    lacking: None, monkeypatch: pytest.MonkeyPatch, rows: int, block: int
) -> None:
    monkeypatch.setattr(reference, "BLOCK_VALUES", block)
    x, w = whole_numbers(rows, 64), whole_numbers(17, 64)
    got = product(x, w)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, F.linear(x, w))
    assert rows < 2 or not torch.equal(got.float(), x.float() @ w.float().t()), "rounded"


@pytest.mark.parametrize("rows", [1, GRAIN - 1, GRAIN + 1, 3 * GRAIN])
def test_rows_are_filled_up_for_the_product(lacking: None, rows: int) -> None:
    """What that is for shows in the next test, but not on every processor."""
    multiplied: list[int] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "matmul" in func.__name__:
                multiplied.append(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    with Watch():
        assert product(whole_numbers(rows, 64), whole_numbers(17, 64)).shape == (rows, 17)
    assert multiplied == [-(-rows // GRAIN) * GRAIN]


@pytest.mark.skipif(not cpu_lacks_bf16(), reason="a CPU that multiplies BF16: not taken there")
def test_a_token_gives_the_same_with_few_and_many_others() -> None:
    torch.manual_seed(1)
    x, w = torch.randn(99, 128).bfloat16(), torch.randn(20_000, 128).bfloat16()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            together = product(x, w)
            for rows in (1, 2, 3, 7, 8, 9, 11, 31, 32, 33, 50, 98):
                assert torch.equal(product(x[:rows], w), together[:rows]), rows
    finally:
        torch.set_num_threads(before)


def test_few_rows_of_a_large_weight_are_left_to_torch(
    lacking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.randn(MANY_ROWS, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    monkeypatch.setattr(reference, "LARGE_WEIGHT", w.numel() - 1)
    called: list[int] = []

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        called.append(x.shape[0])
        return x @ w.t()

    monkeypatch.setattr(reference.F, "linear", linear)
    product(x, w)
    product(x[1:], w)
    monkeypatch.setattr(reference, "LARGE_WEIGHT", w.numel())
    product(x[1:], w)
    assert called == [MANY_ROWS - 1]


def test_one_rounding_of_the_exact_sum(lacking: None) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 320).bfloat16(), torch.randn(40, 320).bfloat16()
    exact = x.double() @ w.double().t()
    error = (product(x, w).double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-8 + 1e-4).all()
    assert error.max() > 0


def test_experts_are_multiplied_one_by_one(lacking: None) -> None:
    x, w = whole_numbers(2 * GRAIN, 64), whole_numbers(3, 24, 64)
    offsets = [0, GRAIN + 5, GRAIN + 5, 2 * GRAIN]
    got = select_gemm("reference").grouped(x, DenseWeight(w_NK=w), Groups(offsets))
    wanted = [F.linear(x[low:high], w[e]) for e, (low, high) in enumerate(pairwise(offsets))]
    assert torch.equal(got, torch.cat(wanted))


def test_only_bf16_on_a_cpu_that_lacks_it(lacking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.widens(torch.zeros(1, dtype=torch.bfloat16))
    assert not reference.widens(torch.zeros(1))
    assert not reference.widens(torch.zeros(1, dtype=torch.bfloat16, device="meta"))
    monkeypatch.setattr(reference, "cpu_lacks_bf16", lambda: False)
    assert not reference.widens(torch.zeros(1, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("machine", "capability", "lacks"),
    [
        ("x86_64", "AVX512", False),
        ("x86_64", "AVX2", True),
        ("x86_64", "DEFAULT", True),
        ("aarch64", "DEFAULT", False),
        ("aarch64", "SVE256", False),
    ],
)
def test_which_cpus_lack_it(
    monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, lacks: bool
) -> None:
    monkeypatch.setattr(reference.platform, "machine", lambda: machine)
    monkeypatch.setattr(reference.torch.backends.cpu, "get_cpu_capability", lambda: capability)
    cpu_lacks_bf16.cache_clear()
    try:
        assert cpu_lacks_bf16() is lacks
    finally:
        cpu_lacks_bf16.cache_clear()
