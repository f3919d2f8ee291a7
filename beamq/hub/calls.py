"""Calls to the Hub: tried again where that helps, explained where it does not.

In: a call into huggingface_hub. Out: its result, or an error of ours that says what to do.

The library retries some requests (range reads, uploads of parts) and not others (looking a
repository up, the first byte of a download, a commit). Here every call gets the same treatment:
what is transient (429, 5xx, a cut or refused connection) is tried again with growing waits, and a
server's Retry-After is kept. All else is at once an `InputError` (no such repository, gated) or an
`EnvironmentFault` (offline, no token, no network, no space).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from beamq.errors import BeamqError, DiskError, HubError, HubUnreachableError, UsageError

T = TypeVar("T")
ATTEMPTS = 6
FIRST_WAIT = 0.5  # seconds, doubled each time
LONGEST_WAIT = 300.0
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})


def hub_call(
    where: str,
    doing: str,
    call: Callable[[], T],
    *,
    stopped: Callable[[], bool] = lambda: False,
    attempts: int = ATTEMPTS,
) -> T:
    """Make `call`, again if it fails for a reason that may pass.

    `where` and `doing` are for messages ("org/name", "looking it up"). `stopped` ends the waits,
    after `attempts` it is given up.
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
                ours = _explained(fault, where, doing, attempt)
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

    return bool(get_token())


def _sleep(seconds: float, stopped: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not stopped() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.2))


def _chain(fault: BaseException) -> Iterator[BaseException]:
    """The error and what caused it; the library wraps transfers' errors in plain ones."""
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


def _explained(fault: BaseException, where: str, doing: str, attempts: int) -> BeamqError | None:
    for link in _chain(fault):
        found = _explain_one(link, where, doing, attempts)
        if found is not None:
            return found
    return None


def _explain_one(fault: BaseException, where: str, doing: str, attempts: int) -> BeamqError | None:
    from huggingface_hub import errors

    if isinstance(fault, errors.OfflineModeIsEnabled):
        return HubUnreachableError(
            f"{where}: {doing} needs the Hub, but HF_HUB_OFFLINE is set; unset it, or download the"
            " repository first"
        )
    if isinstance(fault, errors.LocalTokenNotFoundError):
        return no_token(where, doing)
    if isinstance(fault, errors.HFValidationError):
        return UsageError(f"{where}: not a repository's name: {str(fault)[:200]}")
    status = _status(fault)
    if status is not None:
        return _explain_status(fault, status, where, doing, attempts)
    if isinstance(fault, errors.HTTPError):
        reason = str(fault)[:120] or type(fault).__name__
        return HubUnreachableError(
            f"{where}: {doing} failed: {endpoint()} cannot be reached ({reason}); check the network"
            " and HF_ENDPOINT, then run again"
        )
    if isinstance(fault, errors.FileMetadataError):
        return HubUnreachableError(
            f"{where}: {doing} failed: {endpoint()} does not answer as a Hub does; check"
            " HF_ENDPOINT and proxies"
        )
    if isinstance(fault, OSError) and fault.errno is not None:
        return DiskError(f"{where}: {doing} failed: {fault.strerror}; free space, then run again")
    if _is_short_download(fault) or isinstance(fault, errors.XetDownloadError):
        return HubUnreachableError(f"{where}: {doing} failed: {str(fault)[:160]}; run again")
    if type(fault) is ValueError:  # the library's word for what a server refused
        return HubError(f"{where}: {doing} was refused: {' '.join(str(fault).split())[:300]}")
    return None


def _explain_status(
    fault: BaseException, status: int, where: str, doing: str, attempts: int
) -> BeamqError:
    from huggingface_hub import errors

    token = "its token may not see it" if has_token() else "no token is set (HF_TOKEN)"
    if isinstance(fault, errors.GatedRepoError):
        return HubError(
            f"{where}: gated; ask for access at {endpoint()}/{where.partition('@')[0]} and set"
            f" HF_TOKEN of an account that has it{'' if has_token() else ' (none is set)'}"
        )
    if isinstance(fault, errors.RevisionNotFoundError):
        return HubError(f"{where}: no such branch, tag or commit; check the part after @")
    if isinstance(fault, errors.RepositoryNotFoundError):
        return HubError(
            f"{where}: no such folder here and no such repository on {endpoint()}, or it is private"
            f" and {token}"
        )
    if isinstance(fault, errors.EntryNotFoundError):
        return HubError(f"{where}: {doing} failed: the repository has no such file")
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


def no_token(where: str, doing: str) -> HubUnreachableError:
    """The error for a request that cannot be made without a token."""
    return HubUnreachableError(
        f"{where}: {doing} needs a token with write access; set HF_TOKEN or run `hf auth login`"
    )
