"""Calls to the Hub: what is tried again, how long is waited, and what is said when it fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import errors

from beamq.errors import BeamqError, DiskError, HubError, HubUnreachableError, Interrupted
from beamq.io import hub as hub_calls
from beamq.io.hub import ATTEMPTS, HubId, hub_call, hub_source, parse_hub_id

REQUEST = httpx2.Request("GET", "https://hub.invalid/x")


def answered(
    status: int, kind: type[errors.HfHubHTTPError] = errors.HfHubHTTPError, **headers: str
) -> Exception:
    response = httpx2.Response(status, request=REQUEST, headers=headers)
    return kind("said", response=response)


def wrapped(cause: Exception) -> Exception:
    """As the library wraps what happens in a transfer."""
    error = RuntimeError("Error while uploading 'x' to the Hub.")
    error.__cause__ = cause
    return error


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(hub_calls, "_sleep", lambda seconds, stopped: found.append(seconds))
    return found


def failing(*faults: Exception) -> Callable[[], str]:
    left = list(faults)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


@pytest.mark.parametrize(
    "fault",
    [
        answered(429),
        answered(503),
        httpx2.ConnectError("refused"),
        httpx2.ReadTimeout("late"),
        httpx2.RemoteProtocolError("cut"),
        wrapped(answered(500)),
        wrapped(httpx2.WriteError("cut")),
        OSError("Consistency check failed"),
        errors.XetDownloadError("cut"),
    ],
)
def test_what_may_pass_is_tried_again_with_growing_waits(
    fault: Exception, waits: list[float]
) -> None:
    assert hub_call("a/b", "doing it", failing(fault, fault, fault)) == "done"
    assert waits == [0.5, 1.0, 2.0]


def test_a_server_that_says_when_is_obeyed(waits: list[float]) -> None:
    call = failing(answered(429, **{"Retry-After": "17"}), answered(503, **{"Retry-After": "x"}))
    assert hub_call("a/b", "doing it", call) == "done"
    assert waits == [17.0, 1.0]


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (answered(403), HubError, "was refused: HTTP status 403; the token needs write access"),
        (answered(401), HubUnreachableError, "the token is not valid"),
        (answered(404, errors.RevisionNotFoundError), HubError, "no such branch, tag or commit"),
        (answered(404, errors.RepositoryNotFoundError), HubError, "no such repository"),
        (answered(403, errors.GatedRepoError), HubError, "gated; ask for access"),
        (answered(404, errors.RemoteEntryNotFoundError), HubError, "has no such file"),
        (errors.OfflineModeIsEnabled("x"), HubUnreachableError, "HF_HUB_OFFLINE is set"),
        (errors.LocalTokenNotFoundError("x"), HubUnreachableError, "set HF_TOKEN or run"),
        (errors.FileMetadataError("x"), HubUnreachableError, "does not answer as a Hub does"),
        (OSError(errno.ENOSPC, "No space left"), DiskError, "No space left; free space"),
        (ValueError("LFS batch API returned errors:\nx"), HubError, "returned errors: x"),
        (wrapped(answered(413)), HubError, "HTTP status 413"),
    ],
)
def test_what_will_not_pass_is_said_at_once(
    fault: Exception, error: type[BeamqError], said: str, waits: list[float]
) -> None:
    with pytest.raises(error, match=said) as raised:
        hub_call("a/b", "doing it", failing(fault))
    assert not waits
    assert str(raised.value).startswith("a/b: ")
    assert "\n" not in str(raised.value)


def test_patience_ends(waits: list[float]) -> None:
    with pytest.raises(HubUnreachableError, match=rf"answers 502 \({ATTEMPTS} attempts\)"):
        hub_call("a/b", "doing it", failing(*[answered(502)] * 99))
    assert len(waits) == ATTEMPTS - 1
    with pytest.raises(HubUnreachableError, match="answers 502; run again later"):
        hub_call("a/b", "doing it", failing(answered(502)), stopped=lambda: True)


def test_defects_and_our_own_errors_pass_through(waits: list[float]) -> None:
    for ours in (KeyError("x"), Interrupted("stopped")):
        with pytest.raises(type(ours)):
            hub_call("a/b", "doing it", failing(ours))
    assert not waits


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a/b", HubId(repo="a/b", revision=None)),
        ("a/b@main", HubId(repo="a/b", revision="main")),
        ("a/b@refs/pr/1", HubId(repo="a/b", revision="refs/pr/1")),
        ("A-1/b.c_d@" + "0" * 40, HubId(repo="A-1/b.c_d", revision="0" * 40)),
        ("a", None),
        ("a/b/c", None),
        ("./a/b", None),
        ("../b", None),
        ("/a/b", None),
        ("a/b@", None),
        ("a /b", None),
        ("~/b", None),
    ],
)
def test_what_is_spelled_like_a_repository(text: str, found: HubId | None) -> None:
    assert parse_hub_id(text) == found


def test_what_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("")
    assert hub_source("a/b") is not None
    monkeypatch.chdir(tmp_path)
    assert hub_source("a/b") is None
    assert hub_source(Path("c/d")) is None
    source: Any = hub_source("c/d@x")
    assert str(source) == "c/d@x"
