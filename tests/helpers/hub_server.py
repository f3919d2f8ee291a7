"""A small Hub on the loopback interface: the endpoints that beamq reaches through huggingface_hub.

Look-up, tree listing in pages, sizes of named files of a dataset (its name here begins with
`datasets/`), `resolve` with range requests and the redirect of large files,
creation of repositories and branches, preupload, LFS batch, upload, verification, commit. It
speaks LFS, not Xet (clients set HF_HUB_DISABLE_XET).

Large files are redirected to another address (127.0.0.2), as the Hub redirects to its stores.

`faults` break requests on purpose: the first whose method and path match answers with a status,
cuts the connection after some bytes, or waits. `requests` keeps every request in order, `commits`
the paths of every commit. Nothing but the loopback interface is listened on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

PAGE = 5  # entries of a tree listing's page: small, so that paging is used
LARGE = 100_000  # files from here on are LFS
TOKEN = "hf_good"


@dataclass(slots=True)
class Fault:
    """Break `times` requests that match, after `skip` others that do.

    One of `status`, `cut` (bytes let through), `wait` (seconds). `whole` passes range requests by.
    """

    method: str
    path: str
    times: int = 1
    status: int = 0
    cut: int = -1
    wait: float = 0.0
    skip: int = 0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Blob:
    """A file's bytes."""

    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def large(self) -> bool:
        return len(self.data) >= LARGE


@dataclass(slots=True)
class Repo:
    """`refs` maps branches to commits, `trees` commits to files."""

    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    trees: dict[str, dict[str, Blob]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, Blob]) -> str:
        text = repr((branch, len(self.trees), sorted((k, v.oid) for k, v in files.items())))
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.trees[sha] = files
        self.refs[branch] = sha
        return sha

    def find(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.trees else None)


