"""What a job may write: every byte of a tensor, and no other number of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from beamq.convert.open_shards import JobWriter
from beamq.io.shard_writer import OutputTensor, Shard, ShardWriter


@pytest.mark.parametrize("nbytes", [0, 7, 9])
def test_a_tensor_of_another_length_is_never_finished(tmp_path: Path, nbytes: int) -> None:
    """A worker that skips a piece is a defect; zeros would stand in its place."""
    tensor = OutputTensor(name="codes", dtype="U8", shape=(8,), nbytes=8, offset=4)
    shard = Shard(name="x.safetensors", header=b"head", tensors=(tensor,), nbytes=12)
    out = JobWriter(ShardWriter(tmp_path, shard))
    content = memoryview(bytes(nbytes))
    sink = out.sink(tensor)
    sink.append(content)
    with pytest.raises(RuntimeError, match=f"codes: wrote {nbytes} bytes"):
        sink.finish()
    with pytest.raises(RuntimeError, match=f"codes: {nbytes} bytes"):
        out.write_together([(tensor, content)])
    assert not out.result.tensors
