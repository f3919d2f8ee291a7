"""Calibration data: documents as full rows of token ids, the same for the same seed.

In: `--data` specs (calib/documents.py), the checkpoint's tokenizer, samples, length, seed.
Out: `CalibrationData`: `input_ids` [S, T] int64, its digest, and a record of what was used.

The one idea: each source gives documents until it has its share of S x T tokens, in proportion to
its weight. All documents are then shuffled together, joined with the end-of-text token after each,
and cut every T tokens. Every row is full (no padding), a row may hold several documents, and no
token sees another row. Weights count tokens, not documents.

A source with too little text gives what it has, and the others do not make up for it, so that the
mix stays as asked; `notes` and the record say so. Less than one row is an error.

Limits: the last document of a source is cut where its share is full, and up to T-1 tokens of a
corpus that is too short are not used. All rows are in memory: 8 bytes a token.
"""

from __future__ import annotations

import hashlib
import math
import platform
import random
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from beamq.calib.documents import (
    DataSpec,
    Document,
    SourceLog,
    documents,
    in_pieces,
    parse_spec,
)
from beamq.errors import CalibrationError, MissingDependencyError, UsageError, counted
from beamq.io.files import read_json_object

# The default text: sources of Python's standard library, as the running Python has them.
#
# Beam is for code, every machine that runs beamq has these files, and nothing need be downloaded.
# Odd positions of the sorted list calibrate, even ones evaluate, so that a comparison on the
# default text never judges a checkpoint by text it was calibrated on. A module keeps its side
# even where another is missing. The list holds for Python 3.11 to 3.13, some 3.5 MB or a million
# tokens for each half, without tests, tables and packages that distributions split off. The text
# differs between Python versions: the description names the version, the digest shows it.

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
    """`texts` maps a module's name to its source; records show `description`."""

    description: str
    texts: dict[str, str]

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


