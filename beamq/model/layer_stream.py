"""Layers of one model, or of several in turns, delivered while the next one is being read.

In: a `LayerLoader` for each model. Out: `LayerWeights` in order, sparse layers with their experts
whole or as an iterator of slices.

The one idea: one read-ahead for everything. At most one unit (a layer, or a slice of experts) is
loaded besides those in use, whether one model is streamed or several side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial

from beamq.interpreter import short_turns
from beamq.model.beam import LayerWeights, SparseMlp
from beamq.model.load import LayerLoader
from beamq.model.moe import ExpertSlice
from beamq.stream import read_ahead

Loaded = LayerWeights | ExpertSlice


class LayerStream:
    """Iterates over (index, weights) of a checkpoint's layers, the next one read ahead.

    With `experts`, only those of a sparse layer are loaded. With `slice_experts`, where there are
    more, a sparse layer's `experts` is an iterator that delivers that many at a time, once; what a
    consumer leaves of it is skipped. At most one unit (a layer, or a slice) is loaded besides the
    one in use, so drop a layer before asking for the next.
    """

    def __init__(
        self,
        loader: LayerLoader,
        *,
        layers: Sequence[int] | None = None,
        slice_experts: int | None = None,
        experts: range | None = None,
        ahead: int = 1,
    ) -> None:
        self.loader = loader
        self.config = loader.config
        self._layers = range(loader.config.num_layers) if layers is None else layers
        self._slice = slice_experts
        self._own = range(loader.config.num_experts) if experts is None else experts
        self._ahead = ahead

    @property
    def layers(self) -> Sequence[int]:
        """The layers that are delivered, in order."""
        return self._layers

    def __iter__(self) -> Iterator[tuple[int, LayerWeights]]:
        for _, index, weights in in_turns((self,), ahead=self._ahead):
            yield index, weights
            del weights  # before the next one is asked for, or two would live

    def take(
        self, index: int, units: Iterator[Loaded]
    ) -> tuple[LayerWeights, Iterator[ExpertSlice]]:
        """A layer from what `loads` gave, and its slices, which must be used up before the next."""
        weights = next(units)
        if not isinstance(weights, LayerWeights):
            raise TypeError("a slice of experts where a layer was due")
        slices = self._slices(index)
        if not slices:
            return weights, iter(())
        rest = _take(units, len(slices))
        if isinstance(weights.mlp, SparseMlp):
            weights = replace(weights, mlp=replace(weights.mlp, experts=rest))
        return weights, rest

    def loads(self, index: int) -> Iterator[Callable[[], Loaded]]:
        """What loads a layer, unit by unit."""
        slices = self._slices(index)
        yield partial(self.loader.layer, index, experts=range(0) if slices else self._own)
        for first, count in slices:
            yield partial(self.loader.experts, index, first, count)

    def experts_again(self, index: int) -> Iterator[ExpertSlice]:
        """The slices of a layer that is not loaded whole, read once more, not ahead."""
        for first, count in self._slices(index):
            yield self.loader.experts(index, first, count)

    def _slices(self, index: int) -> list[tuple[int, int]]:
        """(first, count) of a layer's slices; none if its experts come with it."""
        own, step = self._own, self._slice
        sparse = self.config.mlp_layer_types[index] == "sparse"
        if not sparse or step is None or step >= len(own):
            return []
        return [(first, min(step, own.stop - first)) for first in own[::step]]


def in_turns(
    streams: Sequence[LayerStream], *, ahead: int = 1
) -> Generator[tuple[int, int, LayerWeights], None, None]:
    """(place, layer, weights): the first layer of each stream, then the second of each, ...

    One read-ahead serves them all: at most `ahead` units are loaded besides those in use, however
    many models there are. All streams must have the same number of layers.
    """
    turns = [
        (place, index)
        for layers in zip(*(stream.layers for stream in streams), strict=True)
        for place, index in enumerate(layers)
    ]
    loads = (load for place, index in turns for load in streams[place].loads(index))
    units = read_ahead(loads, depth=ahead)
    with short_turns(any(stream.loader.device.type == "cuda" for stream in streams)):
        for place, index in turns:
            weights, rest = streams[place].take(index, units)
            yield place, index, weights
            del weights  # before the next one is asked for, or two would live
            for _ in rest:  # left by a consumer that needed no experts
                pass


def _take(units: Iterator[Loaded], count: int) -> Iterator[ExpertSlice]:
    for _ in range(count):
        unit = next(units)
        if not isinstance(unit, ExpertSlice):
            raise TypeError("a layer where a slice of experts was due")
        yield unit
        del unit
