"""Account for every tensor of a source: what it is, whether it is valid, and where its rows are.

In: an opened `Checkpoint` and its `BeamConfig`. Out: a `SourceMap`: one byte range for each tensor
that a Beam must have (packed 3-D experts cut into rows of one expert), the extra tensors that are
copied bit for bit, and those that are left out, with the reason. A tensor that is missing, has
another shape or dtype, is already quantized or belongs to an adapter is an error here, from the
headers alone; then `content` looks for zeros.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from beamq.beam.config import BeamConfig, unknown_keys
from beamq.beam.tensors import (
    FP32_ROLES,
    Role,
    TensorRole,
    classify,
    expected_tensors,
    is_further_layer,
    packed_shape,
)
from beamq.errors import AlreadyQuantizedError, TensorError, counted
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.safetensors_header import ITEMSIZE, TensorSpec, few
from beamq.plan.content import refuse_zeros

QUANTIZED_SUFFIXES = (
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".input_scale",
    ".weight_packed",
    ".weight_global_scale",
    ".input_global_scale",
)
DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")
PREFIXES = (
    "base_model.model.", "model.language_model.", "language_model.", "_orig_mod.", "module.",
    "model.model.",
)  # fmt: skip
"""What trainers and wrappers put before names."""
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|token_adapter|base_layer|modules_to_save)(\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRange:
    """Whole rows of a stored tensor: `nbytes` bytes from byte `start` of `spec`."""

    spec: TensorSpec
    start: int
    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceMap:
    """Every source tensor: it is in `found`, `extra` or `dropped`."""

    found: tuple[tuple[TensorRole, SourceRange], ...]
    extra: tuple[TensorSpec, ...]
    dropped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def map_sources(checkpoint: Checkpoint, config: BeamConfig) -> SourceMap:
    """Resolve every expected tensor. Raises `TensorError` or `AlreadyQuantizedError`."""
    refuse_quantized(checkpoint)
    _refuse_names(checkpoint)
    packed = _packed_tensors(checkpoint, config)
    found: list[tuple[TensorRole, SourceRange]] = []
    missing: list[str] = []
    used = {spec.name for spec in packed.values()}
    for role, shape in expected_tensors(config):
        spec = checkpoint.tensors.get(role.name)
        if spec is not None:
            stack = packed.get((role.layer, packed_part(role))) if role.expert is not None else None
            if stack is not None:
                raise TensorError(
                    f"layer {role.layer} has packed experts ({stack.name}) and per-expert ones"
                    f" ({role.name}); remove one form"
                )
            _check_spec(role, spec, shape)
            used.add(role.name)
            found.append((role, whole_range(spec)))
        elif role.role is Role.EXPERT and (role.layer, packed_part(role)) in packed:
            found.append((role, _cut(packed[role.layer, packed_part(role)], role, shape)))
        else:
            missing.append(role.name)
    if missing:
        raise TensorError(f"{checkpoint.name}: {missing_tensors(len(missing))}: {few(missing)}")
    extra, dropped = _leftovers(checkpoint, used, config)
    notes = _notes(checkpoint, config, found, extra)
    refuse_zeros(checkpoint)
    return SourceMap(
        found=tuple(found), extra=tuple(extra), dropped=tuple(dropped), notes=tuple(notes)
    )


def _refuse_names(checkpoint: Checkpoint) -> None:
    """Raise `TensorError` for an adapter's tensors, and for names that a wrapper has changed."""
    names = checkpoint.tensors
    if adapter := [name for name in names if _ADAPTER.search(name)]:
        raise TensorError(
            f"{checkpoint.name}: {counted(len(adapter), 'tensor')} of an adapter beside the model"
            f" ({few(adapter)}); no engine loads them. Merge the adapter into the weights first,"
            " or remove its tensors"
        )
    for prefix in PREFIXES:
        plain = {name: unprefixed(name, prefix) for name in names if name.startswith(prefix)}
        known = {name: own for name, own in plain.items() if classify(own).role is not Role.EXTRA}
        if twice := [name for name, own in known.items() if own in names]:
            raise TensorError(
                f"{checkpoint.name}: {twice[0]} and {known[twice[0]]} are the same tensor under"
                f" two names ({counted(len(twice), 'such pair')}); remove one of each"
            )
        if known and "model.embed_tokens.weight" not in names:
            raise TensorError(
                f"{checkpoint.name}: {counted(len(known), 'name begins', 'names begin')} with"
                f" {prefix!r}, which a trainer or wrapper has added ({few(list(known))}); save the"
                " model without the wrapper (unwrap it before save_pretrained), or rename the"
                " tensors"
            )


