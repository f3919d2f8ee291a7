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

An `PostLayerHook` may look at a layer's experts again once all batches have passed them; the layer
then goes the way of slices, with the same bits.

Several models can run side by side: `in_turns` delivers layer 0 of each, layer 1 of each, and so
on, from one read-ahead, and a `LayerPass` for each takes its model's batches a layer further.

Limits: prefill of whole sequences; one device to a process. Tokens of a batch are computed at
once, so a batch's size sets the memory of activations.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from beamq.model.attention import SequenceLayout, position_table
from beamq.model.expert_parallel import ExpertExchange, SingleProcess
from beamq.model.gemm.backend import Gemm
from beamq.model.layer import (
    LayerWeights,
    SparseMlp,
    attention_half,
    close_mlp,
    decoder_layer,
    mlp_input,
)
from beamq.model.layer_stream import LayerStream
from beamq.model.moe import Dispatch, ExpertSlice, add_slice, choose, finish, sort_choices
from beamq.model.observers import Observer, Observers

# Tensors that wait for their turn: on the device as far as a budget goes, on the host beyond.
#
# In and out: tensors by number. Spilled ones lie in page-locked memory, since copies from pageable
# memory would take longer than a layer does.


class OffloadBuffer:
    """Tensors by number, on the device until `budget` bytes are taken, on the host beyond."""

    def __init__(self, device: torch.device, budget: int | None) -> None:
        self._device = device
        self._left = math.inf if budget is None else budget
        self._held: dict[int, torch.Tensor] = {}
        self._spilled: set[int] = set()

    def put(self, key: int, tensor: torch.Tensor) -> None:
        """Store or replace a tensor; its place is chosen the first time."""
        if tensor is self._held.get(key):
            return
        if key in self._spilled:
            self._held[key].copy_(tensor)
        elif key in self._held or tensor.nbytes <= self._left:
            self._left -= 0 if key in self._held else tensor.nbytes
            self._held[key] = tensor.to(self._device)
        else:
            # Pinned, since pageable memory would cost more time than the layer takes.
            pin = self._device.type == "cuda"
            spill = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            self._held[key] = spill.copy_(tensor)
            self._spilled.add(key)

    def drop(self, key: int) -> None:
        """Forget a tensor; its place is free."""
        held = self._held.pop(key)
        if key not in self._spilled:
            self._left += held.nbytes
        self._spilled.discard(key)

    def get(self, key: int) -> torch.Tensor:
        """The tensor, on the device."""
        return self._held[key].to(self._device)

    def peek(self, key: int) -> torch.Tensor:
        """The tensor, wherever it is."""
        return self._held[key]


# Hidden states of all batches of a pass: where they lie, and who knows them.
#
# In: batches, a `OffloadBuffer`, an `ExpertExchange`. Out: states by batch number, on the device.
#
# The one idea: a batch is worked on where it is at home (`exchange.mine`), and told to the other
# processes only when they need it. `told` in between: alone, or undivided, everybody knows all.

TRANSFERS = 4
"""Batches whose states may be on their way between processes at once."""

Work = Callable[[int, torch.Tensor], torch.Tensor]
"""From a batch's number and states [T, K] to its new states."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """Hidden states of some packed sequences; `run_layers` moves them from layer to layer."""

    h_TK: torch.Tensor
    layout: SequenceLayout


class HiddenStates:
    """Holds the states of `batches` on `buffer`, under their numbers, until `hand_over`."""

    def __init__(
        self, batches: Sequence[Batch], buffer: OffloadBuffer, exchange: ExpertExchange
    ) -> None:
        self._batches = batches
        self._buffer = buffer
        self._exchange = exchange
        self._told = True
        self.take_back()

    def get(self, number: int) -> torch.Tensor:
        """States [T, K] of one batch, on the device; not to be changed."""
        return self._buffer.get(number)

    def hand_over(self) -> None:
        """Give the batches their states, wherever those are."""
        for number, batch in enumerate(self._batches):
            batch.h_TK = self._buffer.peek(number)

    def take_back(self) -> None:
        """Take states from the batches again, which are empty until then."""
        for number, batch in enumerate(self._batches):
            self._buffer.put(number, batch.h_TK)
            batch.h_TK = batch.h_TK.new_empty(0)

    def update(self, work: Work) -> None:
        """New states of the batches that are at home; the others do not learn of them yet."""
        for number in filter(self._exchange.mine, range(len(self._batches))):
            self._buffer.put(number, work(number, self._buffer.get(number)))
        self._told = not self._exchange.divided

    def update_all(self, work: Work) -> None:
        """New states of the batches that are at home, told to every process.

        Transfers run beside the next batches' work.
        """
        told: deque[tuple[int, torch.Tensor, Callable[[], None]]] = deque()

        def keep() -> None:
            number, h_TK, wait = told.popleft()
            wait()
            self._buffer.put(number, h_TK)

        for number in range(len(self._batches)):
            h_TK = self._buffer.get(number)
            if self._exchange.mine(number):
                h_TK = work(number, h_TK)
            told.append((number, h_TK, self._exchange.spread(number, h_TK)))
            if len(told) > (TRANSFERS if self._exchange.divided else 0):
                keep()
        while told:
            keep()
        self._told = True

    def tell(self) -> None:
        """Tell every process what it does not know yet."""
        if not self._told:
            self.update_all(lambda number, h_TK: h_TK)


# A second look at a layer's experts, once all batches have passed them.
#
# In: nothing; out: the `PostLayerHook` protocol that `run.LayerPass` calls.
#
# The one idea: when the last batch has left a layer's experts, all that is to be known of their
# inputs is known, and their weights are still at hand (or, where they come in slices, are read once
# more). Whoever needs both at once looks here, and the pass goes on as if nothing had been.
#
# Where processes share a pass each one shows its own experts, and all of them visit the same
# layers: a visitor may exchange what it finds.

Parts = Callable[[], Iterable[ExpertSlice]]
"""This process's experts of the layer in ascending order, whole or in slices; anew at each call."""

