"""A model repository on the Hugging Face Hub, pinned to one commit.

In: `org/name` or `org/name@revision` (a branch, tag or commit). Out: a `HubRepo`: the commit, the
size of every file, and three ways to read them: a byte range, a small file through the shared Hub
cache, a shard into a folder of the caller's.

Everything goes through huggingface_hub, so HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean
what they mean elsewhere. A branch is looked up once; all later requests name the commit, so a
branch that moves during a run changes nothing. With HF_HUB_OFFLINE, a snapshot in the Hub cache
serves instead. A file that is in the cache is never fetched again and never deleted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from beamq.errors import (
    CheckpointError,
    HubError,
    HubUnreachableError,
    Interrupted,
    UsageError,
)
from beamq.io.files import user_path
from beamq.io.hub_call import check_settings, hub_call, offline_by
from beamq.version import __version__

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([^\s@]{1,250}))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HubId:
    """A repository as the user names it; `revision` None is its main branch."""

    repo: str
    revision: str | None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_hub_id(text: str) -> HubId | None:
    """`org/name[@revision]`, or None if the text cannot be one."""
    found = _HUB_ID.fullmatch(text)
    return None if found is None else HubId(repo=found[1], revision=found[2])


MAX_BRANCH_BYTES = 200
_NO_BRANCH = re.compile(
    r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|(^|/)\.|\.lock(/|$)|^[-/]|[/.]$|^@$|^[0-9a-f]{40}$"
)


def check_push_target(repo: str, name: str | None) -> None:
    """Raise `UsageError` for a repository that the Hub would not make, and for a branch `name` that
    git refuses (`git help check-ref-format`) or that is a commit's, which takes no push."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    found = parse_hub_id(repo)
    if found is None or found.revision is not None:
        raise UsageError(f"{repo!r}: expected a repository's name, org/name (and --revision)")
    try:
        validate_repo_id(repo)
    except HFValidationError as fault:
        raise UsageError(f"{repo!r}: the Hub takes no such name: {str(fault)[:200]}") from None
    if name is None:
        return
    if (odd := _NO_BRANCH.search(name)) is not None or len(name.encode()) > MAX_BRANCH_BYTES:
        why = "too long" if odd is None else repr(odd[0]) if odd[0] != name else "all of it"
        raise UsageError(
            f"revision {name[:80]!r}: not the name of a branch ({why}); use letters, digits, '-',"
            " '.' and '/'"
        )


# A relative path that looks like a Hub id often begins with one of these.
_FOLDERS = {
    "checkpoint", "checkpoints", "ckpt", "ckpts", "data", "exp", "experiments", "home", "local",
    "logs", "mnt", "model", "models", "out", "output", "outputs", "results", "root", "run", "runs",
    "save", "saved", "scratch", "tmp", "train", "trained", "user", "users", "work", "workspace",
}  # fmt: skip
_STEP = re.compile(r"(checkpoint|ckpt|epoch|global_step|iter|step)[-_]?\d+", re.IGNORECASE)


def could_be_path(text: str) -> bool:
    """Whether a name may be a folder rather than an id on the Hub."""
    found = parse_hub_id(text)
    if found is None or found.revision is not None:
        return True
    first, _, last = text.partition("/")
    return first.lower() in _FOLDERS or bool(_STEP.search(last)) or Path(text).exists()


def names_a_path(value: object) -> bool:
    """Whether a value in a config is a folder of some machine; a name without a slash is not."""
    return isinstance(value, str) and any(c in value for c in "/\\~") and could_be_path(value)


def cached_repo(folder: Path) -> str | None:
    """The repository whose snapshot in a Hub cache a folder is, by the cache's names."""
    for path in (folder.absolute(), folder.resolve()):
        repo = path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            return repo if parse_hub_id(repo) is not None else None
    return None


