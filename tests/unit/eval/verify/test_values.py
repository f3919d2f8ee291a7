"""Small parts of `verify` that a whole checkpoint exercises too seldom or too coarsely."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from beamq.beam.tensors import classify
from beamq.errors import printable
from beamq.eval.verify.checks import CHECKS, DRAFTER_CHECKS, Ledger
from beamq.eval.verify.inventory import Linear, scalar_fault
from beamq.eval.verify.second_opinion import choose_sample
from beamq.eval.verify.values import Nvfp4Bound, fp8_nan
from beamq.formats import nvfp4
from beamq.io.safetensors_header import few


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 4099])
@pytest.mark.parametrize("clean", [True, False])
def test_fp8_nan_positions(size: int, clean: bool) -> None:
    codes = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    if clean:
        codes[codes & 0x7F == 0x7F] = 0x7E
    expected = np.flatnonzero(codes & 0x7F == 0x7F)
    assert fp8_nan(memoryview(codes.tobytes())).tolist() == expected.tolist()


@pytest.mark.parametrize("position", range(11))
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_among_its_neighbours(position: int, code: int) -> None:
    codes = bytearray(b"\x7e\xfe\x00\x80\x7e\xff"[:5] * 3)[:11]
    codes[position] = code
    assert fp8_nan(memoryview(codes)).tolist() == [position]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (1.0, None),
        (2.0**-126, None),
        (3.4e38, None),
        (1e-39, "reciprocal"),
        (0.0, "positive"),
        (-0.0, "positive"),
        (-1.0, "positive"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_scalar_fault(value: float, fault: str | None) -> None:
    found = scalar_fault(value)
    assert (found is None) if fault is None else (found is not None and fault in found)


def linears() -> list[Linear]:
    names = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"]
    names += [
        f"model.layers.1.mlp.experts.{e}.{p}_proj.weight"
        for e in range(40)
        for p in ("gate", "up", "down")
    ]
    return [Linear(role=classify(name), shape=(16, 16), parts={}) for name in names]


def test_a_sample_covers_every_projection_and_is_always_the_same() -> None:
    chosen = choose_sample(linears(), 12)
    assert len(chosen) == 12
    assert {linear.role.proj for linear in chosen} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert chosen == choose_sample(linears(), 12)
    assert len({linear.role.expert for linear in chosen}) >= 5
    assert len(choose_sample(linears(), 3)) == 3
    assert len(choose_sample(linears()[:2], 9)) == 2


def test_a_check_that_saw_nothing_has_not_passed() -> None:
    ledger = Ledger()
    ledger.examined("files.index", 0)
    ledger.examined("files.readable", 2)
    ledger.skip("for a reason", "tensors.known")
    for _ in range(9):
        ledger.fault("tensors.shape", "a.weight", "is wrong")
    results = {check.name: check for check in ledger.results("structure", with_source=False)}
    assert results["files.index"].status == "skip"
    assert results["files.readable"].status == "pass"
    assert results["tensors.known"].detail == "for a reason"
    assert results["tensors.shape"].count == 9
    assert len(results["tensors.shape"].where) == 5
    assert results["tensors.shape"].detail == "a.weight: is wrong (and 8 more)"
    with pytest.raises(KeyError):
        ledger.fault("no.such-check", "x", "y")


def test_names_of_strangers_are_made_printable() -> None:
    assert printable("a\x1b[31mb\nc") == r"a\x1b[31mb\nc"
    assert len(printable("x" * 1000)) == 303
    assert few(["a", "b\t", "c", "d", "e"]) == r"a, b\t, c and 2 more"


def test_the_documentation_lists_every_check(repo: Path) -> None:
    text = (repo / "docs" / "verify.md").read_text()
    rows = [
        f"| `{name}` | {check.level} | {check.demand} |"
        for checks in (CHECKS, DRAFTER_CHECKS)
        for name, check in checks.items()
    ]
    assert [row for row in text.splitlines() if row.startswith("| `")] == rows


@pytest.mark.parametrize(
    ("factor", "says"),
    [(1.0, None), (1.15, None), (1.4, "the relative error is 0.4"), (1.7, "8 of 8 rows differ")],
)
def test_gptq_codes_are_bounded_row_by_row_and_as_a_whole(factor: float, says: str | None) -> None:
    """Rows may be off by half of their norm, a linear by a quarter."""
    w = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    q = nvfp4.quantize(w * factor, nvfp4.global_scale_from_amax(w.abs().max() * factor))
    bound = Nvfp4Bound("gptq", 256, float(q.global_scale))
    codes, scales = q.codes.numpy(), q.block_scale.view(torch.uint8).numpy()
    for half in (slice(0, 4), slice(4, 8)):
        source, *parts = (memoryview(x[half].tobytes()) for x in (w.numpy(), codes, scales))
        assert bound.compare(source, "F32", *parts).out_of_bound == 0
    found = bound.fault()
    assert found is None if says is None else says in (found or "")
