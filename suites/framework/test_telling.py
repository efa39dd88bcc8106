"""What somebody else named does not move a cursor and stays on its line."""

from __future__ import annotations

import pytest

from fusiongate._telling import one_line


@pytest.mark.parametrize(
    "text, told",
    [
        ("σ × [2, 33] ☃", "σ × [2, 33] ☃"),
        ("two\nlines\r\n", r"two\nlines\r\n"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("\u202eright to left", r"\u202eright to left"),
        ("undecodable \udcff", r"undecodable \udcff"),
        (r"C:\new", r"C:\new"),
    ],
)
def test_only_what_does_not_print_is_escaped(text: str, told: str) -> None:
    assert told == one_line(text)