def hub_source(source: str | Path) -> HubId | None:
    """The repository that a SOURCE names, or None if it is a path.

    What exists on disk is a path, however it is spelled, and so is every `Path` object.
    """
    if isinstance(source, Path) or user_path(source).exists():
        return None
    return parse_hub_id(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """One commit of a repository. `files` maps every path in it to its bytes.

    `snapshot` is the folder in the Hub cache that serves it offline, else None. `kind` says whether
    it is a model or a dataset.
    """

    asked: HubId
    commit: str
    files: Mapping[str, int] = field(repr=False)
    snapshot: Path | None = None
    kind: Literal["model", "dataset"] = "model"

    @property
    def name(self) -> str:
        """For messages: `org/name@` and the start of the commit."""
        return f"{self.asked.repo}@{self.commit[:12]}"

    def cached(self, file: str) -> Path | None:
        """This file of this commit in the Hub cache, or None."""
        from huggingface_hub import try_to_load_from_cache

        if self.snapshot is not None:
            return self.snapshot / file if file in self.files else None
        found = try_to_load_from_cache(
            self.asked.repo, file, revision=self.commit, repo_type=self.kind
        )
        if not isinstance(found, str) or Path(found).stat().st_size != self.files[file]:
            return None
        return Path(found)

    def small_file(self, file: str) -> Path:
        """A config or tokenizer, kept in the Hub cache. Raises `CheckpointError`."""
        if file not in self.files:
            raise CheckpointError(f"{self.name}: has no {file}; is it a checkpoint?")
        return self.cached(file) or self._download(file, None, lambda: False)

    def shard(self, file: str, folder: Path, stopped: Callable[[], bool]) -> Path:
        """Fetch a file into `folder`. Raises `Interrupted` if `stopped` turns true meanwhile."""
        found = self._download(file, folder, stopped)
        size = found.stat().st_size
        if size != self.files[file]:
            found.unlink()
            raise HubUnreachableError(
                f"{self.name}: {file} arrived with {size} bytes, expected {self.files[file]};"
                " run again"
            )
        return found

    def read_range(self, file: str, start: int, nbytes: int) -> bytes:
        """Bytes of a file by one range request."""
        if nbytes == 0:
            return b""
        found = self.cached(file)
        if found is not None:
            with found.open("rb") as stream:
                stream.seek(start)
                return stream.read(nbytes)
        return hub_call(
            self.name, f"reading {file}", lambda: self._request_range(file, start, nbytes)
        )

    def _request_range(self, file: str, start: int, nbytes: int) -> bytes:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        where = {"revision": self.commit, "endpoint": constants.ENDPOINT}
        url = hf_hub_url(self.asked.repo, file, repo_type=self.kind, **where)
        headers = build_hf_headers(library_name="beamq", library_version=__version__)
        headers["Range"] = f"bytes={start}-{start + nbytes - 1}"
        headers["Accept-Encoding"] = "identity"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            whole = start == 0 and nbytes == self.files[file]
            if response.status_code != 206 and not whole:
                raise HubError(
                    f"{self.name}: the server ignores range requests ({file}); download the"
                    " repository and give its folder"
                )
            data = bytearray()
            for chunk in response.iter_bytes(CHUNK):
                data += chunk
                if len(data) > nbytes:
                    break
        if len(data) != nbytes:
            raise OSError(f"{file}: asked for {nbytes} bytes, got {len(data)}")
        return bytes(data)

    def _download(self, file: str, folder: Path | None, stopped: Callable[[], bool]) -> Path:
        from huggingface_hub import constants, hf_hub_download

        def call() -> Path:
            found = hf_hub_download(
                self.asked.repo,
                file,
                revision=self.commit,
                local_dir=folder,
                library_name="beamq",
                library_version=__version__,
                endpoint=constants.ENDPOINT,
                tqdm_class=_silent_bar(stopped),
            )
            return Path(found)

        return hub_call(self.name, f"fetching {file}", call, stopped=stopped)


def _silent_bar(stopped: Callable[[], bool]) -> Any:
    """A progress bar that shows nothing; the library calls it for each chunk, so it can stop."""
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if stopped():
                raise Interrupted("stopped")
            shown: bool | None = super().update(n)
            return shown

    return Silent


def open_repo(asked: HubId) -> HubRepo:
    """Look a repository up and pin it. Raises `HubError` or `HubUnreachableError`."""
    check_settings()
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return _offline(asked)
    from huggingface_hub import HfApi

    api = HfApi(endpoint=constants.ENDPOINT, library_name="beamq", library_version=__version__)
    info = hub_call(
        str(asked),
        "looking it up",
        lambda: api.model_info(asked.repo, revision=asked.revision, timeout=30),
    )
    commit = str(info.sha)
    if _COMMIT.fullmatch(commit) is None:
        raise HubError(f"{asked}: {constants.ENDPOINT} returned no commit; check HF_ENDPOINT")
    entries = hub_call(
        str(asked),
        "listing its files",
        lambda: list(api.list_repo_tree(asked.repo, recursive=True, revision=commit)),
    )
    files = {entry.path: entry.size for entry in entries if hasattr(entry, "size")}
    return HubRepo(asked=asked, commit=commit, files=_safe(asked, files))


LOOK_UP_ATTEMPTS = 2


def dataset_files(repo: str, commit: str, paths: Sequence[str]) -> HubRepo:
    """Some files of a dataset at one commit; nothing else of it is listed.

    Raises `HubError` where one is not there, and `HubUnreachableError` soon: whoever asks has
    another text at hand.
    """
    check_settings()
    from huggingface_hub import HfApi, constants

    asked = HubId(repo=repo, revision=commit)
    if constants.is_offline_mode():
        raise HubUnreachableError(f"datasets/{asked}: {offline_by()} is set; unset it")
    api = HfApi(endpoint=constants.ENDPOINT, library_name="beamq", library_version=__version__)
    entries = hub_call(
        f"datasets/{asked}",
        "looking up its files",
        lambda: api.get_paths_info(repo, list(paths), revision=commit, repo_type="dataset"),
        attempts=LOOK_UP_ATTEMPTS,
    )
    files = {entry.path: entry.size for entry in entries if hasattr(entry, "size")}
    missing = sorted(set(paths) - set(files))
    if missing:
        raise HubError(f"datasets/{asked}: has no {missing[0]}; give --data of your own")
    return HubRepo(asked=asked, commit=commit, files=files, kind="dataset")


def _safe(asked: HubId, files: dict[str, int]) -> dict[str, int]:
    for path in files:
        if path.startswith("/") or "\\" in path or ".." in path.split("/"):
            raise HubError(f"{asked}: lists {path[:80]!r}, a path out of the folder")
    return dict(sorted(files.items()))


def _offline(asked: HubId) -> HubRepo:
    """The newest snapshot of a revision in the Hub cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = hub_call(
            str(asked),
            "looking in the Hub cache",
            lambda: snapshot_download(asked.repo, revision=asked.revision, local_files_only=True),
        )
    except LocalEntryNotFoundError:
        raise HubUnreachableError(
            f"{asked}: no such folder here, {offline_by()} is set and the Hub cache does not have"
            " it; unset the variable or download the repository first"
        ) from None
    snapshot = Path(found)
    files = {
        path.relative_to(snapshot).as_posix(): path.stat().st_size
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    }
    return HubRepo(asked=asked, commit=snapshot.name, files=files, snapshot=snapshot)
