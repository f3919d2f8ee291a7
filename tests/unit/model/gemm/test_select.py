"""GEMM back ends without a GPU: layouts, FP4 on a double, refusals, checks and their cache."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beamq.errors import DeviceError, TensorError
from beamq.formats.nvfp4 import padded_rows, round_up, swizzle
from beamq.model.gemm import check, select
from beamq.model.gemm.backend import OPS, BackendCheck, DeviceFacts, Groups, Nvfp4Weight
from beamq.model.gemm.check import ORDER
from beamq.model.gemm.library_gemm import CublasLt, Cutlass
from beamq.model.gemm.operands import fp4_tokens
from beamq.model.gemm.reference import ReferenceGemm
from beamq.model.gemm.select import SelectedGemm, select_gemm
from beamq.model.gemm.triton_gemm import Triton
from tests.helpers.gemm_double import Fp4Calls, unswizzle

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 300), columns=st.integers(1, 20), seed=st.integers(0, 99))
def test_swizzle_follows_the_formula(rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    scales = torch.randint(0, 255, (rows, columns), dtype=torch.uint8)
    flat = swizzle(scales)
    tiles = round_up(columns, 4) // 4
    assert flat.numel() == round_up(rows, 128) * tiles * 4
    for r, c in {(0, 0), (rows - 1, columns - 1), (rows // 2, columns // 3)}:
        lane = (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
        assert flat[(r // 128 * tiles + c // 4) * 512 + lane] == scales[r, c]
    assert torch.equal(unswizzle(flat, rows, columns), scales)
    assert int(flat.ne(0).sum()) == int(scales.ne(0).sum())
    stacked = swizzle(torch.stack([scales, scales.flip(0)]))
    assert torch.equal(stacked[0], flat)
    assert torch.equal(unswizzle(stacked[1], rows, columns), scales.flip(0))


def test_groups_are_padded_on_their_own() -> None:
    rows, total = padded_rows([0, 3, 3, 131, 260])
    assert total == 128 + 0 + 128 + 256
    assert rows.tolist() == [0, 1, 2, *range(128, 256), *range(256, 385)]


def problem(op: str, seed: int = 0, rows: int = 150) -> tuple[Any, Any, list[int]]:
    torch.manual_seed(seed)
    return check.random_problem(op, CPU, experts=4, rows=rows, n=64, k=96)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
    assert error < check.TOLERANCE, f"relative error {error:.1e}"


def on_double(name: str, ops: tuple[str, ...]) -> tuple[SelectedGemm, Fp4Calls]:
    calls = Fp4Calls()
    kernels = {"cutlass": Cutlass(calls), "cublaslt": CublasLt(calls)}
    return SelectedGemm(name=name, backends=kernels, choices={(op, CPU): name for op in ops}), calls


@pytest.mark.parametrize("name", ["cutlass", "cublaslt"])
def test_fp4_dense_passes_what_the_call_takes(name: str) -> None:
    x, weight, _ = problem("nvfp4-dense")
    gemm, calls = on_double(name, ("nvfp4-dense",))
    close(gemm.linear(x, weight), ReferenceGemm().linear(x, weight))
    assert calls.calls == ["scaled_grouped_mm" if name == "cutlass" else "scaled_mm"]


@pytest.mark.parametrize("gathered", [True, False])
def test_fp4_experts_pass_what_the_call_takes(gathered: bool) -> None:
    x, weight, offsets = problem("nvfp4-grouped")
    gemm, calls = on_double("cutlass", ("nvfp4-grouped",))
    rows = torch.randint(0, 150, (150,)) if gathered else None
    wanted = ReferenceGemm().grouped(x, weight, Groups(offsets, rows))
    close(gemm.grouped(x, weight, Groups(offsets, rows)), wanted)
    assert calls.calls == ["scaled_grouped_mm"]


def test_fp4_expert_mlp_quantizes_swiglu_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate_up, offsets = problem("nvfp4-grouped")
    _, down, _ = check.random_problem("nvfp4-grouped", CPU, experts=4, rows=150, n=96, k=32)
    gemm, calls = on_double("cutlass", ("nvfp4-grouped",))
    rows = torch.randperm(150)
    wanted = ReferenceGemm().experts(x, gate_up, down, Groups(offsets, rows))
    close(gemm.experts(x, gate_up, down, Groups(offsets, rows)), wanted)
    assert len(calls.calls) == 2
    monkeypatch.setattr(select, "CHUNK_BYTES", 60 * 96 * 2)
    close(gemm.experts(x, gate_up, down, Groups(offsets, rows)), wanted)
    assert len(calls.calls) > 4


def test_fp4_needs_input_scale_and_shared_global_scales() -> None:
    x, weight, _ = problem("nvfp4-dense")
    gemm, _ = on_double("cutlass", ("nvfp4-dense",))
    bare = Nvfp4Weight(
        codes=weight.codes.clone(),
        block_scale=weight.block_scale,
        global_scale=weight.global_scale,
        input_scale=None,
    )
    with pytest.raises(TensorError, match="no input_scale"):
        gemm.linear(x, bare)
    mixed = weight.global_scale.clone()
    mixed[3] *= 2
    two = Nvfp4Weight(
        codes=weight.codes.clone(),
        block_scale=weight.block_scale,
        global_scale=mixed,
        input_scale=weight.input_scale,
    )
    with pytest.raises(TensorError, match="differ in weight_scale_2"):
        gemm.linear(x, two)


def test_swizzled_copies_die_with_the_weight() -> None:
    from beamq.model.gemm import operands

    x, weight, _ = problem("nvfp4-dense", seed=5)
    before = len(operands._swizzled)
    gemm, _ = on_double("cutlass", ("nvfp4-dense",))
    gemm.linear(x, weight)
    assert len(operands._swizzled) == before + 1
    del weight
    assert len(operands._swizzled) == before


def test_padding_of_operands_is_zero() -> None:
    x, weight, _ = problem("nvfp4-dense", rows=5)
    operand = fp4_tokens(x, weight.input_scale)
    assert operand.block_scale.shape == (128, 8)
    assert int(operand.block_scale.view(torch.uint8).ne(0).sum()) == 5 * 6


def test_what_kernels_cannot_take_goes_to_the_reference() -> None:
    gemm, calls = on_double("cutlass", ("nvfp4-dense", "nvfp4-grouped"))
    x, weight, _ = problem("nvfp4-dense")
    assert torch.equal(gemm.linear(x.float(), weight), ReferenceGemm().linear(x.float(), weight))
    assert gemm.linear(x[:0], weight).shape == (0, 64)
    assert calls.calls == []


def facts(capability: tuple[int, int], kind: str = "cuda", triton: str | None = "3") -> DeviceFacts:
    return DeviceFacts(
        kind=kind,
        name="x",
        capability=capability,
        torch="2",
        triton=triton,
        quack=None,
        cutlass_dsl=None,
    )


@pytest.mark.parametrize(
    ("kernel", "op", "device", "reason"),
    [
        (Cutlass(), "fp8-grouped", facts((9, 0)), None),
        (Cutlass(), "fp8-grouped", facts((10, 0)), "for sm_90 alone"),
        (Cutlass(), "nvfp4-grouped", facts((9, 0)), "sm_100 and sm_103; this is sm_90"),
        (Cutlass(), "nvfp4-grouped", facts((10, 3)), None),
        (Cutlass(), "nvfp4-dense", facts((12, 0)), "this is sm_120"),
        (Cutlass(), "bf16-grouped", facts((8, 0)), "needs sm_90 or later"),
        (CublasLt(), "fp8-dense", facts((9, 0)), None),
        (CublasLt(), "nvfp4-dense", facts((9, 0)), "came with sm_100"),
        (CublasLt(), "nvfp4-dense", facts((12, 0)), None),
        (CublasLt(), "fp8-dense", facts((0, 0), "cpu"), "needs an NVIDIA GPU; this is cpu"),
        (Triton(), "bf16-grouped", facts((9, 0)), None),
        (Triton(), "bf16-grouped", facts((9, 0), triton=None), "Triton is not installed"),
        (Triton(), "bf16-grouped", facts((8, 9)), "needs sm_90"),
        (Triton(), "bf16-grouped", facts((0, 0), "hip"), "this is hip"),
    ],
)
def test_refusals_name_the_reason(
    kernel: Any, op: str, device: DeviceFacts, reason: str | None
) -> None:
    found = kernel.refusal(op, device)
    assert found is None if reason is None else reason in found


def test_probe_of_a_machine_without_gpu_is_plain_data() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    data = json.loads(json.dumps(check.probe()))
    (device,) = data["devices"]
    assert [op["op"] for op in device["ops"]] == list(OPS)
    for op in device["ops"]:
        assert op["choice"] == "reference"
        assert [b["backend"] for b in op["backends"]] == list(ORDER[op["op"]])
        assert all(b["reason"] for b in op["backends"][:-1])


def test_names_on_a_cpu() -> None:
    x, weight, offsets = problem("fp8-grouped")
    wanted = ReferenceGemm().grouped(x, weight, Groups(offsets))
    assert torch.equal(select_gemm("auto").grouped(x, weight, Groups(offsets)), wanted)
    with pytest.raises(DeviceError, match=r"'cutlass' cannot do fp8-grouped on cpu: needs an NVID"):
        select_gemm("cutlass+fast").grouped(x, weight, Groups(offsets))


@pytest.fixture
def gpu_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DeviceFacts:
    """An imaginary H200, a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return facts((9, 0))


