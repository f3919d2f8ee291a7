"""Layers of one or several models in order, each read while the one before is being computed.

In: a `LayerLoader` for each model. Out: `LayerWeights` in order, sparse layers with their experts
whole or as an iterator of slices.

The one idea: one read-ahead for everything. At most one unit (a layer, or a slice of experts) is
loaded besides those in use, whether one model is streamed or several side by side.
`PrefetchingLoader` announces the shards that its layers need, so that those of a remote source are
fetched ahead of use and dropped afterwards.

`experts_per_slice` finds how many experts fit a memory budget. It counts what is alive at once: two
units of weights and the temporaries of one batch at the widest point of a layer, in the worst case
that every choice of every token falls into one slice. Estimates are upper bounds of tensors, not of
what an allocator reserves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from beamq.beam.config import BeamConfig
from beamq.beam.tensors import FP32_ROLES, Role, classify
from beamq.errors import MemoryBudgetError
from beamq.io.checkpoint import FLOAT_SOURCES, Checkpoint
from beamq.io.source import Prefetch
from beamq.model.gemm.backend import CHUNK_ELEMENTS
from beamq.model.layer import LayerWeights, SparseMlp
from beamq.model.loader import LayerLoader
from beamq.model.moe import ExpertSlice
from beamq.signals import short_turns
from beamq.units import show_bytes

EMBEDDING = "model.embed_tokens.weight"

Unit = LayerWeights | ExpertSlice
Loaded = TypeVar("Loaded")
_UNITS = 2  # one in use, one read ahead
_FP32 = 4


class PrefetchingLoader(LayerLoader):
    """Loads layers `first` and up (and the embedding, where `first` is 0), each once, in order.

    For use in a `with` block. `experts` are those that will be loaded in slices. With `keep_rest`,
    shards that no layer needs (the head's) are fetched as well and kept for later readers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: BeamConfig,
        *,
        first: int,
        experts: range,
        keep_rest: bool,
        stopped: Callable[[], bool],
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, config, **options)
        self._own = experts
        self._stopped = stopped
        self._first = first
        self._prefetch = Prefetch()
        units: list[set[str]] = [set() for _ in range(config.num_layers + 2)]
        for spec in checkpoint.tensors.values():
            layer = classify(spec.name).layer
            if layer is not None and layer < config.num_layers:
                units[layer + 1].add(spec.file)
            elif spec.name == EMBEDDING:
                units[0].add(spec.file)
            elif keep_rest:
                units[-1].add(spec.file)
        self._units = units[first + 1 if first else 0 :]
        self._fetching: AbstractContextManager[Prefetch] = checkpoint.prefetch(self._units)

    def __enter__(self) -> PrefetchingLoader:
        self._prefetch = self._fetching.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        self._fetching.__exit__(*error)

    def embedding(self) -> torch.Tensor:
        """See `LayerLoader`; before any layer."""
        self._prefetch.wait(0, self._stopped)
        table = super().embedding()
        self._prefetch.finish(0)
        return table

    def layer(self, index: int, *, experts: range | None = None) -> LayerWeights:
        unit = self._unit(index)
        self._prefetch.wait(unit, self._stopped)
        built = super().layer(index, experts=experts)
        if experts is None or not self._own or experts.stop == self._own.stop:
            self._prefetch.finish(unit)
        return built

    def experts(self, index: int, first: int, count: int) -> ExpertSlice:
        """See `LayerLoader`; after the layer's own part, in ascending order."""
        built = super().experts(index, first, count)
        if first + count == self._own.stop:
            self._prefetch.finish(self._unit(index))
        return built

    def _unit(self, index: int) -> int:
        return index - self._first + (0 if self._first else 1)


class LayerStream:
    """Iterates over (index, weights) of a checkpoint's layers, the next one read ahead.

    With `experts`, only those of a sparse layer are loaded. If they are more than `slice_experts`,
    its `experts` is an iterator that delivers that many at a time, once; slices that the consumer
    does not take are skipped. Drop a layer before asking for the next, or two are alive.
    """

    def __init__(
        self,
        loader: LayerLoader,
        *,
        layers: Sequence[int] | None = None,
        slice_experts: int | None = None,
        experts: range | None = None,
    ) -> None:
        self.loader = loader
        self.config = loader.config
        self.layers = range(loader.config.num_layers) if layers is None else layers
        self._slice = slice_experts
        self._own = range(loader.config.num_experts) if experts is None else experts

    def __iter__(self) -> Iterator[tuple[int, LayerWeights]]:
        for _, index, weights in in_turns((self,)):
            yield index, weights
            del weights  # before the next one is loaded, or two would be alive

    def take(self, index: int, units: Iterator[Unit]) -> tuple[LayerWeights, Iterator[ExpertSlice]]:
        """A layer from the results of `loads`, and its slices, to be used up before the next."""
        weights = next(units)
        assert isinstance(weights, LayerWeights)
        slices = self._slices(index)
        if not slices:
            return weights, iter(())
        rest = _take(units, len(slices))
        if isinstance(weights.mlp, SparseMlp):
            weights = replace(weights, mlp=replace(weights.mlp, experts=rest))
        return weights, rest

    def loads(self, index: int) -> Iterator[Callable[[], Unit]]:
        """Functions that load a layer, unit by unit."""
        slices = self._slices(index)
        yield partial(self.loader.layer, index, experts=range(0) if slices else self._own)
        for first, count in slices:
            yield partial(self.loader.experts, index, first, count)

    def experts_again(self, index: int) -> Iterator[ExpertSlice]:
        """The slices of a layer that is not loaded whole, read once more, without read-ahead."""
        for first, count in self._slices(index):
            yield self.loader.experts(index, first, count)

    def _slices(self, index: int) -> list[tuple[int, int]]:
        """(first, count) of a layer's slices; empty if its experts are loaded with it."""
        own, step = self._own, self._slice
        sparse = self.config.mlp_layer_types[index] == "sparse"
        if not sparse or step is None or step >= len(own):
            return []
        return [(first, min(step, own.stop - first)) for first in own[::step]]


