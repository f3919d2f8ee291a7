"""A checkpoint's files, wherever they are, and which of them hold its weights.

In: a folder or a repository on the Hub. Out: small files as local paths, shards by byte range.

`SourceFiles` is what the rest of beamq reads from; `LocalFiles` is a folder, `hub_source.HubFiles`
a repository. A shard is read with `read` for data that is worked on, with `peek` for a few bytes
here and there, and within `prefetch` by a loop that knows beforehand which shards it will read.

The index is not trusted: what it names must be a plain name in the same folder, must exist,
and must hold what the index says. Pickle files are never opened.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from beamq.errors import CheckpointError, counted
from beamq.io.companions import hidden, travels
from beamq.io.files import LFS_BYTES, OpenFiles, is_lfs_pointer, read_json_object
from beamq.io.safetensors_header import TensorSpec, few, read_header

Header = tuple[list[TensorSpec], dict[str, str]]


class Prefetch:
    """Has the shards of running jobs on disk; jobs are numbered as given to `prefetch`.

    This one is for files that are all on disk: there is nothing to wait for.
    """

    def wait(self, job: int, stopped: Callable[[], bool]) -> None:
        """Return when the job's shards can be read. Raises what prevents it."""

    def finish(self, job: int) -> None:
        """The job will read no more."""


class SourceFiles(ABC):
    """The files of one checkpoint. `name` is for messages, `label` has no path in it, `parallel`
    is how many `peek`s are worth making at once, `local` whether every read is of a local disk."""

    name: str
    label: str
    parallel = 1
    local = False
    merged: Mapping[str, Any] | None = None
    """The adapter that reading merges into the weights, as records say it."""

    @abstractmethod
    def folder(self) -> Path:
        """A local folder with every file but the shards; fetched now if need be."""

    @abstractmethod
    def listing(self) -> Mapping[str, int]:
        """Every file's path in the checkpoint and its bytes; hidden files are left out.

        Raises `CheckpointError` if one that travels with the weights is only a Git LFS pointer.
        """

    def _without_pointers(self, files: Mapping[str, int]) -> Mapping[str, int]:
        small = [file for file, size in files.items() if size <= LFS_BYTES and travels(file)]
        if found := [file for file in small if is_lfs_pointer(self.path(file))]:
            raise CheckpointError(
                f"{self.name}: {counted(len(found), 'file is', 'files are')} not there, only what"
                f" Git LFS leaves in their place ({few(found)}); run `git lfs pull` there, or"
                " download again"
            )
        return files

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Names at the top of the checkpoint, sorted."""

    @abstractmethod
    def has(self, file: str) -> bool:
        """Whether a file of that name exists, even as a dangling link."""

    @abstractmethod
    def path(self, file: str) -> Path:
        """Where a small file is, fetched now if need be."""

    def expect_headers(self, files: Sequence[str]) -> None:  # noqa: B027  # may do nothing
        """All of these headers will be asked for."""

    @abstractmethod
    def header(self, file: str) -> Header:
        """The checked header of a shard."""

    @abstractmethod
    def read(self, file: str, offset: int, out: memoryview, name: str) -> None:
        """Fill `out`; `name` is the tensor, for messages. Raises `CheckpointError`."""

    def peek(self, file: str, offset: int, nbytes: int, name: str) -> bytes:
        """A few bytes, not worth fetching a whole shard for."""
        out = bytearray(nbytes)
        self.read(file, offset, memoryview(out), name)
        return bytes(out)

    def advise(self, file: str, offset: int, nbytes: int) -> None:  # noqa: B027
        """A hint that these bytes will be read."""

    def missing_nbytes(self) -> Mapping[str, int]:
        """Shards that reading would fetch first, and their bytes."""
        return {}

    def prefetch(self, jobs: Sequence[Collection[str]]) -> AbstractContextManager[Prefetch]:
        """In the block, the shards that each of `jobs` reads are fetched in time, then deleted."""
        return nullcontext(Prefetch())

    @abstractmethod
    def stamp(self, shards: Sequence[str]) -> str:
        """A text that differs between versions of these files."""

    def changed(self) -> str | None:
        """A shard that is no longer the file whose header was read, or None."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Release everything."""


