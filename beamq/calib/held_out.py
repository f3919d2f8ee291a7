"""Texts that calibration never fits, by which a rounding method is judged while it runs.

In: the checkpoint's tokenizer, the size of the calibration, a seed. Out: rows of token ids of some
texts that every machine has (`HeldOutText`), unlike source code in different ways:

    prose        Python's reference manual as `pydoc` has it: English sentences
    vocabulary   tokens of the tokenizer drawn at random, all alike: every script and language that
                 the model reads, in no order

The one idea: GPTQ fits the text that it sees. What it does elsewhere shows on a few rows that
differ from it (calib/expert_rounding.py keeps the scale sweep where GPTQ is worse on them).

Limits: neither is text as users write it; a text for which Python has no source is left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beamq.calib.data import CalibrationData, CheckpointTokenizer, IdsT, ids_digest

ROWS_PER_SAMPLE = 1 / 8
LEAST_ROWS, MOST_ROWS = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOutText:
    """`input_ids` [R, T] int64, every row full."""

    name: str
    input_ids: IdsT

    @property
    def digest(self) -> str:
        """SHA-256 over shape and ids."""
        return ids_digest(list(self.input_ids))


def held_out_texts(
    tokenizer_path: Path, data: CalibrationData, *, seed: int
) -> tuple[HeldOutText, ...]:
    """An eighth of the calibration's rows of each text, 4 to 16, as long as the calibration's."""
    rows = min(max(LEAST_ROWS, int(data.samples * ROWS_PER_SAMPLE)), MOST_ROWS)
    tokenizer = CheckpointTokenizer(tokenizer_path)
    shape = rows, data.sequence_length
    found = {"prose": _prose(tokenizer, seed), "vocabulary": _vocabulary(tokenizer, shape, seed)}
    return tuple(
        HeldOutText(name=name, input_ids=_rows(ids, shape))
        for name, ids in found.items()
        if ids.size
    )


def _rows(ids: IdsT, shape: tuple[int, int]) -> IdsT:
    """`ids`, again from the beginning where they are too few, as rows."""
    rows: IdsT = np.resize(ids, shape)
    return rows


def _prose(tokenizer: CheckpointTokenizer, seed: int) -> IdsT:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions of Python leave it out
        return np.empty(0, dtype=np.int64)
    names = sorted(topics)
    random.Random(f"{seed}:held out").shuffle(names)
    return tokenizer.joined([topics[name] for name in names])


def _vocabulary(tokenizer: CheckpointTokenizer, shape: Sequence[int], seed: int) -> IdsT:
    ids = tokenizer.plain_ids()
    drawn = random.Random(f"{seed}:vocabulary").choices(ids, k=shape[0] * shape[1])
    return np.array(drawn, dtype=np.int64)
