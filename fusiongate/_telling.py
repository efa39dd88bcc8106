"""Words for what is told in many places: numbers of things, and what somebody else named."""

from __future__ import annotations

__all__ = ["counted", "one_line"]


def counted(count: int, noun: str) -> str:
    """A number of things, such as ``1 row``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def one_line(text: str) -> str:
    """The text with an escape for everything that does not print: a file's name may move a cursor, or end a line."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
