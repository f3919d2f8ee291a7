"""A reader of quantized checkpoints written from the formats' definitions alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers import safetensors_edit as st

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def e4m3_table() -> np.ndarray:
    """All 256 values of E4M3 from its definition: bias 7, no infinities, 0x7F is NaN."""
    table = np.zeros(256, np.float32)
    for byte in range(256):
        sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
        value = (
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        )
        table[byte] = np.nan if byte & 0x7F == 0x7F else (-1) ** sign * value
    return table


E4M3 = e4m3_table()


def bf16(data: bytes, shape: list[int]) -> np.ndarray:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def tensors_of(folder: Path) -> st.Tensors:
    merged: st.Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        merged.update(st.load(path))
    return merged


def decode(tensors: st.Tensors, module: str) -> np.ndarray:
    """Ten lines from the format's definition, sharing no code with beamq."""
    dtype, shape, data = tensors[f"{module}.weight"]
    if dtype == "F8_E4M3":
        codes = E4M3[np.frombuffer(data, np.uint8)].reshape(shape)
        if (blocks := tensors.get(f"{module}.weight_scale_inv")) is not None:
            scale = np.frombuffer(blocks[2], "<f4").reshape(blocks[1])
            scale = np.repeat(np.repeat(scale, 128, 0), 128, 1)
            return codes * scale[: shape[0], : shape[1]]
        if tensors[f"{module}.weight_scale"][0] == "U8":
            byte = np.frombuffer(tensors[f"{module}.weight_scale"][2], np.uint8).astype(np.float64)
            return codes * np.exp2(byte - 127).reshape(shape[0], -1).repeat(32, axis=1)
        scale = np.frombuffer(tensors[f"{module}.weight_scale"][2], "<f4")[:, None]
        return codes * scale
    packed = np.frombuffer(data, np.uint8).reshape(shape)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(shape[0], -1)
    values = E2M1[codes & 7] * np.where(codes & 8, -1, 1)
    blocks = E4M3[np.frombuffer(tensors[f"{module}.weight_scale"][2], np.uint8)]
    blocks = blocks.reshape(shape[0], -1).repeat(16, axis=1)
    return values * blocks * np.frombuffer(tensors[f"{module}.weight_scale_2"][2], "<f4")[0]
