"""Statistics of several ranks as one, and tokens that went bad: what happens between two layers.

In: what the collector has of a finished layer, at this rank; hidden states. Out: the layer's
statistics over all ranks, and which tokens hold a NaN or infinity, by sequence and position.

A token that is not finite at some input has hidden states that are not finite behind that layer,
and never gets well again. Its sequence soon follows: attention weighs masked values with 0, and
0 times infinity is NaN. So bad tokens are looked for in the hidden states, once a layer, and the
input where it began is found in the collector's counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from beamq.calib.collect import LayerRecord
from beamq.calib.stats import MAX_DROPPED_NAMES, InputStats
from beamq.errors import CalibrationError

MAX_DROPPED_SHARE = 0.01
"""Of all tokens. One bad sequence among 128 is passed over, two of them stop the run."""


def combine(records: Sequence[LayerRecord], *, divided: bool = False) -> LayerRecord:
    """One layer's record from those of all ranks, each with experts of its own.

    What is not an expert's was seen by each rank of its own batches, if they were `divided`;
    otherwise by every rank alike, and the first one's is taken.
    """
    first = records[0]
    if len(records) == 1:
        return first
    names = dict.fromkeys(name for record in records for name in record.inputs)
    suspects: dict[str, int] = {}
    for record in records:
        for module, count in record.suspects.items():
            known = suspects.get(module, 0)
            suspects[module] = known + count if divided else max(count, known)
    inputs: dict[str, InputStats] = {}
    for name in names:
        found = [record.inputs[name] for record in records if name in record.inputs]
        if ".experts." in name:
            inputs[name] = _sum_of_experts(found)
        else:
            inputs[name] = _of_all_batches(found) if divided else found[0]
    routed = first.routed_tokens
    if divided:
        counts = [r.routed_tokens for r in records if r.routed_tokens is not None]
        routed = np.asarray(sum(counts)) if counts else None
    return LayerRecord(layer=first.layer, inputs=inputs, routed_tokens=routed, suspects=suspects)


def _of_all_batches(entries: Sequence[InputStats]) -> InputStats:
    """Each rank saw some of the batches; largest magnitudes and rows only."""
    return InputStats(
        amax=np.asarray(np.maximum.reduce([entry.amax for entry in entries])),
        rows=np.asarray(sum(entry.rows for entry in entries)),
    )


def _sum_of_experts(entries: Sequence[InputStats]) -> InputStats:
    """Each expert is at one rank; all others have zeros in its place."""
    arrays = [entry.arrays() for entry in entries]
    return InputStats(**{key: np.asarray(sum(a[key] for a in arrays)) for key in arrays[0]})


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
        """Take up the state of an earlier run."""
        self._bad = self.bad_tokens(dict(enumerate(hidden)))
        self.dropped, self.names = dropped, list(names)

    def look_at_embeddings(self, hidden: Sequence[torch.Tensor]) -> None:
        """As `look`, in front of the first layer."""
        self._count(self.bad_tokens(dict(enumerate(hidden))), "in its embedding")

    def bad_tokens(self, hidden: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Which tokens of the batches in `hidden`, by number, are not finite: bool [rows, length]
        on the CPU. Sound batches are left out."""
        fine = {number: _finite(h_TK) for number, h_TK in hidden.items()}  # all before any answer
        return {
            number: (~h_TK.isfinite().all(1)).cpu().view(-1, self._length)
            for number, h_TK in hidden.items()
            if not fine[number]
        }

    def look(self, record: LayerRecord, bad: Mapping[int, torch.Tensor]) -> None:
        """Count and name what went bad in this layer: `bad_tokens` of all batches behind it.

        Raises `CalibrationError` when more than `MAX_DROPPED_SHARE` of all tokens are bad.
        """
        where = f"at the output of model.layers.{record.layer}"
        if record.suspects:
            where = f"at the input of {next(iter(record.suspects))}"
        self._count(bad, where)

    def _count(self, bad: Mapping[int, torch.Tensor], where: str) -> None:
        for number, bad_RT in sorted(bad.items()):
            earlier_RT = self._bad.get(number, torch.zeros_like(bad_RT))
            self._name(bad_RT, earlier_RT.any(1).tolist(), self._first_rows[number], where)
            self._bad[number] = bad_RT
        self.dropped = sum(int(bad_RT.sum()) for bad_RT in self._bad.values())
        if self.dropped > MAX_DROPPED_SHARE * self._total:
            raise CalibrationError(
                f"{self.dropped:,} of {self._total:,} tokens hold NaN or infinity:"
                f" {self.names[-1]}. Check the source's weights, or choose other data"
            )

    def _name(
        self, bad_RT: torch.Tensor, known: Sequence[bool], first_row: int, where: str
    ) -> None:
        """Name sequences that were sound so far."""
        for row, bad_T in enumerate(bad_RT):
            places = bad_T.nonzero().flatten().tolist()
            if not places or known[row] or len(self.names) >= MAX_DROPPED_NAMES:
                continue
            span = f"position {places[0]}"
            if len(places) > 1:
                span = f"{len(places)} positions from {places[0]} on"
            self.names.append(f"sequence {first_row + row}, {span}: not finite {where}")


def _finite(h_TK: torch.Tensor) -> torch.Tensor:
    """A bool []; without a copy of the tensor."""
    low, high = torch.aminmax(h_TK)
    return low.isfinite() & high.isfinite()
