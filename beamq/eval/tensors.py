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

import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from beamq.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.checksum import new_checksum
from beamq.eval.items import Item, Outcome
from beamq.eval.rounding import Nvfp4Bound, rounding_rule
from beamq.eval.structure import LARGEST_GLOBAL, SMALLEST_NORMAL, Linear
from beamq.formats.kernels import cpu
from beamq.header import ITEMSIZE, TensorSpec
from beamq.roles import PRECISE_FP32
from beamq.sources import SourceRange

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
        manifest: Mapping[str, Any] | None = None,
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
            check = "source.router" if item.role.role in PRECISE_FP32 else "source.copied"
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
