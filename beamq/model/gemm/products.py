"""Products of unquantized operands, SwiGLU, and offsets of experts' rows.

`product` is y = x w^T, but not torch's BF16 product where the CPU has no fast one. On x86 before
AVX-512, torch multiplies BF16 6 to 14 times slower than FP32. There, operands are widened to FP32,
which loses nothing, and sums are rounded once: a BF16 product up to the order of its FP32 sums. A
few rows times a large weight are left to torch, since widening the weight would cost more.

FP32 products add the last one to three rows (of a thread's part) in another order than the others,
so rows are filled up to multiples of `GRAIN`: results do not depend on batch size.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import cache, cached_property
from typing import overload

import torch
import torch.nn.functional as F

from beamq import devices

GRAIN = 16
MANY_ROWS = 32
LARGE_WEIGHT = 1 << 22  # values
BLOCK_VALUES = 1 << 24  # of either operand widened at a time: 64 MiB


def product(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """y [T, N] in the dtype that both have."""
    rows = x_TK.shape[0]
    if not widens(x_TK) or (rows < MANY_ROWS and w_NK.numel() > LARGE_WEIGHT):
        return F.linear(x_TK, w_NK)
    y_TN = x_TK.new_empty(rows, w_NK.shape[0])
    step = max(1, BLOCK_VALUES // w_NK.shape[1] // GRAIN) * GRAIN
    for n in range(0, w_NK.shape[0], step):
        w32_KN = w_NK[n : n + step].float().t()
        for t in range(0, rows, step):
            y_TN[t : t + step, n : n + step] = _widened(x_TK[t : t + step], w32_KN)
    return y_TN


def _widened(x_TK: torch.Tensor, w32_KN: torch.Tensor) -> torch.Tensor:
    """FP32 [T, N]."""
    rows = x_TK.shape[0]
    x32_TK = x_TK.new_zeros(-(-rows // GRAIN) * GRAIN, x_TK.shape[1], dtype=torch.float32)
    x32_TK[:rows] = x_TK
    return (x32_TK @ w32_KN)[:rows]


def widens(x: torch.Tensor) -> bool:
    """Whether products of `x` are taken in FP32: BF16 on a CPU that lacks it."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and cpu_lacks_bf16()


@cache
def cpu_lacks_bf16() -> bool:
    """Whether torch has no fast BF16 product on this CPU: x86 without AVX-512."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and torch.backends.cpu.get_cpu_capability() != "AVX512"


CHUNK_ELEMENTS = 1 << 25  # FP32 temporaries of elementwise work stay near 128 MiB


def swiglu(gate_up_SN: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in FP32, rounded once; columns [gate | up]."""
    if devices.serves(gate_up_SN):
        from beamq.formats.kernels import gpu  # Triton

        return gpu.swiglu(gate_up_SN)
    rows, width = gate_up_SN.shape
    out = gate_up_SN.new_empty(rows, width // 2)
    step = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, rows, step):
        gate, up = gate_up_SN[start : start + step].chunk(2, dim=-1)
        out[start : start + step] = F.silu(gate.float()).mul_(up)
    return out


class ExpertRows(Sequence[int]):
    """Offsets of experts' rows on a device: `ends_E` int32 [E], the last of which is `total`.

    Kernels read `ends_E`, so that work after the router is queued while the work before it still
    runs. As a sequence of E + 1 offsets, it knows the first and the last entry; looking at another
    one fetches all of them, which waits for the GPU.
    """

    def __init__(self, ends_E: torch.Tensor, total: int) -> None:
        self.ends_E = ends_E
        self.tables: dict[int, torch.Tensor] = {}
        """Tables that kernels made from the ends, by rows of a tile."""
        self._total = total

    @cached_property
    def host(self) -> tuple[int, ...]:
        """All offsets; waits for the device the first time."""
        return (0, *self.ends_E.tolist())

    def __len__(self) -> int:
        return self.ends_E.numel() + 1

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, int):
            if index in (0, -len(self)):
                return 0
            if index in (-1, len(self) - 1):
                return self._total
        return self.host[index]


def expert_rows(sorted_S: torch.Tensor, num_experts: int) -> Sequence[int]:
    """E + 1 offsets of the experts in `sorted_S`, int64 [S] in ascending order.

    Expert e has rows offsets[e]:offsets[e + 1]. `ExpertRows` on a GPU, a tuple on a CPU.
    """
    experts = torch.arange(num_experts, device=sorted_S.device)
    ends_E = torch.searchsorted(sorted_S, experts, right=True, out_int32=True)
    if sorted_S.is_cuda:
        return ExpertRows(ends_E, sorted_S.numel())
    return (0, *ends_E.tolist())


def part_of(offsets: Sequence[int], first: int, last: int) -> Sequence[int]:
    """Offsets of experts first .. last - 1, counted from 0; the sequence itself for all experts."""
    if first == 0 and last == len(offsets) - 1:
        return offsets
    low = offsets[first]
    return [end - low for end in offsets[first : last + 1]]
