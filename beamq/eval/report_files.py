"""The files of a report: can they be written, asked before the work; texts, after it.

In: the folder that `--report` names, and texts by file name. Each file is written whole or not at
all; an earlier report in the folder is replaced, other files are left. Pages are made by jinja2
from `templates/`, which share `base.html`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from beamq.errors import DiskError
from beamq.shards import disk_errors, make_folder, write_file
from beamq.small_files import user_path


def check_report_folder(folder: str | Path) -> None:
    """Raise `DiskError` where a report could not be written, before the work. Makes nothing."""
    target = user_path(folder)
    place = target.absolute()
    while not place.exists():
        place = place.parent
    _check_place(target, place, "--report")


def check_new_file(file: str | Path, option: str) -> None:
    """Raise `DiskError` where the file of `option` could not be written, before the work: its
    folder has to be there. Makes nothing."""
    target = user_path(file)
    if target.is_dir():
        raise DiskError(f"{target}: is a folder; choose another {option}")
    _check_place(target, target.parent, option)


def _check_place(target: Path, place: Path, option: str) -> None:
    if not place.is_dir():
        raise DiskError(f"{target}: {place} is not a folder; choose another {option}")
    if not os.access(place, os.W_OK | os.X_OK):
        raise DiskError(f"{target}: {place} may not be written to; choose another {option}")


def write_report_files(folder: str | Path, texts: Mapping[str, str]) -> Path:
    """Write all texts; returns the folder. Raises `DiskError`."""
    target = user_path(folder)
    with disk_errors(target, "creating the folder of --report", resumable=False):
        make_folder(target)
    for name, text in texts.items():
        write_file(target / name, text.encode(), resumable=False)
    return target


def page(template: str, **values: Any) -> str:
    """A page of `templates/` with its values; strings are escaped, drawings go in as they are."""
    from jinja2 import Environment, FunctionLoader  # with matplotlib, only where it is written

    def source(name: str) -> str:
        return resources.files("beamq.eval").joinpath(f"templates/{name}").read_text("utf-8")

    pages = Environment(loader=FunctionLoader(source), autoescape=True, trim_blocks=True)
    return pages.get_template(template).render(**values)
