"""A checkpoint with an adapter merged in: the same tensors, read through the merge.

In: an opened source and an `Adapter`. Out: a `Checkpoint` whose reads give merged bytes, so that
calibration, conversion and comparison need to know nothing of adapters, and `quantize` with an
adapter gives the bytes of `merge` followed by `quantize`.

The one idea: every update is local to rows of its weight. A read is widened to whole rows, these
are merged and rounded once to the dtype that the source stores (F32 for the router), and the
bytes asked for are cut out. Arithmetic is that of `formats.kernels.cpu.add_low_rank`, on every
device; a GPU adds low-rank updates to what it converts by itself (`device_update`). Memory: the
pair that a thread works on, and the last few packed tensors of experts, whose columns are
interleaved on disk. DoRA on the embedding needs a first pass over all its rows.

A pair of which A or B is all zero changes nothing, and its weight keeps its bytes (-0.0 included).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beamq.adapter.open import Adapter, open_adapter
from beamq.adapter.options import AdapterOptions
from beamq.adapter.read import (
    Assignment,
    Factor,
    Layout,
    LowRank,
    Order,
    Replaced,
    Update,
    assign,
    packed_weights,
)
from beamq.adapter.record import adapter_record
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import FP32_ROLES, Role, classify, packed_shape
from beamq.errors import AdapterError, TensorError, UsageError, counted
from beamq.formats.kernels import cpu
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint, open_checkpoint
from beamq.io.safetensors_header import ITEMSIZE, TensorSpec, few
from beamq.io.shard_cache import DEFAULT_CACHE_BYTES
from beamq.io.source import Header, Prefetch, SourceFiles
from beamq.limits import usable_cores
from beamq.units import show_seconds

if TYPE_CHECKING:  # imported by the commands: NumPy and torch come later
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

HELD_TENSORS = 4  # of packed experts, whose columns are needed: most often the two B of two layers
NORM_ROWS = 4096  # of the embedding at a time; fixed, because the order of a sum is


def open_merged(
    source: str | Path,
    how: AdapterOptions,
    *,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
    cache_folder: Path | None = None,
) -> Checkpoint:
    """`open_checkpoint`, with the adapter of `how` merged in where there is one."""
    if how.adapter is None:
        if how.expert_lora_layout is not None or how.expert_lora_order is not None:
            raise UsageError("--expert-lora-layout and --expert-lora-order go with --adapter")
        return open_checkpoint(source, cache_bytes=cache_bytes, cache_folder=cache_folder)
    adapter = open_adapter(how.adapter)  # first: it is small, and says most of what is refused
    with ExitStack() as stack:
        stack.callback(adapter.files.close)
        checkpoint = open_checkpoint(source, cache_bytes=cache_bytes, cache_folder=cache_folder)
        stack.callback(checkpoint.close)
        merged = merge_adapter(
            checkpoint, adapter, layout=how.expert_lora_layout, order=how.expert_lora_order
        )
        stack.pop_all()
    return merged


def merge_adapter(
    checkpoint: Checkpoint,
    adapter: Adapter,
    *,
    layout: Layout | None = None,
    order: Order | None = None,
) -> Checkpoint:
    """The checkpoint with the adapter merged in. It owns both, and closes them.

    Raises `AdapterError` before a weight is read, but for copies of the base in the adapter, which
    are compared with the source.
    """
    model = BeamConfig.from_dict(checkpoint.config)
    ends = [s.name for s in adapter.tensors if "embed_tokens." in s.name or "lm_head." in s.name]
    if model.tie_word_embeddings and ends:
        raise AdapterError(
            f"{few(ends, 1)}: the embedding or the head changes, which config.json ties: training"
            " changed one end and a merge would change both; untie them in the source first"
        )
    found = assign(adapter.tensors, adapter.config, model, layout=layout, order=order)
    files = MergedFiles(checkpoint, adapter, found, model)
    files.check_base_copies()
    return replace(checkpoint, tensors=files.merged_tensors, source=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows `first` .. `first + count - 1` of a stored tensor are weight `name`, which changes."""

    first: int
    count: int
    name: str
    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUpdate:
    """`base` to read a weight from, and what to add to it: scaling B A, FP32 [r, K] and [N, r]."""

    base: Checkpoint
    a: Floats
    b: Floats
    scaling: float


