"""Where every output byte goes: drafts of jobs fill shards, and each tensor gets its offset.

In: `Draft`s in the order of the output, and how many bytes a shard may hold. Out: shards with their
headers, and which drafts went into each. Nothing is read; every size follows from dtype and shape.

A draft is never split over shards, so what is computed together is written to one file. Within a
shard tensors lie by falling element size: loaders view a file as typed memory, holes are not
allowed, and so order must align each tensor to its own dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from beamq.header import ITEMSIZE
from beamq.roles import TensorRole
from beamq.shards import OutputTensor, Shard
from beamq.sources import SourceRange

Outputs = tuple[tuple[str, str, tuple[int, ...]], ...]
"""(name, dtype, shape) of the tensors that one source tensor becomes."""
DraftMember = tuple[TensorRole, SourceRange, Outputs]


@dataclass(slots=True, kw_only=True)
class Draft:
    """A job whose outputs have no places yet."""

    kind: str
    group: str
    members: list[DraftMember]

    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum(_nbytes(dtype, shape) for _, _, outs in self.members for _, dtype, shape in outs)


def fill_shards(drafts: Iterable[Draft], limit: int) -> list[tuple[list[Draft], Shard]]:
    """Shards in order, each with the drafts it holds. One larger than `limit` gets its own."""
    bins: list[list[Draft]] = []
    room = -1
    for draft in drafts:
        nbytes = draft.nbytes()
        if nbytes > room:
            bins.append([])
            room = limit
        bins[-1].append(draft)
        room -= nbytes
    return [(inside, _layout(index, len(bins), inside)) for index, inside in enumerate(bins)]


def _layout(index: int, count: int, drafts: list[Draft]) -> Shard:
    entries = [entry for draft in drafts for _, _, outs in draft.members for entry in outs]
    entries.sort(key=lambda entry: -ITEMSIZE[entry[1]])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in entries:
        end = begin + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    tensors = []
    offset = len(raw)
    for name, dtype, shape in entries:
        nbytes = _nbytes(dtype, shape)
        tensors.append(
            OutputTensor(name=name, dtype=dtype, shape=shape, nbytes=nbytes, offset=offset)
        )
        offset += nbytes
    return Shard(
        name=f"model-{index + 1:05d}-of-{count:05d}.safetensors",
        header=raw,
        tensors=tuple(tensors),
        nbytes=offset,
    )


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    count = ITEMSIZE[dtype]
    for size in shape:
        count *= size
    return count
