"""What is spelled like a repository of the Hub, and what is a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from beamq.errors import UsageError
from beamq.io.hub import HubId, check_push_target, hub_source, parse_hub_id


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


@pytest.mark.parametrize(
    "name",
    [
        "a b", "a..b", "a~1", "a^", "a:b", "a?", "a*", "a[b", "a\\b", "a@{b", "a//b", "/a", "a/",
        "-a", ".a", "a/.b", "a.lock", "a.lock/b", "a.", "@", "a\x7f", "a\nb", "0" * 40, "x" * 201,
    ],
)  # fmt: skip
def test_a_branch_that_git_would_refuse(name: str) -> None:
    with pytest.raises(UsageError, match="not the name of a branch"):
        check_push_target("a/b", name)


@pytest.mark.parametrize("name", ["main", "v1.0", "a/b-c", "refs/pr/1", "ü", "0" * 39, None])
def test_a_branch_that_git_takes(name: str | None) -> None:
    check_push_target("a/b", name)


@pytest.mark.parametrize("repo", ["a", "a/b@main", "a/b..c", "a/b--c", "a/b.git", "a/" + "b" * 97])
def test_a_repository_that_the_hub_would_not_make(repo: str) -> None:
    with pytest.raises(UsageError, match=r"no such name|expected a repository"):
        check_push_target(repo, None)