def unprefixed(name: str, prefix: str) -> str:
    """The model's own name for one that begins with one of `PREFIXES`."""
    rest = name.removeprefix(prefix)
    return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"


def missing_tensors(count: int) -> str:
    """How many tensors of a Beam are missing, for errors and notes."""
    each = ("tensor that config.json calls for is", "tensors that config.json calls for are")
    return f"{counted(count, *each)} missing"


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """Raise `AlreadyQuantizedError` if tensors are scales, or codes that have scales.

    Codes alone are enough where the config declares a quantization. Otherwise a tensor of an
    unexpected dtype does not make a quantized model; `map_sources` reports it.
    """
    declared = checkpoint.config.get("quantization_config")
    claims = bool(declared) or checkpoint.source.has("hf_quant_config.json")
    for name, spec in checkpoint.tensors.items():
        if not is_quantized(spec) or not (claims or _scaled(checkpoint, name)):
            continue
        kind = {"U8": "NVFP4", "I8": "INT8"}.get(spec.dtype, "FP8")
        if name.endswith("_scale_2"):
            kind = "NVFP4"
        if isinstance(declared, dict):
            kind = str(declared.get("quant_algo") or declared.get("format") or kind)[:40]
        raise AlreadyQuantizedError(
            f"{checkpoint.name}: already quantized ({kind}; {name} is {spec.dtype})."
            " Use the BF16 original, or `beamq dequantize` first"
        )


