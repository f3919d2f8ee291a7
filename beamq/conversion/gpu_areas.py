"""What a job takes on a GPU, and where in it everything lies: source, codes, scales, info.

In: a job. Out: sizes in bytes; areas of a place on the device. Known from shapes alone, so that a
run can be refused before it begins.
"""

from __future__ import annotations

from collections.abc import Iterable

from beamq.checkpoint import FLOAT_SOURCES
from beamq.conversion.gpu_queue import Memory, Place
from beamq.formats.kernels.group_info import INFO_BYTES
from beamq.formats.layout import NVFP4_BLOCK
from beamq.header import ITEMSIZE
from beamq.plan import Job

PART_BYTES = 64 << 20  # of FP8 rows on the device at a time
MAX_FP8_K = 32_768
ALIGNMENT = 256


def takes(job: Job) -> bool:
    """Whether the kernels do a job: linears with one dtype and one row length."""
    kinds = {(member.source.spec.dtype, member.source.shape[-1]) for member in job.members}
    if job.kind not in ("nvfp4", "fp8") or len(kinds) != 1 or not job.source_nbytes:
        return False
    dtype, k = kinds.pop()
    return dtype in FLOAT_SOURCES and (job.kind == "nvfp4" or k <= MAX_FP8_K)


def device_nbytes(job: Job) -> int:
    """Bytes a job takes on the device at a time; 0 if it is not done there."""
    if not takes(job):
        return 0
    return sum(aligned(size) for size in area_nbytes(job))


def area_nbytes(job: Job) -> tuple[int, ...]:
    """Bytes of source, codes, scales and info of a job, or of a part of its FP8 rows."""
    item, k = item_size(job), job.members[0].source.shape[1]
    rows = sum(member.source.shape[0] for member in job.members)
    if job.kind == "fp8":
        return fp8_sizes(min(rows, part_rows(k, item)), k, item)
    return nvfp4_sizes(rows, k, item)


def item_size(job: Job) -> int:
    """Bytes of a source value."""
    return ITEMSIZE[job.members[0].source.spec.dtype]


def part_rows(k: int, item: int) -> int:
    """FP8 rows of `k` values that are on the device at a time."""
    return max(1, PART_BYTES // (k * item))


def nvfp4_sizes(n: int, k: int, item: int) -> tuple[int, ...]:
    """Bytes of source, codes, scales and info."""
    return n * k * item, n * k // 2, n * k // NVFP4_BLOCK, INFO_BYTES


def fp8_sizes(n: int, k: int, item: int) -> tuple[int, ...]:
    """Bytes of source, codes, scales and info."""
    return n * k * item, n * k, n * 4, INFO_BYTES


def aligned(nbytes: int) -> int:
    """Rounded up to what areas begin at."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def split(place: Memory, sizes: Iterable[int]) -> Place:
    """Areas of device memory, one behind the other."""
    areas, begin = [], 0
    for size in sizes:
        areas.append(place.part(begin, size))
        begin += aligned(size)
    source, codes, scales, info = areas
    return source, codes, scales, info


def area_rows(area: Memory, rows: slice, width: int) -> Memory:
    """Some rows of `width` bytes."""
    return area.part(rows.start * width, (rows.stop - rows.start) * width)
