"""Calls to the Hub: what is tried again, how long is waited, and what is said when it fails."""

from __future__ import annotations

import errno
import re
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import errors

from beamq.commands import outcome
from beamq.errors import (
    BeamqError,
    DiskError,
    HubError,
    HubUnreachableError,
    Interrupted,
    MissingDependencyError,
    UsageError,
)
from beamq.io import hub_call as hub_calls
from beamq.io.hub import HubId, open_repo
from beamq.io.hub_call import ATTEMPTS, check_settings, hub_call

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


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that says nothing about networks."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR",
                 "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE",
                 "TRANSFORMERS_OFFLINE"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


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
        (OSError(errno.ENOSPC, "No space left"), DiskError, "No space left; disk full; free space"),
        (OSError(errno.EDQUOT, "Over quota"), DiskError, "Over quota; disk full; free space"),
        (OSError(errno.EIO, "I/O error"), DiskError, "I/O error; check the disk"),
        (
            PermissionError(13, "Denied", "/a/b"),
            DiskError,
            "/a/b: Denied; choose a writable",
        ),
        (RuntimeError("Could not determine home directory."), DiskError, "set HF_HOME"),
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


# Variables of the environment ------------------------------------------------------------------


def said_of(fault: Exception) -> str:
    """What a user reads where a call always fails by `fault`."""
    with pytest.raises(BeamqError) as raised:
        hub_call("a/b", "doing it", failing(fault), attempts=1)
    return str(raised.value)


REFUSED = httpx2.ConnectError("[Errno 111] Connection refused")


@pytest.mark.parametrize(
    "fault",
    [REFUSED, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
     OSError(errno.ENETUNREACH, "Network is unreachable")],
)  # fmt: skip
def test_a_network_that_fails_names_what_leads_to_it_h2o1110(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "check the network, then run again" in said_of(fault)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy.example:3128")
    monkeypatch.setenv("all_proxy", "me:secret@other.example:1")
    said = said_of(fault)
    assert said.endswith(
        "check the network, HF_ENDPOINT=https://hub.example,"
        " HTTPS_PROXY=http://***@proxy.example:3128 and all_proxy=***@other.example:1,"
        " then run again"
    ), said
    assert "free space" not in said
    assert "secret" not in said


def test_a_proxy_of_another_scheme_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example")
    assert "HTTP_PROXY" not in said_of(REFUSED)


def test_a_certificate_that_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")
    assert "check the network and SSL_CERT_FILE (not set)" in said_of(fault)
    monkeypatch.setenv("SSL_CERT_DIR", "/etc/mine")
    assert "check the network and SSL_CERT_DIR=/etc/mine" in said_of(fault)


@pytest.mark.parametrize("content", [None, "not a certificate"])
def test_certificates_that_cannot_be_read_hub1099(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client raises what reading them raises: an error without a file's name."""
    file = tmp_path / "certificates"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(OSError) as raised:  # noqa: PT011
        ssl.create_default_context(cafile=str(file))
    said = said_of(raised.value)
    assert f"SSL_CERT_FILE={file}: no certificates" in said
    assert said.endswith("correct or unset it")


def test_proxies_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:7")
    with pytest.raises(MissingDependencyError, match=r"ALL_PROXY=socks5://127\.0\.0\.1:7 needs"):
        hub_call("a/b", "doing it", failing(ImportError("Using SOCKS proxy, but 'socksio' ...")))
    monkeypatch.setenv("ALL_PROXY", "foo://x")
    with pytest.raises(UsageError, match=r"ALL_PROXY=foo://x: Unknown scheme for proxy URL"):
        hub_call("a/b", "doing it", failing(ValueError("Unknown scheme for proxy URL foo://x")))


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_the_variable_that_asks_for_offline_mode(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert f"needs the Hub, but {name}=1 is set" in said_of(errors.OfflineModeIsEnabled("x"))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (PermissionError(errno.EACCES, "Denied", "{}/hub/x"), "Denied; choose another place"),
        (IsADirectoryError(errno.EISDIR, "Folder", "{}/token"), "Folder; choose another place"),
        (OSError(errno.EROFS, "Read-only", "{}"), "Read-only; choose another place"),
        (OSError(errno.ENOSPC, "Full", "{}/hub"), "Full; free space, or choose another place"),
    ],
)
def test_a_cache_that_cannot_be_written(
    fault: OSError, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    fault.filename = str(fault.filename).format(tmp_path)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    assert f"{said} for the Hub's files (set HF_HOME)" in said_of(fault)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert f"for the Hub's files (HF_HOME={tmp_path})" in said_of(fault)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc"),
        ("HF_HUB_ETAG_TIMEOUT", "1.5"),
        ("HF_HUB_ETAG_TIMEOUT", ""),
        ("HF_ENDPOINT", "hub.example"),
        ("HF_ENDPOINT", "https://"),
        ("HF_ENDPOINT", "http://[x"),
        ("HF_ENDPOINT", ""),
    ],
)
def test_settings_that_the_library_cannot_read(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads them as it is imported, so the command line checks them before any work."""
    check_settings()
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"^{name}={re.escape(repr(value))}: expected"):
        check_settings()
    with pytest.raises(UsageError):
        open_repo(HubId(repo="a/b", revision=None))
    assert outcome.run(lambda screen: 0) == 2
    monkeypatch.setenv(name, "17" if "TIMEOUT" in name else "http://127.0.0.1:17")
    check_settings()
    assert outcome.run(lambda screen: 0) == 0