def test_verdicts_are_checked_once_and_remembered(
    gpu_here: DeviceFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[tuple[str, str]]] = []

    def child(device: torch.device, pairs: list[tuple[str, str]]) -> tuple[list[str], str | None]:
        """Dies at the second pair of the first call; reports a large error for the third."""
        asked.append(list(pairs))
        if len(asked) == 1:
            op, name = pairs[0]
            return [
                line(BackendCheck(op=op, backend=name, usable=True, error=1e-3))
            ], "exit code -6: trap"
        bad = pairs[0]
        rest = [BackendCheck(op=op, backend=name, usable=True) for op, name in pairs[1:]]
        wrong = BackendCheck(op=bad[0], backend=bad[1], usable=False, reason="differs", error=0.5)
        return [line(v) for v in [wrong, *rest]], None

    def line(verdict: BackendCheck) -> str:
        return json.dumps(dataclasses.asdict(verdict))

    monkeypatch.setattr(check, "_child", child)
    device = torch.device("cuda", 0)
    found = check.all_checks(device, gpu_here, fresh=False)
    assert len(asked) == 2
    first, second, third = asked[0][:3]
    by_pair = {(v.op, v.backend): v for v in found}
    assert by_pair[first].usable
    assert by_pair[second].reason == "exit code -6: trap"
    assert by_pair[third].reason == "differs"
    assert "sm_90" in str(by_pair["nvfp4-grouped", "cutlass"].reason)
    assert all(by_pair[op, "reference"].usable for op in OPS)
    assert check.all_checks(device, gpu_here, fresh=False) == found
    assert len(asked) == 2
    assert len(check.all_checks(device, gpu_here, fresh=True)) == len(found)
    assert len(asked) == 3


def test_a_broken_cache_is_as_good_as_none(gpu_here: DeviceFacts) -> None:
    path = check._cache_path(gpu_here)
    assert check._read_cache(path) == {}
    path.parent.mkdir(parents=True)
    for text in ("", "{", '{"verdicts": [1]}', '{"verdicts": [{"op": 1}]}', "[]"):
        path.write_text(text)
        assert check._read_cache(path) == {}


def test_the_checking_process_reports_failures() -> None:
    lines, death = check._child(CPU, [("fp8-dense", "cublaslt"), ("bf16-grouped", "triton")])
    assert death is None
    first, second = (BackendCheck(**json.loads(text)) for text in lines)
    assert (first.op, first.backend) == ("fp8-dense", "cublaslt")
    assert not second.usable
    assert second.reason


def test_a_wrong_kernel_fails_its_check() -> None:
    class Wrong(CublasLt):
        def _fp8(self, x: Any, w: Any) -> torch.Tensor:
            good = (x.codes.float() * x.scale) @ (w.codes.float() * w.scale).t()
            return (good * 1.02).bfloat16()

    verdict = check.check_backend("fp8-dense", Wrong(), CPU)
    assert not verdict.usable
    assert "differs from the emulation" in str(verdict.reason)
