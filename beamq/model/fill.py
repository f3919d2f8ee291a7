"""Buffers that stored tensors are read into, by several threads, and their way to a device.

In: names of tensors and where each belongs. Out: filled buffers on the CPU, or their copies on a
CUDA device.

The one idea: allocate first, read later, all at once. A loader lays out its buffers and notes
what goes where; `run` then reads everything with a pool of threads, each tensor's bytes straight
into its place. Only a tensor that must be cast passes through a copy of its own.

For CUDA, buffers are pinned and copied on a stream apart, so that the next unit's transfer
overlaps with computing; `upload` returns when the copies are done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from beamq.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.errors import TensorError
from beamq.header import TensorSpec
from beamq.model.stored import expect_shape
from beamq.torch_dtypes import TORCH_DTYPES

Tree = TypeVar("Tree")
TAP_PLACES = 8

Tap = Callable[[TensorSpec, int, torch.Tensor], None]
"""Called as (spec, first, tensor): rows first .. first + len(tensor) - 1 of a stored tensor, as
stored, on the CPU. Whole tensors come at once with first = 0, packed experts one at a time. Called
from reader threads; the tensor must not be changed, nor kept longer than its unit is being loaded
(a layer, or a slice of its experts, the embedding, the head)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A range of a stored tensor's rows, and the buffer they go to."""

    spec: TensorSpec
    first: int
    out: torch.Tensor


class Fill:
    """Buffers under construction. `run` must be called before any of them is looked at."""

    def __init__(
        self, checkpoint: Checkpoint, pool: Executor, *, pin: bool = False, tap: Tap | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self._pool = pool
        self._pin = pin
        self._tap = tap
        self._reads: list[_Read] = []

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU buffer; its contents come from `read`.

        A normal tensor even where the caller is in inference mode: reader threads are not, and may
        not write to an inference tensor.
        """
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, pin_memory=self._pin)

    def read(self, name: str, out: torch.Tensor) -> None:
        """Note that the whole tensor `name` goes to `out`, a contiguous part of a buffer.

        The element count must match; the shape is the caller's to check.
        """
        self._reads.append(_Read(spec=self.checkpoint.spec(name), first=0, out=out))

    def read_rows(self, name: str, first: int, out: torch.Tensor) -> None:
        """Note that rows first .. first + len(out) - 1 of `name` go to `out`, one row a read."""
        spec = self.checkpoint.spec(name)
        self._reads += [
            _Read(spec=spec, first=first + row, out=out[row : row + 1])
            for row in range(out.shape[0])
        ]

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A buffer for one unquantized tensor of a known shape, cast to `dtype`."""
        spec = self.checkpoint.spec(name)
        expect_shape(spec, shape)
        if spec.dtype not in FLOAT_SOURCES:
            raise TensorError(f"{name}: dtype {spec.dtype}, expected BF16, F16 or F32")
        out = self.buffer(shape, dtype)
        self.read(name, out)
        return out

    def run(self) -> None:
        """Read everything noted. Raises the first error.

        Where somebody converts what is read, several places are read at once, so that the threads
        do not all write to one file, whose lock they would wait for.
        """
        reads = self._reads if self._tap is None else _dealt(self._reads, TAP_PLACES)
        list(self._pool.map(self._fetch, reads))  # asking for a result raises its error
        self._reads.clear()

    def _fetch(self, read: _Read) -> None:
        stored = TORCH_DTYPES[read.spec.dtype]
        raw = read.out
        if raw.dtype != stored:
            raw = torch.empty(read.out.shape, dtype=stored)
        flat = raw.view(-1).view(torch.uint8)
        view = memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
        rows = read.spec.shape[0] if read.spec.shape else 1
        self.checkpoint.read_into(read.spec, view, read.first * (read.spec.nbytes // rows))
        if self._tap is not None:
            whole = flat.numel() == read.spec.nbytes
            shape = read.spec.shape if whole else (-1, *read.spec.shape[1:])
            self._tap(read.spec, read.first, raw.view(shape))
        if raw is not read.out:
            read.out.copy_(raw)


def _dealt(reads: list[_Read], places: int) -> list[_Read]:
    """From `places` equal stretches in turn; neighbours stay `places` apart."""
    step = -(-len(reads) // places)
    return [read for first in range(step) for read in reads[first::step]]


def upload(tree: Tree, device: torch.device, stream: torch.cuda.Stream) -> Tree:
    """A copy of a dataclass (and those within) with every tensor on a CUDA device.

    Copies run on `stream`; memory is tied to the device's default stream, which will use it.
    """
    user = torch.cuda.default_stream(device)
    with torch.cuda.stream(stream):
        moved: Tree = _map_tensors(tree, lambda t: t.to(device, non_blocking=True))

    def tie(tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(user)
        return tensor

    _map_tensors(moved, tie)
    stream.synchronize()
    return moved


def tensor_bytes(tree: object) -> int:
    """Bytes of all tensors in a dataclass and those within."""
    total = 0

    def add(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    _map_tensors(tree, add)
    return total


def _map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(_map_tensors(item, change) for item in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {
            field.name: _map_tensors(getattr(tree, field.name), change)
            for field in dataclasses.fields(tree)
        }
        return dataclasses.replace(tree, **values)
    return tree
