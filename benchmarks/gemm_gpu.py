"""GEMM back ends at Beam's widths: TFLOP/s, the ratio to BF16, and errors against FP64.

    python -m benchmarks.gemm_gpu [--json FILE]

Dense: [8192, K] tokens on the widest linears. Experts: 256 of them, 2,048 and 16,384 tokens times
8, evenly spread at random. Activations are quantized beforehand; random data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from beamq.model.gemm.backend import DenseWeight, Fp8Weight, Groups
from beamq.model.gemm.check import backends
from beamq.model.gemm.operands import fp8_rows
from benchmarks.gpu_timing import machine, median_ms
from benchmarks.random_layer import bf16_weight, fp8_weight

DENSE = ((14336, 5120), (5120, 6144), (40960, 5120))
EXPERTS = (("gate_up", 5120, 5120), ("down", 5120, 2560))
NUM_EXPERTS = 256
DENSE_TOKENS = 8192
EXPERT_TOKENS = (2048, 16384)
CUDA = torch.device("cuda")


def report(
    rows: list[dict[str, Any]],
    names: dict[str, Any],
    flop: float,
    calls: Any,
    base: float | None = None,
) -> float:
    """Time each call and compare with `base` ms, or with the first one, whose time is returned."""
    for label, call in calls.items():
        ms = median_ms(call)
        base = ms if base is None else base
        rows.append({**names, "gemm": label, "ms": ms, "tflops": flop / ms / 1e9, "x": base / ms})
        what = " ".join(str(v) for v in names.values())
        print(f"{what:28} {label:22} {ms:7.3f} ms {flop / ms / 1e9:6.0f} TFLOP/s {base / ms:5.2f}x")
    return base or 0.0


def fp8_dense(name: str, x: Any, w: Fp8Weight, fast: bool) -> Callable[[], torch.Tensor]:
    """Without the quantization of activations."""
    kernel: Any = backends(fast=fast)[name]
    if name == "cublaslt":
        return lambda: kernel._fp8(x, w)
    groups = Groups([0, x.codes.shape[0]])
    return lambda: kernel.grouped(x, w.expert(None), groups)


def dense(rows: list[dict[str, Any]], tokens: int) -> None:
    """One linear at a time."""
    for n, k in DENSE:
        x_TK = torch.randn(tokens, k, device=CUDA, dtype=torch.bfloat16)
        plain, eight = bf16_weight((n, k), CUDA), fp8_weight((n, k), CUDA)
        x8 = fp8_rows(x_TK)
        calls = {"bf16": lambda: F.linear(x_TK, plain.w_NK)}  # noqa: B023 - called in this round
        for name in ("cublaslt", "cutlass"):
            for fast in (False, True):
                calls[f"fp8 {name}{'+fast' if fast else ''}"] = fp8_dense(name, x8, eight, fast)
        report(rows, {"op": "dense", "tokens": tokens, "n": n, "k": k}, 2.0 * tokens * n * k, calls)


def routed(tokens: int) -> list[int]:
    """Offsets of 256 experts, 8 distinct ones a token."""
    chosen = torch.rand(tokens, NUM_EXPERTS, device=CUDA).topk(8, dim=1)[1].flatten()
    return [0, *torch.bincount(chosen, minlength=NUM_EXPERTS).cumsum(0).tolist()]


def experts(rows: list[dict[str, Any]], errors: list[dict[str, Any]], tokens: int) -> None:
    """One projection of all experts at a time."""
    offsets = routed(tokens)
    for label, n, k in EXPERTS:
        x_SK = torch.randn(offsets[-1], k, device=CUDA, dtype=torch.bfloat16)
        names = {"op": label, "tokens": tokens, "n": n, "k": k}
        flop = 2.0 * offsets[-1] * n * k
        plain = bf16_weight((NUM_EXPERTS, n, k), CUDA)
        calls: dict[str, Callable[[], torch.Tensor]] = {}
        for name in ("cutlass", "triton"):
            calls[f"bf16 {name}"] = grouped(name, x_SK, plain, offsets, False)
        base = report(rows, names, flop, calls)
        del plain, calls
        torch.cuda.empty_cache()
        eight, x8 = fp8_weight((NUM_EXPERTS, n, k), CUDA), fp8_rows(x_SK)
        eights = {
            f"fp8 {name}{'+fast' if fast else ''}": grouped(name, x8, eight, offsets, fast)
            for name in ("cutlass", "triton")
            for fast in (False, True)
        }
        report(rows, names, flop, eights, base)
        for name, call in eights.items():
            errors.append({**names, "gemm": name, "error": fp64_error(call(), x8, eight, offsets)})
            print(f"   {name}: error against FP64 {errors[-1]['error']:.2e}")
        del eight, x8, eights
        torch.cuda.empty_cache()


def grouped(
    name: str, x: Any, w: DenseWeight | Fp8Weight, offsets: list[int], fast: bool
) -> Callable[[], torch.Tensor]:
    """A call of back end `name`."""
    kernel = backends(fast=fast)[name]
    return lambda: kernel.grouped(x, w, Groups(offsets))


def fp64_error(y: torch.Tensor, x: Any, w: Fp8Weight, offsets: list[int]) -> float:
    """Relative, over the rows of the busiest expert."""
    e = max(range(len(offsets) - 1), key=lambda i: offsets[i + 1] - offsets[i])
    rows = slice(offsets[e], offsets[e + 1])
    own = w.expert(e)
    exact = (x.codes[rows].double() * x.scale[rows]) @ (own.codes.double() * own.scale).t()
    got = y[rows].double()
    return float((got - exact).norm() / exact.norm())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    dense(rows, DENSE_TOKENS)
    for tokens in EXPERT_TOKENS:
        experts(rows, errors, tokens)
    if options.json:
        data = {**machine(), "gemms": rows, "errors": errors}
        options.json.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
