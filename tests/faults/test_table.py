"""The table of faults names tests that exist, and the ids in it stand in tests."""

from __future__ import annotations

import re
from pathlib import Path

TABLE = Path(__file__).with_name("README.md")
TESTS = Path(__file__).resolve().parent.parent
REFERENCE = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")
REPORT = re.compile(r"\b(?:MO|LLMC|CT|VL|SG|HF|LC|GQ|AR|HUB)\d+\b|\bsafetensors601\b|\breap127\b")


def test_every_test_that_is_named_exists() -> None:
    found = REFERENCE.findall(TABLE.read_text())
    assert len(found) > 80
    for file, name in found:
        if file == "test_table.py":
            continue
        path = TESTS / (file if "/" in file else f"faults/{file}")
        text = path.read_text()
        assert not name or f"def {name}(" in text, f"{file}::{name}"


def test_every_report_of_a_fault_test_is_in_the_table() -> None:
    listed = set(REPORT.findall(TABLE.read_text()))
    used = {
        report
        for folder in ("faults", "crash")
        for path in (TESTS / folder).glob("test_*.py")
        for report in REPORT.findall(path.read_text().replace("_", " "))
    }
    assert used <= listed
    assert len(listed) >= 40
