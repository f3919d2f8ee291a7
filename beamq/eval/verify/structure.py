"""Which tensors a checkpoint holds, against what its config calls for; headers and scalars only.

In: a `Folder`. Out: an `Inventory` (every linear with the tensors it is stored as, every precise
tensor), and findings under `tensors.*` and `scales.*`.

A linear counts as quantized if any scale stands beside it or its weight has a code's dtype; then
it must have exactly the tensors of its format (plan/layout.py), and otherwise exactly one BF16
weight. Names that are neither are faults: both engines stop at names they do not know.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from beamq.beam.tensors import (
    FP32_ROLES,
    QUANTIZABLE,
    Role,
    TensorRole,
    classify,
    expected_tensors,
    fused_group,
    packed_shape,
)
from beamq.eval.verify.checks import Ledger
from beamq.eval.verify.config_files import FP8, NVFP4
from beamq.eval.verify.folder import Folder
from beamq.io.checkpoint import Checkpoint
from beamq.io.safetensors_header import TensorSpec
from beamq.plan.layout import quantized_tensors
from beamq.plan.sources import packed_part

_FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}  # stored dtype by format of the folder
CODE_DTYPES = ("U8", "I8", "F8_E4M3", "F8_E5M2")
SCALE_SUFFIXES = ("weight_scale", "weight_scale_2", "input_scale")
SMALLEST_NORMAL = 2.0**-126
LARGEST_GLOBAL = 2.0**117  # beyond it, a code times both scales leaves FP32


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One quantizable linear [n, k] and its stored tensors by suffix (`weight`, ...)."""

    role: TensorRole
    shape: tuple[int, int]
    parts: dict[str, TensorSpec]

    @property
    def module(self) -> str:
        """Its dotted path."""
        return self.role.module

    @property
    def quantized(self) -> bool:
        """Whether anything says so: a scale, or a weight of codes."""
        weight = self.parts.get("weight")
        return any(suffix in self.parts for suffix in SCALE_SUFFIXES) or (
            weight is not None and weight.dtype in CODE_DTYPES
        )

    @property
    def format(self) -> str:
        """The format that the stored tensors themselves tell, whatever the config says."""
        weight = self.parts.get("weight")
        codes = weight is not None and weight.dtype == "U8"
        return NVFP4 if codes or "weight_scale_2" in self.parts else FP8


@dataclass(slots=True, kw_only=True)
class Inventory:
    """Everything stored, sorted out. `unknown` are tensors no Beam has."""

    linears: list[Linear] = field(default_factory=list)
    precise: list[tuple[TensorRole, TensorSpec]] = field(default_factory=list)
    unknown: list[TensorSpec] = field(default_factory=list)

    def stored(self) -> dict[str, bool]:
        """Module -> quantized, for every module of which something is stored."""
        stored = {linear.module: linear.quantized for linear in self.linears if linear.parts}
        for role, spec in self.precise:
            if role.role in (Role.HEAD, Role.EMBEDDING):
                stored[role.module] = spec.dtype in CODE_DTYPES
        for spec in self.unknown:
            module, _, suffix = spec.name.rpartition(".")
            if suffix in SCALE_SUFFIXES and module in stored:
                stored[module] = True
        return stored


def take_inventory(folder: Folder, fmt: str, ledger: Ledger) -> Inventory:
    """Sort every stored tensor and file what is missing, unknown, mis-shaped or mis-typed."""
    inventory = Inventory()
    left = dict(folder.tensors)
    precise = _FLOATS.get(fmt, "BF16") if folder.manifest is None else "BF16"
    packed = _packed(folder, left, precise, inventory, ledger) if folder.plain else frozenset()
    for name in ("tensors.known", "tensors.shape", "tensors.dtype"):
        ledger.examined(name, len(left), "tensors")
    for role, shape in expected_tensors(folder.config):
        ledger.examined("tensors.present", 1, "expected tensors")
        if role.role is Role.EXPERT and (role.layer, packed_part(role)) in packed:
            continue
        if role.role in QUANTIZABLE:
            inventory.linears.append(_linear(role, shape, left, fmt, precise, ledger))
            continue
        spec = left.pop(role.name, None)
        if spec is None:
            ledger.fault("tensors.present", role.name, "is missing")
            continue
        inventory.precise.append((role, spec))
        _check_shape(spec, shape, ledger)
        _check_precise_dtype(role, spec, precise, ledger)
    inventory.unknown = list(left.values())
    for spec in inventory.unknown:
        _unknown(spec, ledger)
    if not packed:
        _check_experts(inventory.linears, ledger)
    return inventory