def _scaled(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is a scale, or has one."""
    module = name.removesuffix(".weight")
    return name.endswith(QUANTIZED_SUFFIXES) or any(
        module + suffix in checkpoint.tensors for suffix in QUANTIZED_SUFFIXES
    )


def is_quantized(spec: TensorSpec) -> bool:
    """Whether a tensor is a scale, or one of Beam's own tensors stored as codes."""
    if spec.name.endswith(QUANTIZED_SUFFIXES):
        return True
    codes = spec.dtype in ("U8", "I8", "F8_E4M3", "F8_E5M2")
    return codes and classify(spec.name).role is not Role.EXTRA


def packed_part(role: TensorRole) -> str:
    """The packed tensor that an expert's linear would be part of."""
    return "down_proj" if role.proj == "down_proj" else "gate_up_proj"


def _packed_tensors(
    checkpoint: Checkpoint, config: BeamConfig
) -> dict[tuple[int | None, str], TensorSpec]:
    """(layer, gate_up_proj|down_proj) -> packed tensor, with its shape checked."""
    packed: dict[tuple[int | None, str], TensorSpec] = {}
    for spec in checkpoint.tensors.values():
        role = classify(spec.name)
        if role.packed is None or role.layer is None or role.layer not in config.sparse_layers:
            continue
        key = (role.layer, role.packed)
        if key in packed:
            raise TensorError(f"{spec.name} and {packed[key].name} hold the same experts twice")
        _check_spec(role, spec, packed_shape(config, role.packed))
        packed[key] = spec
    return packed


def _check_spec(role: TensorRole, spec: TensorSpec, shape: tuple[int, ...]) -> None:
    if spec.dtype not in FLOAT_SOURCES:
        raise TensorError(
            f"{spec.name}: dtype is {spec.dtype}, expected BF16, F16 or F32"
            f" ({role.role.value}, {spec.file})"
        )
    if spec.shape != shape:
        raise TensorError(
            f"{spec.name}: shape {list(spec.shape)}, but config.json calls for {list(shape)}"
            f" ({role.role.value}, {spec.file})"
        )


def whole_range(spec: TensorSpec) -> SourceRange:
    return SourceRange(spec=spec, start=0, nbytes=spec.nbytes, shape=spec.shape)


def _cut(spec: TensorSpec, role: TensorRole, shape: tuple[int, ...]) -> SourceRange:
    """One expert's rows of a packed tensor; in [E, 2I, H] the gate's rows come first."""
    nbytes = shape[0] * shape[1] * ITEMSIZE[spec.dtype]
    slots = 1 if role.proj == "down_proj" else 2
    slot = (role.expert or 0) * slots + (1 if role.proj == "up_proj" else 0)
    return SourceRange(spec=spec, start=slot * nbytes, nbytes=nbytes, shape=shape)


def _leftovers(
    checkpoint: Checkpoint, used: set[str], config: BeamConfig
) -> tuple[list[TensorSpec], list[tuple[str, str]]]:
    extra: list[TensorSpec] = []
    dropped: list[tuple[str, str]] = []
    for name, spec in checkpoint.tensors.items():
        if name in used:
            continue
        if name.endswith(DERIVED_SUFFIXES):
            dropped.append((name, "recomputed from config.json by every loader"))
        else:
            extra.append(spec)
    return extra, dropped


def _dtype_notes(
    config: Mapping[str, Any], found: list[tuple[TensorRole, SourceRange]]
) -> Iterator[str]:
    not_fp32 = [
        role.name
        for role, source in found
        if role.role in FP32_ROLES and source.spec.dtype != "F32"
    ]
    if not_fp32:
        yield (
            f"{counted(len(not_fp32), 'router tensor is', 'router tensors are')} not FP32 in the"
            f" source (a cast before saving? {few(not_fp32)}); their values are stored as FP32"
            " unchanged, but the precision lost in that cast is not restored"
        )
    wider = {
        source.spec.name: source.spec.dtype
        for role, source in found
        if role.role not in FP32_ROLES and source.spec.dtype in ("F32", "F16")
    }
    if wider:
        yield (
            f"{counted(len(wider), 'tensor is', 'tensors are')}"
            f" {' or '.join(sorted(set(wider.values())))} in the source ({few(list(wider))}); what"
            " is not quantized of them is rounded to BF16"
        )
    said = {key: config.get(key) for key in ("dtype", "torch_dtype")}
    stored = Counter(source.spec.dtype for role, source in found if role.role not in FP32_ROLES)
    most = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[stored.most_common(1)[0][0]]
    if odd := {key: value for key, value in said.items() if value not in (None, most)}:
        yield (
            f"config.json says {' and '.join(f'{key} {value}' for key, value in odd.items())}, but"
            f" most tensors are {most}; the tensors decide, and the output says bfloat16"
        )
    halves: dict[str, list[str]] = {"BF16": [], "F16": []}
    for name, dtype in {source.spec.name: source.spec.dtype for _, source in found}.items():
        if dtype in halves:
            halves[dtype].append(name)
    if all(halves.values()):
        fewer, rest = sorted(halves, key=lambda dtype: len(halves[dtype]))
        yield (
            f"{counted(len(halves[fewer]), 'tensor is', 'tensors are')} {fewer}, the others {rest}"
            f" ({few(halves[fewer])}); their bits are read as the header says"
        )


def _notes(
    checkpoint: Checkpoint,
    config: BeamConfig,
    found: list[tuple[TensorRole, SourceRange]],
    extra: list[TensorSpec],
) -> Iterator[str]:
    yield from _dtype_notes(checkpoint.config, found)
    heads = [spec.name for spec in extra if spec.name == "lm_head.weight"]
    if heads:
        yield (
            "config.json ties the embeddings yet lm_head.weight is stored; it is copied, and must"
            " equal the embeddings"
        )
    others = [spec.name for spec in extra if spec.name != "lm_head.weight"]
    further = [name for name in others if is_further_layer(name, config.num_layers)]
    for names, which, effect in (
        (further, "of further layers", "vLLM stops at them, SGLang passes over them"),
        (
            [name for name in others if name not in further],
            "not Beam's",
            "vLLM and SGLang stop at them",
        ),
    ):
        if names:
            some = counted(len(names), "tensor is", "tensors are")
            yield f"{some} {which} ({few(names)}); copied bit for bit, but {effect}"
    if unknown := unknown_keys(checkpoint.config):
        some = counted(len(unknown), "key that is", "keys that are")
        yield f"config.json has {some} not Beam's, copied without being used: {few(unknown)}"
    declared = "quantization_config" in checkpoint.config
    if declared or checkpoint.source.has("hf_quant_config.json"):
        yield "the source's config declares a quantization that its tensors do not have; not copied"
