"""Choose a `Gemm` by name, and send each operation to the best back end of the device.

In: a name. Out: a `Gemm`.

    reference     exact emulation in plain torch, on any device
    weights-only  the same with unquantized activations (W4A16, W8A16)
    auto          for each operation the first usable back end of `check.ORDER`
    triton, cutlass, cublaslt, quack
                  only that back end; an operation it cannot serve raises `DeviceError`
    NAME+fast     FP8 products are added inside the tensor cores in some 14 bits: up to a third
                  faster, error 2.0e-3 to 3.9e-3 instead of 1.7e-3

The one idea: a back end is used for an operation only after it passed its check (check.py) on this
device. `reference` is never refused. It also serves calls that no back end takes: activations that
are not BF16, widths that are not multiples of 16, and weights in MXFP8 or blocks of FP8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from beamq.errors import DeviceError, UsageError
from beamq.model.gemm.backend import (
    DenseWeight,
    Fp8Weight,
    Gemm,
    GemmBackend,
    GroupFp8Weight,
    Groups,
    LinearWeight,
    Nvfp4Weight,
    stored,
)
from beamq.model.gemm.check import ORDER, backends, known_checks
from beamq.model.gemm.operands import fp4_part, part_of
from beamq.model.gemm.reference import ReferenceGemm

FAST = "+fast"
CHUNK_BYTES = 450 << 20

_REFERENCE = ReferenceGemm()
_BY_NAME: dict[str, Gemm] = {
    "reference": _REFERENCE,
    "weights-only": ReferenceGemm(quantize_activations=False),
}
_SELECTED = ("auto", *backends())
_FORMATS = {Fp8Weight: "fp8", Nvfp4Weight: "nvfp4"}


def select_gemm(name: str) -> Gemm:
    """The `Gemm` called `name`; a device is checked when the first product on it is asked for.

    Raises `UsageError` for an unknown name.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    plain = name.removesuffix(FAST)
    if plain in _SELECTED:
        return SelectedGemm(name=plain, backends=backends(fast=name.endswith(FAST)))
    names = ", ".join(sorted([*_BY_NAME, *_SELECTED]))
    raise UsageError(f"gemm {name!r} is unknown, expected one of: {names}")


@dataclass(slots=True, kw_only=True)
class SelectedGemm(Gemm):
    """A `Gemm` that sends each operation to one of `backends`, or to the reference.

    `choices` remembers the back end's name by operation and device.
    """

    name: str
    backends: Mapping[str, GemmBackend]
    choices: dict[tuple[str, torch.device], str] = field(default_factory=dict)

    def linear(self, x_TK: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """See `Gemm.linear`. Unquantized linears go to torch's own product."""
        backend = None
        if not isinstance(weight, DenseWeight):
            backend = self._backend("dense", x_TK, weight, x_TK.shape[0])
        if backend is None:
            return _REFERENCE.linear(x_TK, weight)
        return backend.dense(x_TK, weight)

    def grouped(self, x_TK: torch.Tensor, weight: LinearWeight, groups: Groups) -> torch.Tensor:
        backend = self._backend("grouped", x_TK, weight, groups.offsets[-1])
        if backend is None:
            return _REFERENCE.grouped(x_TK, weight, groups)
        return backend.grouped(backend.tokens(x_TK, weight), weight, groups)

    def experts(
        self, x_TK: torch.Tensor, gate_up: LinearWeight, down: LinearWeight, groups: Groups
    ) -> torch.Tensor:
        offsets, rows = groups.offsets, groups.rows
        backend = self._backend("grouped", x_TK, gate_up, offsets[-1])
        other = self._backend("grouped", x_TK, down, offsets[-1])
        if backend is None or other is None or other.name != backend.name:
            return _REFERENCE.experts(x_TK, gate_up, down, groups)
        y_SK = x_TK.new_empty(offsets[-1], stored(down).shape[1])
        tokens = backend.tokens(x_TK, gate_up)
        if rows is None:
            rows = torch.arange(offsets[-1], device=x_TK.device)
        for first, last in _ranges(offsets, CHUNK_BYTES // (x_TK.shape[1] * x_TK.itemsize)):
            low, high = offsets[first], offsets[last]
            part = part_of(offsets, first, last)
            wide, narrow = (expert_range(backend, w, first, last) for w in (gate_up, down))
            active = backend.gated(tokens, wide, narrow, Groups(part, rows[low:high]))
            backend.grouped(active, narrow, Groups(part), out=y_SK[low:high])
            del active  # before the next range's, or two would be alive
        return y_SK

    def _backend(
        self, kind: str, x_TK: torch.Tensor, weight: LinearWeight, rows: int
    ) -> GemmBackend | None:
        """What serves a product of `rows` rows; None for the reference. Raises `DeviceError`."""
        if not rows or isinstance(weight, GroupFp8Weight) or not _fits(x_TK, weight):
            return None
        op, device = f"{_FORMATS.get(type(weight), 'bf16')}-{kind}", x_TK.device
        if (op, device) not in self.choices:
            self.choices[op, device] = self._choose(op, device)
        return self.backends.get(self.choices[op, device])

    def _choose(self, op: str, device: torch.device) -> str:
        # A back end that never serves the operation leaves it to the others.
        wanted = (self.name,) if self.name in ORDER[op] else ORDER[op]
        checks = [
            check for check in known_checks(device) if check.op == op and check.backend in wanted
        ]
        for check in checks:
            if check.usable:
                return check.backend
        raise DeviceError(
            f"gemm '{self.name}' cannot do {op} on {device}:"
            f" {'; '.join(str(check.reason) for check in checks)}. Use gemm 'auto' or 'reference'"
        )


def _fits(x_TK: torch.Tensor, weight: LinearWeight) -> bool:
    """BF16 activations, and both widths multiples of 16 (of 32 in packed codes), as kernels ask."""
    n, k = stored(weight).shape[-2:]
    return (
        x_TK.dtype == torch.bfloat16
        and n % 16 == 0
        and k % 16 == 0
        and (not isinstance(weight, DenseWeight) or weight.w_NK.dtype == torch.bfloat16)
    )


def expert_range(backend: GemmBackend, weight: LinearWeight, first: int, last: int) -> LinearWeight:
    """Experts first .. last - 1 of a stack, as views that `backend` can multiply."""
    if isinstance(weight, Nvfp4Weight) and backend.swizzles:
        return fp4_part(weight, first, last)
    return weight.expert(slice(first, last))


def _ranges(offsets: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """Ranges of experts of at most `rows` rows each, or of one expert that has more."""
    if offsets[-1] <= rows:
        return [(0, len(offsets) - 1)]
    ranges, first = [], 0
    for expert in range(1, len(offsets)):
        if offsets[expert] - offsets[first] > rows and expert - 1 > first:
            ranges.append((first, expert - 1))
            first = expert - 1
    ranges.append((first, len(offsets) - 1))
    return [(a, b) for a, b in ranges if offsets[b] > offsets[a]]
