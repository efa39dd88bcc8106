"""HTML in which everything is escaped that is not markup already: text comes from tests, messages and file names."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence

__all__ = ["Html", "element", "joined", "plain", "table"]

_VOID = frozenset({"br", "meta", "wbr"})
_LINES = frozenset(
    {"h3", "header", "li", "main", "nav", "p", "pre", "section", "style", "table", "tbody", "thead", "tr"}
)


class Html(str):
    """Finished markup. Any other string is text, and is escaped where it enters the page."""

    __slots__ = ()


def plain(text: str) -> Html:
    """Text as markup, on as many lines as it has; what does not print, a terminal's escapes too, is spelled out."""
    visible = "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode()
        for sign in text.replace("\r\n", "\n").replace("\t", "    ")
    )
    return Html(html.escape(visible))


def joined(parts: Iterable[str], between: str = "") -> Html:
    """Several parts as one, each escaped unless it is markup."""
    return Html(_markup(between).join(map(_markup, parts)))


def element(tag: str, *content: str, **attributes: str | float) -> Html:
    """An element; ``class_`` gives the attribute ``class``, and ``stroke_width`` gives ``stroke-width``."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{plain(str(value))}"' for name, value in attributes.items()
    )
    # One row a line: two reports can be compared, and searched, as text.
    line = "\n" if tag in _LINES else ""
    return Html(f"<{tag}{named}>" if tag in _VOID else f"{line}<{tag}{named}>{joined(content)}</{tag}>")


def table(
    caption: str,
    headings: Sequence[str],
    groups: Iterable[Sequence[Sequence[str]]],
    numbers: int = 0,
    titles: Sequence[str] = (),
) -> Html:
    """A table whose rows are headed by their first cell.

    Parameters
    ----------
    caption
        What it shows.
    headings
        One a column.
    groups
        Rows that belong together, set off from the next ones.
    numbers
        How many columns behind the first hold numbers, which stand to the right.
    titles
        What stands over each group, where anything does.
    """
    head = (element("th", text, scope="col", **_aligned(column, numbers)) for column, text in enumerate(headings))
    above = [[element("tr", element("th", title, colspan=len(headings), scope="rowgroup"))] for title in titles]
    bodies = (
        element("tbody", *title, *(_row(cells, numbers) for cells in rows))
        for title, rows in itertools.zip_longest(above, groups, fillvalue=())
    )
    whole = element("table", element("caption", caption), element("thead", element("tr", *head)), *bodies)
    return element("div", whole, class_="wide")


def _row(cells: Sequence[str], numbers: int) -> Html:
    first, *others = cells
    row = (element("td", cell, **_aligned(column, numbers)) for column, cell in enumerate(others, start=1))
    return element("tr", element("th", first, scope="row"), *row)


def _aligned(column: int, numbers: int) -> dict[str, str]:
    return {"class": "number"} if 1 <= column <= numbers else {}


def _markup(text: str) -> Html:
    return text if isinstance(text, Html) else plain(text)
