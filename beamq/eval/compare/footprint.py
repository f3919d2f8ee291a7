"""What a checkpoint stores, takes on disk and on GPUs, and which machines have room for it.

In: the headers of an opened checkpoint, its files and its `BeamConfig`. Out: its format, a
`Footprint`, and the machines that fit a quantized model but not its source. Quantized parts are
found by the dtypes of their tensors. `plan.serving` does the arithmetic of GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import QUANTIZABLE, is_scale, role_of
from beamq.io.checkpoint import Checkpoint
from beamq.io.safetensors_header import CODE_DTYPES, ITEMSIZE, TensorSpec
from beamq.plan.layout import Unit, format_in, scheme_of
from beamq.plan.serving import (
    COUNTS,
    GPUS,
    KV_ITEMSIZE,
    best_fit,
    default_context,
    kv_cache_nbytes,
    model_weights,
)

CONTEXTS = (32_768, 131_072, 1_048_576)
_FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """`count` GPUs of a kind, with room for the weights and `sequences` whole contexts."""

    gpu: str
    count: int
    layout: str
    sequences: int

    @property
    def label(self) -> str:
        """The GPU's name as it is shown: `B200 180 GB`."""
        return next(gpu.label for gpu in GPUS if gpu.name == self.gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """The machines that fit, for sequences of `context` tokens."""

    context: int
    machines: tuple[Fitting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """`disk_bytes` is every file. `weight_bytes_per_gpu` maps layout and number of GPUs to the
    weights on each, None where the model cannot be divided so; `kv_bytes` maps the tokens of a
    sequence to its cache in `kv_dtype`."""

    disk_bytes: int
    tensor_bytes: int
    parameters: int
    bits_per_weight: float
    weight_bytes_per_gpu: dict[str, dict[int, int | None]]
    kv_dtype: str
    kv_bytes: dict[int, int]
    fits: Fits


def footprint(checkpoint: Checkpoint, config: BeamConfig) -> Footprint:
    """Sizes of a checkpoint, and the machines that it fits."""
    weights = model_weights(config, stored_formats(checkpoint))
    block = checkpoint.config.get("quantization_config")
    kv_dtype = "fp8" if isinstance(block, dict) and block.get("kv_cache_scheme") else "bf16"
    itemsize = KV_ITEMSIZE[kv_dtype]
    tensors = sum(spec.nbytes for spec in checkpoint.tensors.values())
    context = default_context(config)
    machines = tuple(
        Fitting(gpu=gpu.name, count=count, layout=best.layout, sequences=best.sequences)
        for gpu in GPUS
        for count in COUNTS
        if (best := best_fit(weights, gpu, count, context=context, kv_itemsize=itemsize))
        and best.fits
    )
    return Footprint(
        disk_bytes=sum(checkpoint.source.listing().values()),
        tensor_bytes=tensors,
        parameters=weights.parameters,
        bits_per_weight=8 * tensors / weights.parameters,
        weight_bytes_per_gpu=weights.split(),
        kv_dtype=kv_dtype,
        kv_bytes={n: kv_cache_nbytes(config, n, itemsize=itemsize) for n in CONTEXTS},
        fits=Fits(context=context, machines=machines),
    )


def newly_fitting(source: Footprint, candidate: Footprint) -> tuple[Fitting, ...]:
    """Machines that hold the candidate and a whole context, but not the source and one."""
    before = {(found.gpu, found.count) for found in source.fits.machines}
    return tuple(each for each in candidate.fits.machines if (each.gpu, each.count) not in before)


def smallest_each(machines: Sequence[Fitting]) -> list[Fitting]:
    """Of each kind of GPU, the machine with the fewest."""
    fewest: dict[str, Fitting] = {}
    for found in machines:
        if found.gpu not in fewest or found.count < fewest[found.gpu].count:
            fewest[found.gpu] = found
    return list(fewest.values())


def stored_format(tensors: Collection[TensorSpec]) -> str:
    """A key of `layout.SCHEMES`, `mixed` or `other` by the tensors of quantized linears; without
    any, the commonest dtype of the parameters (`bf16`, `fp16`, `fp32`, `fp64`)."""
    parameters: Counter[str] = Counter()
    for spec in tensors:
        if not is_scale(spec.name):
            parameters[spec.dtype] += spec.numel
    codes = parameters.keys() & set(CODE_DTYPES)
    if not codes:
        return _FLOATS.get(max(parameters, key=parameters.__getitem__, default=""), "other")
    named = {spec.name: spec for spec in tensors}
    held = [spec for spec in tensors if spec.dtype in CODE_DTYPES and not is_scale(spec.name)]
    found = {_format(named, spec) or "other" for spec in held}
    if "other" in found:
        return "other"
    return scheme_of(found) or ("fp8" if found == {"fp8-modelopt"} else "mixed")


def _format(tensors: Mapping[str, TensorSpec], weight: TensorSpec) -> str | None:
    """The format of the linear that `weight` holds the codes of; None if it is none of ours."""
    module = weight.name.removesuffix(".weight")
    if weight.dtype == "F8_E4M3" or f"{module}.weight_scale_2" in tensors:
        return format_in(tensors, module)
    return None


def stored_formats(checkpoint: Checkpoint) -> dict[Unit, str]:
    """The format of each quantized unit: that of the first of its linears."""
    formats: dict[Unit, str] = {}
    for spec in checkpoint.tensors.values():
        if spec.dtype not in CODE_DTYPES or is_scale(spec.name):
            continue
        role = role_of(spec.name)
        unit = (role.layer or 0, role.role)
        if role.layer is None or role.role not in QUANTIZABLE or unit in formats:
            continue
        if (fmt := _format(checkpoint.tensors, spec)) is not None:
            formats[unit] = fmt
    return formats


def layer_sizes(checkpoint: Checkpoint) -> dict[int, tuple[int, int]]:
    """Bytes of each layer's quantized linears with their scales, and how many more BF16 takes."""
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
    return {layer: (nbytes, bf16[layer] - nbytes) for layer, nbytes in quantized.items()}
