"""SwiGLU as Beam computes it: the product in FP32, rounded once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from beamq.model import gpu_support

CHUNK_ELEMENTS = 1 << 25  # FP32 temporaries of elementwise work stay near 128 MiB


def swiglu(gate_up_SN: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in FP32, rounded once; columns [gate | up]."""
    if gpu_support.serves(gate_up_SN):
        from beamq.formats.kernels import gpu  # Triton

        return gpu.swiglu(gate_up_SN)
    rows, width = gate_up_SN.shape
    out = gate_up_SN.new_empty(rows, width // 2)
    step = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, rows, step):
        gate, up = gate_up_SN[start : start + step].chunk(2, dim=-1)
        out[start : start + step] = F.silu(gate.float()).mul_(up)
    return out
