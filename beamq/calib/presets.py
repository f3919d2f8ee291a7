"""Named texts for `--data`: `general` and `code` from public datasets, and `stdlib`.

In: a preset's name. Out: its parts (`PublicFile`), and rows of a part, read from the Hub in small
pieces (`public_rows`).

The one idea: a part is one Parquet or JSONL file at one commit. Of a Parquet file the footer and a
few row groups are read, only the needed columns; of a JSONL file some blocks; in an order that the
seed fixes, until there is enough text. No file is downloaded whole, nothing stays on disk. A
document's own digest decides whether it calibrates or judges (`side`), so none does both.

Limits: `MOST_BYTES` of a file. What the datasets hold is not checked. docs/calibration.md lists
their licences, and who has seen which of these files at which commit.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beamq.calib.documents import Split, in_pieces
from beamq.calib.rows import READ_COLUMNS, Document, Row
from beamq.errors import CalibrationError, MissingDependencyError
from beamq.io.hub import HubRepo, dataset_files

LARGE = 20_000_000_000
"""Models of more parameters calibrate on `general`, where the Hub answers."""
MOST_BYTES = 128 << 20
BLOCK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicFile:
    """A part of a preset. `column` holds the text; without it, a row is read like those of a
    user's file. `chat` says that rows are conversations, which need a chat template."""

    domain: str
    weight: float
    repo: str
    revision: str
    path: str
    column: str = ""
    chat: bool = False

    @property
    def name(self) -> str:
        """For records."""
        return f"{self.domain}: {self.repo}@{self.revision[:12]}/{self.path}"


def _code(language: str, weight: float) -> PublicFile:
    return PublicFile(
        domain="code",
        weight=weight,
        repo="bigcode/commitpackft",
        revision="fc56fe33c030c6daa414c2b112c932b8eed085e6",
        path=f"data/{language}/data.jsonl",
        column="new_contents",
    )


def _web(language: str, weight: float) -> PublicFile:
    return PublicFile(
        domain="languages",
        weight=weight,
        repo="HuggingFaceFW/fineweb-2",
        revision="af9c13333eb981300149d5ca60a8e9d659b276b9",
        path=f"data/{language}/train/000_00000.parquet",
        column="text",
    )


PRESETS: dict[str, tuple[PublicFile, ...]] = {
    "stdlib": (),
    "code": (
        _code("python", 0.4),
        _code("javascript", 0.2),
        _code("java", 0.1),
        _code("c++", 0.1),
        _code("go", 0.1),
        _code("rust", 0.1),
    ),
    "general": (
        PublicFile(
            domain="prose",
            weight=0.25,
            repo="HuggingFaceFW/fineweb-edu",
            revision="87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
            path="sample/10BT/000_00000.parquet",
            column="text",
        ),
        _code("python", 0.13),
        _code("javascript", 0.06),
        _code("java", 0.03),
        _code("c++", 0.03),
        _code("rust", 0.03),
        PublicFile(
            domain="mathematics",
            weight=0.12,
            repo="open-web-math/open-web-math",
            revision="fde8ef8de2300f5e778f56261843dab89f230815",
            path="data/train-00000-of-00114-5a023365406cb9c4.parquet",
            column="text",
        ),
        PublicFile(
            domain="dialogue",
            weight=0.12,
            repo="HuggingFaceTB/smoltalk",
            revision="5feaf2fd3ffca7c237fc38d1861bc30365d48ffa",
            path="data/smol-magpie-ultra/train-00000-of-00006.parquet",
            chat=True,
        ),
        PublicFile(
            domain="tool calls",
            weight=0.08,
            repo="NousResearch/hermes-function-calling-v1",
            revision="176b6a99207f758190477ac3f24d702154d0ff5d",
            path="func_calling/train/0000.parquet",
            chat=True,
        ),
        _web("cmn_Hani", 0.05),
        _web("rus_Cyrl", 0.025),
        _web("deu_Latn", 0.025),
        _web("fra_Latn", 0.025),
        _web("jpn_Jpan", 0.025),
    ),
}


# The default text: sources of Python's standard library, as the running Python has them.
#
# Beam is for code, every machine that runs beamq has these files, and nothing need be downloaded.
# Odd positions of the sorted list calibrate, even ones evaluate, so that a comparison on the
# default text never judges a checkpoint by text it was calibrated on. A module keeps its side
# even where another is missing. The list holds for Python 3.11 to 3.13, some 3.5 MB or a million
# tokens for each half, without tests, tables and packages that distributions split off. The text
# differs between Python versions: the description names the version, the digest shows it.

