"""WRITE: output shards in place, at planned offsets, invisible until whole.

A shard is created under a temporary name with its header and full length; tensors are then
written at their offsets by any thread in any order, none of it buffered here. When the last is
in: fsync, journal, rename, fsync of the folder. A crash leaves either the temporary name or a
whole file, never half a shard under a final name.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beamq.errors import DiskError

PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor to be written. `offset` counts from the start of its shard's file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One output file: `header` is its first bytes, `tensors` lie in file order behind it."""

    name: str
    header: bytes = field(repr=False)
    tensors: tuple[OutputTensor, ...] = field(repr=False)
    nbytes: int


@contextmanager
def disk_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an `OSError` of the block into a `DiskError` that says what to do."""
    try:
        yield
    except OSError as fault:
        if fault.errno in _FULL:
            remedy = "disk full; free space, then run again with --resume"
        elif fault.errno == errno.EFBIG:
            remedy = "file-size limit reached (ulimit -f, or the file system's); use a smaller"
            remedy += " --max-shard-size"
        else:
            remedy = "then run again with --resume"
        what = fault.strerror or str(fault)
        raise DiskError(f"{path}: {action} failed: {what}; {remedy}") from fault


class ShardWriter:
    """One output shard under its temporary name. `write` may be called by many threads."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.shard = shard
        self.final = folder / shard.name
        self.partial = folder / (shard.name + PARTIAL)
        with disk_errors(self.partial, "creating it"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.partial, flags, 0o644)
            os.ftruncate(self._descriptor, shard.nbytes)
        self.write(0, memoryview(shard.header))

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of the file. Raises `DiskError`."""
        done = 0
        with disk_errors(self.partial, "writing"):
            while done < data.nbytes:
                done += os.pwrite(self._descriptor, data[done:], offset + done)

    def sync(self) -> None:
        """Make the bytes durable and close the file."""
        with disk_errors(self.partial, "flushing"):
            os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Close the file and leave it under its temporary name."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def publish(self) -> None:
        """Give the shard its final name; durable on return."""
        publish(self.partial, self.final)


def publish(partial: Path, final: Path) -> None:
    """Rename atomically, then make the rename durable."""
    with disk_errors(final, "renaming into place"):
        os.replace(partial, final)
        sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as fault:  # some network file systems cannot sync folders
        if fault.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file so that it is either absent, old, or whole and durable."""
    partial = path.with_name(path.name + PARTIAL)
    with disk_errors(path, "writing"), partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    publish(partial, path)


def write_json(path: Path, data: Any) -> None:
    """`write_file` of readable JSON, keys in the order given."""
    write_file(path, (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())


def copy_file(source: Path, target: Path) -> None:
    """Copy a companion file's bytes (never a link), whole and durable."""
    with disk_errors(target, "copying"):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + PARTIAL)
        with source.open("rb") as reader, partial.open("wb") as writer:
            shutil.copyfileobj(reader, writer, 1 << 20)
            writer.flush()
            os.fsync(writer.fileno())
    publish(partial, target)
