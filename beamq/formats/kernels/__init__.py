"""Fast versions of the number formats, and the record that a GPU job leaves for the host.

`cpu` works on raw buffers (compiled C, or `torch_twin` where there is no compiler), `gpu` launches
the Triton kernels of `triton_*`. `KernelResult` is here because reading it needs neither torch nor
Triton.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

RESULT_NBYTES = 64
SCALE_WORD, COUNTS_WORD = 4, 8  # offsets in 32-bit words; amax is at 0
_RESULT = struct.Struct("<f12xf12x4i16x")  # each field starts at a multiple of 16 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult:
    """What the kernels of one job found: 64 bytes on the device, copied to the host once.

    For an NVFP4 group: the FP32 `amax` (infinity or NaN if the source holds one), `global_scale`,
    and the numbers of blocks that are saturated, raised from underflow, zero, not finite. For FP8
    rows: two zeros, then the numbers of rows that are not finite and of rows of zeros.
    """

    amax: float
    global_scale: float
    counts: tuple[int, ...]

    @classmethod
    def read(cls, buffer: memoryview) -> KernelResult:
        """Decode the 64 bytes."""
        amax, scale, *counts = _RESULT.unpack(buffer)
        return cls(amax=amax, global_scale=scale, counts=tuple(counts))

    def pack(self) -> bytes:
        """Encode as the 64 bytes that the kernels would leave."""
        return _RESULT.pack(self.amax, self.global_scale, *self.counts)