_NAMES = """
__future__ _collections_abc _markupbase _pydecimal _pyio _strptime _threading_local _weakrefset
abc argparse ast asyncio.base_events asyncio.base_subprocess asyncio.events asyncio.futures
asyncio.locks asyncio.proactor_events asyncio.protocols asyncio.queues asyncio.runners
asyncio.selector_events asyncio.sslproto asyncio.staggered asyncio.streams asyncio.subprocess
asyncio.taskgroups asyncio.tasks asyncio.timeouts asyncio.transports asyncio.unix_events
asyncio.windows_events asyncio.windows_utils base64 bdb bz2 cProfile calendar cmd code codecs
codeop collections colorsys compileall concurrent.futures._base concurrent.futures.process
concurrent.futures.thread configparser contextlib copy copyreg csv ctypes ctypes.util dataclasses
dbm dbm.dumb difflib dis doctest email._encoded_words email._header_value_parser
email._parseaddr email._policybase email.charset email.contentmanager email.feedparser
email.generator email.header email.headerregistry email.message email.parser email.policy
email.quoprimime email.utils enum filecmp fileinput fnmatch fractions ftplib functools genericpath
getopt getpass gettext glob graphlib gzip hashlib heapq hmac html html.parser http http.client
http.cookiejar http.cookies http.server imaplib importlib importlib._bootstrap
importlib._bootstrap_external importlib.metadata importlib.util inspect io ipaddress json
json.decoder json.encoder linecache locale logging logging.config logging.handlers lzma mailbox
mimetypes modulefinder multiprocessing.connection multiprocessing.context
multiprocessing.forkserver multiprocessing.heap multiprocessing.managers multiprocessing.pool
multiprocessing.process multiprocessing.queues multiprocessing.reduction
multiprocessing.resource_sharer multiprocessing.resource_tracker multiprocessing.shared_memory
multiprocessing.sharedctypes multiprocessing.spawn multiprocessing.synchronize
multiprocessing.util netrc ntpath numbers operator optparse os pathlib pdb pickle pickletools
pkgutil platform plistlib poplib posixpath pprint profile pstats pty py_compile pyclbr pydoc queue
quopri random re re._compiler re._parser reprlib rlcompleter runpy sched selectors shelve shlex
shutil site smtplib socket socketserver ssl stat statistics string subprocess symtable sysconfig
tabnanny tarfile tempfile textwrap threading timeit tokenize tomllib._parser trace traceback
tracemalloc types typing unittest.async_case unittest.case unittest.loader unittest.main
unittest.mock unittest.result unittest.runner unittest.suite unittest.util urllib.parse
urllib.request urllib.robotparser uuid warnings wave weakref webbrowser wsgiref.handlers
wsgiref.headers wsgiref.simple_server wsgiref.util wsgiref.validate xml.dom.expatbuilder
xml.dom.minidom xml.dom.pulldom xml.dom.xmlbuilder xml.etree.ElementPath xml.etree.ElementTree
xml.sax.expatreader xml.sax.handler xml.sax.saxutils xml.sax.xmlreader xmlrpc.client xmlrpc.server
zipapp zipfile zipimport zoneinfo._common zoneinfo._tzpath zoneinfo._zoneinfo
"""
MODULES: tuple[str, ...] = tuple(_NAMES.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultText:
    """`texts` maps a module's name to its source; records show `description`."""

    description: str
    texts: dict[str, str]

    def pieces(self, piece: int, rng: random.Random) -> list[Document]:
        """The sources, cut where they are long, in an order drawn from `rng`."""
        found = [
            part for text in self.texts.values() for part in in_pieces([text], piece=piece, rng=rng)
        ]
        rng.shuffle(found)
        return found

    def digests(self) -> frozenset[str]:
        """SHA-256 of each source, to test that two texts have no file in common."""
        return frozenset(
            hashlib.sha256(text.encode("utf-8")).hexdigest() for text in self.texts.values()
        )


def split_modules(split: Split) -> tuple[str, ...]:
    """Names of one half: odd positions of the list calibrate, even ones evaluate."""
    return MODULES[1::2] if split == "calibration" else MODULES[0::2]


def default_text(split: Split = "calibration", *, root: Path | None = None) -> DefaultText:
    """Read one half of the list from `root`, by default the running Python's library.

    Raises `CalibrationError` if fewer than half of the sources exist, as in a Python whose library
    is zipped or compiled.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    wanted = split_modules(split)
    texts = {name: text for name in wanted if (text := _source(root, name)) is not None}
    if 2 * len(texts) < len(wanted):
        raise CalibrationError(
            f"default calibration text: {len(texts)} of {len(wanted)} standard-library sources"
            " found; this Python ships without them. Pass --data"
        )
    return DefaultText(
        description=f"Python {platform.python_version()} standard library, {len(texts)} files"
        f" ({split} half)",
        texts=texts,
    )


def _source(root: Path, module: str) -> str | None:
    """A module's source; some are a file in one Python and a package in the next."""
    path = root.joinpath(*module.split("."))
    for candidate in (path.with_name(path.name + ".py"), path / "__init__.py"):
        try:
            return candidate.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
    return None


def side(document: Document) -> Split:
    """Whether a document calibrates or judges, by its content alone."""
    data = document if isinstance(document, str) else json.dumps(document)
    first = hashlib.sha256(data.encode("utf-8", "replace")).digest()[0]
    return "calibration" if first % 2 else "evaluation"


def public_rows(part: PublicFile, rng: random.Random) -> Iterator[Row]:
    """Rows of a part, in an order drawn from `rng`.

    Raises `HubError`, `HubUnreachableError`; `CalibrationError` for a file that is not as expected
    and past `MOST_BYTES`.
    """
    repo = dataset_files(part.repo, part.revision, [part.path])
    file = RangeFile(repo, part.path, MOST_BYTES)
    read = _parquet if part.path.endswith(".parquet") else _jsonl
    for number, values in enumerate(read(file, part, rng)):
        if part.column:
            values = {"text": values.get(part.column)}
        yield Row(values, lambda number=number: f"{part.name}, row {number} as drawn")  # type: ignore[misc]


class RangeFile(io.RawIOBase):
    """A file of a repository as a seekable stream; each read is one range request.

    Raises `CalibrationError` beyond `most` bytes in all.
    """

    def __init__(self, repo: HubRepo, path: str, most: int) -> None:
        self._repo = repo
        self._path = path
        self._left = most
        self._at = 0
        self.size = repo.files[path]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self.size - self._at, 0)
        count = left if size < 0 else min(size, left)
        if count > self._left:
            raise CalibrationError(
                f"{self._repo.name}: more than {MOST_BYTES:,} bytes of {self._path} would be read;"
                " use fewer --samples, or give --data of your own"
            )
        self._left -= count
        data = self._repo.read_range(self._path, self._at, count)
        self._at += count
        return data


