"""Statistics from a forward pass: the observer that calibration uses, and what follows each layer.

In: inputs of linears and choices of routers, layer by layer (`model.context.Observer`). Out: for
each finished layer a `LayerRecord`: `InputStats` by entry, and tokens routed to each expert.

The one idea: each input is read once, on its device, by a reduction that makes no copy; only a few
numbers for each expert are kept. Nothing waits for the device before the layer ends. Largest
magnitudes are exact: those of the activation dtype, widened to FP32.

A token with a NaN or infinity at some input is left out of that input's statistics and counted
(`suspects`). Attention soon spreads it over the sequence, since 0 times infinity is NaN. So
`TokenWatch` looks for bad tokens in the hidden states once a layer, and `suspects` says at which
input they began.

Limits: one layer at a time; with experts="all", routed inputs are not observed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from beamq.beam.config import BeamConfig
from beamq.calib.statistics import MAX_DROPPED_NAMES, ExpertsMode, InputStats
from beamq.errors import CalibrationError, Interrupted
from beamq.model.context import Observer

_GROUPS = {"qkv_gate": "qkv_gate", "o_proj": "o", "gate_up": "gate_up", "down_proj": "down"}
_ATTENTION = ("qkv_gate", "o_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """A finished layer. `suspects` has a module of each input at which tokens were left out, and
    their number. `domain_tokens` [D, E] are `routed_tokens` by the domain of their text."""

    layer: int
    inputs: dict[str, InputStats]
    routed_tokens: NDArray[np.int64] | None
    suspects: dict[str, int]
    domain_tokens: NDArray[np.int64] | None = None


@dataclass(slots=True, kw_only=True)
class _RunningEntry:
    """Running values of one entry: tensors of [G] on the device, G experts or 1."""

    amax: torch.Tensor
    bad: torch.Tensor
    rows: NDArray[np.int64]


class Collector(Observer):
    """`take(layer)` ends a layer; when `stopped()`, the next input raises `Interrupted`."""

    def __init__(
        self,
        config: BeamConfig,
        device: torch.device,
        *,
        experts: ExpertsMode = "routed",
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.every_expert = experts == "all"
        self.expert_inputs = experts == "routed"
        self._config = config
        self._device = device
        self._stopped = stopped
        self._entries: dict[str, _RunningEntry] = {}
        self._routed: torch.Tensor | None = None
        self._domain_T: torch.Tensor | None = None
        self._domains = 0
        self._by_domain: torch.Tensor | None = None
        self._at = 0

    def tell_domains(self, domain_T: NDArray[np.uint16], domains: int) -> None:
        """The domain of each token that will be seen in a layer, in the order of the batches."""
        self._domain_T = torch.from_numpy(domain_T.astype(np.int64)).to(self._device)
        self._domains = domains

    def linear_input(self, layer: int, group: str, x_TK: torch.Tensor) -> None:
        """Input of an attention or dense-MLP group."""
        parent = "self_attn" if group in _ATTENTION else "mlp"
        self._add(f"layers.{layer}.{parent}.{_GROUPS[group]}", x_TK, 0, (0, x_TK.shape[0]), 1)

    def expert_input(
        self, layer: int, group: str, x_SK: torch.Tensor, first: int, offsets: Sequence[int]
    ) -> None:
        """Routed input of some experts."""
        if not self.every_expert:
            self._add_experts(layer, group, x_SK, first, offsets)

    def every_expert_input(self, layer: int, group: str, x_TK: torch.Tensor, expert: int) -> None:
        """Input of one expert over all tokens."""
        self._add_experts(layer, group, x_TK, expert, (0, x_TK.shape[0]))

    def routing(
        self,
        layer: int,
        logits_TE: torch.Tensor,
        experts_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
    ) -> None:
        """Count the chosen experts."""
        counts = torch.bincount(experts_Tk.flatten(), minlength=self._config.num_experts)
        self._routed = counts if self._routed is None else self._routed + counts
        if self._domain_T is not None:
            domain_T = self._domain_T[self._at : self._at + len(experts_Tk)]
            self._at += len(experts_Tk)
            place_Tk = domain_T[:, None] * self._config.num_experts + experts_Tk
            size = self._domains * self._config.num_experts
            counts = torch.bincount(place_Tk.flatten(), minlength=size)
            self._by_domain = counts if self._by_domain is None else self._by_domain + counts

    def expert_amax(self, layer: int, group: str) -> float:
        """Largest magnitude so far at the inputs of a group of a layer's experts, over all."""
        entry = self._entries.get(f"layers.{layer}.experts.{_GROUPS[group]}")
        return 0.0 if entry is None else float(entry.amax.max())

    def take(self, layer: int) -> LayerRecord:
        """The record of `layer`; the collector is then ready for the next one."""
        inputs: dict[str, InputStats] = {}
        suspects: dict[str, int] = {}
        for name, entry in self._entries.items():
            bad = entry.bad.cpu().numpy()
            suspects |= {_module(name, int(at)): int(bad[at]) for at in bad.nonzero()[0]}
            shape = entry.rows.shape if ".experts." in name else ()
            inputs[name] = InputStats(
                amax=entry.amax.cpu().numpy().reshape(shape), rows=(entry.rows - bad).reshape(shape)
            )
        routed = None if self._routed is None else self._routed.cpu().numpy()
        by_domain = None
        if self._by_domain is not None:
            by_domain = self._by_domain.cpu().numpy().reshape(self._domains, -1)
        self._entries, self._routed, self._by_domain, self._at = {}, None, None, 0
        return LayerRecord(
            layer=layer,
            inputs=inputs,
            routed_tokens=routed,
            suspects=suspects,
            domain_tokens=by_domain,
        )

    def _add_experts(
        self, layer: int, group: str, x_SK: torch.Tensor, first: int, offsets: Sequence[int]
    ) -> None:
        name = f"layers.{layer}.experts.{_GROUPS[group]}"
        self._add(name, x_SK, first, offsets, self._config.num_experts)

    def _add(
        self, name: str, x_SK: torch.Tensor, first: int, offsets: Sequence[int], size: int
    ) -> None:
        """Rows offsets[i]:offsets[i+1] belong to place first + i of an entry of `size`."""
        if self._stopped():
            raise Interrupted("stopped")
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _RunningEntry(
                amax=torch.zeros(size, dtype=torch.float32, device=self._device),
                bad=torch.zeros(size, dtype=torch.int64, device=self._device),
                rows=np.zeros(size, dtype=np.int64),
            )
        here = slice(first, first + len(offsets) - 1)
        amax, bad = segment_amax(x_SK, offsets)
        entry.amax[here] = torch.maximum(entry.amax[here], amax)
        entry.bad[here] += bad
        entry.rows[here] += [end - begin for begin, end in itertools.pairwise(offsets)]


