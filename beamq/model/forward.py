"""Layers outside, batches inside: a `LayerPass` takes batches through the layers of a stream.

In: a `LayerStream` and batches of hidden states. Out: the same batches after every layer.

The one idea: each layer is read once, applied to every batch of the data set, and dropped while the
next is being read. Only the hidden states live on. They stay on the device as far as a budget
allows, and wait in pinned host memory otherwise (`OffloadBuffer`).

Where even one layer is too large (`max_device_memory`), its experts pass through in slices: each
batch is taken to the router, then slices outside and batches inside add to an FP32 sum for each
token, then each batch is closed. The result has the same bits as without slices.

Several processes can share a pass (`ExpertExchange`), each with some of every layer's experts and
some of the batches, again with the same bits. A batch's states are computed at its home process and
broadcast when others need them (`HiddenStates`).

A `PostLayerHook` sees a layer's experts again when all batches have passed them and all of their
inputs are known. Such a layer is computed like one with slices.

Limits: prefill of whole sequences; one device to a process. The tokens of a batch are computed
together, so the size of a batch sets the memory of activations.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from beamq.model.context import Observer, PassContext, SequenceLayout, position_table
from beamq.model.expert_parallel import ExpertExchange
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
from beamq.model.moe import Dispatch, ExpertSlice, add_slice, choose, dispatch, finish

TRANSFERS = 4
"""Batches whose states may be on their way between processes at the same time."""


class OffloadBuffer:
    """Tensors by number: on the device until `budget` bytes are used, then in pinned host memory.

    Pinned, since copies from pageable memory would take longer than a layer does.
    """

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
            pin = self._device.type == "cuda"
            spill = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
            self._held[key] = spill.copy_(tensor)
            self._spilled.add(key)

    def drop(self, key: int) -> None:
        """Forget a tensor and free its place."""
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


Work = Callable[[int, torch.Tensor], torch.Tensor]
"""From a batch's number and states [T, K] to its new states."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """Hidden states [T, K] of some packed sequences. Empty while a pass holds the states.

    Observers do not see a batch of a held-out text; `held_out` is the text's number.
    """

    h_TK: torch.Tensor
    layout: SequenceLayout
    held_out: int | None = None


class HiddenStates:
    """The states of all batches of a pass, kept in `buffer` under the batches' numbers.

    `_synced`: every process has the current states of all batches, not only of those at home.
    """

    def __init__(
        self, batches: Sequence[Batch], buffer: OffloadBuffer, exchange: ExpertExchange
    ) -> None:
        self._batches = batches
        self._buffer = buffer
        self._exchange = exchange
        self._synced = True
        self.take_back()

    def get(self, number: int) -> torch.Tensor:
        """States [T, K] of one batch, on the device; not to be changed."""
        return self._buffer.get(number)

    def hand_over(self) -> None:
        """Give the batches their states, wherever those are."""
        for number, batch in enumerate(self._batches):
            batch.h_TK = self._buffer.peek(number)

    def take_back(self) -> None:
        """Take the states from the batches, which are empty from then on."""
        for number, batch in enumerate(self._batches):
            self._buffer.put(number, batch.h_TK)
            batch.h_TK = batch.h_TK.new_empty(0)

    def update(self, work: Work) -> None:
        """New states of the batches that are at home. Other processes do not get them yet."""
        for number in filter(self._exchange.mine, range(len(self._batches))):
            self._buffer.put(number, work(number, self._buffer.get(number)))
        self._synced = not self._exchange.divided

    def update_all(self, work: Work) -> None:
        """New states of the batches that are at home, broadcast to every process.

        Transfers overlap with the next batches' work.
        """
        pending: deque[tuple[int, torch.Tensor, Callable[[], None]]] = deque()

        def keep() -> None:
            number, h_TK, wait = pending.popleft()
            wait()
            self._buffer.put(number, h_TK)

        for number in range(len(self._batches)):
            h_TK = self._buffer.get(number)
            if self._exchange.mine(number):
                h_TK = work(number, h_TK)
            pending.append((number, h_TK, self._exchange.spread(number, h_TK)))
            if len(pending) > (TRANSFERS if self._exchange.divided else 0):
                keep()
        while pending:
            keep()
        self._synced = True

    def sync(self) -> None:
        """Give every process the current states of all batches."""
        if not self._synced:
            self.update_all(lambda number, h_TK: h_TK)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """A sparse layer after all batches have passed its experts, as a `PostLayerHook` sees it.

    `parts()` gives this process's experts in ascending order, whole or in slices; `inputs()` gives
    each batch's input of the experts [T, K] with its `Dispatch`; `held_out()` gives the same of
    the batches of held-out texts, each with its text's number. All start anew at each call.
    `rows_E` is how many rows each of the layer's experts reads, at whichever process it is, without
    held-out ones.
    `exchange` reaches the other processes in the order of experts.
    """

    layer: int
    parts: Callable[[], Iterable[ExpertSlice]]
    inputs: Callable[[], Iterator[tuple[torch.Tensor, Dispatch]]]
    held_out: Callable[[], Iterator[tuple[int, torch.Tensor, Dispatch]]]
    rows_E: tuple[int, ...]
    held_out_texts: int
    exchange: ExpertExchange
    device: torch.device


class PostLayerHook(Protocol):
    """Called for a sparse layer between its experts and the end of its sublayer.

    Where processes share a pass, each gets its own experts, and all call the hook for the same
    layers, so that hooks can exchange what they find.
    """

    def wants(self, layer: int) -> bool:
        """Whether to be called for this layer; the same answer at every process."""

    def run(self, seen: LayerExperts) -> None:
        """Look at the experts and their inputs; nothing may be changed."""


class LayerPass:
    """Batches of one model on their way through its layers.

    `resident_bytes` bounds the device memory of hidden states, and of sums between slices; the rest
    waits on the host, and is left there at the end. With an `exchange` of several processes,
    `stream` must deliver `exchange.experts` only. While the pass holds the states, the batches are
    empty.
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
        device, config = stream.loader.device, stream.config
        longest = max((batch.layout.longest for batch in batches), default=0)
        self._stream = stream
        self._config = config
        self._hook = hook
        self._context = PassContext(
            config=config,
            table=position_table(config, longest, device),
            gemm=gemm,
            observers=tuple(observers),
        )
        self._unobserved = replace(self._context, observers=())
        self._buffer = OffloadBuffer(device, resident_bytes)
        self._exchange = exchange or ExpertExchange(config)
        self._batches = batches
        self.states = HiddenStates(batches, self._buffer, self._exchange)

    def run(
        self,
        *,
        done: Callable[[int], None] | None = None,
        whole: Callable[[int], bool] = lambda layer: True,
    ) -> None:
        """Take all batches through all layers of the stream, in place.

        `done(layer)` is called after each layer, for journals and progress; the batches hold that
        layer's result meanwhile. `whole(layer)` says whether `done` looks at all batches or only at
        those at home; it must answer the same at all processes.
        """
        with torch.inference_mode():
            for index, weights in self._stream:
                self.apply(weights)
                del weights
                if done is not None:
                    if whole(index):
                        self.states.sync()
                    self.states.hand_over()
                    done(index)
                    self.states.take_back()
            self.states.sync()
        self.states.hand_over()

    def apply(self, weights: LayerWeights) -> None:
        """Take every batch through the next layer."""
        mlp, hook = weights.mlp, self._hook
        if hook is not None and not hook.wants(weights.index):
            hook = None
        with torch.inference_mode():
            if isinstance(mlp, SparseMlp) and (
                hook is not None or self._exchange.shared or not isinstance(mlp.experts, tuple)
            ):
                self._sliced(weights, mlp, hook)
            else:
                self.states.update(
                    lambda number, h_TK: decoder_layer(
                        h_TK, weights, self._batches[number].layout, self._context_of(number)
                    )
                )

    def _context_of(self, number: int) -> PassContext:
        return self._context if self._batches[number].held_out is None else self._unobserved

    def _sliced(self, weights: LayerWeights, mlp: SparseMlp, hook: PostLayerHook | None) -> None:
        """A sparse layer, slices of experts outside and batches inside."""
        plans = self._plans(weights, mlp)
        sums = len(plans)  # the sum of batch n is kept under n + sums
        self._experts(weights, mlp, plans)
        if hook is not None:
            hook.run(self._seen(weights, mlp, plans))
        if self._exchange.shared:
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

    def _plans(self, weights: LayerWeights, mlp: SparseMlp) -> list[Dispatch]:
        """Take all batches up to their experts: states after attention, empty sums, choices."""
        chosen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def routed(number: int, h_TK: torch.Tensor) -> torch.Tensor:
            context = self._context_of(number)
            h_TK = attention_half(h_TK, weights, self._batches[number].layout, context)
            x_TK = mlp_input(h_TK, weights, self._config)
            routing = choose(x_TK, mlp.router, context, weights.index)
            chosen[number] = routing.experts_Tk.contiguous(), routing.weights_Tk.contiguous()
            return h_TK

        self.states.update_all(routed)
        plans = []
        device, config = self._stream.loader.device, self._config
        for number, batch in enumerate(self._batches):
            shape = (batch.layout.tokens, config.top_k)
            if number not in chosen:  # computed at another process
                chosen[number] = (
                    torch.empty(shape, dtype=torch.int64, device=device),
                    torch.empty(shape, dtype=torch.float32, device=device),
                )
            experts_Tk, weights_Tk = chosen.pop(number)
            self._exchange.spread(number, experts_Tk, weights_Tk)()
            plans.append(dispatch(experts_Tk, weights_Tk, config.num_experts))
            empty = torch.zeros(shape[0], config.hidden_size, dtype=torch.float32, device=device)
            self._buffer.put(number + len(self._batches), empty)
        return plans

    def _seen(
        self, weights: LayerWeights, mlp: SparseMlp, plans: Sequence[Dispatch]
    ) -> LayerExperts:
        whole = mlp.experts if isinstance(mlp.experts, tuple) else None

        def parts() -> Iterable[ExpertSlice]:
            return self._stream.experts_again(weights.index) if whole is None else whole

        observed = [number for number, each in enumerate(self._batches) if each.held_out is None]

        def inputs() -> Iterator[tuple[torch.Tensor, Dispatch]]:
            for number in observed:
                yield mlp_input(self.states.get(number), weights, self._config), plans[number]

        def held_out() -> Iterator[tuple[int, torch.Tensor, Dispatch]]:
            for number, batch in enumerate(self._batches):
                if batch.held_out is not None:
                    x_TK = mlp_input(self.states.get(number), weights, self._config)
                    yield batch.held_out, x_TK, plans[number]

        return LayerExperts(
            layer=weights.index,
            parts=parts,
            inputs=inputs,
            held_out=held_out,
            rows_E=tuple(
                sum(plans[n].offsets[expert + 1] - plans[n].offsets[expert] for n in observed)
                for expert in range(self._config.num_experts)
            ),
            held_out_texts=1 + max((each.held_out or 0 for each in self._batches), default=0),
            exchange=self._exchange,
            device=self._stream.loader.device,
        )

    def _experts(self, weights: LayerWeights, mlp: SparseMlp, plans: Sequence[Dispatch]) -> None:
        """Add this process's experts to every batch's sum."""
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
                x_TK = mlp_input(self.states.get(number), weights, self._config)
                add_slice(sum_TK, x_TK, plan, part, self._context_of(number), weights.index)
                del x_TK
                if part.first + part.count == own.stop:
                    exchange.send(sum_TK)
                self._buffer.put(number + sums, sum_TK)
            del part
