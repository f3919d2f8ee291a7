"""Where a job's bytes go, and what is told of it: sinks into a shard, checksums, counts."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from beamq.checksum import Checksum, new_checksum
from beamq.plan import Member
from beamq.shards import OutputTensor, ShardWriter


@dataclass(slots=True, kw_only=True)
class JobResult:
    """Checksums by tensor name, and counts worth telling."""

    tensors: dict[str, str] = field(default_factory=dict)
    underflow_blocks: int = 0
    zero_blocks: int = 0
    zero_groups: list[str] = field(default_factory=list)
    zero_rows: int = 0


class TensorSink:
    """Writes one output tensor from front to back, with its checksum."""

    def __init__(self, writer: ShardWriter, tensor: OutputTensor) -> None:
        self._writer = writer
        self._tensor = tensor
        self._position = 0
        self._checksum: Checksum = new_checksum()

    def append(self, data: memoryview) -> None:
        self._writer.write(self._tensor.offset + self._position, data)
        self._checksum.update(data)
        self._position += data.nbytes

    def finish(self, result: JobResult) -> None:
        if self._position != self._tensor.nbytes:
            raise RuntimeError(f"{self._tensor.name}: wrote {self._position} bytes")
        result.tensors[self._tensor.name] = self._checksum.hexdigest()


def write_input_scale(
    member: Member, input_scale: Callable[[str], float], writer: ShardWriter, result: JobResult
) -> None:
    """The last tensor of an NVFP4 linear."""
    content = f32_bytes(input_scale(member.role.module))
    write_whole(writer, member.outputs[-1], content, result)


def write_whole(
    writer: ShardWriter, tensor: OutputTensor, content: memoryview, result: JobResult
) -> None:
    sink = TensorSink(writer, tensor)
    sink.append(content)
    sink.finish(result)


def write_together(
    writer: ShardWriter, contents: Iterable[tuple[OutputTensor, memoryview]], result: JobResult
) -> None:
    """Write small tensors, neighbours in the file at once."""
    runs: list[tuple[int, bytearray]] = []
    for tensor, content in sorted(contents, key=lambda pair: pair[0].offset):
        if content.nbytes != tensor.nbytes:
            raise RuntimeError(f"{tensor.name}: {content.nbytes} bytes")
        checksum = new_checksum()
        checksum.update(content)
        result.tensors[tensor.name] = checksum.hexdigest()
        if runs and runs[-1][0] + len(runs[-1][1]) == tensor.offset:
            runs[-1][1].extend(content)
        else:
            runs.append((tensor.offset, bytearray(content)))
    for offset, run in runs:
        writer.write(offset, memoryview(run))


def f32_bytes(value: float) -> memoryview:
    return memoryview(struct.pack("<f", value))
