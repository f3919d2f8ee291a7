"""scripts/mutate.py tells killed mutants from survivors, and its table fits the code."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scripts import mutate
from scripts.mutate import Mutant, judge, main, read_mutants, stale

CODE = """def double(x):
    return x + x


def loop(x):
    while x > 3:
        x -= 1
    return x
"""
TESTS = """from beamq import double, loop


def test_double():
    assert double(2) == 4


def test_loop():
    assert loop(9) == 3
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A package with two tests, of which one sees too little."""
    for name, text in (("beamq/__init__.py", CODE), ("tests/test_it.py", TESTS)):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "root"


def mutant(name: str, old: str, new: str, **more: str) -> Mutant:
    tests = ("tests/test_it.py::test_double", "tests/test_it.py::test_loop")
    return Mutant(name=name, file="beamq/__init__.py", old=old, new=new, tests=tests, **more)


KILLED = mutant("sum", "x + x", "x + 1")
SURVIVOR = mutant("power", "x + x", "x ** x")
EXPLAINED = mutant("product", "x + x", "x * 2", explained="it is the same")
STALE = mutant("gone", "x - x", "0")
TWICE = mutant("twice", "return x", "return 0")


def verdicts(text: str) -> dict[str, str]:
    """Verdict by name, from the lines but the last."""
    lines = [line.split() for line in text.splitlines()[:-1]]
    return {line[1].rstrip(":"): line[0] for line in lines}


def test_verdicts_and_exit_codes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(root, [KILLED, EXPLAINED]) == 0
    out = capsys.readouterr().out
    assert verdicts(out) == {"sum": "killed", "product": "explained"}
    assert out.endswith("2 mutants: 0 survived unexplained, 0 are stale\n")
    assert judge(root, [KILLED, SURVIVOR]) == 1
    assert verdicts(capsys.readouterr().out) == {"sum": "killed", "power": "SURVIVED"}
    assert judge(root, [STALE, TWICE, KILLED]) == 1
    out = capsys.readouterr().out
    assert verdicts(out) == {"gone": "stale", "twice": "stale", "sum": "killed"}
    assert "found 0 times" in out
    assert "found 2 times" in out
    assert (root / "beamq" / "__init__.py").read_text() == CODE, "only the copy is changed"


def test_a_mutant_that_hangs_is_killed(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate, "TIMEOUT", 8)
    assert judge(root, [mutant("endless", "x -= 1", "pass")]) == 0
    assert verdicts(capsys.readouterr().out) == {"endless": "killed"}


def test_tests_that_fail_anyway_judge_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tests" / "test_it.py").write_text(TESTS.replace("== 4", "== 5"))
    assert judge(root, [KILLED]) == 1
    assert capsys.readouterr().out.startswith("the tests do not pass without a mutant")


def test_a_mutant_that_cannot_be_imported_is_an_error(root: Path) -> None:
    with pytest.raises(RuntimeError, match=r"broken: pytest ended with"):
        judge(root, [mutant("broken", "x + x", "(")])


def test_missing_tests_are_stale(root: Path) -> None:
    for test, why in (("tests/no.py", "no such test file"), ("tests/test_it.py::no", "no test no")):
        unfit = Mutant(name="m", file=KILLED.file, old="x + x", new="0", tests=(test,))
        assert why in (stale(root, unfit) or "")


def test_every_mutant_of_the_table_can_be_made() -> None:
    mutants = read_mutants()
    names = Counter(each.name for each in mutants)
    assert [name for name, count in names.items() if count > 1] == []
    for each in mutants:
        assert each.old != each.new, each.name
        assert each.tests, each.name
        assert stale(mutate.ROOT, each) is None, each.name


def test_what_is_explained_is_in_the_results() -> None:
    results = " ".join((mutate.ROOT / "docs" / "results.md").read_text().split())
    for each in read_mutants():
        assert not each.explained or each.name in results, each.name


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = read_mutants()[0].name
    assert main(["--list", "--only", name]) == 0
    assert capsys.readouterr().out.startswith(name)
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "no such mutant: nothing" in capsys.readouterr().err
