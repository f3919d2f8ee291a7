"""One table on a terminal, in Markdown and in HTML: the same cells, and none of them is markup."""

from __future__ import annotations

import pytest

from beamq.report.console import Screen
from beamq.report.tables import Table, html, labels, markdown

TABLE = Table(
    title="Sizes",
    head=("name", "bytes"),
    align="lr",
    rows=[("<b>a|b</b> [bold]`x`", "1"), ("a\\\\[b](c)", "1,000")],
    note="Bytes are bytes.",
)


def test_a_terminal_aligns_figures(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().show(dict, lambda: [TABLE])
    assert capsys.readouterr().out.splitlines() == [
        "Sizes",
        "name                  bytes",
        "---------------------------",
        "<b>a|b</b> [bold]`x`      1",
        r"a\\[b](c)             1,000",
        "Bytes are bytes.",
    ]


def test_markdown_holds_no_markup_of_a_cell() -> None:
    assert markdown(TABLE).splitlines() == [
        "| name | bytes |",
        "| --- | ---: |",
        r"| &lt;b>a\|b&lt;/b> \[bold]'x' | 1 |",
        r"| a\\\\\[b](c) | 1,000 |",
        "",
        "Bytes are bytes.",
    ]


def test_html_holds_no_markup_of_a_cell() -> None:
    text = html(TABLE)
    assert '<td>&lt;b&gt;a|b&lt;/b&gt; [bold]`x`</td><td class="n">1</td>' in text
    assert '<th scope="col" class="n">bytes</th>' in text
    assert 'aria-label="Sizes"' in text
    assert '<p class="soft">Bytes are bytes.</p>' in text


def test_no_rows_draw_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().show(dict, lambda: [Table(title="Sizes", head=("name",))])
    assert capsys.readouterr().out == ""
    assert html(Table(head=("name",))) == ""


def test_columns_without_a_letter_are_as_the_last_one() -> None:
    assert list(Table(head=("a", "b", "c"), align="lr").columns()) == [
        ("a", False),
        ("b", True),
        ("c", True),
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["short", "as long as it may be"], ["short", "as long as it may be"]),
        (["first of two long names", "other of two long names"],
         ["first of two long...", "other of two long..."]),
        (["a long folder name of run 1", "a long folder name of run 2"],
         ["...der name of run 1", "...der name of run 2"]),
        (["a folder of many runs, run 1 of nvfp4", "a folder of many runs, run 2 of nvfp4",
          "b folder of many runs, run 1 of nvfp4", "b folder of many runs, run 1 of fp8"],
         ["0: a folder of ma...", "1: a folder of ma...", "2: b folder of ma...",
          "3: b folder of ma..."]),
    ],
)  # fmt: skip
def test_long_names_stay_different(names: list[str], expected: list[str]) -> None:
    assert labels(names, 20) == expected


def test_a_table_takes_labels_for_names() -> None:
    table = Table(head=("", "a name"), rows=[("another long name", "a cell that is too long")])
    clipped = table.clipped({"a name": "A", "another long name": "B"}, 10)
    assert clipped.head == ("", "A")
    assert clipped.rows == [("B", "a cell ...")]