class MergedFiles(SourceFiles):
    """A source's files, with the bytes of its tensors merged as they are read. Thread safe."""

    def __init__(
        self, checkpoint: Checkpoint, adapter: Adapter, found: Assignment, model: BeamConfig
    ) -> None:
        self.base = checkpoint
        self.inner = checkpoint.source
        self.adapter = adapter
        self.assignment = found
        self.name = f"{self.inner.name}+{adapter.label}"
        self.label = f"{self.inner.label}+{adapter.label}"
        self.parallel, self.local = self.inner.parallel, self.inner.local
        self._stored = checkpoint.tensors
        self._rows = _changed_rows(checkpoint, found.updates, model)
        self._places = {row.name: name for name, rows in self._rows.items() for row in rows}
        self.merged_tensors = {name: self._merged_spec(spec) for name, spec in self._stored.items()}
        self.merged = adapter_record(adapter, found, self.inner)
        self._lock = threading.RLock()
        self._held: OrderedDict[str, NDArray[Any]] = OrderedDict()
        self._column_scales: dict[str, torch.Tensor] = {}
        self._last = threading.local()

    def _merged_spec(self, spec: TensorSpec) -> TensorSpec:
        """The tensor as read here. An adapted router is F32, whatever the source stores."""
        if spec.name not in self._rows or classify(spec.name).role not in FP32_ROLES:
            return spec
        return replace(spec, dtype="F32", nbytes=spec.numel * ITEMSIZE["F32"])

    # --- files -----------------------------------------------------------------------------------

    def folder(self) -> Path:
        return self.inner.folder()

    def listing(self) -> Mapping[str, int]:
        return self.inner.listing()

    def names(self) -> Sequence[str]:
        return self.inner.names()

    def has(self, file: str) -> bool:
        return self.inner.has(file)

    def path(self, file: str) -> Path:
        return self.inner.path(file)

    def header(self, file: str) -> Header:
        specs, metadata = self.inner.header(file)
        return [self._merged_spec(spec) for spec in specs], metadata

    def advise(self, file: str, offset: int, nbytes: int) -> None:
        self.inner.advise(file, offset, nbytes)

    def missing_nbytes(self) -> Mapping[str, int]:
        return self.inner.missing_nbytes()

    def prefetch(self, jobs: Sequence[Collection[str]]) -> AbstractContextManager[Prefetch]:
        return self.inner.prefetch(jobs)

    def stamp(self, shards: Sequence[str]) -> str:
        return self.inner.stamp(shards)

    def changed(self) -> str | None:
        """A shard of the source. Raises `AdapterError` where the adapter has changed."""
        if (file := self.adapter.files.changed()) is not None:
            raise AdapterError(
                f"{self.adapter.files.name}/{file}: changed while it was read, so the output would"
                " mix two adapters; do not change it during a run, and start again with --overwrite"
            )
        return self.inner.changed()

    def close(self) -> None:
        self.inner.close()
        self.adapter.files.close()

    # --- reading ---------------------------------------------------------------------------------

    def read(self, file: str, offset: int, out: memoryview, name: str) -> None:
        """Fill `out` with merged bytes; `offset` counts in the tensor as it is merged."""
        rows = self._rows.get(name)
        if rows is None:
            self.inner.read(file, offset, out, name)
            return
        self._read_merged(rows, offset, out, name, self.inner.read)

    def peek(self, file: str, offset: int, nbytes: int, name: str) -> bytes:
        rows = self._rows.get(name)
        if rows is None:
            return self.inner.peek(file, offset, nbytes, name)

        def read(file: str, offset: int, out: memoryview, name: str) -> None:
            out[:] = self.inner.peek(file, offset, out.nbytes, name)

        out = bytearray(nbytes)
        self._read_merged(rows, offset, memoryview(out), name, read)
        return bytes(out)

    def _read_merged(
        self,
        changed: Sequence[_Rows],
        offset: int,
        out: memoryview,
        name: str,
        read: Callable[[str, int, memoryview, str], None],
    ) -> None:
        stored, merged = self._stored[name], self.merged_tensors[name]
        total = stored.numel // stored.shape[-1] if len(stored.shape) > 1 else stored.numel
        row, stored_row = merged.nbytes // total, stored.nbytes // total
        start = offset - merged.offset
        first, last = start // row, -(-(start + out.nbytes) // row)
        in_place = merged.dtype == stored.dtype and out.nbytes == (last - first) * row
        base = out if in_place else memoryview(bytearray((last - first) * stored_row))
        read(stored.file, stored.offset + first * stored_row, base, name)
        whole = base
        if merged.dtype != stored.dtype:
            whole = memoryview(bytearray((last - first) * row))
            cpu.convert(base, stored.dtype, whole, merged.dtype)
        for each in changed:
            begin, end = max(first, each.first), min(last, each.first + each.count)
            if begin < end:
                place = slice((begin - first) * row, (end - first) * row)
                source = base[(begin - first) * stored_row : (end - first) * stored_row]
                own = range(begin - each.first, end - each.first)
                self._merge(each, own, (source, stored.dtype), (whole[place], merged.dtype))
        if not in_place:
            out[:] = whole[start - first * row :][: out.nbytes]

    def _merge(
        self,
        changed: _Rows,
        rows: range,
        source: tuple[memoryview, str],
        out: tuple[memoryview, str],
    ) -> None:
        """Merge `rows` of one weight into `out`. Raises `TensorError` if a result is not finite."""
        update, (view, dtype) = changed.update, out
        if isinstance(update, LowRank):
            if update.magnitude is not None:
                self._merge_dora(changed, rows, source, out)
            else:
                a, b, changes = self._factors(changed.name, update)
                if changes:
                    self._add(a, b[rows.start : rows.stop], update.scaling, source, out)
        elif isinstance(update, Replaced):
            first = update.first + rows.start
            _write(self._values(update.spec, slice(first, first + len(rows))), view, dtype)
        else:
            row = len(view) // len(rows)
            for place, token in enumerate(update.tokens):
                if token in rows:
                    at = (token - rows.start) * row
                    values = self._values(update.spec, slice(place, place + 1))
                    _write(values, view[at : at + row], dtype)
        if cpu.amax(view, dtype).nonfinite:
            raise TensorError(
                f"{changed.name}: the merged weight holds NaN or infinite values; is"
                f" {self.adapter.label} an adapter of this model?"
            )

    def _add(
        self,
        a: Floats,
        b: Floats,
        scaling: float,
        source: tuple[memoryview, str],
        out: tuple[memoryview, str],
    ) -> None:
        cpu.add_low_rank(
            source[0], source[1], a.shape[1], _bytes(a), _bytes(b), scaling, out[0], out[1]
        )

    def _merge_dora(
        self,
        changed: _Rows,
        rows: range,
        source: tuple[memoryview, str],
        out: tuple[memoryview, str],
    ) -> None:
        """W <- m / |W + s B A| * (W + s B A): norms summed in FP64, all else in FP32."""
        update = changed.update
        assert isinstance(update, LowRank)
        assert update.magnitude is not None
        if classify(changed.name).role is Role.EMBEDDING:
            scale = self._embedding_scale(changed.name, update)
            summed = self._summed(changed.name, update, rows, source)
            _write(scale * summed, *out)
            return
        summed = self._summed(changed.name, update, rows, source)
        norm = summed.double().square_().sum(dim=1).sqrt_().float()
        magnitude = self._magnitude(update.magnitude)[rows.start : rows.stop]
        _write((magnitude / norm).unsqueeze(1) * summed, *out)

    def _summed(
        self, name: str, update: LowRank, rows: range, source: tuple[memoryview, str]
    ) -> torch.Tensor:
        """W + s B A of some rows, FP32 [rows, K]."""
        import torch

        a, b, _ = self._factors(name, update)
        summed = torch.empty((len(rows), a.shape[1]), dtype=torch.float32)
        self._add(a, b[rows.start : rows.stop], update.scaling, source, (_bytes(summed), "F32"))
        return summed

    def _embedding_scale(self, name: str, update: LowRank) -> torch.Tensor:
        """m / norm of each column of the embedding, FP32 [H]; one pass over all rows, kept."""
        import torch

        with self._lock:
            if name not in self._column_scales:
                spec = self._stored[name]
                row, total = spec.nbytes // spec.shape[0], torch.zeros(spec.shape[1]).double()
                for first in range(0, spec.shape[0], NORM_ROWS):
                    rows = range(first, min(first + NORM_ROWS, spec.shape[0]))
                    piece = memoryview(bytearray(len(rows) * row))
                    self.inner.read(spec.file, spec.offset + first * row, piece, name)
                    summed = self._summed(name, update, rows, (piece, spec.dtype))
                    total += summed.double().square_().sum(dim=0)
                assert update.magnitude is not None
                magnitude = self._magnitude(update.magnitude)
                self._column_scales[name] = magnitude / total.sqrt_().float()
            return self._column_scales[name]

    def device_update(self, name: str) -> DeviceUpdate | None:
        """What a device needs to merge a weight itself, where it can: a plain low-rank update of a
        weight that keeps its dtype."""
        place = self._places.get(name)
        update = self.assignment.updates.get(name)
        if place is None or not isinstance(update, LowRank) or update.magnitude is not None:
            return None
        if self._stored[place].dtype != self.merged_tensors[place].dtype:
            return None
        a, b, changes = self._factors(name, update)
        return DeviceUpdate(base=self.base, a=a, b=b, scaling=update.scaling) if changes else None

    # --- the adapter's tensors -------------------------------------------------------------------

    def _factors(self, name: str, update: LowRank) -> tuple[Floats, Floats, bool]:
        """A [r, K] and B [N, r], FP32, and whether they change anything: not if one is all zero.

        Those that this thread used last are kept.
        """
        if getattr(self._last, "name", None) != name:
            a, b = self._factor(update.a), self._factor(update.b)
            self._last.found = a, b, bool(a.any() and b.any())
            self._last.name = name
        found: tuple[Floats, Floats, bool] = self._last.found
        return found

    def _factor(self, factor: Factor) -> Floats:
        import numpy as np

        if factor.columns == slice(None) and not factor.transposed:
            found = self._read_rows(factor.spec, factor.rows)
        else:
            found = self._whole(factor.spec)[factor.rows, factor.columns]
        found = np.ascontiguousarray(found.T if factor.transposed else found)
        if factor.spec.dtype == "F32":
            return found
        out = np.empty(found.shape, np.float32)
        cpu.convert(_bytes(found), factor.spec.dtype, _bytes(out), "F32")
        return out

    def _whole(self, spec: TensorSpec) -> NDArray[Any]:
        """All of a matrix of which columns are needed; the last few are kept."""
        with self._lock:
            found = self._held.pop(spec.name, None)
            if found is None:
                found = self._read_rows(spec, slice(None))
            self._held[spec.name] = found
            while len(self._held) > HELD_TENSORS:
                self._held.popitem(last=False)
            return found

    def _read_rows(self, spec: TensorSpec, rows: slice) -> NDArray[Any]:
        """Rows of a tensor of the adapter, seen as a matrix: FP32, or the bits of 16-bit floats."""
        import numpy as np

        width = spec.shape[-1] if len(spec.shape) > 1 else 1
        wanted = range(spec.numel // width)[rows]
        item = ITEMSIZE[spec.dtype]
        out = np.empty((len(wanted), width), {4: np.float32, 2: np.uint16}[item])
        start = spec.offset + wanted.start * width * item
        self.adapter.files.read(spec.file, start, _bytes(out), spec.name)
        return out

    def _values(self, spec: TensorSpec, rows: slice) -> torch.Tensor:
        """What `_read_rows` gives, as a tensor of the stored dtype."""
        found = self._read_rows(spec, rows)
        return _tensor(_bytes(found), spec.dtype, found.shape)

    def _magnitude(self, spec: TensorSpec) -> torch.Tensor:
        return self._values(spec, slice(None)).reshape(-1).float()

    def check_base_copies(self) -> None:
        """Raise `AdapterError` unless the adapter's copies of base weights equal the source's."""
        for name, spec in self.assignment.base_copies.items():
            stored = self._stored.get(name)
            if stored is None or spec.shape != stored.shape:
                raise AdapterError(
                    f"{spec.name}: a copy of {name}, which the source does not have in that shape"
                )
            row = stored.nbytes // stored.shape[0]
            for first in range(0, stored.shape[0], NORM_ROWS):
                rows = range(first, min(first + NORM_ROWS, stored.shape[0]))
                piece = bytearray(len(rows) * row)
                self.inner.read(stored.file, stored.offset + first * row, memoryview(piece), name)
                copy = self._values(spec, slice(rows.start, rows.stop))
                if not copy.float().equal(_tensor(piece, stored.dtype, tuple(copy.shape)).float()):
                    raise AdapterError(
                        f"{spec.name}: this copy of the base differs from {name} of"
                        f" {self.label}; the adapter was trained on another base, use that one as"
                        " the source"
                    )


CORE_FLOPS = 50e9  # of merging at rank 16, reading the adapter included; see docs/results.md


def merge_hint(checkpoint: Checkpoint) -> tuple[str, ...]:
    """How long merging takes on this machine's cores, for a plan."""
    files = checkpoint.source
    if not isinstance(files, MergedFiles):
        return ()
    flops = sum(
        2 * each.update.rank * each.count * files.base.spec(name).shape[-1]
        for name, rows in files._rows.items()
        for each in rows
        if isinstance(each.update, LowRank)
    )
    cores = usable_cores()
    return (
        f"merging the adapter adds {flops / 1e12:,.3g} TFLOP of FP32 arithmetic on the CPU, about"
        f" {show_seconds(flops / CORE_FLOPS / cores)} on {counted(cores, 'core')}",
    )


def _changed_rows(
    checkpoint: Checkpoint, updates: Mapping[str, Update], model: BeamConfig
) -> dict[str, tuple[_Rows, ...]]:
    """Stored tensor -> its rows that change. Raises `AdapterError` for a source without them."""
    found: dict[str, tuple[_Rows, ...]] = {}
    left = set(updates)
    for name, spec in checkpoint.tensors.items():
        rows = []
        for target, first, count in _weights_in(spec, model):
            if target in left:
                left.remove(target)
                rows.append(_Rows(first=first, count=count, name=target, update=updates[target]))
        if rows:
            found[name] = tuple(rows)
            if spec.dtype not in FLOAT_SOURCES:
                raise AdapterError(
                    f"{checkpoint.name}: {name} is {spec.dtype}, which is quantized; merge the"
                    " adapter into the high-precision original"
                )
    if left:
        raise AdapterError(
            f"{checkpoint.name}: the adapter changes {few(sorted(left))}, which the source lacks"
        )
    return found


def _weights_in(spec: TensorSpec, model: BeamConfig) -> Iterator[tuple[str, int, int]]:
    """(weight, first row, rows) for each weight in a stored tensor, seen as a matrix."""
    role = classify(spec.name)
    if role.packed is None:
        width = spec.shape[-1] if len(spec.shape) > 1 else 1
        yield spec.name, 0, spec.numel // width if width else 0
    elif spec.shape == packed_shape(model, role.packed):
        for target, first in packed_weights(role, model):
            part = 1 if role.packed == "down_proj" else 2
            yield target, first, spec.shape[1] // part


def _tensor(data: bytearray | memoryview, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    from beamq.formats.numerics import tensor_from_bytes

    return tensor_from_bytes(data, dtype, shape)


def _bytes(array: Floats | torch.Tensor) -> memoryview:
    """The memory of a contiguous array or CPU tensor."""
    import numpy as np

    if not isinstance(array, np.ndarray):
        from beamq.formats.numerics import tensor_bytes

        return tensor_bytes(array)
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _write(values: torch.Tensor, out: memoryview, dtype: str) -> None:
    """Values rounded to `dtype`, into `out`."""
    from beamq.formats.numerics import TORCH_DTYPES

    out[:] = _bytes(values.to(TORCH_DTYPES[dtype]).contiguous())
