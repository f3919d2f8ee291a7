"""Read every byte of a checkpoint once: checksums, impossible values, and the source beside it.

In: an opened checkpoint, its `Inventory`, the checksums beamq.json lists and, if given, where each
tensor lies in the source. Out: findings under `checksums.*`, `values.*` and `source.*`, and the
quantization error of each role.

A work item is one linear with its scales, or one precise tensor; `readers` deals them out. Inside
an item, pieces of about 1 MiB go from the page cache through checksum, scan and comparison while
they are warm, so memory does not grow with a tensor. Every step releases the interpreter lock.
torch is not needed.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from beamq.beam.tensors import FP32_ROLES, Role, TensorRole
from beamq.eval.verify.checks import RoleError
from beamq.eval.verify.folder import LARGEST_GLOBAL, SMALLEST_NORMAL, Inventory, Linear
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.manifest import Manifest, new_checksum
from beamq.io.safetensors_header import ITEMSIZE, TensorSpec
from beamq.plan.layout import quantized_tensors
from beamq.plan.sources import SourceRange

# What a full pass over a checkpoint has to look at, and what looking at one thing showed.
#
# In: an `Inventory` and where each tensor lies in the source. Out: `Item` records in file order
# (one quantized linear with its scales, or one tensor stored as it is), and the `Outcome` of
# each, small enough to be handed from rank to rank.


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

    @property
    def place(self) -> tuple[str, int, int]:
        """File, offset there, and `nbytes`."""
        return self.spec.file, self.spec.offset, self.nbytes


@dataclass(slots=True, kw_only=True)
class Sums:
    """Squared error and source, to be added up."""

    error: float = 0.0
    source: float = 0.0
    worst: float = 0.0
    elements: int = 0

    @property
    def relative_rms(self) -> float:
        """RMS of the error over RMS of the source; 0 for an all-zero source decoded to zeros."""
        return math.sqrt(self.error / self.source) if self.source else math.sqrt(self.error)

    def add(self, found: cpu.BlockComparison, elements: int) -> None:
        """Add one piece."""
        self.error += found.sum_sq_error
        self.source += found.sum_sq_source
        self.worst = max(self.worst, found.max_abs_error)
        self.elements += elements


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one item showed. `faults` are (check, where, detail); `examined` counts per check."""

    faults: list[tuple[str, str, str]] = field(default_factory=list)
    examined: dict[str, int] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)
    nbytes: int = 0
    out_of_bound: int = 0
    first_place: tuple[int, int] = (-1, -1)

    def fault(self, check: str, where: str, detail: str) -> None:
        """File one fault."""
        self.faults.append((check, where, detail))

    def compared(self, found: cpu.BlockComparison, row: int, rows: int, k: int) -> None:
        """Add one piece of rows that was compared with the source."""
        if found.out_of_bound and not self.out_of_bound:
            down, column = divmod(found.first_out_of_bound, k)
            self.first_place = (row + down, column)
        self.out_of_bound += found.out_of_bound
        self.sums.add(found, rows * k)


@dataclass(slots=True)
class RoleTotal:
    """Sums over the linears of a role, and the worst of them."""

    sums: Sums = field(default_factory=Sums)
    linears: int = 0
    worst: str = ""
    worst_relative: float = -1.0

    def add(self, module: str, found: Sums) -> None:
        """Add one linear. The order of calls shows in the last bits."""
        self.linears += 1
        self.sums.error += found.error
        self.sums.source += found.source
        self.sums.worst = max(self.sums.worst, found.worst)
        self.sums.elements += found.elements
        key = (found.relative_rms, module)  # ties are broken by name
        if key > (self.worst_relative, self.worst):
            self.worst_relative, self.worst = key

    def result(self, role: str) -> RoleError:
        """The error of the role."""
        return RoleError(
            role=role,
            linears=self.linears,
            elements=self.sums.elements,
            relative_rms=self.sums.relative_rms,
            worst_linear=self.worst,
            worst_relative_rms=self.worst_relative,
            max_abs_error=self.sums.worst,
        )


def plan_items(inventory: Inventory, sources: Mapping[str, SourceRange]) -> list[Item]:
    """Work items in file order. `sources` maps the output's weight names to source ranges."""
    items: list[Item] = []
    for linear in inventory.linears:
        if linear.quantized and is_sound(linear):
            items.append(_item(linear.role, linear.parts["weight"], sources, linear))
        else:
            # A linear whose parts do not fit each other is still read, part by part.
            for spec in linear.parts.values():
                own = sources if not linear.quantized else {}
                items.append(_item(linear.role, spec, own))
    items += [_item(role, spec, sources) for role, spec in inventory.precise]
    extra = Role.EXTRA
    for spec in inventory.unknown:
        role = TensorRole(name=spec.name, role=extra, module=spec.name, proj="")
        items.append(_item(role, spec, sources))
    return sorted(items, key=lambda item: (item.spec.file, item.spec.offset))


