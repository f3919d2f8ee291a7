"""Reports: JSON as documented, Markdown, and a page that Chromium shows whole, light and dark."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from beamq.beam.tensors import Role
from beamq.errors import DiskError, MissingDependencyError
from beamq.eval.compare.compare import compare
from beamq.eval.compare.records import Comparison
from beamq.report import files
from beamq.report.files import check_report_folder, report_markdown, write_report
from tests.helpers.model_fixtures import quantized_copy, text_ids

HOSTILE = "<img src=x onerror=alert(1)> $x_1$ | [a](b)"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars"
    " --disable-background-networking --disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory, beam_nano: Path) -> Comparison:
    """FP8 and NVFP4 experts; one of the folders has a name that means harm."""
    root = tmp_path_factory.mktemp("reported")
    experts = (Role.EXPERT,)
    paths = [
        quantized_copy(
            beam_nano, root / "nvfp4", "nvfp4", roles=experts, input_amax=lambda _: 20.0
        ),
        quantized_copy(beam_nano, root / HOSTILE, "fp8", roles=experts),
    ]
    return compare(beam_nano, paths, input_ids=text_ids(beam_nano, 2, 200).numpy())


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, comparison: Comparison) -> Path:
    return write_report(comparison, tmp_path_factory.mktemp("report") / "new" / "folder")


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys(item)


def test_every_key_of_the_json_is_documented(report: Path, repo: Path) -> None:
    text = report.with_name("report.json").read_text()
    data = json.loads(text, parse_constant=refuse)
    assert data["schema"] == 1
    documented = set(re.findall(r"`(\w+)`", (repo / "docs" / "report-schema.md").read_text()))
    unknown = {key for key in keys(data) if not key.isdigit()} - documented
    assert not unknown, f"not in docs/report-schema.md: {sorted(unknown)}"
    first = data["candidates"][0]
    assert len(first["linears"]) == 240
    assert [layer["layer"] for layer in first["layers"]] == list(range(8))
    assert first["memory"]["weight_bytes_per_gpu"]["tensor"]["1"] > 0


def test_what_is_not_finite_is_null(comparison: Comparison) -> None:
    from dataclasses import replace

    broken = replace(comparison, seconds=math.nan, settings={"x": [math.inf]})
    data = json.loads(json.dumps(broken.to_dict(), allow_nan=False))
    assert data["seconds"] is None
    assert data["settings"] == {"x": [None]}


def test_markdown_tables_are_whole(comparison: Comparison) -> None:
    text = report_markdown(comparison)
    for name in (
        "Within the recipe's bounds?",
        "Which layers hurt",
        "Memory",
        "| Mean KLD |",
    ):
        assert name in text
    assert "<img" not in text
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in lines}) <= 1, block


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def test_the_page_needs_nothing_else(report: Path) -> None:
    text = report.read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"}.intersection(page.tags)
    assert all(link.startswith("#") for link in page.links), page.links
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert "@import" not in text
    assert {url for url in re.findall(r"url\((.)", text)} <= {"#"}
    assert page.tags.count("svg") == page.tags.count("figure") == 4
    assert "#0101" not in text  # stand-in colours
    assert len(text) < 400_000


def test_a_report_that_cannot_be_written(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="--report"):
        write_report(comparison, tmp_path / "file" / "folder")


def test_a_report_without_matplotlib_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r'pip install "beamq\[report\]"'):
        check_report_folder(tmp_path / "report", "report")


# --- in a browser ---------------------------------------------------------------------------


@pytest.fixture
def chromium(tmp_path: Path) -> Any:
    """Run headless Chromium on a page with further options; returns what it prints."""
    if CHROMIUM is None:
        assert not os.environ.get("CI"), "Chromium is missing; .ci/run installs it"
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")

    def run(page: Path, *options: str) -> str:
        done = subprocess.run(
            [CHROMIUM, *OPTIONS.split(), f"--user-data-dir={tmp_path / 'profile'}", *options,
             page.as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout

    return run


def test_chromium_shows_everything(report: Path, chromium: Any) -> None:
    dom = chromium(report, "--dump-dom")
    for text in ("Within the recipe's bounds?", "Within bounds: ", "Mean KLD", "Router agreement",
                 "KL divergence of single tokens", "Weights on each GPU",
                 "kept in BF16, they would take", "mlp.experts"):  # fmt: skip
        assert text in dom, text
    assert "&lt;img src=x" in dom
    assert "<img" not in dom
    assert dom.count("<svg") == 4


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_pixels_in_light_and_dark(mode: str, report: Path, chromium: Any, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    dark = ("--blink-settings=preferredColorScheme=0",) if mode == "dark" else ()
    chromium(report, f"--screenshot={picture}", "--window-size=1200,2000", *dark)
    pixels = np.asarray(Image.open(picture).convert("L"), dtype=np.float64)
    corner = pixels[5, 5]
    assert corner > 240 if mode == "light" else corner < 40
    # Text and lines stand out from the page: some pixels are far from its brightness.
    assert (np.abs(pixels - corner) > 120).mean() > 0.005


def test_nothing_is_wider_than_a_phone(report: Path, chromium: Any, tmp_path: Path) -> None:
    frame = tmp_path / "phone.html"
    content = report.read_text().replace("&", "&amp;").replace('"', "&quot;")
    frame.write_text(
        f'<iframe id="p" style="width:360px;height:800px;border:0" srcdoc="{content}"></iframe>'
        "<script>onload = () => { const d = document.getElementById('p').contentDocument;"
        " document.title = 'width ' + d.documentElement.scrollWidth; }</script>"
    )
    dom = chromium(frame, "--dump-dom", "--virtual-time-budget=5000")
    found = re.search(r"<title>width (\d+)</title>", dom)
    assert found is not None
    assert int(found[1]) <= 360