def _packed(
    folder: Folder,
    left: dict[str, TensorSpec],
    precise: str,
    inventory: Inventory,
    ledger: Ledger,
) -> frozenset[tuple[int | None, str]]:
    """(layer, part) of experts that are stored packed, which only an unquantized Beam may do."""
    found = set()
    for spec in [spec for spec in left.values() if ".mlp.experts." in spec.name]:
        role = classify(spec.name)
        if role.packed is None or role.layer not in folder.config.sparse_layers:
            continue
        _check_shape(spec, packed_shape(folder.config, role.packed), ledger)
        _check_dtype(spec, precise, ledger)
        ledger.examined("tensors.experts", 1, "packed tensors")
        inventory.precise.append((role, left.pop(spec.name)))
        found.add((role.layer, role.packed))
    return frozenset(found)


def _linear(
    role: TensorRole,
    shape: tuple[int, ...],
    left: dict[str, TensorSpec],
    fmt: str,
    precise: str,
    ledger: Ledger,
) -> Linear:
    """Collect one linear's tensors out of `left`, and check them against its format."""
    n, k = shape
    parts: dict[str, TensorSpec] = {}
    for suffix in ("weight", *SCALE_SUFFIXES):
        spec = left.get(f"{role.module}.{suffix}")
        if spec is not None:
            parts[suffix] = spec
    linear = Linear(role=role, shape=(n, k), parts=parts)
    if not linear.quantized:
        left.pop(role.name, None)
        if "weight" not in parts:
            ledger.fault("tensors.present", role.name, "is missing")
            return linear
        _check_shape(parts["weight"], shape, ledger)
        _check_dtype(parts["weight"], precise, ledger)
        return linear
    # Without a declaration the tensors themselves tell the format.
    own = fmt if fmt in (NVFP4, FP8) else linear.format
    wanted_tensors = quantized_tensors(role.module, own, n, k)
    ledger.examined("tensors.present", len(wanted_tensors) - 1, "expected tensors")
    for name, dtype, wanted in wanted_tensors:
        spec = left.pop(name, None)
        if spec is None:
            ledger.fault("tensors.present", name, f"is missing; {own} needs it")
            continue
        _check_shape(spec, wanted, ledger)
        _check_dtype(spec, dtype, ledger)
    return linear


def _check_shape(spec: TensorSpec, wanted: tuple[int, ...], ledger: Ledger) -> None:
    if spec.shape != wanted:
        ledger.fault("tensors.shape", spec.name, f"is {list(spec.shape)}, expected {list(wanted)}")


def _check_dtype(spec: TensorSpec, wanted: str, ledger: Ledger) -> None:
    if spec.dtype != wanted:
        ledger.fault("tensors.dtype", spec.name, f"is {spec.dtype}, expected {wanted}")


def _check_precise_dtype(role: TensorRole, spec: TensorSpec, precise: str, ledger: Ledger) -> None:
    if role.role in FP32_ROLES:
        ledger.examined("tensors.router", 1, "tensors")
        if spec.dtype != "F32":
            ledger.fault("tensors.router", spec.name, f"is {spec.dtype}, expected F32")
    elif role.role in (Role.HEAD, Role.EMBEDDING):
        ledger.examined("tensors.head", 1, "tensors")
        if spec.dtype in CODE_DTYPES:
            ledger.fault("tensors.head", spec.name, f"is {spec.dtype}, expected {precise}")
        else:
            _check_dtype(spec, precise, ledger)
    else:
        _check_dtype(spec, precise, ledger)


