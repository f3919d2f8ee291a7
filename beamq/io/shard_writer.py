"""Durable output files: shards written in place at planned offsets, and small files.

In: a `Shard` with its header and offsets, and tensors' bytes. Out: a file that has its final name
only when it is complete.

A shard is created under a temporary name with its header and full length. Any thread then writes
tensors at their offsets, in any order; nothing is buffered here. After the last one: fsync,
journal, rename, fsync of the folder. A crash leaves the temporary name or a complete file, never an
incomplete shard under its final name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from beamq.errors import CheckpointError, DiskError
from beamq.io.files import open_file, unreadable

PARTIAL = ".partial"
COPY_BYTES = 1 << 20
FICLONE = 0x40049409  # Linux: make one file share all blocks of another
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW


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
    """One output file: `header` is its first bytes, `tensors` follow in file order."""

    name: str
    header: bytes = field(repr=False)
    tensors: tuple[OutputTensor, ...] = field(repr=False)
    nbytes: int


@contextmanager
def disk_errors(path: Path, action: str, *, resumable: bool = True) -> Iterator[None]:
    """Turn an `OSError` of the block into a `DiskError` that says what to do: run again, with
    `--resume` if the step is `resumable`."""
    try:
        yield
    except OSError as fault:
        what = fault.strerror or str(fault)
        remedy = disk_remedy(fault.errno, path, resumable)
        raise DiskError(f"{path}: {action} failed: {what}; {remedy}") from fault


def disk_remedy(number: int | None, path: Path, resumable: bool) -> str:
    """What to do about the error `number` at `path`."""
    again = "run again with --resume" if resumable else "run it again"
    if number in (errno.ENOSPC, errno.EDQUOT):
        full = "disk full" if _has_inodes(path.parent) else "the disk has no inode left"
        return f"{full}; free space, then {again}"
    if number == errno.EFBIG:
        smaller = ", or use a smaller --max-shard-size" if resumable else ""
        return f"file-size limit reached (ulimit -f, or the file system's); raise it{smaller}"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a writable folder"
    if number in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG):
        return "another file or link has that name; choose another output"
    if number in (errno.EMFILE, errno.ENFILE):
        return f"too many open files; raise ulimit -n, then {again}"
    if number == errno.ENOENT:
        return f"check the path, then {again}"
    return f"check the disk, then {again}"


def _has_inodes(folder: Path) -> bool:
    try:
        status = os.statvfs(folder)
    except OSError:
        return True
    return status.f_files == 0 or status.f_favail > 0


class ShardWriter:
    """One output shard under its temporary name. `write` may be called by many threads.

    `rest` closes the file until the next write opens it again, so any number of shards can be in
    progress with few files open.
    """

    def __init__(self, folder: Path, shard: Shard, *, create: bool = True) -> None:
        """Without `create`, another process creates the file and renames it."""
        self.shard = shard
        self.final = folder / shard.name
        self.partial = folder / (shard.name + PARTIAL)
        self._lock = threading.Lock()
        self._users = 0
        self._descriptor = -1
        if create:
            self._create()

    def _create(self) -> None:
        shard = self.shard
        with disk_errors(self.partial, "creating it"):
            self._descriptor = os.open(self.partial, _CREATE, 0o644)
        try:
            with disk_errors(self.partial, "reserving space"):
                os.ftruncate(self._descriptor, shard.nbytes)
            self.write(0, memoryview(shard.header))
        except BaseException:
            self.rest()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset of the file. Raises `DiskError`."""
        done = 0
        with disk_errors(self.partial, "writing"), self._in_use() as descriptor:
            while done < data.nbytes:
                done += os.pwrite(descriptor, data[done:], offset + done)

    @contextmanager
    def _in_use(self) -> Iterator[int]:
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = os.open(self.partial, _CREATE & ~(os.O_CREAT | os.O_TRUNC))
            self._users += 1
            descriptor = self._descriptor
        try:
            yield descriptor
        finally:
            with self._lock:
                self._users -= 1

    def sync(self) -> None:
        """Make the bytes durable and close the file."""
        try:
            with disk_errors(self.partial, "flushing"), self._in_use() as descriptor:
                os.fsync(descriptor)
        finally:
            self.rest()

    def rest(self) -> None:
        """Close the file, unless a thread writes to it; it keeps its temporary name."""
        with self._lock, disk_errors(self.partial, "closing"):
            if not self._users and self._descriptor >= 0:
                descriptor, self._descriptor = self._descriptor, -1
                os.close(descriptor)

    def share(self, whole: Path) -> bool:
        """Put `whole`, which has this shard's bytes, in place of the file: a clone that shares its
        blocks, or a hard link. False, and nothing changed, where the file system can do neither.
        Nothing may have been written yet, and nothing may be written after."""
        self.rest()
        whole, clone = whole.resolve(), self.final.with_name(f"{self.shard.name}.clone{PARTIAL}")
        with disk_errors(clone, "replacing it"):
            clone.unlink(missing_ok=True)
            if not (_clone(whole, clone) or _link(whole, clone)):
                return False
            os.replace(clone, self.partial)
        return True

    def publish(self) -> None:
        """Give the shard its final name; durable on return."""
        publish(self.partial, self.final)


