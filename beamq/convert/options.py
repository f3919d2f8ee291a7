"""The options of `quantize`, `dequantize`, `repair` and `plan`.

Imports no torch and no NumPy: the command line reads its flags from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

from beamq.adapter.options import LAYOUT, ORDER
from beamq.calib import options as calib
from beamq.options import Flag, option
from beamq.plan.layout import ENGINE_NAMES
from beamq.plan.recipe import BUILT_IN, HEADROOMS, Recipe

RECIPE = Flag(
    f"{', '.join(BUILT_IN)}, or a .yaml file.", short="-r", also="Path", suggested=BUILT_IN
)
EXCLUDE = Flag(
    "Modules to keep in high precision: part of a name, a glob, or re:REGEX. May be repeated.",
    metavar="PATTERN",
    many=True,
    also="str",
)
ENGINE = Flag("Refuse what this engine does not load.", choices=ENGINE_NAMES)
KV_CACHE = Flag("KV cache scheme to declare.", choices=("none", "fp8"), shown="the recipe's")
HEADROOM = Flag(
    "Input scales are for N times the largest calibrated input: 1, 2, 4 ... 64.",
    metavar="N",
    type=int,
    among=HEADROOMS,
    shown="the recipe's",
)
SHARD_SIZE = Flag(
    "Size limit of an output file, such as 5GB.", name="--max-shard-size", metavar="SIZE", size=True
)
HOST_MEMORY = Flag("Memory limit of buffers, such as 1.5GB.", metavar="SIZE", size=True)
CACHE_BUDGET = Flag(
    "Disk limit for source shards, where the source is on the Hub.",
    name="--cache-budget",
    metavar="SIZE",
    size=True,
)
WORKERS = calib.WORKERS
SHARD_BYTES, MEMORY_BYTES, CACHE_BYTES = 5_000_000_000, 1_500_000_000, 100_000_000_000


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan and for which machine."""

    recipe: str = option("nvfp4", RECIPE)
    exclude: Sequence[str] = option((), EXCLUDE)
    kv_cache: str | None = option(None, KV_CACHE)
    engine: str | None = option(None, ENGINE)
    gpu: str | None = option(
        None, "Show one machine in full, such as h200:8 or mine=96GB:8.", metavar="NAME[:N]"
    )
    context: int | None = option(
        None,
        "Length of a sequence in tokens, such as 128k.",
        metavar="N",
        tokens=True,
        shown="131072 or the model's",
    )
    drafter: str | None = option(
        None, "DFlash2 drafter to serve beside it: a folder, or org/name[@revision]."
    )
    output: Path | None = option(
        None, "Where the output would be written.", type=Path, shown="this folder"
    )
    max_shard_bytes: int = option(SHARD_BYTES, SHARD_SIZE)
    max_host_memory: int = option(MEMORY_BYTES, HOST_MEMORY)
    cache_bytes: int = option(CACHE_BYTES, CACHE_BUDGET)
    workers: int | None = option(None, WORKERS)


@dataclass(frozen=True, kw_only=True)
class DequantizeOptions:
    """How to decode. Sizes are in bytes."""

    max_shard_bytes: int = option(SHARD_BYTES, SHARD_SIZE)
    cache_bytes: int = option(CACHE_BYTES, CACHE_BUDGET)
    workers: int | None = option(None, WORKERS)
    resume: bool = option(False, calib.RESUME)
    overwrite: bool = option(False, calib.OVERWRITE)


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """How to merge an adapter. Sizes are in bytes."""

    expert_lora_layout: Literal["new", "old"] | None = option(None, LAYOUT)
    expert_lora_order: Literal["fastest", "slowest"] | None = option(None, ORDER)
    max_shard_bytes: int = option(SHARD_BYTES, SHARD_SIZE)
    cache_bytes: int = option(CACHE_BYTES, CACHE_BUDGET)
    workers: int | None = option(None, WORKERS)
    resume: bool = option(False, calib.RESUME)
    overwrite: bool = option(False, calib.OVERWRITE)


@dataclass(frozen=True, kw_only=True)
class RepairOptions:
    """What a repair may use, and how it is written. Sizes are in bytes."""

    cache_bytes: ClassVar[int] = 0  # it reads folders only
    source: str | None = option(
        None, Flag("Folder of the BF16 source, for what is lost.", metavar="FOLDER", also="Path")
    )
    accept_bounded: bool = option(False, "Make repairs that change weights, within their bounds.")
    max_shard_bytes: int = option(SHARD_BYTES, SHARD_SIZE)
    workers: int | None = option(None, WORKERS)
    resume: bool = option(False, calib.RESUME)
    overwrite: bool = option(False, calib.OVERWRITE)


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How to quantize. Sizes are in bytes.

    NVFP4 needs input scales: from `calibration` (a statistics file), or constant with
    `no_calibration`; otherwise the run calibrates too. `data` to `max_device_memory` say how (see
    `CalibrationOptions`; None and () mean its defaults), and `statistics` is a file to keep what it
    saw. `base_model` is the source's id on the Hub, for the model card.
    """

    recipe: str | Recipe = option("nvfp4", RECIPE)
    calibration: str | Path | None = option(
        None,
        "Statistics file for NVFP4 input scales; nvfp4-gptq takes none.",
        metavar="STATS",
        type=Path,
    )
    no_calibration: bool = option(False, "Set all NVFP4 input scales to 1.0 instead.")
    data: Sequence[str] = option((), calib.DATA)
    samples: int | None = option(None, calib.SAMPLES)
    sequence_length: int | None = option(None, calib.SEQUENCE_LENGTH)
    seed: int | None = option(None, calib.SEED)
    experts: str | None = option(None, calib.EXPERTS_MODE)
    dtype: str | None = option(None, calib.DTYPE)
    device: str = option("auto", calib.DEVICE)
    max_device_memory: int | None = option(None, calib.DEVICE_MEMORY)
    statistics: str | Path | None = option(
        None,
        "Write the statistics of this run's calibration to this file.",
        metavar="STATS",
        type=Path,
    )
    activation_headroom: int | None = option(None, HEADROOM)
    only_changed: str | Path | None = option(
        None,
        "Copy what has not changed from the folder of an earlier conversion; same bytes.",
        metavar="PREVIOUS",
        type=Path,
    )
    exclude: Sequence[str] = option((), EXCLUDE)
    kv_cache: str | None = option(None, KV_CACHE)
    engine: str | None = option(None, ENGINE)
    base_model: str | None = option(
        None, "The source's id on the Hub, for the model card.", metavar="ORG/NAME"
    )
    max_shard_bytes: int = option(SHARD_BYTES, SHARD_SIZE)
    max_host_memory: int = option(MEMORY_BYTES, HOST_MEMORY)
    cache_bytes: int = option(CACHE_BYTES, CACHE_BUDGET)
    workers: int | None = option(None, WORKERS)
    resume: bool = option(False, calib.RESUME)
    overwrite: bool = option(False, calib.OVERWRITE)
    dry_run: bool = option(False, "Plan and check, but write nothing.")

    def calibration_given(self) -> dict[str, Any]:
        """The options of a calibration that were given, besides the device."""
        names = ("samples", "sequence_length", "seed", "experts", "dtype", "max_device_memory")
        found = {"data": tuple(self.data) or None, **{name: getattr(self, name) for name in names}}
        return {name: value for name, value in found.items() if value is not None}


class RunKeywords(TypedDict, total=False):
    """Keywords of both calls."""

    max_shard_bytes: int | str
    cache_bytes: int | str
    workers: int | None
    resume: bool
    overwrite: bool
