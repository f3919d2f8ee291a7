"""Which format each linear of a checkpoint is stored in, told by its tensors, checked by config.

In: a `Checkpoint`, a module's name and its shape. Out: "dense", "fp8" or "nvfp4".

The tensors decide, since they are what will be multiplied: U8 codes with two levels of scales are
NVFP4, E4M3 codes with a row scale are FP8, anything in BF16, FP16 or FP32 is dense. The config
must have announced a quantized format (`quantization_config`, or `hf_quant_config.json` alone),
or the checkpoint is in two minds and no engine would read it as we do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from beamq.errors import CheckpointError, TensorError
from beamq.formats.numerics import NVFP4_BLOCK
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.files import read_json_object
from beamq.io.safetensors_header import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLinear:
    """A linear `module` of [n, k], stored in `format`."""

    module: str
    n: int
    k: int
    format: str


def declared_formats(checkpoint: Checkpoint) -> frozenset[str]:
    """Quantized formats that the checkpoint's config files announce; empty for a plain one."""
    block = checkpoint.config.get("quantization_config")
    if not isinstance(block, dict) or not block:
        if not checkpoint.source.has("hf_quant_config.json"):
            return frozenset()
        path = checkpoint.source.path("hf_quant_config.json")
        nested = read_json_object(path, CheckpointError).get("quantization")
        block = {"quant_method": "modelopt", **(nested if isinstance(nested, dict) else {})}
    method = str(block.get("quant_method", "")).lower()
    if method.startswith("modelopt"):
        mixed = block.get("quant_algo") == "MIXED_PRECISION"
        return frozenset(("nvfp4", "fp8") if mixed else ("nvfp4",))
    if method == "compressed-tensors":
        return frozenset(("fp8",))
    raise CheckpointError(
        f"{checkpoint.name}: quantization_config has quant_method {method[:40]!r}, expected"
        " 'modelopt' or 'compressed-tensors'"
    )


def part_of(
    checkpoint: Checkpoint, declared: frozenset[str], module: str, n: int, k: int
) -> StoredLinear:
    """The linear `module`, its format found and its tensors' shapes checked.

    Raises `TensorError` for a tensor that is missing, misshapen, or not what the config says.
    """
    weight = checkpoint.spec(f"{module}.weight")
    if weight.dtype in FLOAT_SOURCES:
        expect_shape(weight, (n, k))
        return StoredLinear(module=module, n=n, k=k, format="dense")
    if weight.dtype == "F8_E4M3":
        found = "fp8"
        expect_shape(weight, (n, k))
        scale = checkpoint.spec(f"{module}.weight_scale")
        if scale.shape != (n,):  # ModelOpt's per-channel FP8 stores [N]
            expect_shape(scale, (n, 1))
    elif weight.dtype == "U8":
        found = "nvfp4"
        expect_shape(weight, (n, k // 2))
        expect_shape(checkpoint.spec(f"{module}.weight_scale"), (n, k // NVFP4_BLOCK))
        checkpoint.spec(f"{module}.weight_scale_2")
    else:
        raise TensorError(
            f"{weight.name}: dtype {weight.dtype}, expected BF16, F16, F32, F8_E4M3 (FP8) or"
            " U8 (NVFP4)"
        )
    if found not in declared:
        says = " or ".join(sorted(declared)) or "that nothing is quantized"
        raise TensorError(
            f"{weight.name}: stored as {found}, but the config says {says}; restore the config"
            " files that belong to these weights"
        )
    return StoredLinear(module=module, n=n, k=k, format=found)


def same_format(parts: list[StoredLinear]) -> str:
    """The one format of linears that are multiplied as one. Raises `TensorError` if they differ."""
    for part in parts[1:]:
        if part.format != parts[0].format:
            raise TensorError(
                f"{part.module} is {part.format} but {parts[0].module} is {parts[0].format};"
                " engines fuse them, so they must share a format"
            )
    return parts[0].format


def scalar(checkpoint: Checkpoint, name: str) -> float:
    """A positive, finite one-element scale. Raises `TensorError`."""
    spec = checkpoint.spec(name)
    if spec.numel != 1:
        raise TensorError(f"{name}: shape {list(spec.shape)}, expected one number")
    value = float(checkpoint.tensor(name).to(torch.float64))
    if not (math.isfinite(value) and value > 0):
        raise TensorError(f"{name} is {value}, expected a positive finite scale")
    return value


def expect_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    """Raise `TensorError` unless the tensor has the shape that the config implies."""
    if spec.shape != shape:
        raise TensorError(
            f"{spec.name}: shape {list(spec.shape)}, expected {list(shape)} by config.json"
        )
