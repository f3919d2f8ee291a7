"""What is wrong with a quantized Beam that somebody published, and what each tensor must become.

In: an opened checkpoint and, if there is one, where each tensor is in its source. Out: a
`RepairPlan`: findings, each with its class, and the drafts of a sound checkpoint.

The one idea: the drafts follow from what a sound checkpoint holds. Each of its tensors is a range
of stored bytes, perhaps under another name, in another shape or float type, and with at most one
`Edit`. What has no such range is taken from the source, or is a finding that nothing repairs. A
stored tensor that no draft uses is a finding too, so nothing is dropped in silence.

Limits: codes along a wrong axis and swizzled scales that have the right shapes are not noticed.
"""

from __future__ import annotations

import math
import re
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from statistics import median
from typing import Any

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import (
    FP32_ROLES,
    QUANTIZABLE,
    Role,
    TensorRole,
    classify,
    expected_tensors,
    fused_group,
)
from beamq.errors import TensorError
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.safetensors_header import CODE_DTYPES, TensorSpec
from beamq.plan.layout import (
    MX_NAN,
    NVFP4_BLOCK,
    SCHEMES,
    SUFFIXES,
    WEIGHT_FORMATS,
    Outputs,
    Unit,
    quantized_tensors,
    stored_as,
)
from beamq.plan.plan import Draft, DraftMember, JobKind
from beamq.plan.sources import DERIVED_SUFFIXES, SourceRange, whole_range

Edit = Callable[[bytes], bytes]
"""Changes a piece of a stored tensor, byte by byte or as a whole scalar."""


class RepairClass(StrEnum):
    """What a repair costs: nothing, an error with a bound, or something that has to be given."""

    EXACT = "E"
    BOUNDED = "B"
    SOURCE = "S"
    CALIBRATION = "C"
    IMPOSSIBLE = "-"


E, B, S, C, NONE = RepairClass
REPAIRS = {
    "names": "names of compressed-tensors or of another family; renamed",
    "packed-experts": "the experts of a layer are in one tensor; split",
    "reciprocal": "a scale is stored as its reciprocal; inverted",
    "input-scale-missing": "no usable input_scale; the largest of the layer's others is taken",
    "input-scale-differs": "fused linears have different input scales; the largest is taken",
    "global-scale-differs": "fused linears have different global scales; made one",
    "scale-form": "a scale has another shape or float type; stored as engines read it",
    "zero-scales": "block scales are zero over zero codes; set to 1",
    "kv-scales": "KV-cache scales, for which SGLang has no place; dropped with the FP8 KV cache",
    "derived": "computed from config.json by every engine; dropped",
    "router-dtype": "a router tensor is not FP32; widened (what a cast lost stays lost)",
    "float-dtype": "a tensor that stays in high precision is not BF16; rounded to BF16",
    "head-quantized": "lm_head or the embeddings are quantized; decoded to BF16",
    "files": "the index, its totals, names or headers of shards; written anew",
    "configs": "the configs do not say what is stored; derived from the stored dtypes",
    "unusable": "missing, malformed or not finite",
    "unknown": "not a tensor of this Beam",
    "mixed-formats": "NVFP4 and FP8 in one part of a layer, or FP8 experts next to NVFP4",
    "other": "a check of verify fails",
}
"""Each kind of finding: what is wrong, and what is done."""
_HALF_ULP = Fraction(1, 2**8)  # of BF16, relative