Inputs = Callable[[], Iterator[tuple[torch.Tensor, Dispatch]]]
"""Each batch's input of the experts, [T, K], and which expert reads what; anew at every call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """`rows_E`: how many rows each of the layer's experts reads, whoever has it.

    `exchange` reaches the other processes in the order of experts.
    """

    layer: int
    parts: Parts
    inputs: Inputs
    rows_E: tuple[int, ...]
    exchange: ExpertExchange
    device: torch.device


class PostLayerHook(Protocol):
    """Called for a sparse layer between its experts and the end of its sublayer."""

    def wants(self, layer: int) -> bool:
        """Whether to be called for this layer; every process answers alike."""

    def run(self, seen: LayerExperts) -> None:
        """Look; nothing may be changed."""


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
    hook: PostLayerHook | None = None,
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
        hook=hook,
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
        hook: PostLayerHook | None = None,
    ) -> None:
        device = stream.loader.device
        longest = max((batch.layout.longest for batch in batches), default=0)
        self._stream = stream
        self._config = stream.config
        self._gemm = gemm
        self._hook = hook
        self._table = position_table(stream.config, longest, device)
        self._observer = Observers(observers) if observers else None
        self._buffer = OffloadBuffer(device, resident_bytes)
        self._exchange = exchange or SingleProcess(stream.config)
        self._batches = batches
        self.states = HiddenStates(batches, self._buffer, self._exchange)

    def apply(self, weights: LayerWeights) -> None:
        """Take every batch through the next layer."""
        with torch.inference_mode():
            self._layer(weights, self._batches)

    def _layer(self, weights: LayerWeights, batches: Sequence[Batch]) -> None:
        mlp = weights.mlp
        visited = self._hook is not None and self._hook.wants(weights.index)
        shared = visited or not isinstance(self._exchange, SingleProcess)
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
        if self._hook is not None and self._hook.wants(weights.index):
            self._run_hook(self._hook, weights, mlp, plans)
        if not isinstance(self._exchange, SingleProcess):
            for number in range(sums):
                sum_TK = self._buffer.get(number + sums)
                self._exchange.bring_home(number, sum_TK)
                self._buffer.put(number + sums, sum_TK)

        def closed(number: int, h_TK: torch.Tensor) -> torch.Tensor:
            out_TK = finish(self._buffer.get(number + sums), h_TK.dtype, self._config)
            return close_mlp(h_TK, out_TK, weights, self._config)

        self.states.update(closed)
        for number in range(sums):  # other passes may run before this one's next layer
            self._buffer.drop(number + sums)

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
            self._buffer.put(number + len(batches), empty)
        return plans

    def _run_hook(
        self,
        hook: PostLayerHook,
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

        hook.run(
            LayerExperts(
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
                sum_TK = self._buffer.get(number + sums)
                exchange.receive(sum_TK)
                exchange.send(sum_TK)
        for part in mlp.experts:
            for number, plan in enumerate(plans):
                sum_TK = self._buffer.get(number + sums)
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
                self._buffer.put(number + sums, sum_TK)
            del part
