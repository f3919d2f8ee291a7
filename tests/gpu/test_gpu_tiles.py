"""Tables of tiles made on the device against those of the host, and products by either."""

from __future__ import annotations

import pytest
import torch

from beamq.formats import fp8
from beamq.model.gemm.backend import DenseWeight, Fp8Weight, Groups
from beamq.model.gemm.operands import ExpertRows, expert_rows
from beamq.model.gemm.select import select_gemm

EXPERTS = 24


def choices(name: str) -> torch.Tensor:
    """Sorted experts of some rows: spread evenly, onto a few, onto one, a single row."""
    torch.manual_seed(0)
    some = {
        "even": torch.randint(0, EXPERTS, (3000,)),
        "few": torch.tensor([2, 3, 19])[torch.randint(0, 3, (700,))],
        "one": torch.full((513,), 23),
        "lone": torch.tensor([0]),
    }
    return some[name].sort()[0]


@pytest.mark.parametrize("name", ["even", "few", "one", "lone"])
@pytest.mark.parametrize("rows", [64, 128])
def test_the_table_is_the_hosts(cuda: torch.device, name: str, rows: int) -> None:
    from beamq.model.gemm.triton_grouped import tile_table

    offsets = expert_rows(choices(name).to(cuda), EXPERTS)
    assert isinstance(offsets, ExpertRows)
    plain = expert_rows(choices(name), EXPERTS)
    assert list(offsets) == list(plain)
    table, most = tile_table(offsets, rows, cuda)
    wanted, count = tile_table(plain, rows, cuda)
    assert count <= most == table.shape[0] - 1
    assert int(table[0, 0]) == count
    assert torch.equal(table[1 : 1 + count], wanted[1:])


@pytest.mark.parametrize("name", ["even", "few", "one", "lone"])
@pytest.mark.parametrize("gemm", ["triton", "cutlass", "triton+fast"])
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_products_do_not_depend_on_who_knows_the_offsets(
    cuda: torch.device, name: str, gemm: str, fmt: str
) -> None:
    torch.manual_seed(1)
    n, k = 256, 128
    gate_up, down = torch.randn(EXPERTS, n, k).bfloat16(), torch.randn(EXPERTS, k, n // 2)
    weights = []
    for w in (gate_up, down.bfloat16()):
        if fmt == "bf16":
            weights.append(DenseWeight(w_NK=w.to(cuda)))
        else:
            codes, scale = fp8.quantize_rows(w)
            weights.append(Fp8Weight(codes=codes.to(cuda), scale=scale.to(cuda)))
    sorted_S = choices(name)
    x = torch.randn(len(sorted_S), k).bfloat16().to(cuda)
    outputs = [
        select_gemm(gemm).experts(x, weights[0], weights[1], Groups(offsets))
        for offsets in (expert_rows(sorted_S.to(cuda), EXPERTS), expert_rows(sorted_S, EXPERTS))
    ]
    assert torch.equal(outputs[0], outputs[1])
