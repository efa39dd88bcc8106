"""Text cannot become markup, and what does not print is spelled out."""

from __future__ import annotations

import pytest

from fusiongate.report.markup import Html, element, joined, plain, table

from .reported import Page


@pytest.mark.parametrize(
    "text, shown",
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("\"double\" & 'single'", "&quot;double&quot; &amp; &#x27;single&#x27;"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("nul \x00 bell \x07", r"nul \x00 bell \x07"),
        ("right to left \u202e", r"right to left \u202e"),
        ("half a pair \ud800", r"half a pair \ud800"),
        ("two\r\nlines\n", "two\nlines\n"),
        ("over\rwritten", r"over\rwritten"),
        ("a\tb", "a    b"),
        ("2×517×4096 µs 图", "2×517×4096 µs 图"),
    ],
)
def test_text_is_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert shown == plain(text)


def test_an_element_escapes_its_text_and_attributes_and_keeps_its_markup() -> None:
    made = element("a", "<b>", element("code", "x"), href='"><script>', class_="y", stroke_width=1.5)

    assert '<a href="&quot;&gt;&lt;script&gt;" class="y" stroke-width="1.5">&lt;b&gt;<code>x</code></a>' == made
    assert isinstance(made, Html)


def test_joining_escapes_what_stands_between_too() -> None:
    assert "a&lt;<wbr>" == joined(["a", element("wbr")], "<")


def test_a_table_heads_its_columns_rows_and_groups() -> None:
    made = table(
        "C", ("name", "n", "why"), [[("a", "1", "x")], [("b", "2", "y")]], numbers=1, titles=["first", "second"]
    )
    read = Page(made)

    assert {"C": [["name", "n", "why"], ["first"], ["a", "1", "x"], ["second"], ["b", "2", "y"]]} == read.tables
    heads = [attributes.get("scope") for tag, attributes in read.tags if tag == "th"]
    assert ["col", "col", "col", "rowgroup", "row", "rowgroup", "row"] == heads
    right = [tag for tag, attributes in read.tags if attributes.get("class") == "number"]
    assert ["th", "td", "td"] == right