def _item(
    role: TensorRole,
    spec: TensorSpec,
    sources: Mapping[str, SourceRange],
    linear: Linear | None = None,
) -> Item:
    source = sources.get(spec.name)
    shape = linear.shape if linear else spec.shape
    if source is not None and source.shape != shape:
        source = None  # already a finding of the structure checks
    return Item(role=role, spec=spec, linear=linear, source=source)


def is_sound(linear: Linear) -> bool:
    """Whether all parts of a quantized linear are there and fit each other."""
    wanted = quantized_tensors(linear.module, linear.format, *linear.shape)
    if len(wanted) != len(linear.parts):
        return False
    for name, dtype, shape in wanted:
        part = linear.parts.get(name.rpartition(".")[2])
        if part is None or part.dtype != dtype or part.shape != shape:
            return False
    return True


# By which rule a checkpoint's NVFP4 codes were made: what `source.bound` then demands of them.
#
# In: beamq.json, if there is one; for `gptq` also source rows and what was made of them. Out: a
# rule's name, and rows that are further from the source than the rule takes them.
#
#     max      every code is the nearest for its stored scale, and nothing is clipped: a scale is
# what
#              the block's largest value calls for. Also demanded where no recipe is known
#     sweep    every code is the nearest for its stored scale, values beyond the grid have its end,
#              and the scale is one of the 16 that the sweep tries
#     gptq     each row's error is at most half its own size, and a linear's at most a quarter. GPTQ
#              moves each value by what others' rounding costs, so no element alone can be judged;
#              errors of 0.10 (linears) and 0.17 (rows) are the largest seen on trained models, and
#              another row in its place gives 1.4. Values too small for the smallest scale are free.
#              Also held where no recipe is known: another tool may have chosen its scales anyhow
#
# By any of them an exchanged expert, a moved row or a wrong scale is out of bound. What stays in
# bound (another candidate's scale with the codes that go with it) is caught by checksums alone, as
# is any flipped bit.

ROW_BOUND = 0.5
LINEAR_BOUND = 0.25
SMALLEST_SCALE = 2.0**-9  # a block scale is never less; what is far below it becomes 0


def rounding_rule(manifest: Manifest | None, role: Role) -> str:
    """The rule that beamq.json's recipe names for linears of a role.

    `gptq`, the loosest, where it names none. GPTQ rounds experts only.
    """
    recipe = None if manifest is None else manifest.recipe
    if recipe is None:
        return "gptq"
    if recipe.get("rounding") == "gptq" and role is Role.EXPERT:
        return "gptq"
    return "sweep" if recipe.get("scales") == "sweep" else "max"


class Nvfp4Bound:
    """Holds one linear against the source by a rule, some rows after others; `k` values a row."""

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
        """The next rows. Under `gptq` no element is out of bound; `fault` speaks of rows."""
        swept = self._rule != "max"
        found = cpu.nvfp4_compare(source, dtype, codes, scales, self._k, self._scale, swept=swept)
        if self._rule != "gptq":
            return found
        self._add_rows(source, dtype, codes, scales)
        return replace(found, out_of_bound=0, first_out_of_bound=-1)

    def _add_rows(
        self, source: memoryview, dtype: str, codes: memoryview, scales: memoryview
    ) -> None:
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
        # Not "beyond the bound": a NaN is beyond none.
        far_N = ~(error_N <= ROW_BOUND**2 * source_N + free)
        if far_N.any() and self._first < 0:
            self._first = self._rows + int(far_N.argmax())
        self._far += int(far_N.sum())
        self._rows += shape[0]
        self._error += float(error_N.sum())
        self._source += float(source_N.sum())
        self._free += shape[0] * free

    def fault(self) -> str | None:
        """What is wrong with the linear as a whole, if anything; only under `gptq`."""
        if self._far:
            return (
                f"{self._far} of {self._rows} rows are further from the source than GPTQ takes"
                f" them, first row {self._first}"
            )
        if not self._error <= LINEAR_BOUND**2 * self._source + self._free:
            relative = (self._error / self._source) ** 0.5 if self._source else float("inf")
            return f"its relative error is {relative:.3f}; GPTQ stays below {LINEAR_BOUND}"
        return None


