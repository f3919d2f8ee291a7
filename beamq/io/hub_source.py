"""A Hub repository as `SourceFiles`: headers by range requests, shards on disk only while needed.

In: a pinned `HubRepo`. What a command costs follows from what it reads:

    headers, a few bytes (`header`, `peek`)    range requests, several at once; nothing on disk
    configs, tokenizer (`path`, `folder`)      the shared Hub cache, where they stay
    a conversion (`prefetch`)                  shards ahead of the jobs, deleted after the last one
    anything else (`read`)                     shards on demand, least recently used deleted first

Shards that the Hub cache already has are read there and count against no budget. Others are in
`cache_folder`. A conversion puts it into its output's state folder, so that it finds them again
after it was killed; they are deleted when it is done.
"""

from __future__ import annotations

import io
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from beamq.errors import CheckpointError, HubError
from beamq.io.companions import hidden, travels
from beamq.io.files import OpenFiles
from beamq.io.hub import HubRepo
from beamq.io.safetensors_header import parse_header, read_header
from beamq.io.shard_cache import LruCache, Prefetcher, Remote
from beamq.io.source import Header, SourceFiles

FIRST_BYTES = 1 << 17  # holds the header of almost every shard
PEEK_BYTES = 1 << 16
MAX_SMALL_READS = 24  # of a shard; more of them are worth fetching it
REQUESTS = 16  # at once