def _parquet(file: RangeFile, part: PublicFile, rng: random.Random) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as fault:
        raise MissingDependencyError(f"{part.name}: parquet needs `pyarrow`: {fault}") from fault
    try:
        opened = pyarrow.parquet.ParquetFile(file)
        wanted = (part.column,) if part.column else READ_COLUMNS
        columns = [name for name in wanted if name in opened.schema_arrow.names]
        groups = list(range(opened.metadata.num_row_groups))
        rng.shuffle(groups)
        for group in groups:
            rows = opened.read_row_group(group, columns=columns).to_pylist()
            rng.shuffle(rows)
            yield from rows
    except (OSError, ValueError) as fault:  # pyarrow's own errors derive from these
        raise CalibrationError(f"{part.name}: cannot be read: {str(fault)[:120]}") from fault


def _jsonl(file: RangeFile, part: PublicFile, rng: random.Random) -> Iterator[dict[str, Any]]:
    """The lines that lie whole inside a block; those across two blocks are left out."""
    starts = list(range(0, file.size, BLOCK_BYTES))
    rng.shuffle(starts)
    for start in starts:
        file.seek(start)
        lines = file.read(BLOCK_BYTES).split(b"\n")
        whole = lines[1 if start else 0 : None if start + BLOCK_BYTES >= file.size else -1]
        rng.shuffle(whole)
        for line in filter(bytes.strip, whole):
            try:
                values = json.loads(line)
            except ValueError as fault:
                raise CalibrationError(f"{part.name}: not JSON: {str(fault)[:120]}") from fault
            if not isinstance(values, dict):
                raise CalibrationError(f"{part.name}: a line is not a JSON object")
            yield values
