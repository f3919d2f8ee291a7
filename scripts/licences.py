"""Write docs/licences.md: every package that an installation of beamq brings, with its licence.

    python scripts/licences.py

Reads the metadata of the packages that are installed here, from beamq's own requirements down. A
package that is missing here, or that states no licence, is an error.
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import cast

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "licences.md"
EXTRAS = ("report",)
LONGEST = 60  # of a licence's name; some packages put the whole text there
HEAD = """<!-- Made by scripts/licences.py from the metadata of installed packages; do not edit. -->
# Licences

beamq is under Apache-2.0. These are the packages that `pip install "beamq[report]"` brings on Linux
with a CPU build of torch, and the licence that each states in its metadata. The versions are those
that were looked at.

| package | version | licence | brought by |
|---|---|---|---|
"""
TAIL = """
A CUDA build of torch also brings Triton (MIT) and NVIDIA's libraries (`nvidia-cublas`,
`nvidia-cudnn` and others), which are under NVIDIA's own proprietary licences. `beamq[quack]` brings
quack-kernels (Apache-2.0) and nvidia-cutlass-dsl, which is proprietary as well.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One package."""

    name: str
    version: str
    licence: str
    brought_by: str


def own() -> list[str]:
    """beamq's requirements, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *extras]


def rows() -> list[Row]:
    """beamq's requirements and theirs, by name. Raises `LookupError` where one is missing here or
    states no licence."""
    found: dict[str, Row] = {}
    waiting = [(text, "beamq") for text in own()]
    while waiting:
        text, brought_by = waiting.pop(0)
        needed = Requirement(text)
        key = canonicalize_name(needed.name)
        if key in found:
            continue
        try:
            package = metadata.distribution(key)
        except metadata.PackageNotFoundError as fault:
            raise LookupError(f"{key}, which {brought_by} needs, is not installed") from fault
        version = package.version.partition("+")[0]
        found[key] = Row(key, version, licence(package), brought_by)
        extras = (*needed.extras, "")
        waiting += [
            (each, key)
            for each in package.requires or ()
            if (marker := Requirement(each).marker) is None
            or any(marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return sorted(found.values(), key=lambda row: row.name)


def licence(package: metadata.Distribution) -> str:
    """As the metadata states it: an expression, a short name, or classifiers."""
    fields = cast(Message, package.metadata)
    stated = str(fields.get("License-Expression") or fields.get("License") or "")
    if stated and len(stated) <= LONGEST * 2 and "\n" not in stated:
        return " ".join(stated.split())
    kinds = [
        each.rpartition(" :: ")[2]
        for each in fields.get_all("Classifier", ())
        if each.startswith("License :: OSI")
    ]
    if not kinds:
        raise LookupError(f"{fields['Name']} states no licence that can be read")
    return ", ".join(kinds)


def table() -> str:
    """The whole document."""
    lines = [f"| {r.name} | {r.version} | {r.licence} | {r.brought_by} |" for r in rows()]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def main() -> int:
    """Write."""
    TARGET.write_text(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
