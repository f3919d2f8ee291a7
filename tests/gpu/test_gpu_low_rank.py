"""Low-rank sums on a GPU: the bytes of plain torch on both devices, and of the C kernel."""

from __future__ import annotations

import pytest
import torch

from beamq.formats.kernels import cpu
from tests.helpers import low_rank_cases
from tests.helpers.low_rank_cases import DTYPES, SHAPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", [low_rank_cases.ordinary, low_rank_cases.wild])
def test_every_bit(cuda: torch.device, case, shape, dtype: torch.dtype) -> None:
    low_rank_cases.compare(str(cuda), case(*shape), dtype)


@pytest.mark.parametrize("rank", [16, 32])
@pytest.mark.parametrize("shape", [(2560, 5120), (5120, 2560)])
def test_experts_of_beam(cuda: torch.device, shape: tuple[int, int], rank: int) -> None:
    n, k = shape
    w, a, b = low_rank_cases.ordinary((4,), n, k, rank)
    w, a = (w * 0.02).bfloat16(), a * 0.02
    on = w.to(cuda)
    triton_lowrank().add_low_rank(on, a.to(cuda), b.to(cuda), 0.5)
    for expert in range(4):
        rows, wanted = w[expert].view(torch.uint8).numpy().reshape(-1), bytearray(2 * n * k)
        factors = (t[expert].numpy().reshape(-1) for t in (a, b))
        cpu.add_low_rank(rows, "BF16", k, *factors, 0.5, wanted, "BF16")
        found = on[expert].cpu().view(torch.uint8).numpy().tobytes()
        assert cpu.equal(found, wanted) == -1
        assert found != rows.tobytes()


WRONG = {
    "rank": ((4, 8), (0, 8), (4, 0)),
    "k": ((4, 8), (2, 7), (4, 2)),
    "rows": ((4, 8), (2, 8), (5, 2)),
    "ranks": ((4, 8), (2, 8), (4, 3)),
    "stack": ((3, 4, 8), (2, 2, 8), (3, 4, 2)),
    "too deep": ((1, 1, 4, 8), (1, 1, 2, 8), (1, 1, 4, 2)),
    "a vector": ((8,), (2, 8), (1, 2)),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_do_not_fit_are_refused(cuda: torch.device, name: str) -> None:
    w, a, b = (torch.ones(shape, device=cuda) for shape in WRONG[name])
    with pytest.raises(ValueError, match="expected"):
        triton_lowrank().add_low_rank(w, a, b, 1.0)


def test_what_else_is_refused(cuda: torch.device) -> None:
    w, a, b = (t.to(cuda) for t in low_rank_cases.ordinary((), 6, 6, 6))
    before = w.clone()
    for arguments in [
        (w.double(), a, b, 1.0),
        (w, a.bfloat16(), b, 1.0),
        (w, a, b.half(), 1.0),
        (w.T, a, b, 1.0),
        (w, a.T, b, 1.0),
        (w, a, b.T, 1.0),
        (w, a, b, float("inf")),
        (w, a, b, 2.0**128),
    ]:
        with pytest.raises(ValueError, match=r"expected|finite"):
            triton_lowrank().add_low_rank(*arguments)
    assert torch.equal(w, before)
    triton_lowrank().add_low_rank(w[:0], a, b[:0], 1.0)  # no rows


def triton_lowrank():
    from beamq.formats.kernels import triton_lowrank

    return triton_lowrank
