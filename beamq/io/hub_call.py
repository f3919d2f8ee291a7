"""Calls to the Hugging Face Hub: tried again where that may help, and explained where it does not.

In: a call of huggingface_hub. Out: its result, or an error with a remedy that follows from what
happened: the server's answer, the network with the variables of the environment that lead to it
(addresses, proxies, certificates, offline mode), or the disk by its error number.

The library retries only some requests. `hub_call` retries all transient failures, with growing
waits and by a server's Retry-After.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from beamq.errors import (
    BeamqError,
    DiskError,
    HubError,
    HubUnreachableError,
    MissingDependencyError,
    UsageError,
    shown_value,
)
from beamq.io.shard_writer import disk_remedy
from beamq.ranks import int_or_none

T = TypeVar("T")
ATTEMPTS = 6
FIRST_WAIT = 0.5  # seconds, doubled each time
LONGEST_WAIT = 300.0
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
UNREACHED = frozenset(
    (
        errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE,
        errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH,
    )
)  # fmt: skip
NO_TOKEN = "{doing} needs a token with write access; set HF_TOKEN or run `hf auth login`"

# Class of huggingface_hub's error, ours, and its message; the first class that fits counts.
_ANSWERED = (
    (
        "GatedRepoError",
        HubError,
        "gated; ask for access at {endpoint}/{repo} and set HF_TOKEN of an account that has"
        " it{unset}",
    ),
    ("RevisionNotFoundError", HubError, "no such branch, tag or commit; check the part after @"),
    (
        "RepositoryNotFoundError",
        HubError,
        "no such folder here and no such repository on {endpoint}, or it is private and {token}",
    ),
    ("EntryNotFoundError", HubError, "{doing} failed: the repository has no such file"),
)
_NOT_ANSWERED = (
    (
        "OfflineModeIsEnabled",
        HubUnreachableError,
        "{doing} needs the Hub, but {offline} is set; unset it, or download the repository first",
    ),
    ("LocalTokenNotFoundError", HubUnreachableError, NO_TOKEN),
    ("HFValidationError", UsageError, "not a repository's name: {said}"),
    (
        "HTTPError",
        HubUnreachableError,
        "{doing} failed: {endpoint} cannot be reached ({said}); check {network}, then run again",
    ),
    (
        "FileMetadataError",
        HubUnreachableError,
        "{doing} failed: {endpoint} does not answer as a Hub does; check {network}",
    ),
    ("XetDownloadError", HubUnreachableError, "{doing} failed: {said}; run again"),
)


def hub_call(
    where: str,
    doing: str,
    call: Callable[[], T],
    *,
    stopped: Callable[[], bool] = lambda: False,
    attempts: int = ATTEMPTS,
) -> T:
    """Make `call`, and again if it fails for a reason that may pass, `attempts` times at most.

    `where` and `doing` are for messages ("org/name", "looking it up"). `stopped` ends the waits.
    Raises `HubError`, `HubUnreachableError`, `DiskError`, `UsageError`.
    """
    wait = FIRST_WAIT
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except BeamqError:
            raise
        except Exception as fault:
            if attempt == attempts or stopped() or not _transient(fault):
                explained = (_explain(link, where, doing, attempt) for link in _chain(fault))
                ours = next(filter(None, explained), None)
                if ours is None:
                    raise
                raise ours from fault
            pause = min(max(wait, _retry_after(fault)), LONGEST_WAIT)
        _sleep(pause, stopped)
        wait *= 2
    raise AssertionError("unreachable")


def endpoint() -> str:
    """Address of the Hub in use (HF_ENDPOINT, or the public one)."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def has_token() -> bool:
    """Whether HF_TOKEN or a stored login gives a token."""
    from huggingface_hub import get_token

    try:
        return bool(get_token())
    except OSError:  # the file of a stored login cannot be read, as the request itself says
        return False


def no_token(where: str, doing: str) -> HubUnreachableError:
    """The error for a request that cannot be made without a token."""
    return HubUnreachableError(f"{where}: {NO_TOKEN.format(doing=doing)}")


def check_settings() -> None:
    """Raise `UsageError` for a variable of the environment with which the Hub's library cannot be
    imported or has no address to call."""
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        value = os.environ.get(name)
        if value is not None and int_or_none(value) is None:
            raise UsageError(f"{name}={shown_value(value)}: expected a whole number of seconds")
    address = os.environ.get("HF_ENDPOINT")
    try:
        url = urlsplit("https://x" if address is None else address)
    except ValueError:
        url = urlsplit("")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise UsageError(
            f"HF_ENDPOINT={shown_value(address)}: expected an address, such as"
            " https://huggingface.co"
        )


def _given(*names: str) -> str:
    """The variables of the environment that are set, each as `NAME=value`, without passwords."""
    found = ((name, os.environ.get(name)) for name in names)
    hidden = ((name, re.sub(r"[^/@]*@", "***@", value)) for name, value in found if value)
    return ", ".join(f"{name}={value[:200]}" for name, value in hidden)


def _proxies() -> str:
    """The proxies that requests to the endpoint may go through."""
    names = (f"{urlsplit(endpoint()).scheme}_proxy", "all_proxy")
    return _given(*(spelling for name in names for spelling in (name, name.upper())))


