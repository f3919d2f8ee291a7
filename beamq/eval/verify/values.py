"""Read every byte of a checkpoint once: checksums, impossible values, and the source's values.

In: an opened checkpoint, its `Inventory`, its manifest and, if there is a source, where each tensor
lies in it. Out: findings under `checksums.tensors`, `values.*` and `source.*`, and the quantization
error of each role.

A work item is one quantized linear with its scales, or one tensor stored as it is; `Readers`
shares the items out. Within an item, pieces of about 1 MiB pass through checksum, scan and
comparison while they are in the CPU's cache. Every step releases the interpreter lock. Outcomes are
recorded in file order, so faults and errors do not depend on threads or ranks. No torch.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from beamq.beam.tensors import FP32_ROLES, Role, TensorRole
from beamq.errors import RecipeError
from beamq.eval.verify.checks import NVFP4, Ledger, RoleError
from beamq.eval.verify.checksums import NOT_WRITTEN, Readers
from beamq.eval.verify.inventory import LARGEST_GLOBAL, SMALLEST_NORMAL, Inventory, Linear
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.manifest import MANIFEST_NAME, Manifest, new_checksum
from beamq.io.safetensors_header import ITEMSIZE, TensorSpec
from beamq.plan.layout import MX_NAN, WEIGHT_FORMATS
from beamq.plan.recipe import parse_recipe
from beamq.plan.sources import SourceRange

PIECE_BYTES = 1 << 20
LOOSEST_WEIGHT_ERROR = {NVFP4: 0.25}  # of the built-in recipes; 0.04 of FP8 of all kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A quantized linear (`linear`), or one tensor stored as it is (`spec`)."""

    role: TensorRole
    spec: TensorSpec
    linear: Linear | None = None
    source: SourceRange | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to read, source included."""
        parts = self.linear.parts.values() if self.linear else (self.spec,)
        return sum(p.nbytes for p in parts) + (self.source.nbytes if self.source else 0)


@dataclass(slots=True, kw_only=True)
class Sums:
    """Sums of squares of the error and of the source, and the largest error."""

    error: float = 0.0
    source: float = 0.0
    worst: float = 0.0
    elements: int = 0

    @property
    def relative_rms(self) -> float:
        """RMS of the error over RMS of the source; 0 for an all-zero source decoded to zeros."""
        return math.sqrt(self.error / self.source) if self.source else math.sqrt(self.error)

    def add(self, error: float, source: float, worst: float, elements: int) -> None:
        """Add other elements. The order of calls shows in the last bits."""
        self.error += error
        self.source += source
        self.worst = max(self.worst, worst)
        self.elements += elements


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one item showed; ranks exchange it. `faults` are (check, where, detail); `examined`
    counts per check, and `digests` are checksums by tensor."""

    faults: list[tuple[str, str, str]] = field(default_factory=list)
    examined: Counter[str] = field(default_factory=Counter)
    digests: dict[str, str] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)
    nbytes: int = 0
    out_of_bound: int = 0
    first_place: tuple[int, int] = (-1, -1)

    def fault(self, check: str, where: str, detail: str) -> None:
        """Record one fault."""
        self.faults.append((check, where, detail))

    def compared(self, found: cpu.BlockComparison, row: int, rows: int, k: int) -> None:
        """Add one piece of rows that was compared with the source."""
        if found.out_of_bound and not self.out_of_bound:
            down, column = divmod(found.first_out_of_bound, k)
            self.first_place = (row + down, column)
        self.out_of_bound += found.out_of_bound
        self.sums.add(found.sum_sq_error, found.sum_sq_source, found.max_abs_error, rows * k)


def plan_items(inventory: Inventory, sources: Mapping[str, SourceRange]) -> list[Item]:
    """Work items in file order. `sources` maps the output's weight names to source ranges."""
    items: list[Item] = []

    def add(
        role: TensorRole, spec: TensorSpec, linear: Linear | None = None, *, traced: bool = True
    ) -> None:
        source = sources.get(spec.name) if traced else None
        shape = linear.shape if linear else spec.shape
        if source is not None and source.shape != shape:
            source = None  # a finding of the structure checks
        items.append(Item(role=role, spec=spec, linear=linear, source=source))

    for linear in inventory.linears:
        if linear.quantized and is_sound(linear):
            add(linear.role, linear.parts["weight"], linear)
        else:  # not quantized, or its parts do not fit each other: still read, part by part
            for spec in linear.parts.values():
                add(linear.role, spec, traced=not linear.quantized)
    for role, spec in inventory.high_precision:
        add(role, spec)
    for spec in inventory.unknown:
        role = TensorRole(name=spec.name, role=Role.EXTRA, module=spec.name, proj="")
        add(role, spec)
    return sorted(items, key=lambda item: (item.spec.file, item.spec.offset))


