"""Source bytes that are hard on quantization kernels, for tests that compare them bit by bit."""

from __future__ import annotations

import numpy as np
import torch

DTYPES = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4}
GLOBAL_SCALES = [1.0, 0.02 / 2688, 3.7e-6, 2.0**-126, 1.7 * 2.0**-120, 2.0**117]


def encoded(values: np.ndarray, dtype: str) -> bytes:
    """FP32 values as `dtype` bytes."""
    torch_dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]
    tensor = torch.from_numpy(values.astype(np.float32)).to(torch_dtype)
    return tensor.view(torch.uint8).numpy().tobytes()


def patterns(dtype: str, seed: int = 0) -> bytes:
    """Every 16-bit pattern in a shuffled order, or 65,536 random FP32 patterns."""
    rng = np.random.default_rng(seed)
    if dtype == "F32":
        return rng.integers(0, 2**32, 65536, dtype=np.uint32).tobytes()
    return rng.permutation(65536).astype(np.uint16).tobytes()


def aimed(dtype: str) -> bytes:
    """Finite values: Gaussians, ties of both grids, zero blocks, -0.0, tiny and huge blocks."""
    rng = np.random.default_rng(1)
    blocks = [rng.standard_normal((80, 16)) * 0.02]
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2)
    blocks += [ties * s * scale for scale in (1.0, 0.5, 1.125, 448.0) for s in (1.0, -1.0)]
    blocks += [np.zeros(16), np.full(16, -0.0), np.array([-0.0, 0.0] * 7 + [1e-6, -1e-6])]
    blocks += [rng.standard_normal(16) * 10.0**e for e in (-44, -40, -38, -30, -8, 4)]
    flat = np.concatenate([np.asarray(block).reshape(-1) for block in blocks])
    return encoded(flat, dtype)


def shifted(data: bytes, by: int) -> memoryview:
    """The same bytes at an address that is no multiple of four (or of two)."""
    return memoryview(bytearray(by) + data)[by:]


def sources(dtype: str) -> list[bytes]:
    return [patterns(dtype), aimed(dtype)]