def offline_by() -> str:
    """The variable that asks for offline mode, with its value."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return _given(next((name for name in names if os.environ.get(name)), "")) or names[0]


def _network(said: str) -> str:
    """What to check where the Hub does not answer."""
    words = ["the network", _given("HF_ENDPOINT"), _proxies()]
    if "certificate" in said.lower():
        words.append(_given("SSL_CERT_FILE", "SSL_CERT_DIR") or "SSL_CERT_FILE (not set)")
    return " and ".join(", ".join(filter(None, words)).rsplit(", ", 1))


def _unusable_certificates() -> str | None:
    """What is wrong with the user's own certificates, which every request would fail by."""
    file = os.environ.get("SSL_CERT_FILE")
    try:
        ssl.create_default_context(cafile=file or None)
    except OSError as fault:
        return f"{_given('SSL_CERT_FILE')}: no certificates ({fault.strerror}); correct or unset it"
    return None


def _sleep(seconds: float, stopped: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not stopped() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))


def _chain(fault: BaseException) -> Iterator[BaseException]:
    """The error and its causes; the library wraps errors of transfers in plain ones."""
    link: BaseException | None = fault
    for _ in range(8):
        if link is None:
            return
        yield link
        link = link.__cause__


def _status(fault: BaseException) -> int | None:
    status = getattr(getattr(fault, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _transient(fault: BaseException) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    for link in _chain(fault):
        if isinstance(link, OfflineModeIsEnabled):
            return False
        status = _status(link)
        if status is not None:
            return status in TRANSIENT
        if isinstance(link, HTTPError) and not isinstance(link, HfHubHTTPError):
            return True  # no answer: refused, cut, timed out
        if type(link).__name__ == "XetDownloadError" or _is_short_download(link):
            return True
    return False


def _is_short_download(fault: BaseException) -> bool:
    """The library's own OSError for a file of the wrong size has no errno."""
    return type(fault) is OSError and fault.errno is None


def _retry_after(fault: BaseException) -> float:
    for link in _chain(fault):
        headers = getattr(getattr(link, "response", None), "headers", None)
        if headers is not None:
            value = str(headers.get("Retry-After") or "")
            return float(value) if value.isdecimal() else 0.0
    return 0.0


def _explain(fault: BaseException, where: str, doing: str, attempts: int) -> BeamqError | None:
    """Our error for one of the library's; None for a defect."""
    from huggingface_hub import errors

    status = _status(fault)
    said = " ".join(str(fault).split())[:200] or type(fault).__name__
    facts = {
        "doing": doing,
        "endpoint": endpoint(),
        "repo": where.partition("@")[0],
        "said": said,
        "network": _network(said),
        "offline": offline_by(),
        "unset": "" if has_token() else " (none is set)",
        "token": "its token may not see it" if has_token() else "no token is set (HF_TOKEN)",
    }
    for name, error, text in _NOT_ANSWERED if status is None else _ANSWERED:
        if isinstance(fault, getattr(errors, name)):
            return error(f"{where}: {text.format_map(facts)}")
    if status is not None:
        return _explain_status(fault, status, where, doing, attempts)
    if _is_short_download(fault):
        return HubUnreachableError(f"{where}: {doing} failed: {said}; run again")
    if isinstance(fault, OSError) and fault.errno is not None:
        if unusable := _unusable_certificates():
            return HubUnreachableError(f"{where}: {doing} failed: {unusable}")
        lost = isinstance(fault, (ssl.SSLError, socket.gaierror)) or fault.errno in UNREACHED
        if lost:
            text = dict((name, text) for name, _, text in _NOT_ANSWERED)["HTTPError"]
            return HubUnreachableError(f"{where}: {text.format_map(facts)}")
        return DiskError(f"{where}: {doing} failed: {_explain_disk(fault)}")
    if proxies := _proxies():
        if isinstance(fault, ImportError) and "SOCKS" in said:
            return MissingDependencyError(
                f"{where}: {proxies} needs the package socksio; install it, or unset the variable"
            )
        if "proxy" in said.lower() or type(fault).__name__ == "InvalidURL":
            return UsageError(f"{where}: {proxies}: {said}; correct or unset the variable")
    if type(fault) is ValueError:  # what the library raises for a server's refusal
        return HubError(f"{where}: {doing} was refused: {said}")
    if isinstance(fault, RuntimeError) and "home directory" in said:
        return DiskError(f"{where}: {doing} failed: this user has no home; set HF_HOME to a folder")
    return None


def _explain_disk(fault: OSError) -> str:
    from huggingface_hub import constants

    path = Path(os.fsdecode(fault.filename or ""))
    remedy = disk_remedy(fault.errno, path, resumable=True)
    if fault.filename is None:
        return f"{fault.strerror}; {remedy}"
    homes = map(Path, (constants.HF_HOME, constants.HF_HUB_CACHE, constants.HF_TOKEN_PATH))
    if any(path.is_relative_to(home) or home.is_relative_to(path) for home in homes):
        given = _given("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH", "XDG_CACHE_HOME")
        full = "free space, or " if fault.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        remedy = f"{full}choose another place for the Hub's files ({given or 'set HF_HOME'})"
    return f"{path}: {fault.strerror}; {remedy}"


def _explain_status(
    fault: BaseException, status: int, where: str, doing: str, attempts: int
) -> BeamqError:
    if status in TRANSIENT:
        tries = f" ({attempts} attempts)" if attempts > 1 else ""
        return HubUnreachableError(
            f"{where}: {doing} failed: {endpoint()} answers {status}{tries}; run again later"
        )
    if status == 401:
        return HubUnreachableError(
            f"{where}: {doing} failed: the token is not valid; set HF_TOKEN or log in again"
        )
    said = getattr(fault, "server_message", None) or f"HTTP status {status}"
    remedy = "; the token needs write access to it" if status == 403 else ""
    return HubError(f"{where}: {doing} was refused: {' '.join(str(said).split())[:300]}{remedy}")
