"""What a checkpoint takes on disk and on GPUs, and which machines have room for it that had none.

In: an opened checkpoint (headers only) and its `BeamConfig`. Out: a `Footprint`; `newly_fitting`
for two of them. The sums about GPUs are `beamq.plan.serving`' and `beamq.plan.serving`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import QUANTIZABLE, is_scale, role_of
from beamq.io.checkpoint import Checkpoint
from beamq.io.safetensors_header import CODE_DTYPES, ITEMSIZE, TensorSpec
from beamq.plan.layout import Unit
from beamq.plan.serving import (
    COUNTS,
    GPUS,
    KV_ITEMSIZE,
    LAYOUTS,
    Weights,
    best_fit,
    kv_cache_nbytes,
    model_weights,
)

CONTEXTS = (32_768, 131_072, 1_048_576)
FIT_CONTEXT = 131_072
_FORMATS = {"U8": "nvfp4", "F8_E4M3": "fp8"}
_FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A machine with room for weights and `sequences` whole contexts."""

    gpu: str
    label: str
    count: int
    layout: str
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """What the quantized linears of one layer take, and would take in BF16."""

    layer: int
    quantized: int
    bf16: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes. `per_gpu` maps layout and number of GPUs to weights on each, None where the model
    cannot be divided so; `kv` maps a context's tokens to one sequence's cache in `kv_dtype`."""

    disk: int
    tensors: int
    parameters: int
    bits_per_weight: float
    per_gpu: dict[str, dict[int, int | None]]
    kv_dtype: str
    kv: dict[int, int]
    fit_context: int
    fits: tuple[Fitting, ...]
    layers: tuple[LayerSize, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; see docs/report-schema.md."""
        return {
            "disk_bytes": self.disk,
            "tensor_bytes": self.tensors,
            "parameters": self.parameters,
            "bits_per_weight": self.bits_per_weight,
            "weight_bytes_per_gpu": {
                layout: {str(count): size for count, size in sizes.items()}
                for layout, sizes in self.per_gpu.items()
            },
            "kv_dtype": self.kv_dtype,
            "kv_bytes": {str(context): size for context, size in self.kv.items()},
            "fits": {
                "context": self.fit_context,
                "machines": [
                    {
                        "gpu": found.gpu,
                        "count": found.count,
                        "layout": found.layout,
                        "sequences": found.sequences,
                    }
                    for found in self.fits
                ],
            },
        }


def footprint(checkpoint: Checkpoint, config: BeamConfig) -> Footprint:
    """All of it. Quantized parts are found by the dtypes of their tensors."""
    fmt, units = stored_units(checkpoint)
    weights = model_weights(config, fmt, units)
    kv_dtype = "fp8" if _declares_fp8_cache(checkpoint) else "bf16"
    tensors = sum(spec.nbytes for spec in checkpoint.tensors.values())
    context = min(FIT_CONTEXT, config.max_position_embeddings)
    return Footprint(
        disk=sum(checkpoint.source.listing().values()),
        tensors=tensors,
        parameters=weights.parameters,
        bits_per_weight=8 * tensors / weights.parameters,
        per_gpu={
            layout: {count: weights.per_gpu(layout, count) for count in COUNTS}
            for layout in LAYOUTS
        },
        kv_dtype=kv_dtype,
        kv={
            tokens: kv_cache_nbytes(config, tokens, itemsize=KV_ITEMSIZE[kv_dtype])
            for tokens in CONTEXTS
        },
        fit_context=context,
        fits=_fits(weights, context, KV_ITEMSIZE[kv_dtype]),
        layers=_layer_bytes(checkpoint),
    )


def newly_fitting(source: Footprint, candidate: Footprint) -> tuple[Fitting, ...]:
    """Machines that hold the candidate and a whole context, but not the source and one."""
    before = {(found.gpu, found.count) for found in source.fits}
    return tuple(found for found in candidate.fits if (found.gpu, found.count) not in before)


def _fits(weights: Weights, context: int, kv_itemsize: int) -> tuple[Fitting, ...]:
    found = []
    for gpu in GPUS:
        for count in COUNTS:
            best = best_fit(weights, gpu, count, context=context, kv_itemsize=kv_itemsize)
            if best is not None and best.fits:
                found.append(
                    Fitting(
                        gpu=gpu.name,
                        label=gpu.label,
                        count=count,
                        layout=best.layout,
                        sequences=best.sequences,
                    )
                )
    return tuple(found)


def stored_format(tensors: Collection[TensorSpec]) -> str:
    """`nvfp4`, `fp8`, `mixed` or `other` by the dtypes of quantized codes; without any, the
    commonest dtype of the parameters (`bf16`, `fp16`, `fp32`, `fp64`)."""
    parameters: Counter[str] = Counter()
    for spec in tensors:
        if not is_scale(spec.name):
            parameters[spec.dtype] += spec.numel
    codes = parameters.keys() & set(CODE_DTYPES)
    if not codes:
        return _FLOATS.get(max(parameters, key=parameters.__getitem__, default=""), "other")
    if codes == {"U8"} and any(spec.name.endswith(".weight_scale_2") for spec in tensors):
        return "nvfp4"
    if codes == {"F8_E4M3"}:
        return "fp8"
    return "mixed" if codes == {"U8", "F8_E4M3"} else "other"


def stored_units(checkpoint: Checkpoint) -> tuple[str | None, frozenset[Unit]]:
    """The commonest quantized format, and the units with at least one tensor in it."""
    units: dict[str, set[Unit]] = {fmt: set() for fmt in _FORMATS.values()}
    for spec in checkpoint.tensors.values():
        fmt = _FORMATS.get(spec.dtype)
        if fmt is None or is_scale(spec.name):
            continue
        role = role_of(spec.name)
        if role.layer is not None and role.role in QUANTIZABLE:
            units[fmt].add((role.layer, role.role))
    fmt = max(units, key=lambda name: len(units[name]))
    return (fmt, frozenset(units[fmt])) if units[fmt] else (None, frozenset())


def _layer_bytes(checkpoint: Checkpoint) -> tuple[LayerSize, ...]:
    quantized: Counter[int] = Counter()
    bf16: Counter[int] = Counter()
    for spec in checkpoint.tensors.values():
        role = role_of(spec.name)
        if role.layer is None or role.role not in QUANTIZABLE:
            continue
        if is_scale(spec.name):
            quantized[role.layer] += spec.nbytes
        elif spec.dtype in CODE_DTYPES:
            quantized[role.layer] += spec.nbytes
            bf16[role.layer] += spec.numel * (2 if spec.dtype == "U8" else 1) * ITEMSIZE["BF16"]
    return tuple(
        LayerSize(layer=layer, quantized=quantized[layer], bf16=bf16[layer])
        for layer in sorted(quantized)
    )


def _declares_fp8_cache(checkpoint: Checkpoint) -> bool:
    block = checkpoint.config.get("quantization_config")
    return isinstance(block, dict) and bool(block.get("kv_cache_scheme"))


def smallest_each(fits: Sequence[Fitting]) -> list[Fitting]:
    """The fewest of each GPU among machines."""
    fewest: dict[str, Fitting] = {}
    for found in fits:
        if found.gpu not in fewest or found.count < fewest[found.gpu].count:
            fewest[found.gpu] = found
    return list(fewest.values())
