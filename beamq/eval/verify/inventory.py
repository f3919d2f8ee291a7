"""The tensors of a folder, each at its place in the model, checked against config.json.

In: a `Folder`. Out: an `Inventory` with every linear and what else is stored, and findings under
`tensors.*` and `scales.*`. Of the bytes only the scalars are read.

A linear counts as quantized if a scale belongs to it or its weight has the dtype of codes. It must
then have exactly the tensors of its format (plan/layout.py), and otherwise exactly one BF16 weight.
Any other name is a fault, because both engines stop at names that they do not know.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import (
    FP32_ROLES,
    QUANTIZABLE,
    Role,
    TensorRole,
    classify,
    expected_tensors,
    fused_group,
    is_further_layer,
    packed_shape,
)
from beamq.eval.verify.checks import ENGINES, FP8, NVFP4, Ledger
from beamq.eval.verify.folder import Folder
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.manifest import (
    Manifest,
)
from beamq.io.safetensors_header import CODE_DTYPES, TensorSpec
from beamq.plan.layout import SCHEMES, SUFFIXES, WEIGHT_FORMATS, Outputs, stored_as
from beamq.plan.sources import packed_part

SCALE_SUFFIXES = SUFFIXES[1:]
SMALLEST_NORMAL = 2.0**-126
LARGEST_GLOBAL = 2.0**117  # above it, the product of a code and both scales overflows FP32
_FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}  # stored dtype by format of the folder


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
        """Whether a stored tensor says so: a scale, or a weight of codes."""
        weight = self.parts.get("weight")
        return any(suffix in self.parts for suffix in SCALE_SUFFIXES) or (
            weight is not None and weight.dtype in CODE_DTYPES
        )

    @property
    def format(self) -> str:
        """The format of the stored tensors, whatever the config says."""
        found = stored_as({suffix: (s.dtype, s.shape) for suffix, s in self.parts.items()})
        return found or FP8

    def wanted(self, scheme: str) -> Outputs:
        """The tensors that it must have in a folder of a scheme ("": whatever is declared).

        Its own format decides which of the scheme's it is in.
        """
        own, fmt = WEIGHT_FORMATS[self.format].rounding, self.format
        if scheme in SCHEMES:
            fmt = SCHEMES[scheme].roundings.get(own, SCHEMES[scheme].formats[0])
        return WEIGHT_FORMATS[fmt].tensors(self.module, *self.shape)


@dataclass(slots=True, kw_only=True)
class Inventory:
    """Every stored tensor in its place. `unknown` are tensors that no Beam has."""

    linears: list[Linear] = field(default_factory=list)
    high_precision: list[tuple[TensorRole, TensorSpec]] = field(default_factory=list)
    unknown: list[TensorSpec] = field(default_factory=list)

    def stored(self) -> dict[str, str]:
        """Module -> rounding of its format, "" if it is not quantized, for every module of which
        something is stored."""
        stored = {
            linear.module: WEIGHT_FORMATS[linear.format].rounding if linear.quantized else ""
            for linear in self.linears
            if linear.parts
        }
        for role, spec in self.high_precision:
            if role.role in (Role.HEAD, Role.EMBEDDING):
                codes = {"U8": NVFP4}.get(spec.dtype, FP8)
                stored[role.module] = codes if spec.dtype in CODE_DTYPES else ""
        for spec in self.unknown:
            module, _, suffix = spec.name.rpartition(".")
            if suffix in SCALE_SUFFIXES and module in stored:
                stored[module] = stored[module] or FP8
        return stored


class Sorter:
    """Takes tensors out of `_left`, one expected tensor or linear after the other."""

    def __init__(self, folder: Folder, fmt: str, ledger: Ledger) -> None:
        self._folder = folder
        self._format = fmt
        self._ledger = ledger
        self._left = dict(folder.tensors)
        self._float = _FLOATS.get(fmt, "BF16") if folder.any_float else "BF16"
        self._inventory = Inventory()

    def sort(self) -> Inventory:
        """Give every stored tensor its place; record what is missing, unknown or malformed."""
        ledger, inventory = self._ledger, self._inventory
        packed = self._packed_experts() if self._folder.plain else frozenset()
        for check in ("tensors.known", "tensors.shape", "tensors.dtype"):
            ledger.examined(check, len(self._left))
        for role, shape in expected_tensors(self._folder.beam):
            ledger.examined("tensors.present")
            if role.role is Role.EXPERT and (role.layer, packed_part(role)) in packed:
                continue
            if role.role in QUANTIZABLE:
                inventory.linears.append(self._linear(role, (shape[0], shape[1])))
            elif (spec := self._left.pop(role.name, None)) is None:
                ledger.fault("tensors.present", role.name, "is missing")
            else:
                inventory.high_precision.append((role, spec))
                ledger.expect("tensors.shape", spec.name, list(spec.shape), list(shape))
                self._check_kept_dtype(role, spec)
        inventory.unknown = list(self._left.values())
        for spec in inventory.unknown:
            _unknown(spec, self._folder.beam, ledger)
        if not packed:
            _check_experts(inventory.linears, ledger)
        return inventory

    def _packed_experts(self) -> frozenset[tuple[int | None, str]]:
        """(layer, part) of experts stored in packed tensors, which only an unquantized Beam may."""
        config = self._folder.beam
        found = set()
        for spec in [spec for spec in self._left.values() if ".mlp.experts." in spec.name]:
            role = classify(spec.name)
            if role.packed is None or role.layer not in config.sparse_layers:
                continue
            self._check_form(spec, packed_shape(config, role.packed), self._float)
            self._ledger.examined("tensors.experts", unit="packed tensors")
            self._inventory.high_precision.append((role, self._left.pop(spec.name)))
            found.add((role.layer, role.packed))
        return frozenset(found)

    def _linear(self, role: TensorRole, shape: tuple[int, int]) -> Linear:
        """Collect one linear's tensors, and check them against its format."""
        parts = {
            suffix: self._left[name]
            for suffix in SUFFIXES
            if (name := f"{role.module}.{suffix}") in self._left
        }
        linear = Linear(role=role, shape=shape, parts=parts)
        wanted: tuple[tuple[str, str, tuple[int, ...]], ...] = ((role.name, self._float, shape),)
        need = ""
        if linear.quantized:
            wanted = linear.wanted(self._format)
            need = f"; {self._format if self._format in SCHEMES else linear.format} needs it"
            self._ledger.examined("tensors.present", len(wanted) - 1)
        for name, dtype, part_shape in wanted:
            spec = self._left.pop(name, None)
            if spec is None:
                self._ledger.fault("tensors.present", name, f"is missing{need}")
            else:
                self._check_form(spec, part_shape, dtype)
        return linear

    def _check_form(self, spec: TensorSpec, shape: tuple[int, ...], dtype: str) -> None:
        self._ledger.expect("tensors.shape", spec.name, list(spec.shape), list(shape))
        # Engines cast floats, but FP32 scalars are read as they are.
        soft = bool(shape) and {spec.dtype, dtype} <= set(FLOAT_SOURCES)
        self._ledger.expect("tensors.dtype", spec.name, spec.dtype, dtype, soft=soft)

    def _check_kept_dtype(self, role: TensorRole, spec: TensorSpec) -> None:
        """A tensor that is never quantized has its role's float type."""
        check, dtype = "tensors.dtype", self._float
        if role.role in FP32_ROLES:
            check, dtype = "tensors.router", "F32"
            self._ledger.examined(check)
        elif role.role in (Role.HEAD, Role.EMBEDDING):
            self._ledger.examined("tensors.head")
            if spec.dtype in CODE_DTYPES:
                check = "tensors.head"
        soft = spec.dtype in FLOAT_SOURCES
        self._ledger.expect(check, spec.name, spec.dtype, dtype, soft=soft)


