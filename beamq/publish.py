"""PUSH: publish a checkpoint on the Hub, so that nobody can load it before it is complete.

In: a folder that `verify` passes at levels `structure` and `quick`, and a repository's name. Out: a
`PushResult`, after the repository's listing was compared with the folder.

    verify -> repository, branch -> [withdraw old index and configs] -> weights and other files
           -> index, configs, manifest in one commit -> compare the listing

huggingface_hub's `upload_folder` skips files that have arrived, so a stopped push continues when it
is run again. Loaders look for index and configs, so these come last, and an older version of them
is deleted before its weights are replaced. Hidden files are never sent. Weight files that only the
repository has are refused, not deleted: vLLM would read them.
"""

from __future__ import annotations

import glob
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from beamq.errors import CheckFailed, HubError, UsageError
from beamq.eval.verify.checks import VerifyReport
from beamq.eval.verify.verify import verify
from beamq.io.companions import WEIGHT_SUFFIXES
from beamq.io.hub import has_token, hub_call, no_token, parse_hub_id
from beamq.io.manifest import MANIFEST_NAME
from beamq.io.shard_writer import PARTIAL
from beamq.io.source import INDEX_NAME
from beamq.options import takes
from beamq.units import short_repr
from beamq.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

LAST_NAMES = (INDEX_NAME, "hf_quant_config.json", "config.json", MANIFEST_NAME)
MAX_HASHED_BYTES = 1 << 28
Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFile:
    """A file to send. The `last` ones make the repository loadable."""

    path: str
    nbytes: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What was sent, or would be. `commit` and `url` are None for a dry run."""

    __repr__ = short_repr

    repo: str
    revision: str
    private: bool
    dry_run: bool
    files: tuple[PushFile, ...]
    withdrawn: tuple[str, ...] = ()
    commit: str | None = None
    url: str | None = None
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


@takes()
def push(
    checkpoint: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    show_progress: bool = False,
    checking: Callable[[], AbstractContextManager[Advance | None]] = nullcontext,
) -> PushResult:
    """Upload a folder to `repo` (org/name) and check what arrived.

    The repository and the branch `revision` are made if they do not exist; `private` refuses one
    that is public already. `show_progress` lets huggingface_hub draw its bars on stderr.
    Every byte is first compared with beamq.json; `dry_run` then sends nothing. `checking` makes a
    context around the comparison and yields what to call with bytes done and in total. Raises
    `CheckFailed` for a folder that verify refuses and for a listing that differs at the end,
    `UsageError`, `HubError`, `HubUnreachableError`.
    """
    begun = time.monotonic()
    folder = Path(checkpoint).expanduser()
    asked = parse_hub_id(repo)
    if asked is None or asked.revision is not None:
        raise UsageError(f"{repo!r}: expected a repository's name, org/name (and --revision)")
    _require_structure(folder)
    if not dry_run and not has_token():  # checked before the long read
        raise no_token(repo, "uploading")
    with checking() as progress:
        _require_bytes(folder, progress)
    files = files_to_push(folder)
    branch = revision or "main"
    result = PushResult(repo=repo, revision=branch, private=private, dry_run=dry_run, files=files)
    if dry_run:
        return result
    pusher = _Pusher(folder, repo, branch, files)
    with _bars(show_progress):
        pusher.prepare(private)
        withdrawn = pusher.withdraw()
        pusher.upload([file for file in files if not file.last], "weights")
        commit = pusher.upload([file for file in files if file.last], "index and configs")
        pusher.compare(commit)
    url = f"{pusher.endpoint}/{repo}/tree/{branch}"
    seconds = time.monotonic() - begun
    return replace(result, withdrawn=withdrawn, commit=commit, url=url, seconds=seconds)


def _require_structure(folder: Path) -> None:
    """Raise `CheckFailed` for a folder that beamq did not make, or that fails level `structure`."""
    report = verify(folder, level="structure")
    if report.check("manifest.present").status in ("skip", "warn"):
        raise CheckFailed(
            f"{folder}: cannot be published: it has no {MANIFEST_NAME}, so beamq did not make it;"
            " `hf upload` publishes any folder"
        )
    _require_ok(folder, report, "--level structure")


def _require_bytes(folder: Path, progress: Advance | None) -> None:
    """Raise `CheckFailed` where a byte is not the one that was written; far faster than sending."""
    report = verify(folder, level="quick", progress=progress)
    _require_ok(folder, report, "--quick")
    sums = report.check("checksums.tensors")
    if sums.status != "pass":
        raise CheckFailed(f"{folder}: cannot be published: no tensor was checked: {sums.detail}")


def _require_ok(folder: Path, report: VerifyReport, level: str) -> None:
    """Raise `CheckFailed` with the first failed checks, and with all places that verify names."""
    if report.ok:
        return
    shown = []
    for check in report.failures[:2]:
        others = f": {', '.join(check.where[1:])}" if check.where[1:] else ""
        shown.append(f"{check.name}: {check.detail}{others}")
    rest = len(report.failures) - 2
    more = f" and {rest} more" if rest > 0 else ""
    raise CheckFailed(
        f"{folder}: cannot be published ({'; '.join(shown)}{more}); see `beamq verify {folder}"
        f" {level}`"
    )


def files_to_push(folder: Path) -> tuple[PushFile, ...]:
    """All files but hidden, state and partial ones; at the end those that make it loadable."""
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and not path.name.endswith(PARTIAL):
            name = relative.as_posix()
            found.append(PushFile(path=name, nbytes=path.stat().st_size, last=name in LAST_NAMES))
    return tuple(sorted(found, key=lambda file: file.last))


class _Pusher:
    """One push: `prepare`, `withdraw`, `upload` twice, `compare`."""

    def __init__(self, folder: Path, repo: str, branch: str, files: Sequence[PushFile]) -> None:
        from huggingface_hub import HfApi, constants

        self.endpoint: str = constants.ENDPOINT
        self._folder = folder
        self._repo = repo
        self._branch = branch
        self._files = files
        self._api: HfApi = HfApi(
            endpoint=self.endpoint, library_name="beamq", library_version=__version__
        )

    def prepare(self, private: bool) -> None:
        """Make repository and branch if needed; refuse a public repository if `private`."""
        api, repo, branch = self._api, self._repo, self._branch
        hub_call(
            repo,
            "creating it",
            lambda: api.create_repo(repo, private=private or None, exist_ok=True),
        )
        info = hub_call(repo, "looking it up", lambda: api.model_info(repo, timeout=30))
        if private and not info.private:
            raise HubError(
                f"{repo}: exists and is public; make it private in its settings, or leave out"
                " --private"
            )
        if branch != "main":
            hub_call(
                repo,
                f"creating the branch {branch}",
                lambda: api.create_branch(repo, branch=branch, exist_ok=True),
            )

    def withdraw(self) -> tuple[str, ...]:
        """Delete index and configs that differ from ours, before their weights change.

        Raises `HubError` if there are weights that this checkpoint does not have.
        """
        there = self._listing(self._branch)
        ours = {file.path for file in self._files}
        foreign = [path for path in there if path.endswith(WEIGHT_SUFFIXES) and path not in ours]
        if foreign:
            shown = ", ".join(foreign[:3]) + (" ..." if len(foreign) > 3 else "")
            raise HubError(
                f"{self._repo}@{self._branch}: holds {len(foreign)} weight files that this"
                f" checkpoint does not have ({shown}), and engines would read them; delete them, or"
                " push to another --revision"
            )
        old = [name for name in LAST_NAMES if name in there]
        same = all(self._is_same(there[name]) for name in old)
        if not old or (same and MANIFEST_NAME in old):  # the manifest has every checksum
            return ()
        from huggingface_hub import CommitOperationDelete

        hub_call(
            self._repo,
            "withdrawing the old index and configs",
            lambda: self._api.create_commit(
                self._repo,
                [CommitOperationDelete(path_in_repo=name) for name in old],
                commit_message="Withdraw index and configs while the weights are replaced",
                revision=self._branch,
            ),
        )
        return tuple(old)

    def upload(self, files: Sequence[PushFile], what: str) -> str:
        """Send some of the files, in as many commits as the library makes. Returns the last one."""
        info = hub_call(
            self._repo,
            f"uploading {what}",
            lambda: self._api.upload_folder(
                repo_id=self._repo,
                folder_path=self._folder,
                allow_patterns=[glob.escape(file.path) for file in files],
                commit_message=f"Upload {what} with beamq {__version__}",
                revision=self._branch,
            ),
        )
        return str(info.oid)

    def compare(self, commit: str) -> None:
        """Raise `CheckFailed` if the listing lacks a file, or has one of another size or content.

        Of shards only the size is compared.
        """
        there = self._listing(commit)
        wrong = []
        for file in self._files:
            found = there.get(file.path)
            if found is None:
                wrong.append(f"{file.path} is missing")
            elif found.size != file.nbytes:
                wrong.append(f"{file.path} has {found.size} bytes, expected {file.nbytes}")
            elif not file.path.endswith(WEIGHT_SUFFIXES) and not self._is_same(found):
                wrong.append(f"{file.path} has other content")
        if wrong:
            shown = "; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
            raise CheckFailed(
                f"{self._repo}@{commit[:12]}: does not hold what was sent: {shown}; run the same"
                " push again"
            )

    def _listing(self, revision: str) -> dict[str, RepoFile]:
        from huggingface_hub.hf_api import RepoFile

        entries = hub_call(
            f"{self._repo}@{revision}",
            "listing its files",
            lambda: list(self._api.list_repo_tree(self._repo, recursive=True, revision=revision)),
        )
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _is_same(self, there: RepoFile) -> bool:
        """Whether our file of that name has the content listed, by the digest of git or LFS."""
        path = self._folder / there.path
        if not path.is_file() or path.stat().st_size != there.size:
            return False
        if there.size > MAX_HASHED_BYTES:
            return True  # only shards are so large
        data = path.read_bytes()
        if there.lfs is not None:
            return hashlib.sha256(data).hexdigest() == there.lfs.sha256
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == there.blob_id


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Keep the library's progress bars off the terminal unless they are wanted."""
    from huggingface_hub import utils

    if shown or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()
