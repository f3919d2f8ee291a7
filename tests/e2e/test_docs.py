"""The documentation: its commands run on the small Beam, its options exist, and its site builds.

A fenced block of `sh` is run, page by page and in order, in a folder with `my-beam`, `my-adapter`,
`their-nvfp4` and `examples`. A comment before the block says otherwise:

    <!-- not run: REASON -->    only its options are checked
    <!-- exit code: N -->       that of its last command; 0 without the comment
    <!-- file: NAME -->         before a block of any language: its text becomes a file of that name
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

import beamq
from beamq.cli import MODULES, app
from tests.helpers.adapters import made, pair
from tests.helpers.checkpoint_damage import edit_json

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")],
    key=lambda path: path.as_posix(),
)
BLOCK = re.compile(r"(?:^<!-- ([a-z ]+): (.+?) -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(rf"\bbeamq ({'|'.join(MODULES)})\b([^`\n#]*)")


@dataclass(frozen=True)
class Block:
    """A fenced block and the comment before it."""

    language: str
    text: str
    said: str = ""
    detail: str = ""


def blocks(page: Path) -> list[Block]:
    found = BLOCK.findall(page.read_text())
    return [Block(language, text, said, detail) for said, detail, language, text in found]


def runs(page: Path) -> bool:
    return any(block.language == "sh" and block.said != "not run" for block in blocks(page))


@pytest.fixture(scope="module")
def models(beam_nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages call my-beam, my-adapter and their-nvfp4."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(beam_nano, folder / "my-beam")
    adapted = pair("model.layers.0.self_attn.o_proj", 128, 128)
    made(folder / "my-adapter", adapted, target_modules=["o_proj"])
    beamq.quantize(beam_nano, folder / "their-nvfp4", samples=2)
    for name in ("hf_quant_config.json", "beamq.json", "README.md"):
        (folder / "their-nvfp4" / name).unlink()
    edit_json(
        folder / "their-nvfp4" / "config.json",
        lambda config: config["quantization_config"]["ignore"].clear(),
    )
    return folder


@pytest.mark.parametrize("page", filter(runs, PAGES), ids=lambda page: page.stem)
def test_commands_run(page: Path, models: Path, tmp_path: Path) -> None:
    for each in models.iterdir():
        shutil.copytree(each, tmp_path / each.name)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = os.environ.get("PYTHONPATH") or str(ROOT)
    scripts = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for block in blocks(page):
        if block.said == "file":
            (tmp_path / block.detail).write_text(block.text)
        if block.language != "sh" or block.said == "not run":
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", block.text],
            cwd=tmp_path, env={**os.environ, "PATH": scripts, "PYTHONPATH": path},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        expected = int(block.detail) if block.said == "exit code" else 0
        assert done.returncode == expected, (block.text, done.stderr[-2000:])


def test_every_block_that_is_not_run_says_why() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.said in ("", "not run", "exit code", "file"), (page, block)
            assert block.language in ("sh", "yaml", "text"), (page, block.language)
            assert not block.said or block.detail.strip()
    assert len([page for page in PAGES if runs(page)]) >= 4


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    group: Any = typer.main.get_command(app)
    commands = {name: group.get_command(None, name) for name in MODULES}
    return {
        name: {"--help", "-h", *(text for each in command.params for text in each.opts)}
        for name, command in commands.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_option_exists(page: Path, options: dict[str, set[str]]) -> None:
    """In every command line of the page: blocks, and code within sentences."""
    for command, rest in COMMAND.findall(page.read_text()):
        given = re.findall(r"(?<![\w-])(--?[a-z][\w-]*)", rest)
        assert set(given) <= options[command], (command, rest)


def test_an_option_that_does_not_exist_is_found(options: dict[str, set[str]]) -> None:
    (found,) = COMMAND.findall("see `beamq verify X --sauce Y` and --other")
    assert found == ("verify", " X --sauce Y")
    assert "--sauce" not in options["verify"]


def test_every_benchmark_and_script_exists() -> None:
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(r"python -m benchmarks\.([a-z]\w+)", text):
            assert (ROOT / "benchmarks" / f"{name}.py").is_file(), (page, name)
        for name in re.findall(r"python (scripts/\w+\.py)", text):
            assert (ROOT / name).is_file(), (page, name)
        for name in re.findall(r"^ +make (\w+)", text, re.M):
            assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.M), (page, name)


def test_the_readme_shows_what_verify_finds(beam_nano: Path, tmp_path: Path) -> None:
    beamq.quantize(beam_nano, tmp_path / "out", samples=4, sequence_length=64)
    checks = [each.status for each in beamq.verify(tmp_path / "out", source=beam_nano).checks]
    passed, skipped = checks.count("pass"), checks.count("skip")
    text = (ROOT / "README.md").read_text()
    assert f"ok: {passed} checks passed, {skipped} skipped" in text
    assert f"({passed - 3} more checks)" in text


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="MkDocs is not installed: .[docs]")
def test_the_site_builds(tmp_path: Path) -> None:
    """Links and anchors lead somewhere; every page is in the navigation or is found by search."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Which page next" in (tmp_path / "index.html").read_text()