class CheckpointTokenizer:
    """The checkpoint's own tokenizer: text to ids, conversations to text, and the `separator`
    between documents (`eos_token`, or `eos_token_id` of config.json).

    Text needs the `tokenizers` library alone, which loads in milliseconds and runs no code from the
    checkpoint. Only conversations need transformers, for the chat template (rendered in its
    sandbox, never with `trust_remote_code`). Special tokens are neither added nor escaped, so text
    that was rendered with a chat template before means the same here.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `CalibrationError` where `folder` has no usable tokenizer.json or separator."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CalibrationError(
                f"{path}: not found; calibration needs the checkpoint's tokenizer."
                " Copy tokenizer.json and tokenizer_config.json next to config.json"
            )
        try:
            from tokenizers import Tokenizer  # late: only runs that calibrate need it
        except ImportError as fault:
            raise MissingDependencyError(f"calibration needs `tokenizers`: {fault}") from fault
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as fault:  # the library raises plain Exception for anything unreadable
            raise CalibrationError(f"{path}: not a tokenizer: {str(fault)[:120]}") from fault
        # A saved tokenizer may truncate or pad texts to the length that it was last used with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._folder = folder
        self._chat: Any = None
        model = _optional_json(folder / "config.json")
        vocabulary = model.get("vocab_size")
        self._vocab_size = vocabulary if isinstance(vocabulary, int) else None
        self.separator = self._separator(model)

    def encode(self, text: Document) -> NDArray[np.int64]:
        """Token ids [T] of a text, without special tokens around it; ids stay as they are."""
        if not isinstance(text, str):
            ids = np.asarray(text, dtype=np.int64)
            if self._vocab_size is not None and not 0 <= ids.min() <= ids.max() < self._vocab_size:
                raise CalibrationError(
                    f"`input_ids` from {ids.min()} to {ids.max()}, expected 0 to"
                    f" {self._vocab_size - 1}; use data of this model's tokenizer"
                )
            return ids
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        if self._vocab_size is not None and ids.size and int(ids.max()) >= self._vocab_size:
            raise CalibrationError(
                f"{self._folder / 'tokenizer.json'}: yields id {int(ids.max())}, but config.json"
                f" has vocab_size {self._vocab_size}; the tokenizer belongs to another model"
            )
        return ids

    def joined(self, texts: Sequence[Document]) -> NDArray[np.int64]:
        """Ids [T] of documents, the separator after each."""
        separator = np.array([self.separator], dtype=np.int64)
        return np.concatenate([part for text in texts for part in (self.encode(text), separator)])

    def plain_ids(self) -> list[int]:
        """The ids of all tokens that are not special, in order."""
        return sorted(self._tokenizer.get_vocab(with_added_tokens=False).values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> str | None:
        """A conversation and its tools in the form of the chat template; None where the template
        refuses it, as templates do on purpose (for roles that do not alternate, say).

        Raises `CalibrationError` for a tokenizer without a template: no row could be used.
        """
        if self._chat is None:
            self._chat = self._load_chat()
        try:
            return str(self._chat.apply_chat_template(list(messages), tools=tools, tokenize=False))
        except Exception:  # a template is a program: it may raise whatever it likes
            return None

    def _load_chat(self) -> Any:
        try:
            from transformers import AutoTokenizer  # late: a second, and `messages` are rare
        except ImportError as fault:
            raise MissingDependencyError(f"`messages` need transformers: {fault}") from fault
        try:
            chat = AutoTokenizer.from_pretrained(
                str(self._folder), trust_remote_code=False, local_files_only=True
            )
        except Exception as fault:  # many kinds, none of them documented
            raise CalibrationError(
                f"{self._folder}: the tokenizer's chat template cannot be loaded:"
                f" {str(fault)[:120]}. Use data with a `text` column"
            ) from fault
        if not chat.chat_template:
            raise CalibrationError(
                f"{self._folder}: data has `messages`, but the tokenizer has no chat template;"
                " use data with a `text` column, or add chat_template.jinja"
            )
        return chat

    def _separator(self, model: dict[str, Any]) -> int:
        token = _optional_json(self._folder / "tokenizer_config.json").get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found = self._tokenizer.token_to_id(token)
            if found is not None:
                return int(found)
        ids = model.get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and not isinstance(first, bool) and first >= 0:
            return first
        raise CalibrationError(
            f"{self._folder}: no end-of-text token (eos_token in tokenizer_config.json, or"
            " eos_token_id in config.json); calibration separates documents with it"
        )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, CalibrationError) if path.is_file() else {}


IdsT = NDArray[np.int64]

PIECE_PER_TOKEN = 8
MIN_PIECE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """What one source gave. `tokens` include one separator for each of `documents`."""

    name: str
    kind: str
    weight: float
    files: int
    documents: int
    tokens: int
    tokens_asked: int
    digest: str
    skipped: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationData:
    """`input_ids` [S, T] int64, every row full; `digest` is a SHA-256 over shape and ids.

    `notes` are sentences for the user: where this is less than was asked for.
    """

    input_ids: NDArray[np.int64]
    digest: str
    samples_asked: int
    seed: int
    sources: tuple[SourceRecord, ...]
    notes: tuple[str, ...]

    @property
    def samples(self) -> int:
        """Number of rows S."""
        return int(self.input_ids.shape[0])

    @property
    def sequence_length(self) -> int:
        """Tokens in each row, T."""
        return int(self.input_ids.shape[1])

    @property
    def tokens(self) -> int:
        """S x T."""
        return int(self.input_ids.size)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: everything but the ids, without paths of this machine."""
        return {
            "digest": self.digest,
            "samples": self.samples,
            "samples_asked": self.samples_asked,
            "sequence_length": self.sequence_length,
            "tokens": self.tokens,
            "seed": self.seed,
            "sources": [asdict(source) for source in self.sources],
        }


@dataclass(slots=True, kw_only=True)
class _Drawn:
    """A source's documents as token ids, each ending in the separator, and their record."""

    documents: list[IdsT]
    record: SourceRecord
    notes: list[str]


