"""PUSH: publish a checkpoint on the Hub, so that nobody can load it before it is complete.

In: a folder that `verify` passes at levels `structure` and `quick`, and a repository's name. Out: a
`PushResult`, after the repository's listing was compared with the folder.

    verify -> repository, branch -> [withdraw old index and configs] -> weights and other files
           -> index, configs, manifest in one commit -> compare the listing

huggingface_hub's `upload_folder` skips files that have arrived, so a stopped push continues when it
is run again. Loaders look for index and configs, so these come last, and an older version of them
is deleted before its weights are replaced, with beamq's other files of an earlier push. What
`io.companions` would not copy is not sent, nor are hidden files. Weight files that only the
repository has are refused, not deleted: vLLM would read them. Other files stay, and are named.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from beamq.errors import CheckFailed, HubError
from beamq.eval.verify.checks import VerifyReport
from beamq.eval.verify.drafter import is_drafter_place
from beamq.eval.verify.verify import verify
from beamq.io.companions import WEIGHT_SUFFIXES, WRITTEN_ANEW, hidden, reason_left
from beamq.io.files import user_path
from beamq.io.hub import check_push_target
from beamq.io.hub_call import has_token, hub_call, no_token
from beamq.io.manifest import MANIFEST_NAME, Manifest
from beamq.io.source import INDEX_NAME
from beamq.options import ignore, takes
from beamq.report.model_card import card_gaps
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
    """A file to send. The `last` ones make the repository loadable; `there` says that the
    repository had the same content before."""

    path: str
    nbytes: int
    last: bool
    there: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What was sent, or would be. `commit` and `url` are None for a dry run.

    `kept_back` are files of the folder that are not sent, and why; `others` files that only the
    repository has, which stay there; `gaps` what its page lacks (`card_gaps`).
    """

    __repr__ = short_repr

    repo: str
    revision: str
    private: bool
    dry_run: bool
    files: tuple[PushFile, ...]
    kept_back: tuple[tuple[str, str], ...] = ()
    gaps: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
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
    on_plan: Callable[[PushResult], None] = ignore,
) -> PushResult:
    """Upload a folder to `repo` (org/name) and check what arrived.

    The repository and the branch `revision` are made if they do not exist; `private` refuses one
    that is public already. `show_progress` lets huggingface_hub draw its bars on stderr.
    Every byte is first compared with beamq.json (or, of a drafter, examined); `dry_run` then sends
    nothing. `checking` makes a context around that and yields what to call with bytes done and in
    total; `on_plan` is called with the result of a dry run before anything is sent. Raises
    `CheckFailed` where verify refuses and where the listing differs, `UsageError`, `HubError`,
    `HubUnreachableError`.
    """
    begun = time.monotonic()
    folder = user_path(checkpoint)
    check_push_target(repo, revision)
    _require_structure(folder)
    if not dry_run and not has_token():  # checked before the long read
        raise no_token(repo, "uploading")
    with checking() as progress:
        _require_bytes(folder, progress)
    files, kept_back = files_to_push(folder)
    branch = revision or "main"
    result = PushResult(
        repo=repo, revision=branch, private=private, dry_run=dry_run, files=files,
        kept_back=kept_back, gaps=card_gaps(folder),
    )  # fmt: skip
    if dry_run:
        return result
    on_plan(result)
    pusher = _Pusher(folder, repo, branch, files)
    with _library_output(show_progress):
        pusher.prepare(private)
        before = pusher.listing(branch)
        withdrawn = pusher.withdraw(before)
        pusher.upload([file for file in files if not file.last], "weights")
        commit = pusher.upload([file for file in files if file.last], "index and configs")
        after = pusher.listing(commit)
        pusher.compare(after, commit)
    ids = {path: each.blob_id for path, each in before.items() if path not in withdrawn}
    names = {file.path for file in files}
    return replace(
        result,
        files=tuple(replace(f, there=ids.get(f.path) == after[f.path].blob_id) for f in files),
        withdrawn=withdrawn,
        others=tuple(path for path in after if path not in names and not hidden(path)),
        commit=commit,
        url=f"{pusher.endpoint}/{repo}/tree/{branch}",
        seconds=time.monotonic() - begun,
    )


def _require_structure(folder: Path) -> None:
    """Raise `CheckFailed` for a folder that beamq did not make, or that fails level `structure`."""
    report = verify(folder, level="structure")
    if report.format == "drafter":
        return _require_ok(folder, report, "--target BEAM")
    if report.check("manifest.present").status in ("skip", "warn"):
        raise CheckFailed(
            f"{folder}: cannot be published: it has no {MANIFEST_NAME}, so beamq did not make it;"
            " `hf upload` publishes any folder"
        )
    _require_ok(folder, report, "--level structure")


def _require_bytes(folder: Path, progress: Advance | None) -> None:
    """Raise `CheckFailed` where a byte is not the one that was written; far faster than sending."""
    if is_drafter_place(folder):  # it has no beamq.json: every value is looked at instead
        return _require_ok(folder, verify(folder, progress=progress), "--target BEAM")
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


def files_to_push(folder: Path) -> tuple[tuple[PushFile, ...], tuple[tuple[str, str], ...]]:
    """The files to send, with those at the end that make it loadable; the names of others that are
    not hidden, and why they stay behind."""
    own = {INDEX_NAME}
    if (folder / MANIFEST_NAME).exists():
        own.update(Manifest.read(folder / MANIFEST_NAME).shards or ())
    else:  # a drafter
        own.update(path.name for path in folder.glob("*.safetensors"))
    found, kept_back = [], []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if hidden(name) or not path.is_file():
            continue
        why = None if name in own else reason_left(name)
        if why not in (None, WRITTEN_ANEW):
            kept_back.append((name, str(why)))
        else:
            found.append(PushFile(path=name, nbytes=path.stat().st_size, last=name in LAST_NAMES))
    return tuple(sorted(found, key=lambda file: file.last)), tuple(kept_back)


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

    def withdraw(self, there: Mapping[str, RepoFile]) -> tuple[str, ...]:
        """Delete index and configs that differ from ours, before their weights change, and beamq's
        other files that we do not have.

        Raises `HubError` if there are weights that this checkpoint does not have.
        """
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
        if same and MANIFEST_NAME in old:  # the manifest has every checksum
            old = []
        old += [path for path in there if path.startswith("beamq-") and path not in ours]
        if not old:
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

    def compare(self, there: Mapping[str, RepoFile], commit: str) -> None:
        """Raise `CheckFailed` if the listing lacks a file, or has one of another size or content.

        Of shards only the size is compared.
        """
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

    def listing(self, revision: str) -> dict[str, RepoFile]:
        """What the repository has."""
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
            return True  # the library compares them as it sends
        data = path.read_bytes()
        if there.lfs is not None:
            return hashlib.sha256(data).hexdigest() == there.lfs.sha256
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == there.blob_id


@contextmanager
def _library_output(bars: bool) -> Iterator[None]:
    """Keep the library's warnings off the terminal, and its progress bars unless wanted."""
    from huggingface_hub import utils

    verbosity, hide = utils.logging.get_verbosity(), not bars
    hide = hide and not utils.are_progress_bars_disabled()
    utils.logging.set_verbosity(logging.ERROR)
    if hide:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.logging.set_verbosity(verbosity)
        if hide:
            utils.enable_progress_bars()