def _unknown(spec: TensorSpec, ledger: Ledger) -> None:
    module, _, suffix = spec.name.rpartition(".")
    if module in ("lm_head", "model.embed_tokens") and suffix in SCALE_SUFFIXES:
        ledger.fault("tensors.head", spec.name, "a scale, but this must not be quantized")
    reason = "no engine knows it: vLLM raises ValueError, SGLang KeyError"
    if suffix in ("k_scale", "v_scale"):
        reason = "SGLang's Beam has no place for KV-cache scales (KeyError)"
    elif ".experts.gate_up_proj" in spec.name or ".experts.down_proj" in spec.name:
        reason = "packed experts; quantized checkpoints hold one tensor per expert"
    ledger.fault("tensors.known", spec.name, reason)


def _check_experts(linears: Iterable[Linear], ledger: Ledger) -> None:
    """Per layer: every expert whole, and all quantized or none; engines ask for expert 0 only."""
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        if linear.role.role is Role.EXPERT and linear.role.layer is not None:
            by_layer.setdefault(linear.role.layer, []).append(linear)
    if not by_layer:
        ledger.skip("tensors.experts", "this model has no experts")
    for layer, members in by_layer.items():
        ledger.examined("tensors.experts", 1, "layers")
        where = f"model.layers.{layer}.mlp.experts"
        gone = [m for m in members if "weight" not in m.parts]
        if gone:
            first = gone[0].module.removeprefix(where + ".")
            ledger.fault(
                "tensors.experts", where, f"{len(gone)} of {len(members)} missing, first {first}"
            )
        quantized = sum(m.quantized for m in members if m.parts)
        whole = sum(1 for m in members if m.parts)
        if 0 < quantized < whole:
            odd = next(m for m in members if m.parts and m.quantized == (2 * quantized < whole))
            ledger.fault(
                "tensors.experts",
                where,
                f"{quantized} of {whole} linears are quantized; all or none, see"
                f" {odd.module.removeprefix(where + '.')}",
            )


# --- scalars --------------------------------------------------------------------------------


def check_scalars(checkpoint: Checkpoint, inventory: Inventory, ledger: Ledger) -> None:
    """Values of the FP32 scalars: sane each, and equal to the bit over what engines fuse."""
    names = ("scales.global", "scales.shared", "scales.input", "scales.input-shared")
    if not any(linear.quantized and linear.format == NVFP4 for linear in inventory.linears):
        for name in names:
            ledger.skip(name, "no NVFP4 linears")
        return
    for suffix, one, shared in (
        ("weight_scale_2", "scales.global", "scales.shared"),
        ("input_scale", "scales.input", "scales.input-shared"),
    ):
        groups: dict[str, dict[bytes, str]] = {}
        for linear, raw in _scalars(checkpoint, inventory, suffix):
            ledger.examined(one, 1, "scalars")
            fault = scalar_fault(struct.unpack("<f", raw)[0])
            if fault:
                ledger.fault(one, f"{linear.module}.{suffix}", fault)
            groups.setdefault(fused_group(linear.role), {}).setdefault(raw, linear.module)
        ledger.examined(shared, len(groups), "groups")
        for group, values in groups.items():
            if len(values) > 1:
                shown = " and ".join(f"{struct.unpack('<f', raw)[0]!r}" for raw in values)
                ledger.fault(
                    shared,
                    group,
                    f"{suffix} differs ({shown}); engines keep one, others decode wrong",
                )


def _scalars(
    checkpoint: Checkpoint, inventory: Inventory, suffix: str
) -> Iterator[tuple[Linear, bytes]]:
    for linear in inventory.linears:
        spec = linear.parts.get(suffix)
        if spec is not None and spec.dtype == "F32" and spec.numel == 1:
            yield linear, bytes(checkpoint.read(spec.name))


def scalar_fault(value: float) -> str | None:
    """Why a scale cannot be used, or None. Engines divide by it, so it may not be denormal."""
    if not math.isfinite(value):
        return f"is {value}"
    if value <= 0.0:
        return f"is {value}, expected a positive number"
    if value < SMALLEST_NORMAL:
        return f"is {value}, so small that its reciprocal is infinite or denormals flush it to 0"
    return None