class LocalFiles(SourceFiles):
    """A folder. Raises `CheckpointError` if there is none."""

    local = True

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise CheckpointError(
                f"{root}: no such folder; expected the folder of a checkpoint or an adapter"
            )
        inside = root.name == "snapshots" and root.parent.name.startswith("models--")
        snapshots = root if inside else root / "snapshots"
        if snapshots.is_dir() and not (root / "config.json").exists():
            found = sorted(path.name for path in snapshots.iterdir())
            raise CheckpointError(
                f"{root}: a repository in the Hub's cache; give one of its snapshots:"
                f" {few([f'snapshots/{name}' for name in found]) or 'there is none yet'}"
            )
        self.name = str(root)
        self.label = root.resolve().name
        self._root = root
        self._open = OpenFiles(root)

    def folder(self) -> Path:
        return self._root

    def listing(self) -> Mapping[str, int]:
        """Regular files and links to such.

        Raises `CheckpointError` for a link, of a file that is copied, that points nowhere, to a
        folder, or out of this one: a copy of what it names might end on the Hub.
        """
        found = {}
        for path in sorted(self._root.rglob("*")):
            name = path.relative_to(self._root).as_posix()
            if path.is_symlink() and travels(name):
                self._check_link(path)
            if not hidden(name) and path.is_file():
                found[name] = path.stat().st_size
        return self._without_pointers(found)

    def _check_link(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"{path}: a link that points nowhere; restore or remove it")
        if path.is_dir():
            raise CheckpointError(f"{path}: a link to a folder; put a copy in its place")
        root = self._root.resolve()
        homes = [root]
        if root.parent.name == "snapshots":  # of the Hub's cache, whose files are in `blobs`
            homes.append(root.parent.parent / "blobs")
        target = path.resolve()
        if not any(home in target.parents for home in homes):
            raise CheckpointError(
                f"{path}: a link to {target}, outside the folder; put a copy in its place"
            )

    def names(self) -> Sequence[str]:
        return sorted(os.listdir(self._root))

    def has(self, file: str) -> bool:
        return os.path.lexists(self._root / file)

    def path(self, file: str) -> Path:
        return self._root / file

    def header(self, file: str) -> Header:
        """Read it now; from here on the file must stay what it is."""
        self._open.expect(file)
        return read_header(self._root / file, file)

    def read(self, file: str, offset: int, out: memoryview, name: str) -> None:
        self._open.read(file, offset, out, name)

    def advise(self, file: str, offset: int, nbytes: int) -> None:
        self._open.advise(file, offset, nbytes)

    def stamp(self, shards: Sequence[str]) -> str:
        """Sizes and modification times of the shards when their headers were read."""
        lines = []
        for file in shards:
            size, moment = self._open.size_and_time(file)
            lines.append(f"\n{file}\t{size}\t{moment}")
        return "".join(lines)

    def changed(self) -> str | None:
        return self._open.changed()

    def close(self) -> None:
        self._open.close()


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 1 << 30


def weight_files(source: SourceFiles) -> tuple[list[str], dict[str, str] | None]:
    """The safetensors files to read, and the index's map where there is one.

    Raises `CheckpointError` for an index that is broken or incomplete, or no weights at all.
    """
    if source.has(INDEX_NAME):
        return _indexed_files(source)
    if source.has(SINGLE_NAME):
        return [SINGLE_NAME], None
    found = [name for name in source.names() if name.endswith(".safetensors")]
    if found:
        raise CheckpointError(
            f"{source.name}: {len(found)} safetensors files but no {INDEX_NAME} and no"
            f" {SINGLE_NAME}; restore the index"
        )
    pickles = [name for name in source.names() if name.endswith(".bin")]
    if pickles:
        raise CheckpointError(
            f"{source.name}: only pickle files ({few(pickles)}); beamq never unpickles."
            " Save the model as safetensors first"
        )
    raise CheckpointError(f"{source.name}: no {SINGLE_NAME} and no {INDEX_NAME}; not a checkpoint")


def _indexed_files(source: SourceFiles) -> tuple[list[str], dict[str, str]]:
    where = f"{source.name}/{INDEX_NAME}"
    index = read_json_object(source.path(INDEX_NAME), CheckpointError, MAX_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: no weight_map; expected tensor name -> file")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not safe_file_name(file):
            raise CheckpointError(
                f"{where}: {name} points to {str(file)[:80]!r}; expected the name of a"
                " .safetensors file in the same folder"
            )
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not source.has(file)]
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} of {counted(len(files), 'shard is', 'shards are')} missing:"
            f" {few(missing)}; finish the download"
        )
    return files, weight_map


def safe_file_name(name: str) -> bool:
    """Whether a name from an index is a plain safetensors file name that stays in its folder."""
    return (
        name.endswith(".safetensors")
        and "/" not in name
        and "\\" not in name
        and "\0" not in name
        and not name.startswith(".")
        and len(name) < 256
    )


def check_index(
    where: str, weight_map: Mapping[str, str], tensors: Mapping[str, TensorSpec]
) -> None:
    """Raise `CheckpointError` where index and shards disagree."""
    problems = [
        f"{name} (index says {file}, "
        f"{'found in ' + tensors[name].file if name in tensors else 'not there'})"
        for name, file in weight_map.items()
        if name not in tensors or tensors[name].file != file
    ]
    problems += [f"{name} (in {tensors[name].file}, not in the index)"
                 for name in tensors if name not in weight_map]  # fmt: skip
    if problems:
        raise CheckpointError(
            f"{where}: {counted(len(problems), 'entry disagrees', 'entries disagree')} with the"
            f" shards: {few(problems)}"
        )