class HubFiles(SourceFiles):
    """See the module. `cache_bytes` bounds the shards on disk."""

    parallel = REQUESTS

    def __init__(
        self, repo: HubRepo, *, cache_bytes: int, cache_folder: Path | None = None
    ) -> None:
        self.name = repo.name
        self.label = repo.asked.repo
        self.repo = repo
        self._cache_bytes = cache_bytes
        self._cache_folder = cache_folder
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._headers: dict[str, Future[Header]] = {}
        self._cached: dict[str, Path | None] = {}
        self._small_reads: Counter[str] = Counter()
        self._open = OpenFiles(Path(), self._locate)
        self._prefetch: Prefetcher | None = None
        self._demand: LruCache | None = None

    def folder(self) -> Path:
        """The snapshot in the Hub cache, with every file that travels with the weights."""
        wanted = [file for file in self.repo.files if travels(file)]
        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(self.repo.small_file, wanted))
        return self.repo.small_file("config.json").parent

    def listing(self) -> Mapping[str, int]:
        files = self.repo.files
        return self._without_pointers({file: files[file] for file in files if not hidden(file)})

    def names(self) -> Sequence[str]:
        return [file for file in self.repo.files if "/" not in file]

    def has(self, file: str) -> bool:
        return file in self.repo.files

    def path(self, file: str) -> Path:
        """Its path in the Hub cache. Raises `CheckpointError` if the commit lacks it."""
        return self.repo.small_file(file)

    def expect_headers(self, files: Sequence[str]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="beamq-hub")
        for file in files:
            if file not in self._headers:
                self._headers[file] = self._pool.submit(self._read_header, file)

    def header(self, file: str) -> Header:
        """One or two range requests, unless `expect_headers` made them already."""
        self.expect_headers([file])
        return self._headers[file].result()

    def _read_header(self, file: str) -> Header:
        where = f"{self.name}/{file}"
        if file not in self.repo.files:
            raise CheckpointError(f"{where}: not found")
        size = self.repo.files[file]
        first = self.repo.read_range(file, 0, min(size, FIRST_BYTES))
        whole = 8 + int.from_bytes(first[:8], "little")
        if len(first) < whole <= size and not first.startswith(b"version "):
            first += self.repo.read_range(file, len(first), whole - len(first))
        return parse_header(where, file, size, io.BytesIO(first).read)

    def read(self, file: str, offset: int, out: memoryview, name: str) -> None:
        """From disk if the shard is there, by a request if little is asked for, else fetch it."""
        if self._here(file):
            self._open.read(file, offset, out, name)
        elif self._prefetch is not None or (out.nbytes <= PEEK_BYTES and self._is_rare(file)):
            out[:] = self.repo.read_range(file, offset, out.nbytes)
        else:
            with self._on_demand().hold(file):
                self._open.read(file, offset, out, name)

    def peek(self, file: str, offset: int, nbytes: int, name: str) -> bytes:
        """From disk if the shard is there, else by one request."""
        if self._here(file):
            return super().peek(file, offset, nbytes, name)
        return self.repo.read_range(file, offset, nbytes)

    def missing_nbytes(self) -> Mapping[str, int]:
        """Shards that the Hub cache lacks."""
        return {file: self.repo.files[file] for file in self._headers if not self._in_cache(file)}

    @contextmanager
    def prefetch(self, jobs: Sequence[Collection[str]]) -> Iterator[Prefetcher]:
        self._end_demand()
        self._clear("demand")
        sizes = self.missing_nbytes()
        ahead = Prefetcher(
            [[file for file in files if file in sizes] for files in jobs],
            Remote(sizes=sizes, fetch=self._fetch, forget=self._open.forget),
            folder=self._place() / "ahead",
            budget=self._cache_bytes,
        )
        with ahead:
            self._prefetch = ahead
            try:
                yield ahead
            finally:
                self._prefetch = None

    def stamp(self, shards: Sequence[str]) -> str:
        """The commit, which fixes every byte; so `changed` has nothing to find."""
        return f"hub:{self.repo.asked.repo}@{self.repo.commit}"

    def close(self) -> None:
        """Stop requests, close files, delete shards fetched on demand."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._end_demand()
        self._open.close()

    def _fetch(self, file: str, folder: Path, stopped: Callable[[], bool]) -> Path:
        """Fetch a shard and check that it has the header that was planned with."""
        path = self.repo.shard(file, folder, stopped)
        if read_header(path, file) != self.header(file):
            path.unlink()
            raise HubError(f"{self.name}: {file} is not the file its header was read from")
        return path

    def _is_rare(self, file: str) -> bool:
        """Count a small read. True: there were few so far, and the shard is not on disk."""
        with self._lock:
            self._small_reads[file] += 1
            few = self._small_reads[file] <= MAX_SMALL_READS
            return few and (self._demand is None or not self._demand.has(file))

    def _in_cache(self, file: str) -> bool:
        with self._lock:
            if file not in self._cached:
                self._cached[file] = self.repo.cached(file)
            return self._cached[file] is not None

    def _here(self, file: str) -> bool:
        """Whether reading needs no request, and will not while the caller's job runs."""
        if self._in_cache(file):
            return True
        ahead = self._prefetch
        return ahead is not None and (ahead.folder / file).exists()

    def _locate(self, file: str) -> Path:
        cached = self._cached.get(file)
        if cached is not None:
            return cached
        source = self._prefetch or self._demand
        return (source.folder if source is not None else Path()) / file

    def _place(self) -> Path:
        if self._cache_folder is not None:
            return self._cache_folder
        from huggingface_hub import constants

        return Path(constants.HF_HOME) / "beamq"

    def _clear(self, kind: str) -> None:
        """Delete what an earlier run left of the other kind: it would add to the budget."""
        if self._cache_folder is not None:
            shutil.rmtree(self._cache_folder / kind, ignore_errors=True)

    def _on_demand(self) -> LruCache:
        with self._lock:
            if self._demand is None:
                self._clear("ahead")
                self._demand = LruCache(
                    self._place() / "demand",
                    f"{self.repo.asked.repo.replace('/', '--')}-{self.repo.commit[:12]}",
                    Remote(sizes=self.repo.files, fetch=self._fetch, forget=self._open.forget),
                    budget=self._cache_bytes,
                )
            return self._demand

    def _end_demand(self) -> None:
        with self._lock:
            demand, self._demand = self._demand, None
        if demand is not None:
            self._open.close()
            demand.close()
