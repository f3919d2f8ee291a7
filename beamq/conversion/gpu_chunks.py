"""Page-locked chunks through which a worker's bytes go to a GPU and come back.

In: a queue, parts of device memory and the sinks they belong to. Out: chunks in turn, each free of
what was copied through it before; batches of parts that fill a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from beamq.conversion.gpu_areas import aligned
from beamq.conversion.gpu_queue import GpuQueue, Memory
from beamq.conversion.sinks import TensorSink

IN_BYTES = 16 << 20  # of a chunk: half of an expert's projection
OUT_BYTES = 8 << 20
CHUNKS = 2  # each way
SLOT_BYTES = CHUNKS * (IN_BYTES + OUT_BYTES)

Part = tuple[Memory, TensorSink]


class Chunk:
    """Page-locked bytes that a copy may be using."""

    def __init__(self, queue: GpuQueue, nbytes: int) -> None:
        self.array = queue.host(nbytes)
        self.view = memoryview(self.array)  # type: ignore[arg-type]  # numpy arrays are buffers
        self.address: int = self.array.ctypes.data
        self._mark = queue.mark()
        self._marked = False

    def mark(self) -> None:
        """In use by what was queued so far."""
        self._mark.record()
        self._marked = True

    def wait(self) -> None:
        """Until it is not."""
        if self._marked:
            self._mark.wait()
            self._marked = False


class Ring:
    """Chunks in turn, made when first needed; each is waited for before it is given out again."""

    def __init__(self, queue: GpuQueue, nbytes: int) -> None:
        self._queue = queue
        self._nbytes = nbytes
        self._chunks: list[Chunk] = []
        self._turn = 0

    def next(self) -> Chunk:
        """One that nothing uses."""
        if len(self._chunks) < CHUNKS:
            self._chunks.append(Chunk(self._queue, self._nbytes))
        chunk = self._chunks[self._turn % CHUNKS]
        self._turn += 1
        chunk.wait()
        return chunk


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """(start, size) of as few equal pieces as chunks allow."""
    count = -(-nbytes // IN_BYTES)
    size = min(IN_BYTES, aligned(-(-nbytes // count)))
    for start in range(0, nbytes, size):
        yield start, min(size, nbytes - start)


def packed(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Batches of parts that fit a chunk, large ones divided."""
    batch: list[Part] = []
    room = OUT_BYTES
    for memory, sink in parts:
        done = 0
        while done < memory.nbytes:
            size = min(room, memory.nbytes - done)
            batch.append((memory.part(done, size), sink))
            done += size
            room -= size
            if not room:
                yield batch
                batch, room = [], OUT_BYTES
    if batch:
        yield batch