def _module(entry: str, expert: int) -> str:
    """A linear that reads the input of an entry (`layers.4.experts.down` and 7, say)."""
    parent, _, group = entry.rpartition(".")
    linear = {"qkv_gate": "q_proj", "gate_up": "gate_proj"}.get(group, f"{group}_proj")
    if parent.endswith(".experts"):
        return f"model.{parent.removesuffix('experts')}mlp.experts.{expert}.{linear}"
    return f"model.{parent}.{linear}"


def segment_amax(x_SK: torch.Tensor, offsets: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest |x| FP32 [G], rows left out int64 [G]) of each segment's rows; 0 where it has none.

    A row with a NaN or infinity is left out as a whole.
    """
    if x_SK.device.type == "cpu":
        # A plain reduction over everything is 20 times faster there than one over each row.
        amax = _segments_at_once(x_SK, offsets)
        bad = torch.zeros(len(amax), dtype=torch.int64)
        for place in (~amax.isfinite()).nonzero().flatten().tolist():
            rows = x_SK[offsets[place] : offsets[place + 1]]
            amax[place : place + 1], bad[place : place + 1] = _by_rows(rows, (0, len(rows)))
        return amax, bad
    return _by_rows(x_SK, offsets)


def _segments_at_once(x_SK: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    amax = torch.zeros(len(offsets) - 1, dtype=torch.float32)
    found = [(place, torch.aminmax(x_SK[low:high])) for place, low, high in _busy(offsets)]
    if found and x_SK.shape[1]:
        lows = torch.stack([each.min for _, each in found])
        highs = torch.stack([each.max for _, each in found])
        amax[[place for place, _ in found]] = torch.maximum(lows.neg(), highs).float()
    return amax


def _by_rows(x_SK: torch.Tensor, offsets: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    row_S = torch.linalg.vector_norm(x_SK, math.inf, dim=1).float()
    finite_S = row_S.isfinite()
    lengths = torch.tensor(np.diff(offsets), device=x_SK.device)
    if not x_SK.shape[0]:
        return torch.zeros_like(lengths, dtype=torch.float32), torch.zeros_like(lengths)
    amax = torch.segment_reduce(
        torch.where(finite_S, row_S, 0.0), "max", lengths=lengths, initial=0.0
    )
    # Sums of ones are exact in FP32 up to 2**24 rows, more than a batch has.
    bad = torch.segment_reduce((~finite_S).float(), "sum", lengths=lengths, initial=0.0)
    return amax, bad.long()


def _busy(offsets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place, first row, end row) of the segments that have rows."""
    for place in range(len(offsets) - 1):
        if offsets[place + 1] > offsets[place]:
            yield place, offsets[place], offsets[place + 1]


class LayerPace(Observer):
    """Progress within a layer: calls `tell(layer, share)` each time one of `batches` enters it,
    with the share (0 to 1) of those that entered before. No input is read.

    Limits: where experts come in slices or are rounded, all batches enter before the first one is
    through; a process sees its own batches only.
    """

    expert_inputs = False

    def __init__(self, batches: int, tell: Callable[[int, float], None]) -> None:
        self._batches = batches
        self._tell = tell
        self._layer = -1
        self._entered = 0

    def linear_input(self, layer: int, group: str, x_TK: torch.Tensor) -> None:
        """A layer's first input means that a batch enters it."""
        if group != "qkv_gate":
            return
        if layer != self._layer:
            self._layer, self._entered = layer, 0
        self._tell(layer, self._entered / self._batches)
        self._entered += 1