def _unknown(spec: TensorSpec, config: BeamConfig, ledger: Ledger) -> None:
    """A tensor that no Beam has. transformers warns of such names, and loads the rest."""
    if "rotary_emb.inv_freq" in spec.name:
        ledger.fault("tensors.known", spec.name, "is computed by every engine", soft=True)
        return
    module, _, suffix = spec.name.rpartition(".")
    if module in ("lm_head", "model.embed_tokens") and suffix in SCALE_SUFFIXES:
        ledger.fault("tensors.head", spec.name, "is a scale, but this module is never quantized")
    reason = "is unknown to the engines: vLLM raises ValueError, SGLang KeyError"
    stopped = {"vLLM", "SGLang"}
    if is_further_layer(spec.name, config.num_layers):
        reason = f"is beyond the {config.num_layers} layers of config.json: vLLM raises ValueError,"
        reason += " SGLang passes over it"
        stopped = {"vLLM"}
    elif suffix in ("k_scale", "v_scale"):
        reason = "is a KV-cache scale, for which SGLang's Beam has no place (KeyError)"
        stopped = {"SGLang"}
    elif ".experts.gate_up_proj" in spec.name or ".experts.down_proj" in spec.name:
        reason = "packs experts, but a quantized checkpoint has one tensor per expert"
        stopped = set(ENGINES)
    ledger.fault("tensors.known", spec.name, reason)
    ledger.stopped |= stopped


