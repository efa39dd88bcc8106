"""Text for a terminal that may hold what somebody else named."""

from __future__ import annotations

__all__ = ["one_line"]


def one_line(text: str) -> str:
    """The text with an escape for everything that does not print: a file's name may move a cursor, or end a line."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