class HubServer:
    """The state. `with hub_server() as hub` starts and stops it."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.store: dict[str, Blob] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, str]] = []
        self.commits: list[tuple[list[str], list[str]]] = []
        self.sent: dict[str, int] = {}  # bytes of large files sent, by name
        self.received: list[str] = []  # sha256 of large files received, in order
        self.lock = threading.RLock()
        self.endpoint = ""
        self.cdn = ""
        self.leaked: list[str] = []  # requests to the store that carried a token

    def add(self, name: str, folder: Path, *, private: bool = False, gated: bool = False) -> str:
        """A repository with a folder's files on main. Returns the commit."""
        repo = self.repos.setdefault(name, Repo(private=private, gated=gated))
        files = {
            path.relative_to(folder).as_posix(): Blob(path.read_bytes())
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return repo.commit("main", files)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """What a revision holds."""
        repo = self.repos[name]
        commit = repo.find(revision)
        return {} if commit is None else {k: v.data for k, v in repo.trees[commit].items()}

    def count(self, method: str, pattern: str) -> int:
        """Requests so far whose path matches."""
        return sum(m == method and bool(re.search(pattern, p)) for m, p, _ in self.requests)

    def fault(self, method: str, path: str, ranged: bool) -> Fault | None:
        """The fault this request meets, used up."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                    if fault.whole and ranged:
                        continue
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A running server."""
    hub = HubServer()

    class Handler(_Handler):
        state = hub

    servers = [ThreadingHTTPServer((host, 0), Handler) for host in ("127.0.0.1", "127.0.0.2")]
    hub.endpoint, hub.cdn = (f"http://{s.server_address[0]}:{s.server_address[1]}" for s in servers)
    threads = [
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        for server in servers
    ]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join(5)


def _only_loopback(request: Any) -> None:
    assert request.url.host in ("127.0.0.1", "127.0.0.2"), f"a test asked {request.url}"


@contextmanager
def client_of(hub: HubServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this process, a huggingface_hub that knows only this server and can reach no other.

    Nothing is broken at first; waits between attempts are short. No token is set.
    """
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils import _http

    from beamq.io import hub_call as hub_calls

    hub.faults.clear()
    hub.requests.clear()
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub_calls, "FIRST_WAIT", 0.01)

    def client() -> Any:
        made = _http.default_client_factory()
        made.event_hooks["request"].insert(0, _only_loopback)
        return made

    set_client_factory(client)
    try:
        yield
    finally:
        set_client_factory(_http.default_client_factory)
    assert not hub.leaked, "a token was sent to the store"


def environment(hub: HubServer, home: Path) -> dict[str, str]:
    """The same for a process of its own."""
    return {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
    }


class _Answer(Exception):
    """Ends a request with this status."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(message or code)
        self.status = status
        self.headers = {}
        if code:
            self.headers["X-Error-Code"] = code
        if message:
            self.headers["X-Error-Message"] = message


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        self.hub = self.state
        url = urlsplit(self.path)
        self.route, self.query = unquote(url.path), url.query
        with self.hub.lock:
            self.hub.requests.append((self.command, self.route, self.headers.get("Range", "")))
        fault = self.hub.fault(self.command, self.route, "Range" in self.headers)
        self.cut = -1
        try:
            if fault is not None and fault.wait:
                time.sleep(fault.wait)
            if fault is not None and fault.cut >= 0:
                self.cut = fault.cut
                if self.command in ("POST", "PUT"):
                    self.rfile.read(min(fault.cut, int(self.headers.get("Content-Length", 0))))
                    self._hang_up()
                    return
            body = self._body()
            if fault is not None and fault.status:
                raise _Answer(fault.status)
            self._dispatch(body)
        except _Answer as answer:
            self._reply(answer.status, b"{}", answer.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(2)

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        wanted = int(self.headers.get("Content-Length", 0))
        data = self.rfile.read(wanted)
        if len(data) < wanted:
            raise ConnectionResetError
        return data

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if 0 <= self.cut < len(body):
            self.wfile.write(body[: self.cut])
            self.wfile.flush()
            self._hang_up()
            return
        self.wfile.write(body)

    def _json(self, data: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self._reply(status, body, {"Content-Type": "application/json", **(headers or {})})

    def _dispatch(self, body: bytes) -> None:
        for method, pattern, action in _ROUTES:
            found = re.fullmatch(pattern, self.route)
            if found is not None and self.command in method:
                action(self, *found.groups(), body=body)
                return
        raise _Answer(404, message=f"no route for {self.command} {self.route}")

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _writer(self) -> None:
        if not self.token:
            raise _Answer(401, message="Invalid username or password.")
        if self.token != TOKEN:
            raise _Answer(403, message="no write access")

    def _repo(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.token != TOKEN):
            raise _Answer(404 if self.token else 401, "RepoNotFound", "Repository not found")
        return repo

    def dataset(self, name: str) -> None:
        """What `datasets` would need is not there."""
        raise _Answer(404 if self.token else 401, "RepoNotFound", f"Dataset {name} not found")

    def paths_info(self, name: str, revision: str, body: bytes) -> None:
        _, files = self._tree(name, revision)
        asked = [path for path in parse_qs(body.decode())["paths"] if path in files]
        sizes = [(path, files[path]) for path in asked]
        self._json(
            [
                {"type": "file", "path": path, "size": len(blob.data), "oid": blob.oid}
                for path, blob in sizes
            ]
        )

    def _tree(self, name: str, revision: str) -> tuple[str, dict[str, Blob]]:
        repo = self._repo(name)
        commit = repo.find(revision)
        if commit is None:
            raise _Answer(404, "RevisionNotFound", "Invalid rev id")
        return commit, repo.trees[commit]

    def info(self, name: str, revision: str | None, body: bytes) -> None:
        repo = self._repo(name)
        commit, files = self._tree(name, revision or "main") if repo.refs else ("", {})
        self._json(
            {
                "id": name,
                "sha": commit or None,
                "private": repo.private,
                "gated": "manual" if repo.gated else False,
                "siblings": [{"rfilename": path} for path in files],
            }
        )

    def tree(self, name: str, revision: str, body: bytes) -> None:
        _, files = self._tree(name, revision)
        first = int(dict(re.findall(r"(\w+)=(\w+)", self.query)).get("cursor", 0))
        entries: list[dict[str, Any]] = []
        for path, blob in sorted(files.items())[first : first + PAGE]:
            entry: dict[str, Any] = {
                "type": "file",
                "path": path,
                "size": len(blob.data),
                "oid": blob.oid,
            }
            if blob.large:
                entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}
            entries.append(entry)
        headers = {}
        if first + PAGE < len(files):
            follow = f"{self.hub.endpoint}{self.route}?recursive=True&cursor={first + PAGE}"
            headers["Link"] = f'<{follow}>; rel="next"'
        self._json(entries, headers)

    def resolve(self, name: str, revision: str, path: str, body: bytes) -> None:
        repo = self._repo(name)
        if repo.gated and self.token != TOKEN:
            raise _Answer(401 if not self.token else 403, "GatedRepo", "Access is restricted.")
        commit, files = self._tree(name, revision)
        blob = files.get(path)
        if blob is None:
            raise _Answer(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit}
        if not blob.large:
            self._send_file(blob, {**headers, "ETag": f'"{blob.oid}"'}, path)
            return
        headers["X-Linked-Size"] = str(len(blob.data))
        headers["X-Linked-Etag"] = f'"{blob.sha256}"'
        self.hub.store[blob.sha256] = blob
        headers["Location"] = f"{self.hub.cdn}/cdn/{blob.sha256}/{path}"
        self._reply(302, b"", headers)

    def cdn(self, sha: str, path: str, body: bytes) -> None:
        if self.token:
            self.hub.leaked.append(path)
        self._send_file(self.hub.store[sha], {"ETag": f'"{sha}"'}, path)

    def _send_file(self, blob: Blob, headers: dict[str, str], path: str) -> None:
        data, status = blob.data, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is not None:
            start = int(wanted[1])
            stop = min(int(wanted[2]) + 1 if wanted[2] else len(data), len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        if self.command == "GET":
            with self.hub.lock:
                self.hub.sent[path] = self.hub.sent.get(path, 0) + len(data)
        self._reply(status, data, headers)

    def create(self, body: bytes) -> None:
        self._writer()
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        status = 409 if name in self.hub.repos else 200
        if status == 200:
            repo = self.hub.repos[name] = Repo(private=asked.get("visibility") == "private")
            repo.commit("main", {".gitattributes": Blob(b"*.safetensors filter=lfs\n")})
        self._json({"url": f"{self.hub.endpoint}/{name}", "id": name}, status=status)

    def branch(self, name: str, branch: str, body: bytes) -> None:
        self._writer()
        repo = self._repo(name)
        if branch in repo.refs:
            raise _Answer(409, message="Reference already exists")
        repo.refs[branch] = repo.refs["main"]
        self._json({})

    def validate(self, body: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def preupload(self, name: str, revision: str, body: bytes) -> None:
        self._writer()
        _, files = self._tree(name, revision)
        answers = []
        for asked in json.loads(body)["files"]:
            old = files.get(asked["path"])
            large = asked["size"] >= LARGE
            oid = None if old is None else (old.sha256 if large else old.oid)
            mode = "lfs" if large else "regular"
            answers.append(
                {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
            )
        self._json({"files": answers})

    def batch(self, name: str, body: bytes) -> None:
        self._writer()
        objects = []
        for asked in json.loads(body)["objects"]:
            entry: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.store:
                path = f"lfs/{asked['oid']}"
                entry["actions"] = {
                    "upload": {"href": f"{self.hub.cdn}/{path}"},
                    "verify": {"href": f"{self.hub.endpoint}/{path}/verify"},
                }
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def upload(self, oid: str, body: bytes) -> None:
        if self.token:
            self.hub.leaked.append(oid)
        blob = Blob(body)
        if blob.sha256 != oid:
            raise _Answer(400, message="wrong content")
        with self.hub.lock:
            self.hub.store[oid] = blob
            self.hub.received.append(oid)
        self._reply(200, b"")

    def verified(self, oid: str, body: bytes) -> None:
        asked = json.loads(body)
        blob = self.hub.store.get(oid)
        if blob is None or len(blob.data) != asked["size"]:
            raise _Answer(400, message="not there")
        self._json({})

    def commit(self, name: str, revision: str, body: bytes) -> None:
        self._writer()
        repo = self._repo(name)
        _, old = self._tree(name, revision)
        files = dict(old)
        added: list[str] = []
        deleted: list[str] = []
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]))
                added.append(value["path"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.store[value["oid"]]
                added.append(value["path"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
                deleted.append(value["path"])
        with self.hub.lock:
            sha = repo.commit(revision, files)
            self.hub.commits.append((added, deleted))
        self._json({"commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}", "commitOid": sha})


_PLAIN = r"[^/]+/[^/]+"
_NAME = f"({_PLAIN})"
_ROUTES: tuple[tuple[tuple[str, ...], str, Any], ...] = (
    (("GET",), rf"/api/models/{_NAME}()", lambda s, n, r, body: s.info(n, None, body)),
    (("GET",), r"/api/datasets/(.+)", lambda s, n, body: s.dataset(n)),
    (("POST",), rf"/api/(datasets/{_PLAIN})/paths-info/(.+)", _Handler.paths_info),
    (("GET", "HEAD"), rf"/(datasets/{_PLAIN})/resolve/([^/]+)/(.+)", _Handler.resolve),
    (("GET",), rf"/api/models/{_NAME}/revision/(.+)", _Handler.info),
    (("GET",), rf"/api/models/{_NAME}/tree/(.+)", _Handler.tree),
    (("GET", "HEAD"), rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
    (("GET", "HEAD"), r"/cdn/([0-9a-f]{64})/(.+)", _Handler.cdn),
    (("POST",), r"/api/repos/create", _Handler.create),
    (("POST",), rf"/api/models/{_NAME}/branch/(.+)", _Handler.branch),
    (("POST",), r"/api/validate-yaml", _Handler.validate),
    (("POST",), rf"/api/models/{_NAME}/preupload/(.+)", _Handler.preupload),
    (("POST",), rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (("PUT",), r"/lfs/([0-9a-f]{64})", _Handler.upload),
    (("POST",), r"/lfs/([0-9a-f]{64})/verify", _Handler.verified),
    (("POST",), rf"/api/models/{_NAME}/commit/(.+)", _Handler.commit),
)
