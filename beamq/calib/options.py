"""What a calibration can be told, checked before anything is read. Imports no torch.

Defaults by device, where nothing else is asked for:

    GPU    256 samples of 2,048 tokens (524,288), what public NVFP4 checkpoints are calibrated on
    CPU    128 samples of   512 tokens  (65,536), so that a small Beam takes seconds

and never longer samples than the model's `max_position_embeddings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from beamq.calib.stats import ExpertsMode
from beamq.errors import UsageError

DTYPES = ("bfloat16", "float32")
DEFAULT_SIZE = {"cuda": (256, 2048), "cpu": (128, 512)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """Raises `UsageError` when made with values that make no sense.

    `data` are `--data` specs (none: the default text). `experts` "all" shows every expert every
    token, for statistics only. `percentile` (99.9, say) and `second_moments` ask for more than
    largest magnitudes. `dtype` is that of activations; `device` "auto" is the GPU where there is
    one, and `gemm` "auto" the fastest that works there. `max_device_memory` is in bytes (None:
    what is free on a GPU, no limit on a CPU).
    """

    data: tuple[str, ...] = ()
    samples: int | None = None
    sequence_length: int | None = None
    seed: int = 0
    experts: ExpertsMode = "routed"
    percentile: float | None = None
    second_moments: bool = False
    dtype: str = "bfloat16"
    device: str = "auto"
    gemm: str = "auto"
    max_device_memory: int | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "sequence_length", "max_device_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name.replace('_', ' ')} is {value}, expected at least 1")
        if self.experts not in get_args(ExpertsMode):
            raise UsageError(f"experts is {self.experts!r}, expected routed or all")
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype is {self.dtype!r}, expected {' or '.join(DTYPES)}")
        if self.percentile is not None and not 0 < self.percentile <= 100:
            raise UsageError(
                f"percentile is {self.percentile}, expected more than 0 and at most 100"
            )

    def size(self, device_type: str, config: Mapping[str, Any]) -> tuple[int, int]:
        """(samples, sequence length) on a device, for a model's config.json."""
        samples, length = DEFAULT_SIZE.get(device_type, DEFAULT_SIZE["cpu"])
        longest = config.get("max_position_embeddings")
        if not isinstance(longest, int) or longest < 1:
            longest = None
        if self.sequence_length is not None:
            length = self.sequence_length
            if longest is not None and length > longest:
                raise UsageError(
                    f"sequence length {length:,} is beyond the model's max_position_embeddings"
                    f" ({longest:,})"
                )
        elif longest is not None:
            length = min(length, longest)
        return self.samples or samples, length

    def recorded(self) -> dict[str, str]:
        """What of this changes the statistics, besides the data, by option."""
        return {
            "--experts": self.experts,
            "--percentile": str(self.percentile),
            "--second-moments": str(self.second_moments),
            "--dtype": self.dtype,
        }