MAX_DROPPED_SHARE = 0.01
"""Of all tokens. One bad sequence among 128 is dropped; two of them stop the run."""


def combine(records: Sequence[LayerRecord]) -> LayerRecord:
    """One layer's record from those of all ranks.

    Each rank saw the inputs of its own experts for all batches, and of the other linears for its
    own batches.
    """
    first = records[0]
    if len(records) == 1:
        return first
    names = dict.fromkeys(name for record in records for name in record.inputs)
    suspects: dict[str, int] = {}
    for record in records:
        for module, count in record.suspects.items():
            suspects[module] = suspects.get(module, 0) + count
    inputs: dict[str, InputStats] = {}
    for name in names:
        found = [record.inputs[name] for record in records if name in record.inputs]
        # An expert is at one rank and the others have zeros for it, so the maximum fits both kinds.
        inputs[name] = InputStats(
            amax=np.asarray(np.maximum.reduce([entry.amax for entry in found])),
            rows=np.asarray(sum(entry.rows for entry in found)),
        )
    return LayerRecord(
        layer=first.layer,
        inputs=inputs,
        routed_tokens=_sum([record.routed_tokens for record in records]),
        suspects=suspects,
        domain_tokens=_sum([record.domain_tokens for record in records]),
    )


def _sum(counts: Sequence[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
    found = [each for each in counts if each is not None]
    return np.asarray(sum(found)) if found else None


class TokenWatch:
    """Which tokens are not finite, by batch. All batches hold whole rows of `length` tokens.

    `first_rows` has the first row of each batch, `total` is the number of all tokens.
    """

    def __init__(self, length: int, total: int, first_rows: Sequence[int]) -> None:
        self._length = length
        self._total = total
        self._first_rows = first_rows
        self._bad: dict[int, torch.Tensor] = {}
        self.dropped = 0
        self.names: list[str] = []

    def continue_from(
        self, hidden: Iterable[torch.Tensor], dropped: int, names: Sequence[str]
    ) -> None:
        """Restore the state of an earlier run."""
        self._bad = self.bad_tokens(dict(enumerate(hidden)))
        self.dropped, self.names = dropped, list(names)

    def look_at_embeddings(self, hidden: Sequence[torch.Tensor]) -> None:
        """Like `look`, before the first layer."""
        self._count(self.bad_tokens(dict(enumerate(hidden))), "in its embedding")

    def bad_tokens(self, hidden: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Which tokens are not finite, for each batch number in `hidden` with any: bool [rows,
        length] on the CPU."""
        fine = {number: _finite(h_TK) for number, h_TK in hidden.items()}  # all before any answer
        return {
            number: (~h_TK.isfinite().all(1)).cpu().view(-1, self._length)
            for number, h_TK in hidden.items()
            if not fine[number]
        }

    def look(self, record: LayerRecord, bad: Mapping[int, torch.Tensor]) -> None:
        """Count and name tokens that went bad in this layer: `bad_tokens` of all batches after it.

        With experts="all", an input that is not finite may reach no hidden state; it is named too.
        Raises `CalibrationError` when more than `MAX_DROPPED_SHARE` of all tokens are bad.
        """
        where = f"at the output of model.layers.{record.layer}"
        if record.suspects:
            where = f"at the input of {next(iter(record.suspects))}"
        self._count(bad, where)
        for module, count in record.suspects.items():
            if count > self.dropped and len(self.names) < MAX_DROPPED_NAMES:
                some = f"{count:,} of {self._total:,} tokens"
                self.names.append(f"{some} at the input of {module}: not finite; check its weights")

    def _count(self, bad: Mapping[int, torch.Tensor], where: str) -> None:
        for number, bad_RT in sorted(bad.items()):
            earlier_RT = self._bad.get(number, torch.zeros_like(bad_RT))
            for row in (bad_RT.any(1) & ~earlier_RT.any(1)).nonzero().flatten().tolist():
                places = bad_RT[row].nonzero().flatten().tolist()
                many = f"{len(places)} positions from {places[0]} on"
                span = many if places[1:] else f"position {places[0]}"
                if len(self.names) < MAX_DROPPED_NAMES:
                    row += self._first_rows[number]
                    self.names.append(f"sequence {row}, {span}: not finite {where}")
            self._bad[number] = bad_RT
        self.dropped = sum(int(bad_RT.sum()) for bad_RT in self._bad.values())
        if self.dropped > MAX_DROPPED_SHARE * self._total:
            raise CalibrationError(
                f"{self.dropped:,} of {self._total:,} tokens hold NaN or infinity:"
                f" {self.names[-1]}. Check the source's weights, or choose other data"
            )


def _finite(h_TK: torch.Tensor) -> torch.Tensor:
    """Bool [], computed without a copy of the tensor."""
    low, high = torch.aminmax(h_TK)
    return low.isfinite() & high.isfinite()