def _check_experts(linears: Iterable[Linear], ledger: Ledger) -> None:
    """Each layer's experts are complete, and all or none quantized: engines look at expert 0."""
    check = "tensors.experts"
    by_layer: dict[int, list[Linear]] = {}
    for linear in linears:
        if linear.role.role is Role.EXPERT and linear.role.layer is not None:
            by_layer.setdefault(linear.role.layer, []).append(linear)
    if not by_layer:
        ledger.skip("this model has no experts", check)
    for layer, members in by_layer.items():
        ledger.examined(check)
        where = f"model.layers.{layer}.mlp.experts"
        gone = [m.module.removeprefix(f"{where}.") for m in members if "weight" not in m.parts]
        if gone:
            reason = f"{len(gone)} of {len(members)} are missing, the first is {gone[0]}"
            ledger.fault(check, where, reason)
        whole = [member for member in members if member.parts]
        quantized = sum(member.quantized for member in whole)
        if 0 < quantized < len(whole):
            few_are = 2 * quantized < len(whole)
            odd = next(m.module for m in whole if m.quantized == few_are).removeprefix(f"{where}.")
            some = f"{quantized} of {len(whole)} linears are quantized"
            ledger.fault(check, where, f"{some}, expected all or none; {odd} differs from most")


# --- scalars --------------------------------------------------------------------------------


def check_scalars(
    checkpoint: Checkpoint, inventory: Inventory, manifest: Manifest | None, ledger: Ledger
) -> None:
    """The FP32 scalars: each usable, and equal to the bit over linears that the engines fuse.

    A pass says the room that input scales have, where beamq.json records it.
    """
    checks = {
        "weight_scale_2": ("scales.global", "scales.shared"),
        "input_scale": ("scales.input", "scales.input-shared"),
    }
    if not any(linear.quantized and linear.format == NVFP4 for linear in inventory.linears):
        for names in checks.values():
            ledger.skip("no NVFP4 linears", *names)
        return
    for suffix, (one, shared) in checks.items():
        groups: dict[str, dict[bytes, float]] = {}
        for linear in inventory.linears:
            spec = linear.parts.get(suffix)
            if spec is None or spec.dtype != "F32" or spec.numel != 1:
                continue
            raw = bytes(checkpoint.read(spec.name))
            value: float = struct.unpack("<f", raw)[0]
            ledger.examined(one)
            fault = scalar_fault(value)
            if fault:
                ledger.fault(one, f"{linear.module}.{suffix}", fault)
            groups.setdefault(fused_group(linear.role), {})[raw] = value
        ledger.examined(shared, len(groups))
        for group, values in groups.items():
            if len(values) > 1:
                shown = " and ".join(map(repr, values.values()))
                reason = "engines keep one value, and decode the other linears with it"
                ledger.fault(shared, group, f"{suffix} differs ({shown}); {reason}")
    headroom = None if manifest is None else manifest.input_scales.get("headroom")
    state = ledger.states["scales.input"]
    if isinstance(headroom, int) and state.examined:
        room = f"for {headroom} x the largest calibrated input"
        state.measured = f"{state.unit}: {state.examined:,}, {room}"


def scalar_fault(value: float) -> str | None:
    """Why a scale cannot be used, or None. Engines divide by it, so it may not be denormal."""
    if not math.isfinite(value):
        return f"is {value}"
    if value <= 0.0:
        return f"is {value}, expected a positive number"
    if value < SMALLEST_NORMAL:
        return f"is {value}, so small that its reciprocal is infinite or denormals flush it to 0"
    return None