def is_sound(linear: Linear) -> bool:
    """Whether a quantized linear has all its parts and they fit each other."""
    wanted = linear.wanted("")
    found = [(spec.name, spec.dtype, spec.shape) for spec in linear.parts.values()]
    return sorted(found) == sorted(wanted)


def read_all(
    examiner: Examiner, items: Sequence[Item], readers: Readers, ledger: Ledger
) -> tuple[int, list[RoleError], dict[str, str]]:
    """Examine all items. Returns bytes read, by all ranks together, the error by role, and the
    checksums by tensor."""
    nbytes = 0
    digests: dict[str, str] = {}
    compared: dict[str, list[tuple[str, Sums]]] = {}
    outcomes = readers.read(items, [item.nbytes for item in items], examiner.examine)
    for item, outcome in zip(items, outcomes, strict=True):
        nbytes += outcome.nbytes
        digests |= outcome.digests
        for name, count in outcome.examined.items():
            ledger.examined(name, count)
        for name, where, detail in outcome.faults:
            ledger.fault(name, where, detail)
        if outcome.sums.elements:
            role, module = item.role.role.value, item.role.module
            compared.setdefault(role, []).append((module, outcome.sums))
    formats = {item.linear.format for item in items if item.linear is not None}
    if NVFP4 not in formats:
        ledger.skip("no NVFP4 linears", "values.block-scales")
    if not formats - {NVFP4}:
        ledger.skip("no FP8 linears", "values.row-scales", "values.codes")
    errors = [_role_error(role, linears) for role, linears in sorted(compared.items())]
    return nbytes, errors, digests


def _role_error(role: str, linears: Sequence[tuple[str, Sums]]) -> RoleError:
    """The error over (module, sums) of a role's linears; of equally bad ones the last by name."""
    total, worst = Sums(), (-1.0, "")
    for module, sums in linears:
        total.add(sums.error, sums.source, sums.worst, sums.elements)
        if (sums.relative_rms, module) > worst:
            worst = (sums.relative_rms, module)
    return RoleError(
        role=role,
        linears=len(linears),
        elements=total.elements,
        relative_rms=total.relative_rms,
        worst_linear=worst[1],
        worst_relative_rms=worst[0],
        max_abs_error=total.worst,
    )


# --- bounds of NVFP4 ------------------------------------------------------------------------
# What `source.bound` demands of NVFP4 codes depends on the rule by which they were made:
#
#     max      Every code is the nearest for its stored scale, and nothing is clipped, because the
#              scale is the one that the block's largest value calls for.
#     sweep    Every code is the nearest for its stored scale, a value beyond the grid has the code
#              at its end, and the scale is one of the 16 that the sweep tries.
#     gptq     Each row's error is at most half of its own norm, and a linear's at most a quarter.
#              GPTQ moves each value by the rounding errors of others, so no element alone can be
#              judged. The largest errors seen on trained models are 0.10 (linears) and 0.17 (rows);
#              a row of another linear gives 1.4. Values too small for the smallest scale are free.
#              This rule also applies where no recipe is known: another tool may choose any scale.
#
# An exchanged expert, a moved row or a wrong scale is out of bound by any of them. Checksums alone
# find another candidate scale with the codes that belong to it, or under `gptq` a flipped bit.

ROW_BOUND = 0.5
LINEAR_BOUND = 0.25
SMALLEST_SCALE = 2.0**-9  # the smallest block scale; values far below it become 0


def rounding_rule(manifest: Manifest | None, role: Role) -> str:
    """The rule that beamq.json's recipe names for linears of a role.

    `gptq`, the loosest, where it names none. GPTQ rounds experts only.
    """
    recipe = None if manifest is None else manifest.recipe
    if recipe is None or (recipe.get("rounding") == "gptq" and role is Role.EXPERT):
        return "gptq"
    return "sweep" if recipe.get("scales") == "sweep" else "max"


