"""When the optional back end `quack` is used: refusals, order, checks, import of the package."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from beamq.errors import DeviceError
from beamq.model.gemm import check
from beamq.model.gemm.backend import OPS, BackendCheck, DeviceFacts, Fp8Weight
from beamq.model.gemm.check import ORDER, backends
from beamq.model.gemm.library_gemm import Quack
from beamq.model.gemm.reference import ReferenceGemm
from beamq.model.gemm.select import select_gemm
from tests.helpers.gemm_double import BlockScaledOperand, QuackCalls

CPU = torch.device("cpu")
QUACK_OPS = ("nvfp4-dense", "nvfp4-grouped")
RTX = DeviceFacts(
    kind="cuda",
    name="RTX PRO 6000",
    capability=(12, 0),
    torch="2.11.0",
    triton="3.6.0",
    quack="0.6.5",
    cutlass_dsl="4.8.1",
)


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
    for op in QUACK_OPS:
        found = Quack().refusal(op, device)
        assert found is None if reason is None else reason in str(found)


def test_the_documented_order_is_the_order() -> None:
    text = (Path(__file__).parents[4] / "docs" / "architecture.md").read_text()
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
        found = [BackendCheck(op=op, backend=name, usable=True) for op, name in pairs]
        return [json.dumps(dataclasses.asdict(verdict)) for verdict in found], None

    monkeypatch.setattr(check, "_child", child)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


def test_installed_later_it_is_checked_then(checked: list[tuple[str, str]]) -> None:
    cuda = torch.device("cuda", 0)

    def choice(device: DeviceFacts) -> str:
        found = check.all_checks(cuda, device, fresh=False)
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
    x, weight, _ = check.random_problem("nvfp4-dense", CPU, experts=1, rows=3, n=16, k=32)
    wanted = ReferenceGemm().linear(x, weight)
    torch.testing.assert_close(kernel.dense(x, weight), wanted, rtol=1e-2, atol=1e-2)
    assert len(calls.operands) == 1
    assert os.environ["QUACK_CACHE_DIR"] == str(tmp_path / "beamq" / "quack")


def test_a_missing_package_is_the_reason_of_its_check() -> None:
    """Facts can be out of date: then the check says so."""
    lines, death = check._child(CPU, [("nvfp4-dense", "quack")])
    assert death is None
    found = BackendCheck(**json.loads(lines[0]))
    assert not found.usable
    assert "ModuleNotFoundError: No module named 'quack'" in str(found.reason)


def test_by_name_on_a_cpu() -> None:
    x, weight, _ = check.random_problem("nvfp4-dense", CPU, experts=1, rows=3, n=16, k=32)
    with pytest.raises(DeviceError, match=r"'quack' cannot do nvfp4-dense on cpu: needs an NVIDIA"):
        select_gemm("quack").linear(x, weight)
    fp8 = check.random_problem("fp8-dense", CPU, experts=1, rows=3, n=16, k=32)
    assert isinstance(fp8[1], Fp8Weight)
    wanted = ReferenceGemm().linear(*fp8[:2])
    assert torch.equal(select_gemm("quack").linear(*fp8[:2]), wanted)


def test_every_device_is_told_of_it() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    (device,) = check.probe()["devices"]
    told = {op["op"] for op in device["ops"] for b in op["backends"] if b["backend"] == "quack"}
    assert told == set(QUACK_OPS) < set(OPS)