def in_turns(
    streams: Sequence[LayerStream],
) -> Generator[tuple[int, int, LayerWeights], None, None]:
    """(place, layer, weights): the first layer of each stream, then the second of each, and so on.

    At most one unit is loaded besides those in use, however many models there are. All streams must
    have the same number of layers.
    """
    turns = [
        (place, index)
        for layers in zip(*(stream.layers for stream in streams), strict=True)
        for place, index in enumerate(layers)
    ]
    loads = (load for place, index in turns for load in streams[place].loads(index))
    units = read_ahead(loads, depth=1)
    with short_turns(any(stream.loader.device.type == "cuda" for stream in streams)):
        for place, index in turns:
            weights, rest = streams[place].take(index, units)
            yield place, index, weights
            del weights  # before the next one is loaded, or two would be alive
            for _ in rest:  # slices that the consumer did not take
                pass


def _take(units: Iterator[Unit], count: int) -> Iterator[ExpertSlice]:
    for _ in range(count):
        unit = next(units)
        assert isinstance(unit, ExpertSlice)
        yield unit
        del unit


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBytes:
    """Loaded sizes: of the largest layer without its experts, of one expert, of the head."""

    base: int
    expert: int
    head: int


def layer_bytes(checkpoint: Checkpoint, config: BeamConfig, dtype: torch.dtype) -> LoadedBytes:
    """Sizes after loading: unquantized tensors in `dtype`, quantized ones as stored."""
    base: dict[int, int] = {}
    experts: dict[int, int] = {}
    for spec in checkpoint.tensors.values():
        role = classify(spec.name)
        if role.layer is None:
            continue
        # Scale tensors have no role, but a layer.
        expert = role.role is Role.EXPERT or ".mlp.experts." in spec.name
        sizes = experts if expert else base
        size = spec.nbytes
        if spec.dtype in FLOAT_SOURCES:
            size = spec.numel * (_FP32 if role.role in FP32_ROLES else dtype.itemsize)
        sizes[role.layer] = sizes.get(role.layer, 0) + size
    return LoadedBytes(
        base=max(base.values(), default=0),
        expert=-(-max(experts.values(), default=0) // config.num_experts),
        head=config.vocab_size * config.hidden_size * dtype.itemsize + CHUNK_ELEMENTS * 2 * _FP32,
    )


def activation_bytes(config: BeamConfig, tokens: int, dtype: torch.dtype) -> int:
    """Upper bound of a layer's temporaries for one batch."""
    item = dtype.itemsize
    q, kv, hidden = config.q_dim, config.kv_dim, config.hidden_size
    attention = tokens * (item * (3 * hidden + 5 * q + 4 * kv) + _FP32 * 3 * q)
    rows, width = tokens * config.top_k, config.moe_intermediate_size
    sparse = tokens * (2 * item + 2 * _FP32) * hidden + rows * item * (2 * hidden + 3 * width)
    dense = tokens * item * (3 * hidden + 3 * config.intermediate_size)
    return max(attention, sparse, dense) + 3 * CHUNK_ELEMENTS * _FP32


def experts_per_slice(
    checkpoint: Checkpoint, config: BeamConfig, dtype: torch.dtype, budget: int, tokens: int
) -> int | None:
    """Experts to a slice under `budget` bytes, or None if whole layers fit.

    Raises `MemoryBudgetError` if not even one expert at a time does.
    """
    sizes = layer_bytes(checkpoint, config, dtype)
    room = budget - activation_bytes(config, tokens, dtype) - _UNITS * sizes.base
    if room >= _UNITS * sizes.expert * config.num_experts:
        return None
    count = room // max(1, _UNITS * sizes.expert)
    if count < 1 or sizes.head > budget:
        least = max(budget - room + _UNITS * sizes.expert, sizes.head)
        raise MemoryBudgetError(
            f"{show_bytes(budget)} of device memory for batches of {tokens} tokens: at least"
            f" {show_bytes(least)} are needed; allow more, or shorten the batches"
        )
    return int(count)


def read_ahead(loads: Iterable[Callable[[], Loaded]], *, depth: int = 1) -> Iterator[Loaded]:
    """Yield each load's result in order, up to `depth` of them loaded ahead (0: none, no thread).

    One background thread loads, so memory is set by the size of a unit, not by their number. Raises
    what a load raises, when its turn comes. A consumer that stops early stops the loads.
    """
    if depth < 1:
        for load in loads:
            yield load()
        return
    pool = ThreadPoolExecutor(1, thread_name_prefix="beamq-read-ahead")
    ahead: deque[Future[Loaded]] = deque()
    try:
        for load in loads:
            ahead.append(pool.submit(load))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
