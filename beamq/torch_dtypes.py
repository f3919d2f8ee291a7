"""Safetensors dtype names as torch dtypes, and bytes as tensors; the one place that maps them."""

from __future__ import annotations

from typing import Any

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def tensor_from_bytes(data: Any, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over a writable buffer, shared, not copied. `dtype` is a safetensors name."""
    if 0 in shape:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(data, dtype=torch.uint8).view(TORCH_DTYPES[dtype]).reshape(shape)