class Nvfp4Bound:
    """Compares the rows of one linear with the source by a rule, in order; `k` values a row."""

    def __init__(self, rule: str, k: int, global_scale: float) -> None:
        self._rule = rule
        self._k = k
        self._scale = global_scale
        self._error = self._source = self._free = 0.0
        self._far = 0
        self._rows = 0
        self._first = -1

    def compare(
        self, source: memoryview, dtype: str, codes: memoryview, scales: memoryview
    ) -> cpu.BlockComparison:
        """The next rows. Under `gptq` no element is out of bound; `fault` judges rows."""
        swept = self._rule != "max"
        found = cpu.nvfp4_compare(source, dtype, codes, scales, self._k, self._scale, swept=swept)
        if self._rule != "gptq":
            return found
        shape = (codes.nbytes * 2 // self._k, self._k)
        raw = memoryview(bytearray(4 * shape[0] * shape[1]))
        cpu.nvfp4_dequantize(codes, scales, self._k, self._scale, raw, "F32")
        decoded = np.frombuffer(raw, "<f4").reshape(shape)
        if dtype != "F32":
            exact = memoryview(bytearray(raw.nbytes))
            cpu.convert(source, dtype, exact, "F32")
            source = exact
        exact_NK = np.frombuffer(source, "<f4").reshape(shape)
        error_N, source_N = _squares(decoded - exact_NK), _squares(exact_NK)
        free = self._k * (SMALLEST_SCALE * self._scale) ** 2
        # Not "error > bound": a NaN compares as false.
        far_N = ~(error_N <= ROW_BOUND**2 * source_N + free)
        if far_N.any() and self._first < 0:
            self._first = self._rows + int(far_N.argmax())
        self._far += int(far_N.sum())
        self._rows += shape[0]
        self._error += float(error_N.sum())
        self._source += float(source_N.sum())
        self._free += shape[0] * free
        return replace(found, out_of_bound=0, first_out_of_bound=-1)

    def fault(self) -> str | None:
        """What is wrong with the linear as a whole, if anything; only under `gptq`."""
        if self._far:
            return (
                f"{self._far} of {self._rows} rows differ from the source by more than {ROW_BOUND}"
                f" of their norm, the first is row {self._first}"
            )
        if not self._error <= LINEAR_BOUND**2 * self._source + self._free:
            relative = (self._error / self._source) ** 0.5 if self._source else float("inf")
            return f"the relative error is {relative:.3f}, expected at most {LINEAR_BOUND}"
        return None


def _squares(x_NK: NDArray[np.float32]) -> NDArray[np.float64]:
    sums_N: NDArray[np.float64] = np.einsum("nk,nk->n", x_NK, x_NK).astype(np.float64)
    return sums_N


# --- reading --------------------------------------------------------------------------------


class Readable(Protocol):
    """Where values are read from: a checkpoint, or what one decodes to."""

    def read_into(self, spec: TensorSpec, out: memoryview, start: int = 0) -> None:
        """Fill `out` with a tensor's bytes from `start`."""


class Examiner:
    """Examines items; one per pass, shared by its threads (buffers are per thread)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: Readable | None,
        manifest: Manifest | None,
        checksums: Manifest | None,
    ) -> None:
        """`manifest` names the rounding rule. `checksums` is the same if they can be compared."""
        self._checkpoint = checkpoint
        self._source = source
        self._manifest = manifest
        self.checksums = checksums
        self._checksums = {} if checksums is None else checksums.tensors
        self._algorithm = "" if checksums is None else checksums.algorithm
        self._buffers = threading.local()

    def examine(self, item: Item) -> Outcome:
        """Read one item. Raises `CheckpointError` when a file cannot be read."""
        outcome = Outcome()
        if item.linear is None:
            self._unquantized(item, outcome)
        elif item.linear.format == NVFP4:
            self._nvfp4(item, item.linear, outcome)
        else:
            self._fp8(item, item.linear, outcome)
        if outcome.sums.elements:
            outcome.examined["source.bound"] = outcome.sums.elements
        if outcome.out_of_bound:
            some = f"{outcome.out_of_bound} of {outcome.sums.elements} elements"
            reason = f"{some} are not rounded to the nearest code"
            where = f"the first is at {list(outcome.first_place)}"
            outcome.fault("source.bound", item.role.module, f"{reason}, {where}")
        if item.linear is not None and outcome.sums.elements:
            outcome.examined["source.error"] = 1
            error, bound = outcome.sums.relative_rms, self._weight_error(item.linear.format)
            if error > bound:
                reason = f"an error of {error:.3f} of the weight's size, expected at most {bound:g}"
                remedy = "keep the linear in high precision with --exclude"
                outcome.fault("source.error", item.role.module, f"{reason}; {remedy}")
        return outcome

    def _weight_error(self, fmt: str) -> float:
        """The bound of the folder's recipe, or else the loosest of a built-in one."""
        named, bound = self._manifest and self._manifest.recipe, None
        with suppress(RecipeError):
            bound = parse_recipe(named, origin=MANIFEST_NAME).bounds.weight_error if named else None
        return bound or LOOSEST_WEIGHT_ERROR.get(fmt, 0.04)

    def _buffer(self, name: str, nbytes: int) -> memoryview:
        buffers: dict[str, bytearray] = self._buffers.__dict__
        if len(buffers.get(name, b"")) < nbytes:
            buffers[name] = bytearray(nbytes)
        return memoryview(buffers[name])[:nbytes]

    def _pieces(
        self, spec: TensorSpec, unit: int, outcome: Outcome, slot: str
    ) -> Iterator[tuple[int, memoryview]]:
        """(start, bytes) of a tensor in whole units of `unit` bytes; at the end its checksum is
        compared with the one in beamq.json."""
        size = max(PIECE_BYTES // unit, 1) * unit
        listed = self._checksums.get(spec.name)
        checksum = None if listed is None else new_checksum(self._algorithm)
        for start in range(0, spec.nbytes, size):
            view = self._buffer(slot, min(size, spec.nbytes - start))
            self._checkpoint.read_into(spec, view, start)
            outcome.nbytes += view.nbytes
            if checksum is not None:
                checksum.update(view)
            yield start, view
        if checksum is not None:
            check = "checksums.tensors"
            outcome.examined[check] += 1
            outcome.digests[spec.name] = checksum.hexdigest()
            if outcome.digests[spec.name] != listed:
                outcome.fault(check, spec.name, NOT_WRITTEN)

    def _whole(self, spec: TensorSpec, outcome: Outcome, slot: str) -> memoryview:
        ((_, view),) = self._pieces(spec, spec.nbytes, outcome, slot)
        return view

    def _read_source(
        self, source: SourceRange, start: int, nbytes: int, out: Outcome
    ) -> memoryview:
        assert self._source is not None
        view = self._buffer("source", nbytes)
        self._source.read_into(source.spec, view, source.start + start)
        out.nbytes += nbytes
        return view

    def _rows(
        self, linear: Linear, source: SourceRange | None, outcome: Outcome
    ) -> Iterator[tuple[int, int, memoryview, memoryview]]:
        """(first row, number of rows, their codes, their values in the source if there is one)."""
        weight, (n, k) = linear.parts["weight"], linear.shape
        line = weight.nbytes // n
        block = WEIGHT_FORMATS[linear.format].block[0]
        for start, codes in self._pieces(weight, line * block, outcome, "codes"):
            row, rows = start // line, codes.nbytes // line
            values = memoryview(b"")
            if source is not None:
                wide = k * ITEMSIZE[source.spec.dtype]
                values = self._read_source(source, row * wide, rows * wide, outcome)
            yield row, rows, codes, values

    def _nvfp4(self, item: Item, linear: Linear, outcome: Outcome) -> None:
        k, parts, source = linear.shape[1], linear.parts, item.source
        scalar = self._whole(parts["weight_scale_2"], outcome, "scalar")
        global_scale: float = struct.unpack("<f", scalar)[0]
        self._whole(parts["input_scale"], outcome, "scalar")
        scales = self._whole(parts["weight_scale"], outcome, "scales")
        outcome.examined["values.block-scales"] = scales.nbytes
        scan = cpu.scan_e4m3_scales(scales)
        if scan.first >= 0:
            where = f"the first is at {list(divmod(scan.first, k // 16))}"
            reason = f"{scan.nan} are NaN, {scan.zero} zero, {scan.negative} negative, {where}"
            outcome.fault("values.block-scales", parts["weight_scale"].name, reason)
        if source is not None and not SMALLEST_NORMAL <= global_scale <= LARGEST_GLOBAL:
            outcome.examined["source.bound"] = 1
            reason = f"cannot be decoded, because weight_scale_2 is {global_scale}"
            outcome.fault("source.bound", linear.module, reason)
            source = None
        bound = Nvfp4Bound(rounding_rule(self._manifest, item.role.role), k, global_scale)
        for row, rows, codes, values in self._rows(linear, source, outcome):
            if source is not None:
                block_scales = scales[row * k // 16 : (row + rows) * k // 16]
                found = bound.compare(values, source.spec.dtype, codes, block_scales)
                outcome.compared(found, row, rows, k)
        fault = bound.fault()
        if fault is not None:
            outcome.fault("source.bound", linear.module, fault)

    def _fp8(self, item: Item, linear: Linear, outcome: Outcome) -> None:
        k, source, fmt = linear.shape[1], item.source, WEIGHT_FORMATS[linear.format]
        spec = linear.parts[fmt.scale]
        scales = self._whole(spec, outcome, "scales")
        _check_scales(spec, scales, outcome)
        recipe = None if self._manifest is None else self._manifest.recipe
        nan, first_nan = 0, -1
        for row, rows, codes, values in self._rows(linear, source, outcome):
            bad = fp8_nan(codes)
            if bad.size:
                first_nan = first_nan if nan else row * k + int(bad[0])
                nan += bad.size
            if source is not None:
                own = scales[fmt.scale_nbytes(row, k) : fmt.scale_nbytes(row + rows, k)]
                found = cpu.fp8_compare(
                    values, source.spec.dtype, codes, own, k,
                    rounding=fmt.rounding, exact=recipe is not None,
                )  # fmt: skip
                outcome.compared(found, row, rows, k)
        outcome.examined["values.codes"] = linear.parts["weight"].nbytes
        if nan:
            where = list(divmod(first_nan, k))
            reason = f"{nan} codes are NaN, the first is at {where}"
            outcome.fault("values.codes", item.spec.name, reason)

    def _unquantized(self, item: Item, outcome: Outcome) -> None:
        spec, source = item.spec, item.source
        size = ITEMSIZE[spec.dtype]
        floats = spec.dtype in FLOAT_SOURCES
        nonfinite, first = 0, -1
        different: int | None = None
        for start, view in self._pieces(spec, size, outcome, "codes"):
            if floats:
                found = cpu.amax(view, spec.dtype)
                if found.nonfinite and not nonfinite:
                    first = start // size + found.first_nonfinite
                nonfinite += found.nonfinite
            if source is not None and different is None:
                different = self._difference(source, spec, start, view, outcome)
        if floats:
            outcome.examined["values.finite"] = 1
        if nonfinite:
            reason = f"{nonfinite} values are NaN or infinite, the first at flat index {first}"
            outcome.fault("values.finite", spec.name, reason)
        if source is not None:
            check = "source.router" if item.role.role in FP32_ROLES else "source.copied"
            outcome.examined[check] = 1
            if different is not None:
                reason = f"differs from the source, first at flat index {different}"
                outcome.fault(check, spec.name, reason)

    def _difference(
        self, source: SourceRange, spec: TensorSpec, start: int, view: memoryview, out: Outcome
    ) -> int | None:
        """Index of the first element that differs from the source's, after the one allowed cast."""
        size = ITEMSIZE[spec.dtype]
        count = view.nbytes // size
        dtype = source.spec.dtype
        wide = ITEMSIZE[dtype]
        values = self._read_source(source, start // size * wide, count * wide, out)
        if dtype != spec.dtype:
            if dtype not in FLOAT_SOURCES or spec.dtype not in ("BF16", "F32"):
                return start // size
            cast = self._buffer("cast", view.nbytes)
            cpu.convert(values, dtype, cast, spec.dtype)
            values = cast
        position = cpu.equal(view, values)
        return None if position < 0 else (start + position) // size


def _check_scales(spec: TensorSpec, scales: memoryview, outcome: Outcome) -> None:
    """FP8 scales are positive and not denormal; of MXFP8's bytes only 255 is no number."""
    if spec.dtype == "U8":
        bytes_N = np.frombuffer(scales, dtype=np.uint8)
        good_N, shown_N = bytes_N != MX_NAN, bytes_N.astype(np.float32)
        what = "is byte"
    else:
        shown_N, what = np.frombuffer(scales, dtype="<f4"), "is"
        good_N = np.isfinite(shown_N) & (shown_N >= SMALLEST_NORMAL)
    outcome.examined["values.row-scales"] = good_N.size
    if not good_N.all():
        first = int(np.argmin(good_N))
        columns = spec.shape[1] if len(spec.shape) > 1 else 1
        where = f"row {first}" if columns == 1 else str(list(divmod(first, columns)))
        some = f"{int((~good_N).sum())} of {good_N.size} cannot be used"
        reason = f"{some}, the first {what} {shown_N[first]:g} in {where}"
        outcome.fault("values.row-scales", spec.name, reason)


def fp8_nan(codes: memoryview) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Positions of E4M3 NaN bytes (0x7F and 0xFF)."""
    bytes_N = np.frombuffer(codes, dtype=np.uint8)
    whole = bytes_N.size // 8 * 8
    # Eight bytes at a time: without its sign, only 0x7F carries into the top bit when 1 is added.
    words_W = bytes_N[:whole].view(np.uint64) & np.uint64(0x7F7F7F7F7F7F7F7F)
    words_W += np.uint64(0x0101010101010101)
    words_W &= np.uint64(0x8080808080808080)
    if not words_W.any() and not (bytes_N[whole:] & 0x7F == 0x7F).any():
        return np.empty(0, dtype=np.intp)
    return np.flatnonzero(bytes_N & 0x7F == 0x7F)
