"""The keywords of `quantize` and `dequantize`: what to make, how, and what the run reports.

Imports no torch and no NumPy: the command line reads its flags from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from beamq.calib.options import (
    DATA,
    DEVICE,
    DEVICE_MEMORY,
    DTYPE,
    EXPERTS_MODE,
    OVERWRITE,
    RESUME,
    SAMPLES,
    SEED,
    SEQUENCE_LENGTH,
    CalibrationEvents,
    TextKeywords,
)
from beamq.options import Flag, ignore, option
from beamq.plan.recipe import BUILT_IN, Recipe

if TYPE_CHECKING:
    from beamq.calib.run import LayerDone
    from beamq.calib.setup import CalibrationSetup
    from beamq.convert.run import Progress
    from beamq.plan.plan import Plan, Work

RECIPE = Flag(f"{', '.join(BUILT_IN)}, or a .yaml file.", short="-r")
EXCLUDE = Flag(
    "Modules to leave precise: a dotted part, a glob, or re:REGEX. May be repeated.",
    metavar="PATTERN",
    many=True,
)
KV_CACHE = Flag("KV cache scheme to declare.", choices=("none", "fp8"), shown="the recipe's")
SHARD_SIZE = Flag(
    "Largest output file, as 5GB.", name="--max-shard-size", metavar="SIZE", size=True
)
HOST_MEMORY = Flag("Bound on buffers, as 1.5GB.", metavar="SIZE", size=True)
CACHE_BUDGET = Flag(
    "Bound on shards on disk at a time, where the source is on the Hub.",
    name="--cache-budget",
    metavar="SIZE",
    size=True,
)
WORKERS = Flag("Threads.", type=int, at_least=1, shown="usable cores")
SHARD_BYTES, MEMORY_BYTES, CACHE_BYTES = 5_000_000_000, 1_500_000_000, 100_000_000_000


@dataclass(frozen=True, kw_only=True)
class DequantizeOptions:
    """How to decode. Sizes are in bytes."""

    max_shard_bytes: int = option(SHARD_BYTES, SHARD_SIZE)
    cache_bytes: int = option(CACHE_BYTES, CACHE_BUDGET)
    workers: int | None = option(None, WORKERS)
    resume: bool = option(False, RESUME)
    overwrite: bool = option(False, OVERWRITE)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How to quantize. Sizes are in bytes.

    NVFP4 needs input scales: from `calibration` (a statistics file), or constant with
    `no_calibration`; otherwise the run calibrates on the way. `data` to `max_device_memory` say how
    (see `CalibrationOptions`; None and () were not given), and `statistics` is a file to keep what
    it saw. `base_model` is the source's id on the Hub, for the model card.
    """

    recipe: str | Recipe = option("nvfp4", RECIPE)
    calibration: str | Path | None = option(
        None,
        Flag(
            "Statistics for NVFP4 input scales; nvfp4-gptq takes none.", metavar="STATS", type=Path
        ),
    )
    no_calibration: bool = option(False, Flag("NVFP4 input scales all 1.0 instead."))
    data: Sequence[str] = option((), DATA)
    samples: int | None = option(None, SAMPLES)
    sequence_length: int | None = option(None, SEQUENCE_LENGTH)
    seed: int | None = option(None, SEED)
    experts: str | None = option(None, EXPERTS_MODE)
    dtype: str | None = option(None, DTYPE)
    device: str = option("auto", DEVICE)
    max_device_memory: int | None = option(None, DEVICE_MEMORY)
    statistics: str | Path | None = option(
        None, Flag("Keep what calibration saw, here.", metavar="STATS", type=Path)
    )
    exclude: Sequence[str] = option((), EXCLUDE)
    kv_cache: str | None = option(None, KV_CACHE)
    base_model: str | None = option(
        None, Flag("The source's id, for the card.", metavar="ORG/NAME")
    )
    max_shard_bytes: int = option(SHARD_BYTES, SHARD_SIZE)
    max_host_memory: int = option(MEMORY_BYTES, HOST_MEMORY)
    cache_bytes: int = option(CACHE_BYTES, CACHE_BUDGET)
    workers: int | None = option(None, WORKERS)
    resume: bool = option(False, RESUME)
    overwrite: bool = option(False, OVERWRITE)
    dry_run: bool = option(False, Flag("Plan and check, write nothing."))

    def calibration_given(self) -> dict[str, Any]:
        """The options of a calibration that were given, besides the device."""
        names = ("samples", "sequence_length", "seed", "experts", "dtype", "max_device_memory")
        found = {"data": tuple(self.data) or None, **{name: getattr(self, name) for name in names}}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ConvertEvents(CalibrationEvents):
    """Called by `quantize`: with the plan before work, with a sentence on what converts and the
    memory it takes, by a calibration on the way, and with progress about every 32 MiB or hundredth
    of the total, whichever is less, from worker threads."""

    on_plan: Callable[[Plan], None] = ignore
    on_engine: Callable[[str], None] = ignore
    on_progress: Callable[[Progress], None] | None = None


@dataclass(frozen=True, kw_only=True)
class DequantizeEvents:
    """Called by `dequantize`: before work, where no checksums are recorded, and with progress."""

    on_plan: Callable[[Work], None] = ignore
    on_unchecked: Callable[[], None] = ignore
    on_progress: Callable[[Progress], None] | None = None


class RunKeywords(TypedDict, total=False):
    """Keywords of both calls."""

    max_shard_bytes: int
    cache_bytes: int
    workers: int | None
    resume: bool
    overwrite: bool
    on_progress: Callable[[Progress], None] | None


class DequantizeKeywords(RunKeywords, total=False):
    """Keywords of `dequantize`."""

    on_plan: Callable[[Work], None]
    on_unchecked: Callable[[], None]


class QuantizeKeywords(RunKeywords, TextKeywords, total=False):
    """Keywords of `quantize`."""

    recipe: str | Recipe
    calibration: str | Path | None
    no_calibration: bool
    seed: int | None
    experts: str | None
    dtype: str | None
    max_device_memory: int | None
    statistics: str | Path | None
    exclude: Sequence[str]
    kv_cache: str | None
    base_model: str | None
    max_host_memory: int
    dry_run: bool
    on_plan: Callable[[Plan], None]
    on_engine: Callable[[str], None]
    on_start: Callable[[CalibrationSetup], None]
    on_layer: Callable[[LayerDone], None]
