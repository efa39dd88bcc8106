"""Text cannot become markup, and what does not print is spelled out."""

from __future__ import annotations

import pytest

from fusiongate.report.text import marked, templates, visible


@pytest.mark.parametrize(
    "text, shown",
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("\"double\" & 'single'", "&#34;double&#34; &amp; &#39;single&#39;"),
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
    assert shown == templates(html=True).from_string("{{ text }}").render(text=text)


def test_a_marked_word_escapes_its_text_and_stays_markup() -> None:
    assert '<b class="red">&lt;i&gt;\\x1b</b>' == marked("red", "<i>\x1b")
    assert marked("red", "1") == visible(marked("red", "1"))


def test_a_name_that_a_template_does_not_have_is_an_error() -> None:
    with pytest.raises(Exception, match="'missing' is undefined"):
        templates(html=True).from_string("{{ missing }}").render()
