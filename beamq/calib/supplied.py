"""A layer loader that says which shards it will read, so that a remote source is fetched in time.

In: a checkpoint, the layers to come. Out: a `LayerLoader` for use in a `with` block. Shards are
fetched ahead of the layers that need them and dropped behind them (`Checkpoint.supply`); of a
folder all this is nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from beamq.checkpoint import Checkpoint
from beamq.config import BeamConfig
from beamq.model.beam import LayerWeights
from beamq.model.load import LayerLoader
from beamq.model.moe import ExpertSlice
from beamq.roles import classify
from beamq.source_files import NoSupply, Supply

EMBEDDING = "model.embed_tokens.weight"


class SuppliedLoader(LayerLoader):
    """Loads layers `first` and up (and the embedding, where `first` is 0), each once, in order.

    `experts` are those that will be asked for in slices. With `keep_rest`, shards of what no layer
    needs (the head) are fetched as well and left for whoever reads them next.
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
        self._supply: Supply = NoSupply()
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
        self._fetching: AbstractContextManager[Supply] = checkpoint.supply(self._units)

    def __enter__(self) -> SuppliedLoader:
        self._supply = self._fetching.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        self._fetching.__exit__(*error)

    def embedding(self) -> torch.Tensor:
        """See `LayerLoader`; before any layer."""
        self._supply.wait(0, self._stopped)
        table = super().embedding()
        self._supply.finish(0)
        return table

    def layer(self, index: int, *, experts: range | None = None) -> LayerWeights:
        """See `LayerLoader`."""
        unit = self._unit(index)
        self._supply.wait(unit, self._stopped)
        built = super().layer(index, experts=experts)
        if experts is None or not self._own or experts.stop == self._own.stop:
            self._supply.finish(unit)
        return built

    def experts(self, index: int, first: int, count: int) -> ExpertSlice:
        """See `LayerLoader`; after the layer's own part, in ascending order."""
        built = super().experts(index, first, count)
        if first + count == self._own.stop:
            self._supply.finish(self._unit(index))
        return built

    def _unit(self, index: int) -> int:
        return index - self._first + (0 if self._first else 1)