@dataclass(slots=True, kw_only=True)
class RepairFinding:
    """One kind of fault: its place in `REPAIRS`, its class, where it is, and details.

    `bound` is the largest relative error of a decoded weight, for class B.
    """

    repair: str
    kind: RepairClass
    where: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    bound: Fraction = Fraction(0)

    @property
    def text(self) -> str:
        """What is wrong and what is done, with the bound or the first detail."""
        text = REPAIRS[self.repair]
        if self.kind is S and self.repair != "unusable":
            text = f"{text.partition(';')[0]}; taken from the source"
        if self.kind is B:
            text += f"; error of a weight at most {self.bound_text}"
        return "; ".join([text, *self.details[:1]])

    @property
    def bound_text(self) -> str:
        """The bound, rounded up, as a percentage."""
        digits = 4 if self.bound > Fraction(1, 10**6) else 7
        return f"{math.ceil(self.bound * 10 ** (digits + 2)) / 10**digits:.{digits}f} %"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for beamq.json and `--json`."""
        found = {"repair": self.repair, "class": str(self.kind), "what": self.text}
        return {**found, "bound": float(self.bound), "where": self.where}


@dataclass(slots=True, kw_only=True)
class DamagedLinear:
    """A linear [n, k] of a quantized part: its stored tensors by suffix, and its scalars.

    `fault` says why it cannot be used. `table` maps each byte of its block scales to a new one.
    """

    role: TensorRole
    shape: tuple[int, int]
    parts: dict[str, SourceRange]
    fault: str = ""
    global_scale: float = 0.0
    input_scale: float = 0.0  # 0: none that can be used
    table: bytes | None = None


_EXPERT = r"(\.mlp\.experts\.\d+)"
_NAMES = {
    r"\.weight_packed$": ".weight",
    r"\.weight_global_scale$": ".weight_scale_2",
    r"\.input_global_scale$": ".input_scale",
    r"^(model\.layers\.\d+)\.block_sparse_moe\.": r"\1.mlp.",
    _EXPERT + r"\.w1\.": r"\1.gate_proj.",
    _EXPERT + r"\.w3\.": r"\1.up_proj.",
    _EXPERT + r"\.w2\.": r"\1.down_proj.",
}
_SCALARS = ("weight_scale_2", "input_scale")
_PACKED = re.compile(
    r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)"
    rf"(?:[._]({'|'.join(SUFFIXES)}))?"
)
_KV = re.compile(r"model\.layers\.\d+\.self_attn\.([qkv]_proj\.|attn\.)?[qkv]_scale")
_FORMATS = {"U8": "nvfp4", "F8_E4M3": "fp8"}


class RepairPlan:
    """The findings in a checkpoint, and the drafts of a sound one if nothing is refused.

    `origin` has each tensor's place in the source; it is empty without one. Without `values` no
    scale of a block or row is read, only scalars. `edits` are by the name of the output tensor,
    `input_scales` by module. Raises `ConfigError`, and `TensorError` where nothing is quantized.
    """

    def __init__(
        self, checkpoint: Checkpoint, origin: Mapping[str, SourceRange], *, values: bool
    ) -> None:
        self.config = BeamConfig.from_dict(checkpoint.config)
        self.scheme = ""
        self.formats: dict[Unit, str] = {}
        self.drafts: list[Draft] = []
        self.edits: dict[str, Edit] = {}
        self._checkpoint, self._origin = checkpoint, origin
        self._found: dict[tuple[str, RepairClass], RepairFinding] = {}
        self._left: dict[str, SourceRange] = {}  # by the name that Beam and ModelOpt have for it
        self._linears: dict[str, DamagedLinear] = {}  # by the name of their weight
        self._groups: dict[str, list[DamagedLinear]] = {}  # those that share scales
        self._place_tensors()
        self._collect_linears()
        self._check_values(values)
        self._draft_all()

    @property
    def findings(self) -> tuple[RepairFinding, ...]:
        return tuple(self._found.values())

    @property
    def input_scales(self) -> dict[str, float]:
        return {linear.role.module: linear.input_scale for linear in self._linears.values()}

    def has(self, repair: str) -> bool:
        """Whether there is such a finding."""
        return any(name == repair for name, _ in self._found)

    def note(
        self, repair: str, kind: RepairClass, where: str, what: str = "", bound: Fraction | int = 0
    ) -> None:
        """Add a place to a kind of finding."""
        fresh = RepairFinding(repair=repair, kind=kind)
        found = self._found.setdefault((repair, kind), fresh)
        found.where.append(where)
        found.details += [f"{where}: {what}"] if what else []
        found.bound = max(found.bound, Fraction(bound))

    # --- what is stored ---

    def _place_tensors(self) -> None:
        for spec in self._checkpoint.tensors.values():
            name = spec.name
            for pattern, new in _NAMES.items():
                name = re.sub(pattern, new, name)
            if name != spec.name:
                self.note("names", E, spec.name)
            pieces = {name: whole_range(spec)}
            if packed := _PACKED.fullmatch(name):
                self.note("packed-experts", E, spec.name)
                pieces = dict(self._split(spec, packed))
            for own, piece in pieces.items():
                if own in self._left:
                    what = f"{self._left[own].spec.name} has its place"
                    self.note("unknown", NONE, spec.name, what)
                self._left[own] = piece

    def _split(self, spec: TensorSpec, packed: re.Match[str]) -> Iterator[tuple[str, SourceRange]]:
        """A packed tensor's pieces under the names of single experts; gate rows come first."""
        count, suffix, shape = self.config.num_experts, packed[3] or "weight", spec.shape
        projections = ("down_proj",) if packed[2] == "down_proj" else ("gate_proj", "up_proj")
        each, pieces = len(projections), count * len(projections)
        if suffix in _SCALARS:  # one for all, for each expert, or for each of gate and up
            pieces, shape = spec.numel, ()
            sound = pieces in (1, count, count * each)
        else:
            sound = len(shape) > 1 and shape[0] == count and shape[1] % each == 0
            shape = (shape[1] // each, *shape[2:]) if sound else ()
        if not sound:
            self.note("unknown", NONE, spec.name, f"has shape {list(spec.shape)}")
            return
        nbytes = spec.nbytes // pieces
        for place in range(count * each):
            start = place * pieces // (count * each) * nbytes
            piece = SourceRange(spec=spec, start=start, nbytes=nbytes, shape=shape)
            name = f"{packed[1]}.{place // each}.{projections[place % each]}.{suffix}"
            yield name, piece

    def _collect_linears(self) -> None:
        """The linears of every part that holds codes, with what the headers show to be wrong."""
        expected = [each for each in expected_tensors(self.config) if each[0].role in QUANTIZABLE]
        found: dict[str, str] = {}  # rounding by the name of a weight
        for role, _ in expected:
            code = self._left[role.name].spec.dtype if role.name in self._left else ""
            if code in CODE_DTYPES:
                found[role.name] = self._rounding(role.module, code)
        if not found:
            raise TensorError(
                f"{self._checkpoint.name}: no linear is quantized, so there is nothing that repair"
                " knows; `beamq verify` checks a plain Beam"
            )
        self._choose_formats(found)
        odd_layers = set()
        for role, (n, k) in expected:
            if _unit(role) not in self.formats:
                continue
            own = quantized_tensors(role.module, self.formats[_unit(role)], n, k)
            names = [name for name, _, _ in own if name in self._left]
            parts = {name.rpartition(".")[2]: self._left.pop(name) for name in names}
            linear = DamagedLinear(role=role, shape=(n, k), parts=parts)
            linear.fault = self._form_fault(linear)
            self._linears[role.name] = linear
            self._groups.setdefault(self._group(role), []).append(linear)
            if linear.fault and role.proj == "down_proj":
                odd_layers.add(role.layer)
        for linear in self._linears.values():
            weight = linear.parts.get("weight")
            if weight and len(weight.spec.shape) == 3 and linear.role.layer in odd_layers:
                # A packed gate_up_proj may be square, so that its own shape shows no other axis.
                linear.fault = linear.fault or "packed, and down_proj of its layer has other axes"

    def _rounding(self, module: str, code: str) -> str:
        """The rounding of codes by their dtype, and of E4M3 ones by their scales."""
        if code != "F8_E4M3":
            return _FORMATS.get(code, code)
        parts = {
            suffix: (piece.spec.dtype, piece.shape)
            for suffix in SUFFIXES
            if (piece := self._left.get(f"{module}.{suffix}")) is not None
        }
        parts = {suffix: each for suffix, each in parts.items() if "scale_2" not in suffix}
        return WEIGHT_FORMATS[stored_as(parts) or "fp8"].rounding

    def _choose_formats(self, found: Mapping[str, str]) -> None:
        """The scheme, and the format of each unit: that of most of its linears, if the scheme of
        all units has it, or else that of most linears. `found` are roundings of codes."""
        units: dict[Unit, Counter[str]] = {}
        for name, rounding in found.items():
            units.setdefault(_unit(classify(name)), Counter())[rounding] += 1
        most = {unit: counts.most_common(1)[0][0] for unit, counts in units.items()}
        overall = Counter(found.values()).most_common(1)[0][0]
        mixed = {rounding for (_, role), rounding in most.items() if role is Role.EXPERT} <= {
            "nvfp4"
        }
        fitting = (
            name
            for name, each in SCHEMES.items()
            if set(each.roundings) == set(most.values()) and (mixed or len(each.formats) == 1)
        )
        self.scheme = next(fitting, overall if overall in SCHEMES else "nvfp4")
        roundings = SCHEMES[self.scheme].roundings
        first = SCHEMES[self.scheme].formats[0]
        self.formats = {unit: roundings.get(rounding, first) for unit, rounding in most.items()}
        for name, rounding in found.items():
            if WEIGHT_FORMATS[self.formats[_unit(classify(name))]].rounding != rounding:
                self.note("mixed-formats", NONE, name)

    def _group(self, role: TensorRole) -> str:
        return fused_group(role) if self._is_nvfp4(role) else role.module

    def _is_nvfp4(self, role: TensorRole) -> bool:
        return self.formats[_unit(role)] == "nvfp4"

    def _form_fault(self, linear: DamagedLinear) -> str:
        """Why the tensors of a linear cannot be used as they are, going by the headers."""
        for name, dtype, shape in self._tensors(linear):
            suffix = name.rpartition(".")[2]
            part = linear.parts.get(suffix)
            if part is None and suffix != "input_scale":
                return f"{suffix} is missing"
            if part is None:
                continue
            row_scale = suffix == "weight_scale" and dtype == "F32"
            dtypes = FLOAT_SOURCES if row_scale else (dtype,)
            others = [shape[:1], (*shape[:1], 1)] if row_scale else [shape or (1,)]
            if part.spec.dtype not in dtypes or part.shape not in (shape, *others):
                found = f"{suffix} is {part.spec.dtype} {list(part.shape)}"
                return f"{found}, expected {dtype} {list(shape)}"
        return ""

    def _tensors(self, linear: DamagedLinear) -> Outputs:
        fmt = self.formats[_unit(linear.role)]
        return quantized_tensors(linear.role.module, fmt, *linear.shape)

    def _read(self, part: SourceRange) -> bytes:
        raw = bytearray(part.nbytes)
        self._checkpoint.read_into(part.spec, memoryview(raw), part.start)
        return bytes(raw)

    # --- scales ---

    def _check_values(self, values: bool) -> None:
        """Find what scales are wrong, and what they must be. Then settle whom the source helps."""
        self._read_scalars()
        for linear in self._linears.values():
            if values and not linear.fault:
                self._check_scales(linear)
        shared = {k: group for k, group in self._groups.items() if self._is_nvfp4(group[0].role)}
        for key, group in shared.items():
            if not any(linear.fault for linear in group):
                self._share_global_scale(key, group)
        self._fill_input_scales(shared)
        for group in self._groups.values():
            if any(linear.fault for linear in group):
                for linear in group:
                    if linear.fault:
                        self.note("unusable", S, linear.role.module, linear.fault)
                    linear.fault = linear.fault or "a linear that shares its scales is unusable"

    def _read_scalars(self) -> None:
        """Both scalars of every linear, inverted where the checkpoint has reciprocals."""
        nvfp4 = [linear for linear in self._linears.values() if self._is_nvfp4(linear.role)]
        sound = [linear for linear in nvfp4 if not linear.fault]
        inverted = any("weight_global_scale" in name for name in self._checkpoint.tensors)
        for suffix in _SCALARS:
            parts = {each.role.name: each.parts.get(suffix) for each in sound}
            read = {name: _f32(self._read(part)) for name, part in parts.items() if part}
            # A multiplier above 1 would mean weights above 2,688. Activations may be so large, so
            # their scales count as reciprocals only where the weights' are, or go by such names.
            large = median([value for value in read.values() if _usable(value)] or [0.0]) > 1.0
            inverted = large and (inverted or suffix == "weight_scale_2")
            for linear in sound:
                value = read.get(linear.role.name, 0.0)
                if inverted and _usable(value):
                    value, stored = _f32(_f32_bytes(1.0 / value)), value
                    bound = abs(Fraction(value) * Fraction(stored) - 1)
                    name = f"{linear.role.module}.{suffix}"
                    self.note("reciprocal", B if bound else E, name, bound=bound)
                if suffix == "input_scale":
                    linear.input_scale = value if _usable(value) else 0.0
                elif _usable(value) and value <= 1.0:
                    linear.global_scale = value
                else:
                    linear.fault = f"{suffix} is {value}"

    def _check_scales(self, linear: DamagedLinear) -> None:
        """Read the scales of a linear's blocks or rows, and find those that cannot be used."""
        fmt = WEIGHT_FORMATS[self.formats[_unit(linear.role)]]
        scale = linear.parts[fmt.scale]
        raw = self._read(scale)
        if fmt.scale_dtype == "U8":
            bad = raw.count(MX_NAN)
            linear.fault = f"{bad} of its scales are NaN" if bad else ""
            return
        if not fmt.scalars:
            if scale.spec.dtype != "F32":
                wide = bytearray(fmt.scale_nbytes(*linear.shape))
                cpu.convert(memoryview(raw), scale.spec.dtype, memoryview(wide), "F32")
                raw = bytes(wide)
            bad = sum(not _usable(value) for (value,) in struct.iter_unpack("<f", raw))
            linear.fault = f"{bad} of its row scales cannot be used" if bad else ""
            return
        scan = cpu.scan_e4m3_scales(memoryview(raw))
        if scan.nan or scan.negative:
            linear.fault = f"{scan.nan} of its block scales are NaN, {scan.negative} negative"
        elif scan.zero:
            codes, half = self._read(linear.parts["weight"]), NVFP4_BLOCK // 2
            zeros = (at * half for at, byte in enumerate(raw) if byte == 0)
            lost = sum(any(byte & 0x77 for byte in codes[at : at + half]) for at in zeros)
            if lost:
                linear.fault = f"{lost} of its block scales are zero over codes that are not"
            else:
                self.note("zero-scales", E, f"{linear.role.module}.weight_scale")
                linear.table = bytes([ONE, *range(1, 256)])

    def _share_global_scale(self, key: str, group: list[DamagedLinear]) -> None:
        """The largest global scale for a fused group; smaller block scales make up for it."""
        largest, bound = max(linear.global_scale for linear in group), Fraction(0)
        smaller = [linear for linear in group if linear.global_scale < largest]
        if not smaller:
            return
        if self._origin:
            self.note("global-scale-differs", S, key)
            group[0].fault = "shares its scales with others, and they differ"
            return
        for linear in smaller:
            ratio = Fraction(linear.global_scale) / Fraction(largest)
            table = rescaled_scales(ratio)
            used = set(self._read(linear.parts["weight_scale"]))
            bound = max(bound, *(scale_error(table, byte, ratio) for byte in used))
            linear.table = table if linear.table is None else bytes([ONE, *table[1:]])
        if bound >= 1:
            group[0].fault = "its block scales would vanish under the group's weight_scale_2"
            return
        for linear in group:
            linear.global_scale = largest
        self.note("global-scale-differs", B if bound else E, key, bound=bound)

    def _fill_input_scales(self, groups: Mapping[str, list[DamagedLinear]]) -> None:
        """An input scale for every linear, one for each fused group."""
        kinds: dict[tuple[int | None, Role, str], float] = {}
        for key, group in groups.items():
            kind = (group[0].role.layer, group[0].role.role, key.rpartition(".")[2])
            kinds[kind] = max(kinds.get(kind, 0.0), *(linear.input_scale for linear in group))
        for key, group in groups.items():
            kind = (group[0].role.layer, group[0].role.role, key.rpartition(".")[2])
            filled = max(linear.input_scale for linear in group) or kinds[kind]
            if len({linear.input_scale for linear in group} - {0.0}) > 1:
                self.note("input-scale-differs", E, key)
            for linear in group:
                where = f"{linear.role.module}.input_scale"
                if not filled:
                    what = "no other linear of its kind in the layer has one"
                    self.note("input-scale-missing", C, where, what)
                elif not linear.input_scale and not linear.fault:
                    self.note("input-scale-missing", E, where)
                linear.input_scale = filled

    # --- drafts ---

    def _draft_all(self) -> None:
        """Draft every tensor of the sound checkpoint, and account for the rest."""
        for role, shape in expected_tensors(self.config):
            linear = self._linears.get(role.name)
            if linear is None:
                self._draft_high_precision(role, shape)
            elif linear.fault:
                self._draft_again(self._groups[self._group(role)], linear)
            else:
                self._draft_linear(linear)
        for name, piece in self._left.items():
            if _KV.fullmatch(name):
                self.note("kv-scales", E, piece.spec.name)
            elif name.endswith(DERIVED_SUFFIXES):
                self.note("derived", E, piece.spec.name)
            else:
                what = f"{piece.spec.dtype} {list(piece.spec.shape)}"
                self.note("unknown", NONE, piece.spec.name, what)

    def _copy(self, name: str, piece: SourceRange, dtype: str, shape: tuple[int, ...]) -> None:
        member = (classify(name), piece, ((name, dtype, shape),))
        self.drafts.append(Draft(kind=JobKind.COPY, group=name, members=[member]))

    def _draft_linear(self, linear: DamagedLinear) -> None:
        """The tensors of a linear that can be used."""
        scalars = {"weight_scale_2": linear.global_scale, "input_scale": linear.input_scale}
        for name, dtype, shape in self._tensors(linear):
            suffix = name.rpartition(".")[2]
            piece = linear.parts.get(suffix)
            if piece is not None and (piece.spec.dtype, piece.shape) != (dtype, shape):
                self.note("scale-form", E, name)
            if suffix in scalars:
                value = _f32_bytes(scalars[suffix])
                # A scale that is missing is written over four other bytes.
                piece = piece or linear.parts["weight_scale_2"]
                if self._read(piece) != value:
                    self.edits[name] = _constant(value)
            elif suffix == "weight_scale" and linear.table is not None:
                self.edits[name] = _translated(linear.table)
            self._copy(name, piece or linear.parts["weight"], dtype, shape)

    def _draft_again(self, group: list[DamagedLinear], linear: DamagedLinear) -> None:
        """Quantize a linear, with all that share its scales, from the source."""
        if linear is not group[0] or not self._origin:
            return
        members: list[DraftMember] = []
        for each in group:
            members.append((each.role, self._origin[each.role.name], self._tensors(each)))
        kind = JobKind(WEIGHT_FORMATS[self.formats[_unit(linear.role)]].rounding)
        self.drafts.append(Draft(kind=kind, group=self._group(linear.role), members=members))

    def _draft_high_precision(self, role: TensorRole, shape: tuple[int, ...]) -> None:
        """A tensor that is not quantized, or must not be."""
        piece, dtype = self._left.pop(role.name, None), "BF16"
        if role.role in FP32_ROLES:
            dtype = "F32"
        if piece and piece.spec.dtype in FLOAT_SOURCES and piece.shape == shape:
            if piece.spec.dtype != dtype and dtype == "F32":
                self.note("router-dtype", E, role.name)
            elif piece.spec.dtype != dtype:
                self.note("float-dtype", B, role.name, bound=_HALF_ULP)
            self._copy(role.name, piece, dtype, shape)
            return
        for suffix in SUFFIXES[1:]:
            self._left.pop(f"{role.module}.{suffix}", None)
        fmt = self._decodable(role, shape) if piece else ""
        if fmt and piece and not self._origin:
            self.note("head-quantized", B, role.name, bound=_HALF_ULP)
            member = (role, piece, ((role.name, "BF16", shape),))
            kind = JobKind(f"decode-{fmt}")
            self.drafts.append(Draft(kind=kind, group=role.module, members=[member]))
            return
        found = f"is {piece.spec.dtype} {list(piece.shape)}" if piece else "is missing"
        what = f"{found}, expected {dtype} {list(shape)}"
        self.note("head-quantized" if fmt else "unusable", S, role.name, "" if fmt else what)
        if self._origin:
            self._copy(role.name, self._origin[role.name], dtype, shape)

    def _decodable(self, role: TensorRole, shape: tuple[int, ...]) -> str:
        """The format of a head or embedding that has all its tensors in the usual form, or ""."""
        stored = self._checkpoint.tensors  # decoding finds scales by their own names
        fmt = _FORMATS.get(stored[role.name].dtype, "") if role.name in stored else ""
        if not fmt or role.role not in (Role.HEAD, Role.EMBEDDING):
            return ""
        wanted = quantized_tensors(role.module, fmt, shape[0], shape[1])
        return fmt * all(
            name.endswith("input_scale")
            or (name in stored and (stored[name].dtype, stored[name].shape) == (dtype, part))
            for name, dtype, part in wanted
        )


def _unit(role: TensorRole) -> Unit:
    return role.layer or 0, role.role


# --- block scales under another global scale ----------------------------------------------------

ONE = 0x38  # the E4M3 code of 1.0
E4M3_VALUES = tuple(
    Fraction(byte, 2**9) if byte < 8 else Fraction(8 + byte % 8) * Fraction(2) ** (byte // 8 - 10)
    for byte in range(127)
)
"""The values of the codes 0 to 126; 127 is NaN."""


def rescaled_scales(ratio: Fraction) -> bytes:
    """For each E4M3 byte the one nearest to its value times `ratio` (below 1): ties to even, and
    never zero where the scale was not."""
    table = bytearray(range(256))
    for byte in range(1, 127):
        wanted = E4M3_VALUES[byte] * ratio
        upper = bisect_left(E4M3_VALUES, wanted)
        near = ((abs(E4M3_VALUES[code] - wanted), code % 2, code) for code in (upper - 1, upper))
        table[byte] = max(min(near)[2], 1)
    return bytes(table)


def scale_error(table: bytes, byte: int, ratio: Fraction) -> Fraction:
    """Relative error of a scale that `table` replaces, exactly; 0 for zero."""
    if not 0 < byte < len(E4M3_VALUES):
        return Fraction(0)
    return abs(E4M3_VALUES[table[byte]] / (E4M3_VALUES[byte] * ratio) - 1)


def _translated(table: bytes) -> Edit:
    return lambda raw: raw.translate(table)


def _constant(value: bytes) -> Edit:
    return lambda _: value


def _f32(raw: bytes) -> float:
    value: float = struct.unpack("<f", raw)[0]
    return value


def _f32_bytes(value: float) -> bytes:
    return struct.pack("<f", value)


def _usable(value: float) -> bool:
    """Whether a scale and its reciprocal are normal FP32 numbers."""
    return 2.0**-126 <= value <= 2.0**126