def _clone(whole: Path, clone: Path) -> bool:
    descriptor, _ = open_file(whole)
    try:
        with open(descriptor, "rb") as reader, _create(clone) as writer:
            fcntl.ioctl(writer.fileno(), FICLONE, reader.fileno())
    except OSError:
        clone.unlink(missing_ok=True)
        return False
    return True


def _link(whole: Path, clone: Path) -> bool:
    if not os.access(whole, os.W_OK):  # fsync will open it, although nothing is written
        return False
    try:
        os.link(whole, clone)
    except OSError:
        return False
    return True


def publish(partial: Path, final: Path, *, resumable: bool = True) -> None:
    """Rename atomically, then make the rename durable."""
    with disk_errors(final, "renaming into place", resumable=resumable):
        os.replace(partial, final)
        sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that names in it survive a loss of power."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder can be writable but not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as fault:  # some network file systems cannot sync folders
        if fault.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; durable on return."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
    folder.mkdir(exist_ok=True)  # raises where a file has that name


def write_file(path: Path, content: bytes, *, resumable: bool = True) -> None:
    """Write a small file so that a crash leaves it absent, unchanged, or complete and durable.

    `resumable`: see `disk_errors`.
    """
    partial = path.with_name(path.name + PARTIAL)
    with disk_errors(path, "writing", resumable=resumable), _create(partial) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    publish(partial, path, resumable=resumable)


def check_place(target: Path, option: str, *, makes_folders: bool = False) -> None:
    """Raise `DiskError` if `write_file` could not write `target`, the value of `option`; to be
    called before the work. Makes nothing."""
    folder = target.absolute().parent
    while makes_folders and not folder.exists():
        folder = folder.parent
    if target.is_dir():
        raise DiskError(f"{target}: is a folder; choose another {option}")
    if not folder.is_dir():
        raise DiskError(f"{target}: {folder} is not a folder; choose another {option}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DiskError(f"{target}: {folder} may not be written to; choose another {option}")
    if len(os.fsencode(target.name + PARTIAL)) > os.pathconf(folder, "PC_NAME_MAX"):
        raise DiskError(f"{target}: the name is too long for a file; choose another {option}")


def write_json(path: Path, data: Any) -> None:
    """`write_file` of readable JSON, keys in the order given."""
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair in a config
        text = json.dumps(data, indent=2).encode()
    write_file(path, text + b"\n")


def copy_file(source: Path, root: Path, relative: str) -> None:
    """Copy a file's bytes (never a link) to `root`/`relative`, complete and durable.

    Raises `CheckpointError` where the source cannot be read, `DiskError` otherwise, also where a
    sub-folder is a link, which would lead the copy out of the output.
    """
    target = root / relative
    if not target.is_relative_to(root) or ".." in target.parts[len(root.parts) :]:
        raise CheckpointError(f"{relative[:200]!r}: a file name that leads out of the folder")
    for parent in target.relative_to(root).parents:
        if (root / parent).is_symlink() and str(parent) != ".":
            raise DiskError(f"{root / parent}: is a link; beamq writes only inside {root}")
    partial = target.with_name(target.name + PARTIAL)
    try:
        descriptor, _ = open_file(source)
    except OSError as fault:
        raise unreadable(source, fault, CheckpointError) from fault
    with open(descriptor, "rb") as reader, disk_errors(target, "copying"):
        make_folder(target.parent)
        with _create(partial) as writer:
            while piece := _read_piece(reader, source):
                writer.write(piece)
            writer.flush()
            os.fsync(writer.fileno())
    publish(partial, target)


def _create(partial: Path) -> BinaryIO:
    """An empty file for writing; a link in its place is not followed."""
    return open(os.open(partial, _CREATE, 0o644), "wb")


def _read_piece(reader: BinaryIO, source: Path) -> bytes:
    try:
        return reader.read(COPY_BYTES)
    except OSError as fault:
        raise unreadable(source, fault, CheckpointError) from fault
