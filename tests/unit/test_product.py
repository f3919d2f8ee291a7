"""Products of BF16 on CPUs without BF16 instructions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from beamq.model import product as module
from beamq.model.product import ROWS, product, widened_product


def operands(t: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(t + n + k)
    return (
        torch.randn(t, k, generator=generator).bfloat16(),
        torch.randn(n, k, generator=generator).bfloat16(),
    )


@pytest.mark.parametrize(("t", "n", "k"), [(1, 1, 16), (ROWS + 3, 40, 96), (5, 70, 64), (0, 8, 16)])
def test_one_rounding_of_the_exact_product(
    t: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WEIGHT_BYTES", 4 * k * 32)  # pieces of 32 rows of weights
    x_TK, w_NK = operands(t, n, k)
    exact = x_TK.double() @ w_NK.double().t()
    found = widened_product(x_TK, w_NK)
    assert found.dtype == torch.bfloat16
    # Half a unit in BF16's eighth bit, and what FP32 sums may be off where terms cancel.
    room = exact.abs() * 2.0**-8 + 2.0**-20 * (x_TK.double().abs() @ w_NK.double().abs().t())
    assert ((found.double() - exact).abs() <= room).all()


def test_pieces_change_nothing() -> None:
    """One piece each is the plain twin: widen, multiply, round."""
    x_TK, w_NK = operands(2 * ROWS + 7, 48, 64)
    plain = torch.cat([F.linear(x.float(), w_NK.float()).bfloat16() for x in x_TK.split(ROWS)])
    assert widened_product(x_TK, w_NK).equal(plain)


def test_only_where_there_are_no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TK, w_NK = operands(4, 8, 32)
    calls: list[int] = []
    monkeypatch.setattr(
        module, "widened_product", lambda x, w: calls.append(1) or widened_product(x, w)
    )
    for supported, expected in ((True, 0), (False, 1)):
        monkeypatch.setattr(module, "has_bf16", lambda supported=supported: supported)
        calls.clear()
        product(x_TK, w_NK)
        assert len(calls) == expected
        product(x_TK.float(), w_NK.float())
        assert len(calls) == expected
