"""scripts/house_counts.py counts what it says, on a package made up for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.house_counts import main, measure

FILES = {
    "__init__.py": "",
    "alone.py": "import os\n",
    "io/__init__.py": "",
    "io/first.py": "from beamq.io import second\n\n\nclass Same:\n    pass\n",
    "io/second.py": "def late():\n    from beamq.third import Same\n\n    return Same\n",
    "third.py": "import beamq.io.first\n\n\nclass Same:\n    def m(self, a, *b, c, **d): ...\n",
    "user.py": "from beamq.third import Same\n\n\ndef _twice(): ...\n\n\ndef _once(): ...\n\n\n"
    "_once()\n_twice()\n_twice()\n",
    "long.py": "def just():\n" + "    pass\n" * 59 + "\n\ndef over():\n" + "    pass\n" * 60,
    "wide.py": "def eight(a, b, c, d, e, f, g, h): ...\n\n\n"
    "async def nine(a, /, *b, c, d, e, f, g, h, **i): ...\n\n\n"
    "@triton.jit\ndef kernel(a, b, c, d, e, f, g, h, i): ...\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "beamq" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_counts(root: Path) -> None:
    found = measure(root)
    assert found["modules"].value == len(FILES)
    assert found["lines"].value == sum(text.count("\n") for text in FILES.values())
    assert found["imports between modules"].value == 4
    assert found["imported by exactly one other"].items == ("beamq.io.first", "beamq.io.second")
    circle = "beamq.io.first, beamq.io.second, beamq.third"
    assert found["import cycles, local imports included"].items == (circle,)
    assert found["functions over 60 lines"].items == ("beamq.long.over: 61 lines",)
    assert found["functions with over 8 parameters"].items == ("beamq.wide.nine: 9 parameters",)
    assert found["class names used twice"].items == ("Same: beamq.io.first, beamq.third",)
    assert found["private functions"].value == 2
    assert found["private functions called once"].items == ("beamq.user._once",)


def test_the_report_lists_what_counts_consist_of(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(root)])
    short = capsys.readouterr().out
    main([str(root), "--long"])
    long = capsys.readouterr().out
    assert "       1  functions over 60 lines\n" in short
    assert "beamq.long.over" not in short
    assert "       1  functions over 60 lines\n            beamq.long.over: 61 lines\n" in long