def _squares(x_NK: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sum over each row."""
    sums_N: NDArray[np.float64] = np.einsum("nk,nk->n", x_NK, x_NK).astype(np.float64)
    return sums_N


PIECE_BYTES = 1 << 20


class Readable(Protocol):
    """What values are read from: a checkpoint, or what one decodes to."""

    def read_into(self, spec: TensorSpec, out: memoryview, start: int = 0) -> None:
        """Fill `out` with a tensor's bytes from `start`."""


class Examiner:
    """Examines items; one per pass, shared by its threads (buffers are per thread)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: Readable | None,
        checksums: Mapping[str, str],
        algorithm: str,
        manifest: Manifest | None = None,
    ) -> None:
        """`manifest` (beamq.json) tells by which rule codes were made (see `rounding`)."""
        self._checkpoint = checkpoint
        self._source = source
        self._checksums = checksums
        self._algorithm = algorithm
        self._manifest = manifest
        self._buffers = threading.local()

    def examine(self, item: Item) -> Outcome:
        """Read one item. Raises `CheckpointError` when a file cannot be read."""
        outcome = Outcome()
        if item.linear is None:
            self._precise(item, outcome)
        elif "weight_scale_2" in item.linear.parts:
            self._nvfp4(item, item.linear, outcome)
        else:
            self._fp8(item, item.linear, outcome)
        return outcome

    def _hold(self, name: str, digest: str, outcome: Outcome) -> None:
        """Against the checksum that beamq.json lists."""
        check = "checksums.tensors"
        outcome.examined[check] = outcome.examined.get(check, 0) + 1
        if digest != self._checksums[name]:
            outcome.fault(check, name, "its bytes are not those that were written")

    def _buffer(self, name: str, nbytes: int) -> memoryview:
        """A reusable buffer of this thread's."""
        buffers: dict[str, bytearray] = self._buffers.__dict__
        if len(buffers.get(name, b"")) < nbytes:
            buffers[name] = bytearray(nbytes)
        return memoryview(buffers[name])[:nbytes]

    def _pieces(
        self, spec: TensorSpec, unit: int, outcome: Outcome, slot: str
    ) -> Iterator[tuple[int, memoryview]]:
        """(start, bytes) of a tensor in whole units, adding up its checksum on the way."""
        size = max(PIECE_BYTES // unit, 1) * unit
        listed = spec.name in self._checksums
        checksum = new_checksum(self._algorithm) if listed else None
        for start in range(0, spec.nbytes, size):
            view = self._buffer(slot, min(size, spec.nbytes - start))
            self._checkpoint.read_into(spec, view, start)
            outcome.nbytes += view.nbytes
            if checksum is not None:
                checksum.update(view)
            yield start, view
        if checksum is not None:
            self._hold(spec.name, checksum.hexdigest(), outcome)

    def _whole(self, spec: TensorSpec, outcome: Outcome, slot: str) -> memoryview:
        """All of a small tensor."""
        view = self._buffer(slot, spec.nbytes)
        self._checkpoint.read_into(spec, view)
        outcome.nbytes += view.nbytes
        if spec.name in self._checksums:
            checksum = new_checksum(self._algorithm)
            checksum.update(view)
            self._hold(spec.name, checksum.hexdigest(), outcome)
        return view

    def _read_source(
        self, source: SourceRange, start: int, nbytes: int, out: Outcome
    ) -> memoryview:
        if self._source is None:
            raise ValueError("no source is open")
        view = self._buffer("source", nbytes)
        self._source.read_into(source.spec, view, source.start + start)
        out.nbytes += nbytes
        return view

    def _nvfp4(self, item: Item, linear: Linear, outcome: Outcome) -> None:
        k = linear.shape[1]
        parts = linear.parts
        scalar = bytes(self._whole(parts["weight_scale_2"], outcome, "scalar"))
        global_scale: float = struct.unpack("<f", scalar)[0]
        self._whole(parts["input_scale"], outcome, "scalar")
        scales = self._whole(parts["weight_scale"], outcome, "scales")
        outcome.examined["values.block-scales"] = scales.nbytes
        scan = cpu.scan_e4m3_scales(scales)
        if scan.first >= 0:
            row, column = divmod(scan.first, k // 16)
            outcome.fault(
                "values.block-scales",
                parts["weight_scale"].name,
                f"{scan.nan} NaN, {scan.zero} zero, {scan.negative} negative,"
                f" first at [{row}, {column}]",
            )
        usable = SMALLEST_NORMAL <= global_scale <= LARGEST_GLOBAL
        if item.source is not None and not usable:
            outcome.examined["source.bound"] = 1
            outcome.fault(
                "source.bound",
                linear.module,
                f"nothing can be decoded with the weight_scale_2 {global_scale}",
            )
        bound = Nvfp4Bound(rounding_rule(self._manifest, item.role.role), k, global_scale)
        for start, codes in self._pieces(parts["weight"], k // 2, outcome, "codes"):
            if item.source is None or not usable:
                continue
            row, rows = start * 2 // k, codes.nbytes * 2 // k
            line = k * ITEMSIZE[item.source.spec.dtype]
            values = self._read_source(item.source, row * line, rows * line, outcome)
            block_scales = scales[row * k // 16 : (row + rows) * k // 16]
            found = bound.compare(values, item.source.spec.dtype, codes, block_scales)
            outcome.compared(found, row, rows, k)
        _bound_fault(linear.module, outcome)
        fault = bound.fault()
        if fault is not None:
            outcome.fault("source.bound", linear.module, fault)

    def _fp8(self, item: Item, linear: Linear, outcome: Outcome) -> None:
        k = linear.shape[1]
        scales = self._whole(linear.parts["weight_scale"], outcome, "scales")
        outcome.examined["values.row-scales"] = linear.shape[0]
        values_N = np.frombuffer(scales, dtype="<f4")
        good_N = np.isfinite(values_N) & (values_N >= SMALLEST_NORMAL)
        if not good_N.all():
            row = int(np.argmin(good_N))
            outcome.fault(
                "values.row-scales",
                linear.parts["weight_scale"].name,
                f"{int((~good_N).sum())} of {good_N.size} unusable,"
                f" first {values_N[row]} in row {row}",
            )
        nan, first_nan = 0, -1
        for start, codes in self._pieces(linear.parts["weight"], k, outcome, "codes"):
            bad = fp8_nan(codes)
            if bad.size:
                first_nan = first_nan if nan else start + int(bad[0])
                nan += bad.size
            if item.source is None:
                continue
            row, rows = start // k, codes.nbytes // k
            line = k * ITEMSIZE[item.source.spec.dtype]
            source = self._read_source(item.source, row * line, rows * line, outcome)
            row_scales = scales[row * 4 : (row + rows) * 4]
            found = cpu.fp8_compare(source, item.source.spec.dtype, codes, row_scales, k)
            outcome.compared(found, row, rows, k)
        outcome.examined["values.codes"] = linear.parts["weight"].nbytes
        if nan:
            where = list(divmod(first_nan, k))
            outcome.fault("values.codes", item.spec.name, f"{nan} NaN codes, first at {where}")
        _bound_fault(linear.module, outcome)

    def _precise(self, item: Item, outcome: Outcome) -> None:
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
            outcome.fault(
                "values.finite", spec.name, f"{nonfinite} NaN or infinite, first at flat {first}"
            )
        if source is not None:
            check = "source.router" if item.role.role in FP32_ROLES else "source.copied"
            outcome.examined[check] = 1
            if different is not None:
                outcome.fault(
                    check, spec.name, f"differs from the source, first at flat index {different}"
                )

    def _difference(
        self, source: SourceRange, spec: TensorSpec, start: int, view: memoryview, out: Outcome
    ) -> int | None:
        """Index of the first element unlike the source's, cast the one way that is allowed."""
        size = ITEMSIZE[spec.dtype]
        count = view.nbytes // size
        dtype = source.spec.dtype
        item = ITEMSIZE[dtype]
        values = self._read_source(source, start // size * item, count * item, out)
        if dtype != spec.dtype:
            if dtype not in FLOAT_SOURCES or spec.dtype not in ("BF16", "F32"):
                return start // size
            cast = self._buffer("cast", view.nbytes)
            cpu.convert(values, dtype, cast, spec.dtype)
            values = cast
        position = cpu.equal(view, values)
        return None if position < 0 else (start + position) // size


def _bound_fault(module: str, outcome: Outcome) -> None:
    if outcome.sums.elements:
        outcome.examined["source.bound"] = outcome.sums.elements
    if outcome.out_of_bound:
        outcome.fault(
            "source.bound",
            module,
            f"{outcome.out_of_bound} of {outcome.sums.elements} elements are not what rounding to"
            f" nearest gives, first at {list(outcome.first_place)}",
        )


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
