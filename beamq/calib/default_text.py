"""The text to calibrate on when the user gives none: sources of Python's standard library.

In: a split. Out: the sources of a fixed list of modules, as the running Python has them.

Code is what Beam is for, every machine that runs beamq has these files, and nothing need be
downloaded. The list is sorted and taken apart by position: odd positions calibrate, even ones
evaluate, so a comparison on the default text never judges a checkpoint on what it was calibrated
on. A module keeps its side even where another is absent (Linux distributions leave some out).
The modules exist in Python 3.11 to 3.13. Their text differs between Python versions, so the
description names the version, and the digest of the data (`calib.data`) tells two apart.

Limits: half of the list is some 3.5 MB, about a million tokens. Tables (`html.entities`), tests
and packages that distributions split off (tkinter, idlelib, lib2to3) are not in it.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from beamq.errors import CalibrationError

Split = Literal["calibration", "evaluation"]

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
    """`description` for people and records; `texts` maps a module's name to its source."""

    description: str
    texts: dict[str, str]

    def digests(self) -> frozenset[str]:
        """SHA-256 of each source, to show that two texts have no file in common."""
        return frozenset(
            hashlib.sha256(text.encode("utf-8")).hexdigest() for text in self.texts.values()
        )


def split_modules(split: Split) -> tuple[str, ...]:
    """The modules of one side: odd positions of the list calibrate, even ones evaluate."""
    return MODULES[1::2] if split == "calibration" else MODULES[0::2]


def default_text(split: Split = "calibration", *, root: Path | None = None) -> DefaultText:
    """Read one side of the list. `root` is the library's folder (the running Python's if None).

    Raises `CalibrationError` where fewer than half of the sources are there (a Python that ships
    its library zipped or compiled only).
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