def load_calibration_data(
    specs: Sequence[str],
    tokenizer_path: Path,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    split: Split = "calibration",
) -> CalibrationData:
    """Rows of token ids from `specs`, or from the default text (its `split` half) without any.

    `tokenizer_path` is the checkpoint's folder. Raises `CalibrationError` for data that cannot be
    read or is shorter than one row, `UsageError` for counts below 1.
    """
    if samples < 1 or sequence_length < 1:
        raise UsageError(
            f"samples ({samples}) and sequence length ({sequence_length}) must be at least 1"
        )
    parsed = [parse_spec(spec) for spec in specs]
    tokenizer = CheckpointTokenizer(tokenizer_path)
    piece = max(MIN_PIECE, PIECE_PER_TOKEN * sequence_length)
    quotas = shares([spec.weight for spec in parsed] or [1.0], samples * sequence_length)
    if parsed:
        drawn = [
            _draw(spec, tokenizer, quota, seed=f"{seed}:{position}", piece=piece)
            for position, (spec, quota) in enumerate(zip(parsed, quotas, strict=True))
        ]
    else:
        drawn = [_draw_default(split, tokenizer, quotas[0], seed=f"{seed}:0", piece=piece)]
    return _packed(drawn, samples=samples, sequence_length=sequence_length, seed=seed)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` in proportion to `weights`; the largest remainders get what rounding leaves."""
    whole = math.fsum(weights)
    exact = [total * (weight / whole) for weight in weights]
    parts = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


def _draw(
    spec: DataSpec, tokenizer: CheckpointTokenizer, quota: int, *, seed: str, piece: int
) -> _Drawn:
    log = SourceLog()
    texts = documents(spec, seed=seed, piece=piece, render=tokenizer.render, log=log)
    taken = list(_tokens(texts, tokenizer, quota))
    notes = [
        f"{spec.name}: skipped {count} {reason} (first: {log.examples[reason]})"
        for reason, count in log.skipped.items()
    ]
    if log.cut:
        notes.append(
            f"{spec.name}: {counted(log.cut, 'document')} of more than {2 * piece:,} characters"
            f" were read in pieces of about {piece:,}"
        )
    if not taken and quota:
        why = f"; {'; '.join(notes)}" if notes else ""
        raise CalibrationError(f"--data {spec.text}: no text found{why}")
    record = _record(taken, spec.name, spec.kind, quota, weight=spec.weight, log=log)
    return _Drawn(documents=taken, record=record, notes=notes)


def _draw_default(
    split: Split, tokenizer: CheckpointTokenizer, quota: int, *, seed: str, piece: int
) -> _Drawn:
    default = default_text(split)
    rng = random.Random(seed)
    texts = [
        part for text in default.texts.values() for part in in_pieces([text], piece=piece, rng=rng)
    ]
    rng.shuffle(texts)
    taken = list(_tokens(iter(texts), tokenizer, quota))
    log = SourceLog(files=len(default.texts))
    record = _record(taken, default.description, "standard library", quota, weight=1.0, log=log)
    return _Drawn(documents=taken, record=record, notes=[])


def _tokens(
    texts: Iterator[Document], tokenizer: CheckpointTokenizer, quota: int
) -> Iterator[IdsT]:
    """Documents as ids with the separator after each, until they are exactly `quota` tokens."""
    left = quota
    while left > 0 and (text := next(texts, None)) is not None:
        ids = np.append(tokenizer.encode(text)[: left - 1], np.int64(tokenizer.separator))
        left -= ids.size
        yield ids


def _record(
    taken: list[IdsT], name: str, kind: str, quota: int, *, weight: float, log: SourceLog
) -> SourceRecord:
    return SourceRecord(
        name=name,
        kind=kind,
        weight=weight,
        files=log.files,
        documents=len(taken),
        tokens=sum(ids.size for ids in taken),
        tokens_asked=quota,
        digest=ids_digest(taken),
        skipped=dict(log.skipped),
    )


def _packed(
    drawn: list[_Drawn], *, samples: int, sequence_length: int, seed: int
) -> CalibrationData:
    every = [ids for source in drawn for ids in source.documents]
    random.Random(f"{seed}:mix").shuffle(every)
    found = sum(ids.size for ids in every)
    rows = found // sequence_length
    if rows == 0:
        raise CalibrationError(
            f"calibration data: {found:,} tokens found, at least {sequence_length:,} needed for"
            " one sample; give more --data or a shorter --sequence-length"
        )
    stream = np.concatenate(every)[: rows * sequence_length]
    input_ids = np.ascontiguousarray(stream.reshape(rows, sequence_length))
    notes = [note for source in drawn for note in source.notes]
    if rows < samples:
        notes.append(
            f"calibration data: {rows:,} of {samples:,} samples of {sequence_length:,} tokens;"
            f" the data has {found:,} of {samples * sequence_length:,} tokens"
        )
        notes += [
            f"{source.record.name}: has {source.record.tokens:,} tokens, fewer than its"
            f" share of {source.record.tokens_asked:,}"
            for source in drawn
            if len(drawn) > 1 and source.record.tokens < source.record.tokens_asked
        ]
    return CalibrationData(
        input_ids=input_ids,
        digest=ids_digest(list(input_ids)),
        samples_asked=samples,
        seed=seed,
        sources=tuple(source.record for source in drawn),
        notes=tuple(notes),
    )


def ids_digest(sequences: Sequence[IdsT]) -> str:
    """SHA-256 over the number of sequences, then each one's length and ids (int64, little end)."""
    digest = hashlib.sha256(b"beamq token ids 1\n")
    digest.update(len(sequences).to_bytes(8, "little"))
    for ids in sequences:
        digest.update(ids.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()
