"""Which machines hold a Beam that is served: GPUs by name, and what fits on so many of them.

In: a model's `Weights`, a GPU, a count, a layout, a context. Out: a `Fit`: weights and KV cache on
each GPU, room, sequences.

A GPU's budget is `USABLE_SHARE` of its memory, as vLLM's gpu_memory_utilization has it by default,
less `RUNTIME_NBYTES` and `activation_nbytes`; what weights leave of it is for KV cache. GB are
1e9 bytes and nominal: drivers report the nominal size or somewhat more. The allowances are
estimates; a server's own profiling run has the last word.
"""

from __future__ import annotations

from dataclasses import dataclass

from beamq.config import BeamConfig
from beamq.errors import UsageError
from beamq.memory import LAYOUTS, Weights, activation_nbytes, kv_cache_nbytes, kv_heads_per_gpu

COUNTS = (1, 2, 4, 8, 16)
USABLE_SHARE = 0.9
RUNTIME_NBYTES = 1_500_000_000  # CUDA context, communication buffers, captured graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by the name `--gpu` knows, the label tables use, and its nominal bytes."""

    name: str
    label: str
    nbytes: int


GPUS = (
    Gpu(name="h100", label="H100 80 GB", nbytes=80_000_000_000),
    Gpu(name="h200", label="H200 141 GB", nbytes=141_000_000_000),
    Gpu(name="b200", label="B200 180 GB", nbytes=180_000_000_000),
    Gpu(name="b300", label="B300, GB300 288 GB", nbytes=288_000_000_000),
    Gpu(name="rtx-pro-6000", label="RTX PRO 6000 96 GB", nbytes=96_000_000_000),
)
_OTHER_NAMES = {"gb300": "b300", "rtxpro6000": "rtx-pro-6000", "rtx6000": "rtx-pro-6000"}


def parse_gpu(text: str) -> tuple[Gpu, int | None]:
    """`h200:8` -> (H200, 8); `h200` -> (H200, None). Raises `UsageError`."""
    name, _, number = text.strip().lower().replace("_", "-").partition(":")
    name = _OTHER_NAMES.get(name, name)
    gpu = next((gpu for gpu in GPUS if gpu.name == name), None)
    if gpu is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise UsageError(f"--gpu {text!r}: unknown GPU; known are {known} (for example h200:8)")
    if not number and ":" not in text:
        return gpu, None
    if not (number.isascii() and number.isdigit()) or not 1 <= int(number[:6]) <= 1024:
        raise UsageError(f"--gpu {text!r}: the count must be from 1 to 1024, as in h200:8")
    return gpu, int(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a model sits on `count` GPUs. Bytes are for each GPU; `sequences` for all together."""

    gpu: Gpu
    count: int
    layout: str
    weight_nbytes: int
    kv_nbytes: int
    room_nbytes: int
    sequences: int
    max_context: int

    @property
    def fits(self) -> bool:
        """Whether weights and at least one full context have room."""
        return self.sequences > 0


def fit(
    weights: Weights, gpu: Gpu, count: int, layout: str, *, context: int, kv_itemsize: int = 2
) -> Fit | None:
    """The sums for one machine; None where the model cannot be divided so."""
    config = weights.config
    held = weights.per_gpu(layout, count)
    if held is None:
        return None
    heads = kv_heads_per_gpu(config, layout, count)
    kv = kv_cache_nbytes(config, context, itemsize=kv_itemsize, heads=heads)
    budget = round(gpu.nbytes * USABLE_SHARE) - RUNTIME_NBYTES - activation_nbytes(config)
    room = budget - held
    sequences = max(0, room // kv) * (count if layout == "expert" else 1)
    return Fit(
        gpu=gpu,
        count=count,
        layout=layout,
        weight_nbytes=held,
        kv_nbytes=kv,
        room_nbytes=room,
        sequences=sequences,
        max_context=_longest_context(config, room, heads, kv_itemsize),
    )


def best_fit(
    weights: Weights, gpu: Gpu, count: int, *, context: int, kv_itemsize: int = 2
) -> Fit | None:
    """The layout that holds more sequences; tensor parallel where both hold as many."""
    found = [
        result
        for layout in LAYOUTS
        if (result := fit(weights, gpu, count, layout, context=context, kv_itemsize=kv_itemsize))
    ]
    return max(found, key=lambda result: result.sequences, default=None)


def smallest_count(weights: Weights, gpu: Gpu, *, context: int, kv_itemsize: int = 2) -> int | None:
    """The fewest of these GPUs, of `COUNTS`, that hold the model and one full context."""
    for count in COUNTS:
        result = best_fit(weights, gpu, count, context=context, kv_itemsize=kv_itemsize)
        if result is not None and result.fits:
            return count
    return None


def _longest_context(config: BeamConfig, room: int, heads: int, itemsize: int) -> int:
    """Tokens that one sequence may have in `room`, at most what the config allows."""
    limit = config.max_position_embeddings
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if kv_cache_nbytes(config, middle, itemsize=itemsize, heads=heads) <= room:
            low = middle
        else:
            high = middle - 1
    return low
