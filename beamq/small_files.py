"""Small files that a stranger may have made: read whole, but never more than they may hold.

In: a path and a limit in bytes. Out: the bytes, or the JSON object in them; or an error that names
the file. A named pipe, a device or a folder in a file's place is refused rather than waited for,
and the size is that of the file that was opened, so nobody can swap it in between.

JSON grows when it is parsed: an empty list is two bytes in a file and sixty in memory. A file
that is mostly brackets is therefore none of ours and is refused before it is parsed; what is
parsed takes some twenty times its bytes at most.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from beamq.errors import BeamqError, DiskError, UsageError, counted

FREE_BRACKETS = 4096
MACHINE_FAULTS = {
    errno.EIO: "the device fails; check it",
    errno.ENXIO: "the device is gone; check it",
    errno.ESTALE: "the network file system lost the file; mount it again",
    errno.ETIMEDOUT: "the network file system does not answer",
    errno.EMFILE: "raise the limit (ulimit -n)",
    errno.ENFILE: "the machine has too many files open",
}
MAX_YAML_DEPTH = 16
MAX_YAML = 1 << 16  # the parser manages some hundred kilobytes a second
BYTES_PER_BRACKET = 8  # a tensor's entry in a header has 3 brackets in at least 50 bytes


def user_path(text: str | Path) -> Path:
    """A path as a user gave it, with `~` resolved. Raises `UsageError` where it cannot be one."""
    if not str(text):
        raise UsageError("an empty path; expected a folder or a file")
    try:
        path = Path(text).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
    except (OSError, ValueError, RuntimeError) as fault:
        words = (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
        raise UsageError(f"{text}: not a path that can be used: {words}") from None
    return path


def open_file(path: Path) -> tuple[int, os.stat_result]:
    """A descriptor for reading a regular file, and its status. Raises `OSError`."""
    # Without O_NONBLOCK, opening a named pipe waits for a writer, perhaps for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status
    os.close(descriptor)
    kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
    raise OSError(0, f"{kind}, not a file", str(path))


def read_small(path: Path, error: type[BeamqError], limit: int) -> bytes:
    """All bytes of a file. Raises `error` if it is absent, unreadable, no file, or too large."""
    try:
        descriptor, status = open_file(path)
        with open(descriptor, "rb") as stream:
            if status.st_size > limit:
                raise error(
                    f"{path}: {status.st_size} bytes, expected at most {limit}; not a file of this"
                    " kind"
                )
            return stream.read(status.st_size)  # never a buffer larger than the file
    except FileNotFoundError:
        raise error(f"{path}: not found; is this the right folder?") from None
    except (OSError, ValueError) as fault:
        raise unreadable(path, fault, error) from fault


def unreadable(
    path: Path | str, fault: Exception, error: type[BeamqError], doing: str = "cannot be read"
) -> BeamqError:
    """What to raise for a failed read: `error`, or `DiskError` where the machine is at fault."""
    words = (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
    number = fault.errno if isinstance(fault, OSError) else None
    if number in MACHINE_FAULTS:
        return DiskError(f"{path}: {doing}: {words}; {MACHINE_FAULTS[number]}")
    return error(f"{path}: {doing}: {words}")


def read_json_object(path: Path, error: type[BeamqError], limit: int) -> dict[str, Any]:
    """The one object in a JSON file. Raises `error` with the file's name."""
    raw = read_small(path, error, limit)
    try:
        parsed = parse_json(raw)
    except ValueError as fault:
        raise error(f"{path}: not valid JSON: {str(fault)[:120]}") from None
    if not isinstance(parsed, dict):
        raise error(f"{path}: holds a {type(parsed).__name__}, expected a JSON object")
    return parsed


def parse_json(raw: bytes, *, unique: bool = False) -> Any:
    """`json.loads` with bounded growth. Raises `ValueError` for anything that is amiss.

    With `unique`, an object that has a key twice is refused; otherwise the last one counts, as
    it does for every loader.
    """
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets > FREE_BRACKETS + len(raw) // BYTES_PER_BRACKET:
        raise ValueError(f"{brackets} brackets in {len(raw)} bytes")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        shown = ", ".join(name[:60] for name in twice[:3])
        raise ValueError(f"{counted(len(twice), 'name is', 'names are')} there twice: {shown}")
    return found


def parse_yaml(text: str) -> Any:
    """A few lines of YAML as plain data. Raises `ValueError` for anything that is amiss.

    Aliases are refused: with them a kilobyte can stand for gigabytes, and nobody needs them here.
    """
    import yaml  # only where there is some to parse

    if len(text) > MAX_YAML:
        raise ValueError(f"{len(text)} characters of YAML, expected at most {MAX_YAML}")
    try:
        depth = 0
        for event in yaml.parse(text):  # lazily, so that nothing deep is ever gone into
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("aliases (*name) are not allowed")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH:
                raise ValueError("nested too deeply")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, OverflowError) as fault:
        raise ValueError(" ".join(str(fault).split())[:160]) from None
