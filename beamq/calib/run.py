"""The forward pass of a calibration: all samples through all layers, resumable.

In: an open source and `CalibrationOptions`. `CalibrationSetup` loads the data and checks device and
memory before any work. Out: `CalibrationStats`.

    embed -> [layer: forward, collect, gather ranks, look for bad tokens, `after`, save] ...

The one idea: a layer's statistics are complete when the last batch has left it, while the next
layer is already being read. `after` gets them at that moment, and `tap` sees every tensor that the
loader reads: a converter needs nothing more to write the layer in the same pass.

On the device: two units of weights (one in use, one read ahead), one batch's activations, and the
hidden states of all samples as far as they fit. Where not even whole layers fit, experts come in
slices and all states wait on the host. On a CPU the limit applies to weights and activations.

Limits: prefill; rows of one length. The figures of `DevicePlan` are upper bounds.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from beamq import limits
from beamq.beam.config import BeamConfig
from beamq.beam.tensors import classify
from beamq.calib.collector import Collector, LayerPace, TokenWatch, combine
from beamq.calib.data import load_text
from beamq.calib.expert_rounding import ExpertRounding, RoundingRequest, rounding_nbytes
from beamq.calib.held_out import HeldOutText, held_out_texts
from beamq.calib.options import CalibrationOptions
from beamq.calib.state import RunState, Saved
from beamq.calib.statistics import CalibrationStats
from beamq.devices import choose_device
from beamq.io.checkpoint import Checkpoint
from beamq.model.context import Observer, SequenceLayout
from beamq.model.expert_parallel import ExpertExchange, exchange_for, own_experts
from beamq.model.forward import Batch, LayerPass
from beamq.model.gemm.select import select_gemm
from beamq.model.layer_stream import (
    LayerStream,
    PrefetchingLoader,
    activation_bytes,
    experts_per_slice,
    layer_bytes,
)
from beamq.model.loader import LayerLoader, Tap
from beamq.ranks import Ranks
from beamq.version import __version__

BATCH_TOKENS = {"cuda": 16_384, "cpu": 4_096}
FREE_SHARE = 0.9  # of a GPU's free memory, where no limit was given
_UNITS = 2  # of weights: one in use, one read ahead


class CalibrationSetup:
    """Data, device, plan and fingerprint of one calibration.

    Raises `CalibrationError`, `UsageError`, `DeviceError` or `MemoryBudgetError` when made.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: CalibrationOptions,
        ranks: Ranks,
        *,
        rounding: str | None = None,
        waiting_nbytes: int = 0,
        taken_nbytes: int = 0,
    ) -> None:
        """What a conversion in the same pass adds: `rounding`, how it rounds experts by their
        inputs; `waiting_nbytes` on the host, for members that wait for their partners;
        `taken_nbytes` of the device, besides the forward pass."""
        self.checkpoint = checkpoint
        self.options = options
        self.ranks = ranks
        self.device: torch.device = choose_device(options.device, ranks)
        samples, length = options.size(self.device.type, checkpoint.config)
        self.data = load_text(
            options.data,
            checkpoint,
            samples=samples,
            sequence_length=length,
            seed=options.seed,
            ranks=ranks,
        )
        self.held_out: tuple[HeldOutText, ...] = ()
        if rounding == "gptq":
            self.held_out = held_out_texts(checkpoint.root, self.data, seed=options.seed)
        plan = plan_device(
            checkpoint,
            options,
            ranks,
            self.device,
            samples=self.data.samples,
            length=self.data.sequence_length,
            rounding=None if rounding is None else [len(text.input_ids) for text in self.held_out],
            taken_nbytes=taken_nbytes,
        )
        self.plan = replace(plan, host_nbytes=plan.host_nbytes + waiting_nbytes)
        fewer = "use fewer --samples or a smaller --max-device-memory, or a larger machine"
        limits.check_room(plan.least_nbytes, self.plan.host_nbytes, "the calibration", fewer)
        self.fingerprint = checkpoint.content_digest()

    @property
    def state_nbytes(self) -> int:
        """Bytes on disk of a run's state: two sets of hidden states, old and new."""
        itemsize = 4 if self.options.dtype == "float32" else 2
        tokens = self.data.tokens + sum(text.input_ids.size for text in self.held_out)
        return 2 * tokens * int(self.checkpoint.config["hidden_size"]) * itemsize

    def data_record(self) -> dict[str, Any]:
        """The record of the data and of the activations' dtype in the statistics."""
        return {**self.data.to_dict(), "activations": self.options.dtype}

    def identity(self) -> dict[str, str]:
        """What must be equal for a run to resume another; options have their flags as keys."""
        return {
            "version of beamq": __version__,
            "version of torch": torch.__version__,
            "source": self.checkpoint.fingerprint(),
            "device": self.device.type,
            "--samples": str(self.data.samples_asked),
            "--sequence-length": str(self.data.sequence_length),
            "--seed": str(self.data.seed),
            "--data": self.data.digest,
            **{f"held-out text {text.name}": text.digest for text in self.held_out},
            **self.options.recorded(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Experts in a slice (None: whole layers) and bytes of states on the device (None: all).

    `device_nbytes` is what a GPU needs (0 on a CPU), `host_nbytes` what the host needs at most,
    `least_nbytes` what it needs in any case.
    """

    slice_experts: int | None
    resident_nbytes: int | None
    device_nbytes: int
    host_nbytes: int
    least_nbytes: int


def batch_rows(device: torch.device, samples: int, length: int) -> list[slice]:
    """Samples in batches of about `BATCH_TOKENS` tokens, at least one sample each."""
    rows = max(1, BATCH_TOKENS[device.type] // length)
    return [slice(first, min(first + rows, samples)) for first in range(0, samples, rows)]


def plan_device(
    checkpoint: Checkpoint,
    options: CalibrationOptions,
    ranks: Ranks,
    device: torch.device,
    *,
    samples: int,
    length: int,
    rounding: Sequence[int] | None = None,
    taken_nbytes: int = 0,
) -> DevicePlan:
    """The plan of one process, if others take `taken_nbytes` of its GPU. `rounding` has the rows of
    each held-out text, where experts are rounded.

    Raises `MemoryBudgetError` if one expert at a time is too much.
    """
    config = BeamConfig.from_dict(checkpoint.config)
    dtype: torch.dtype = getattr(torch, options.dtype)
    on_gpu = device.type == "cuda"
    budget = options.max_device_memory
    if budget is None and on_gpu:
        budget = int(FREE_SHARE * torch.cuda.mem_get_info(device)[0]) - taken_nbytes
    counts = [samples, *(rounding or ())]
    batches = [rows for count in counts for rows in batch_rows(device, count, length)]
    batch = max(rows.stop - rows.start for rows in batches) * length
    rounded = rounding_nbytes(device.type, config) if rounding is not None else 0
    experts = len(own_experts(ranks, config))
    sizes = layer_bytes(checkpoint, config, dtype)
    activations = activation_bytes(config, batch, dtype) + rounded
    width = sum(counts) * length * config.hidden_size
    states = width * dtype.itemsize
    weights = _UNITS * (sizes.base + sizes.expert * experts)
    count, resident = None, None
    if budget is not None and weights + activations > budget:
        found = experts_per_slice(checkpoint, config, dtype, budget - rounded, batch)
        count, resident = min(found or experts, experts), 0
        weights = _UNITS * (sizes.base + sizes.expert * count)
    if count is not None or experts < config.num_experts or rounded:
        states += width * 4  # FP32 sums between slices, or ranks
    if budget is not None and count is None and states > budget - weights - activations:
        resident = budget - weights - activations
    on_device = states if resident is None else min(states, resident)
    embedding = config.vocab_size * config.hidden_size * dtype.itemsize + states
    here = weights // _UNITS + states - on_device if on_gpu else weights + activations + states
    held = sizes.expert * (experts if count is None else count) + width * dtype.itemsize
    return DevicePlan(
        slice_experts=count,
        resident_nbytes=resident,
        device_nbytes=weights + activations + on_device if on_gpu else 0,
        host_nbytes=max(here, embedding),
        least_nbytes=states - on_device if on_gpu else held,
    )


# Two things grow in a long pass on a CPU that no tensor accounts for. oneDNN keeps a kernel for
# every shape, and each expert's number of rows is a new shape: some 10 MB a layer, up to 1,024
# kernels. And glibc keeps freed memory in holes that the next layer's sizes do not fit. Both caps
# hold for the whole process and cost others nothing.

KEPT_KERNELS = "64"
TRIM_SECONDS = 1.0


def cap_kernel_caches() -> None:
    """Takes effect before the first product of the process. The user's own setting wins."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, KEPT_KERNELS)


class HeapTrim:
    """Returns unused heap to the system where the C library can (glibc), at most once a second,
    since memory that is needed again costs page faults."""

    def __init__(self) -> None:
        try:
            self._trim: Callable[[int], int] | None = ctypes.CDLL(None).malloc_trim
        except (AttributeError, OSError):
            self._trim = None
        self._next = 0.0

    def between_layers(self) -> None:
        """Trim if it is time."""
        if self._trim is not None and time.monotonic() >= self._next:
            self._trim(0)
            self._next = time.monotonic() + TRIM_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDone:
    """One of `layers` layers is done: its own statistics, and source bytes of the layers so far."""

    layer: int
    layers: int
    done_nbytes: int
    total_nbytes: int
    stats: CalibrationStats


class CalibrationPass:
    """One run. `stopped` ends it between two inputs; the caller begins and removes `state`.

    `tap` sees each tensor that the loader reads, once; `after` each finished layer's statistics.
    `rounding` has experts rounded as soon as their layer's inputs are known. `passed` gets a layer
    and the share of its batches that have entered it.
    """

    def __init__(
        self,
        setup: CalibrationSetup,
        state: RunState,
        *,
        tap: Tap | None = None,
        after: Callable[[LayerDone], None] = lambda done: None,
        rounding: RoundingRequest | None = None,
        passed: Callable[[int, float], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        options, data = setup.options, setup.data
        self._setup = setup
        self._checkpoint = setup.checkpoint
        self._config = BeamConfig.from_dict(setup.checkpoint.config)
        self._data = data
        self._ranks = setup.ranks
        self._state = state
        self._after = after
        self._tap = tap
        self._rounding = rounding
        self._passed = passed
        self._stopped = stopped
        self._rows = batch_rows(setup.device, data.samples, data.sequence_length)
        self._held_out = [
            (number, text.input_ids[rows])
            for number, text in enumerate(setup.held_out)
            for rows in batch_rows(setup.device, len(text.input_ids), data.sequence_length)
        ]
        self._layer_nbytes = _layer_nbytes(setup.checkpoint, self._config.num_layers)
        self._heap = HeapTrim()
        self._watch = TokenWatch(
            data.sequence_length, data.tokens, [rows.start for rows in self._rows]
        )
        self._save = False
        self._collector = Collector(
            self._config, setup.device, experts=options.experts, stopped=stopped
        )
        self._stats = CalibrationStats(
            model_name=setup.checkpoint.label,
            model_fingerprint=setup.fingerprint,
            experts=options.experts,
            total_tokens=data.tokens,
            inputs={},
            routed_tokens={},
            data=(setup.data_record(),),
            versions=dict(
                beamq=__version__, python=platform.python_version(), torch=torch.__version__
            ),
        )

    def run(self) -> CalibrationStats:
        """All layers. Raises `CalibrationError`, `MemoryBudgetError`, `Interrupted`, ..."""
        final = self._state.load_final()
        if final is not None and self._rounding is None:
            return final
        cap_kernel_caches()
        exchange = exchange_for(self._ranks, self._config)
        saved = self._state.load()
        if saved and self._rounding and min(self._rounding.wanted) <= saved.layer:
            saved = None  # experts before it have to be rounded again, and their inputs are gone
        first = 0 if saved is None else saved.layer + 1
        if len(self._data.domains) > 1:
            home = [rows for number, rows in enumerate(self._rows) if exchange.mine(number)]
            domain_T = np.concatenate([self._data.domain_ST[rows].ravel() for rows in home])
            self._collector.tell_domains(domain_T, len(self._data.domains))
        device, options = self._setup.device, self._setup.options
        plain = device.type == "cpu" and options.gemm == "auto"
        gemm = select_gemm("reference" if plain else options.gemm)
        observers: list[Observer] = [self._collector]
        if self._passed is not None:
            observers.append(LayerPace(len(self._rows), self._passed))
        rounding = None
        if self._rounding is not None:
            rounding = ExpertRounding(self._rounding, self._config, gemm, self._expert_amax)
        with PrefetchingLoader(
            self._checkpoint,
            self._config,
            first=first,
            experts=exchange.experts,
            keep_rest=self._tap is not None,
            stopped=self._stopped,
            dtype=getattr(torch, options.dtype),
            device=device,
            tap=self._tap,
        ) as loader:
            batches = self._embed(loader) if saved is None else self._take_up(saved)
            stream = LayerStream(
                loader,
                layers=range(first, self._config.num_layers),
                slice_experts=self._setup.plan.slice_experts,
                experts=exchange.experts,
            )
            layers = LayerPass(
                stream,
                batches,
                gemm=gemm,
                observers=observers,
                resident_bytes=self._setup.plan.resident_nbytes,
                exchange=exchange,
                hook=rounding,
            )
            layers.run(done=lambda layer: self._finish(layer, batches, exchange), whole=self._saves)
        return self._stats

    def _expert_amax(self, layer: int, group: str) -> float:
        return float(max(self._ranks.gather(self._collector.expert_amax(layer, group))))

    def _embed(self, loader: LayerLoader) -> list[Batch]:
        table = loader.embedding()
        ids = [torch.from_numpy(self._data.input_ids[rows]).flatten() for rows in self._rows]
        hidden = [table[vector] for vector in ids]
        self._watch.look_at_embeddings(hidden)
        held_out = [torch.from_numpy(ids_RT).flatten() for _, ids_RT in self._held_out]
        return self._batches([*hidden, *(table[vector] for vector in held_out)])

    def _take_up(self, saved: Saved) -> list[Batch]:
        self._stats = saved.stats
        hidden, stats = saved.hidden[: len(self._rows)], saved.stats
        self._watch.continue_from(hidden, stats.dropped_rows, stats.dropped_names)
        return self._batches(saved.hidden)

    def _batches(self, hidden: Sequence[torch.Tensor]) -> list[Batch]:
        length = self._data.sequence_length
        sizes: list[tuple[int, int | None]] = [(r.stop - r.start, None) for r in self._rows]
        sizes += [(len(ids_RT), text) for text, ids_RT in self._held_out]
        return [
            Batch(h_TK=h_TK, layout=SequenceLayout.rectangle(rows, length), held_out=text)
            for h_TK, (rows, text) in zip(hidden, sizes, strict=True)
        ]

    def _saves(self, layer: int) -> bool:
        """Whether the first rank is going to save this layer's state, which takes all batches."""
        due = layer + 1 < self._config.num_layers and self._state.due
        self._save = self._ranks.gather(due)[0]
        return self._save

    def _finish(self, layer: int, batches: Sequence[Batch], exchange: ExpertExchange) -> None:
        hidden = [batch.h_TK for batch in batches]
        observed = enumerate(hidden[: len(self._rows)])
        home = {number: h_TK for number, h_TK in observed if exchange.mine(number)}
        found = self._ranks.gather((self._collector.take(layer), self._watch.bad_tokens(home)))
        record = combine([theirs for theirs, _ in found])
        self._watch.look(record, {n: bad_RT for _, bad in found for n, bad_RT in bad.items()})
        routed = {} if record.routed_tokens is None else {layer: record.routed_tokens}
        domains = {} if record.domain_tokens is None else {layer: record.domain_tokens}
        own = replace(
            self._stats, inputs=record.inputs, routed_tokens=routed, domain_tokens=domains
        )
        self._stats = replace(
            self._stats.with_layer(record.inputs, routed, domains),
            dropped_rows=self._watch.dropped,
            dropped_names=tuple(self._watch.names),
        )
        layers = self._config.num_layers
        self._after(
            LayerDone(
                layer=layer,
                layers=layers,
                done_nbytes=sum(self._layer_nbytes[: layer + 1]),
                total_nbytes=sum(self._layer_nbytes),
                stats=own,
            )
        )
        self._heap.between_layers()
        if self._ranks.first and self._save:
            self._state.save(layer, self._stats, hidden)


def _layer_nbytes(checkpoint: Checkpoint, layers: int) -> list[int]:
    sizes = [0] * layers
    for spec in checkpoint.tensors.values():
        layer = classify(spec.name).layer
        if layer is not None and layer < layers:
            sizes[layer] += spec.nbytes
    return sizes
