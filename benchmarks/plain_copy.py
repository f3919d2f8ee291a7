"""The floor of a conversion: read the source's bytes, write as many as the result has, do nothing.

In: a checkpoint folder, an empty folder, how many bytes to write, a number of threads. Each thread
takes an equal run of the source, reads it piece by piece into one buffer that stays in its cache,
and appends the due share of each piece to a file of its own: no shared file, no lock, no page that
is touched twice. A conversion that reads and writes the same bytes can hardly be faster on these
cores with these system calls.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

PIECE_BYTES = 1 << 20


def copy(source: Path, output: Path, *, write_nbytes: int, threads: int, fsync: bool) -> None:
    """Read all shards of `source`; write `write_nbytes` bytes to `threads` files of `output`."""
    pieces = [
        (path, start, min(PIECE_BYTES, path.stat().st_size - start))
        for path in sorted(source.glob("*.safetensors"))
        for start in range(0, path.stat().st_size, PIECE_BYTES)
    ]
    total = sum(nbytes for _, _, nbytes in pieces)
    output.mkdir(parents=True, exist_ok=True)
    each = -(-len(pieces) // threads)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            mine = pieces[number * each : (number + 1) * each]
            _copy_pieces(mine, output / f"{number}.bin", write_nbytes / total, fsync)
        except BaseException as failure:
            failures.append(failure)

    started = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if failures:
        raise failures[0]


def _copy_pieces(
    pieces: list[tuple[Path, int, int]], target: Path, share: float, fsync: bool
) -> None:
    buffer = bytearray(PIECE_BYTES)
    view = memoryview(buffer)
    reading: Path | None = None
    reader = -1
    read = written = 0
    writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for path, start, nbytes in pieces:
            if path != reading:
                if reader >= 0:
                    os.close(reader)
                reader, reading = os.open(path, os.O_RDONLY), path
            got = os.preadv(reader, [view[:nbytes]], start)
            if got != nbytes:
                raise RuntimeError(f"{path}: read {got} of {nbytes} bytes at {start}")
            read += nbytes
            due = round(read * share) - written
            done = 0
            while done < due:
                done += os.pwrite(writer, view[done:due], written + done)
            written += due
        if fsync:
            os.fsync(writer)
    finally:
        os.close(writer)
        if reader >= 0:
            os.close(reader)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Copy as many bytes as a conversion moves.")
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--write-bytes", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--fsync", action="store_true")
    options = parser.parse_args(arguments)
    copy(
        options.source,
        options.output,
        write_nbytes=options.write_bytes,
        threads=options.threads,
        fsync=options.fsync,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
