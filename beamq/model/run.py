"""Layers outside, batches inside: `LayerStream` delivers weights, `run_layers` applies them.

In: a `LayerStream` and batches of hidden states. Out: the same batches after every layer.

The one idea: each layer is read once, applied to every batch of the data set, and dropped while
the next is already being read. What lives on is the hidden states, which stay on the device or,
beyond a budget, wait on the host.

Where even one layer is too much (`max_device_memory`), its experts pass through in slices: each
batch is taken to the router, then slices outside and batches inside, then each batch is closed.
An FP32 sum a token is kept meanwhile. The result has the same bits as without slices.

Several processes can share a pass, each with some of every layer's experts and some of the batches:
an `ExpertExchange` carries the sums from one to the next, in the order of experts, so the bits are
again the same.

An `ExpertVisitor` may look at a layer's experts again once all batches have passed them; the layer
then goes the way of slices, with the same bits.

Several models can run side by side: `in_turns` delivers layer 0 of each, layer 1 of each, and so
on, from one read-ahead, and a `LayerPass` for each takes its model's batches a layer further.

Limits: prefill of whole sequences; one device to a process. Tokens of a batch are computed at
once, so a batch's size sets the memory of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from beamq.model.attention import position_table
from beamq.model.beam import (
    LayerWeights,
    SparseMlp,
    attention_half,
    close_mlp,
    decoder_layer,
    mlp_input,
)
from beamq.model.exchange import Alone, ExpertExchange
from beamq.model.layer_stream import LayerStream
from beamq.model.linear import Gemm
from beamq.model.moe import Dispatch, ExpertSlice, add_slice, choose, finish, sort_choices
from beamq.model.observe import Observer, Observers
from beamq.model.shelf import Shelf
from beamq.model.states import Batch, HiddenStates
from beamq.model.visit import ExpertVisitor, VisitedLayer


def run_layers(
    stream: LayerStream,
    batches: Sequence[Batch],
    *,
    gemm: Gemm,
    observers: Sequence[Observer] = (),
    resident_bytes: int | None = None,
    done: Callable[[int], None] | None = None,
    whole: Callable[[int], bool] = lambda layer: True,
    exchange: ExpertExchange | None = None,
    visitor: ExpertVisitor | None = None,
) -> None:
    """Pass all batches through the layers of `stream`, in place.

    `resident_bytes` bounds what hidden states (and sums between slices) take of the device; the
    rest waits on the host, and is left there at the end. `done(layer)` is called after each layer,
    for journals and progress; the batches hold that layer's result meanwhile. With `exchange`, the
    stream must be one of `exchange.experts`, and `whole(layer)` says, alike at all processes,
    whether `done` looks at all batches, or only at those that are at home.
    """
    run = LayerPass(
        stream,
        batches,
        gemm=gemm,
        observers=observers,
        resident_bytes=resident_bytes,
        exchange=exchange,
        visitor=visitor,
    )
    with torch.inference_mode():
        for index, weights in stream:
            run.apply(weights)
            del weights
            if done is not None:
                if whole(index):
                    run.states.tell()
                run.states.hand_over()
                done(index)
                run.states.take_back()
        run.states.tell()
    run.states.hand_over()


class LayerPass:
    """Batches of one model on their way through its layers: see `run_layers`.

    While a pass holds them in `states`, the batches are empty.
    """

    def __init__(
        self,
        stream: LayerStream,
        batches: Sequence[Batch],
        *,
        gemm: Gemm,
        observers: Sequence[Observer] = (),
        resident_bytes: int | None = None,
        exchange: ExpertExchange | None = None,
        visitor: ExpertVisitor | None = None,
    ) -> None:
        device = stream.loader.device
        longest = max((batch.layout.longest for batch in batches), default=0)
        self._stream = stream
        self._config = stream.config
        self._gemm = gemm
        self._visitor = visitor
        self._table = position_table(stream.config, longest, device)
        self._observer = Observers(observers) if observers else None
        self._shelf = Shelf(device, resident_bytes)
        self._exchange = exchange or Alone(stream.config)
        self._batches = batches
        self.states = HiddenStates(batches, self._shelf, self._exchange)

    def apply(self, weights: LayerWeights) -> None:
        """Take every batch through the next layer."""
        with torch.inference_mode():
            self._layer(weights, self._batches)

    def _layer(self, weights: LayerWeights, batches: Sequence[Batch]) -> None:
        mlp = weights.mlp
        visited = self._visitor is not None and self._visitor.wants(weights.index)
        shared = visited or not isinstance(self._exchange, Alone)
        if isinstance(mlp, SparseMlp) and (shared or not isinstance(mlp.experts, tuple)):
            self._sliced(weights, mlp, batches)
            return

        def whole(number: int, h_TK: torch.Tensor) -> torch.Tensor:
            return decoder_layer(
                h_TK,
                weights,
                self._config,
                batches[number].layout,
                self._table,
                gemm=self._gemm,
                observer=self._observer,
            )

        self.states.update(whole)

    def _sliced(self, weights: LayerWeights, mlp: SparseMlp, batches: Sequence[Batch]) -> None:
        """A sparse layer whose experts come in slices, or are visited: batches inside."""
        plans = self._plans(weights, mlp, batches)
        sums = len(batches)  # the sum of batch n is kept under n + sums
        self._experts(weights, mlp, plans)
        if self._visitor is not None and self._visitor.wants(weights.index):
            self._visit(self._visitor, weights, mlp, plans)
        if not isinstance(self._exchange, Alone):
            for number in range(sums):
                sum_TK = self._shelf.get(number + sums)
                self._exchange.bring_home(number, sum_TK)
                self._shelf.put(number + sums, sum_TK)

        def closed(number: int, h_TK: torch.Tensor) -> torch.Tensor:
            out_TK = finish(self._shelf.get(number + sums), h_TK.dtype, self._config)
            return close_mlp(h_TK, out_TK, weights, self._config)

        self.states.update(closed)
        for number in range(sums):  # other passes may run before this one's next layer
            self._shelf.drop(number + sums)

    def _plans(
        self, weights: LayerWeights, mlp: SparseMlp, batches: Sequence[Batch]
    ) -> list[Dispatch]:
        """Batches up to their experts: the states behind attention, empty sums, choices."""
        chosen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def routed(number: int, h_TK: torch.Tensor) -> torch.Tensor:
            h_TK = attention_half(
                h_TK,
                weights,
                self._config,
                batches[number].layout,
                self._table,
                gemm=self._gemm,
                observer=self._observer,
            )
            routing = choose(
                mlp_input(h_TK, weights, self._config),
                mlp.router,
                self._config,
                layer=weights.index,
                observer=self._observer,
            )
            chosen[number] = routing.experts_Tk.contiguous(), routing.weights_Tk.contiguous()
            return h_TK

        self.states.update_all(routed)
        plans = []
        device, config = self._stream.loader.device, self._config
        for number, batch in enumerate(batches):
            shape = (batch.layout.tokens, config.top_k)
            if number not in chosen:
                chosen[number] = (
                    torch.empty(shape, dtype=torch.int64, device=device),
                    torch.empty(shape, device=device),
                )
            experts_Tk, weights_Tk = chosen.pop(number)
            self._exchange.spread(number, experts_Tk, weights_Tk)()
            plans.append(sort_choices(experts_Tk, weights_Tk, config.num_experts))
            empty = torch.zeros(shape[0], config.hidden_size, device=device)
            self._shelf.put(number + len(batches), empty)
        return plans

    def _visit(
        self,
        visitor: ExpertVisitor,
        weights: LayerWeights,
        mlp: SparseMlp,
        plans: Sequence[Dispatch],
    ) -> None:
        whole = mlp.experts if isinstance(mlp.experts, tuple) else None

        def parts() -> Iterable[ExpertSlice]:
            return self._stream.experts_again(weights.index) if whole is None else whole

        def inputs() -> Iterator[tuple[torch.Tensor, Dispatch]]:
            for number, plan in enumerate(plans):
                yield mlp_input(self.states.get(number), weights, self._config), plan

        visitor.visit(
            VisitedLayer(
                layer=weights.index,
                parts=parts,
                inputs=inputs,
                rows_E=tuple(
                    sum(plan.offsets[expert + 1] - plan.offsets[expert] for plan in plans)
                    for expert in range(self._config.num_experts)
                ),
                exchange=self._exchange,
                device=self._stream.loader.device,
            )
        )

    def _experts(self, weights: LayerWeights, mlp: SparseMlp, plans: Sequence[Dispatch]) -> None:
        """Slices outside, batches inside; the sums of batches lie behind their states."""
        exchange, own, sums = self._exchange, self._exchange.experts, len(plans)
        if not own:
            for number in range(sums):
                sum_TK = self._shelf.get(number + sums)
                exchange.receive(sum_TK)
                exchange.send(sum_TK)
        for part in mlp.experts:
            for number, plan in enumerate(plans):
                sum_TK = self._shelf.get(number + sums)
                if part.first == own.start:
                    exchange.receive(sum_TK)
                add_slice(
                    sum_TK,
                    mlp_input(self.states.get(number), weights, self._config),
                    plan,
                    part,
                    gemm=self._gemm,
                    layer=weights.index,
                    observer=self._observer,
                )
                if part.first + part.count == own.stop:
                    exchange.send(sum_TK)
                self._shelf.put(number + sums, sum_TK)
            del part
