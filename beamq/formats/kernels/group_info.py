"""What a job's kernels tell the host: 64 bytes, one copy. Apart from gpu_groups.py, which needs
Triton to be imported."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

INFO_BYTES = 64
SCALE_WORD, COUNTS_WORD = 4, 8  # places as 32-bit words; amax is at 0
_INFO = struct.Struct("<f12xf12x4i16x")  # each field at a multiple of 16 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """What the kernels found.

    Of an NVFP4 group: FP32 `amax` (infinity or NaN if the source holds one), `global_scale`, and
    blocks saturated, raised from underflow, zero, not finite. Of FP8 rows: two 0.0, then rows that
    are not finite, rows of zeros, 0, 0.
    """

    amax: float
    global_scale: float
    counts: tuple[int, ...]

    @classmethod
    def read(cls, info: memoryview) -> GroupInfo:
        """From the info's bytes on the host."""
        amax, scale, *counts = _INFO.unpack(info)
        return cls(amax=amax, global_scale=scale, counts=tuple(counts))

    def pack(self) -> bytes:
        """The info's bytes, from who computes it elsewhere."""
        return _INFO.pack(self.amax, self.global_scale, *self.counts)

    @property
    def finite_group(self) -> bool:
        """Whether every value of an NVFP4 group is finite."""
        return math.isfinite(self.amax)

    @property
    def finite_rows(self) -> bool:
        """Whether every FP8 row is."""
        return not self.counts[0]
