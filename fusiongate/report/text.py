"""Text on its way into a page: templates, what does not print spelled out, and the one way to mark a word."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fusiongate import io
from fusiongate.errors import FusiongateError
from fusiongate.io import write_text

__all__ = ["marked", "template_text", "templates", "visible", "write_page"]


def visible(value: Any) -> Any:
    """Text in which all that does not print is spelled out, a terminal's escapes too; markup stays as it is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return io.visible(value.replace("\r\n", "\n").replace("\t", "    "))


def marked(kind: str, text: str) -> str:
    """A word that stands out on the page, in the class ``kind``; on no page it would be text like any other."""
    return Markup('<b class="{}">{}</b>').format(kind, visible(text))


@functools.cache
def templates(*, html: bool) -> Environment:
    """The templates of this package: escaped for a page of HTML, or plain for Markdown."""
    return Environment(
        loader=PackageLoader("fusiongate.report"),
        autoescape=html,
        finalize=visible if html else None,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )


def template_text(name: str) -> Markup:
    """A template's own text, which the page holds as it is."""
    environment = templates(html=True)
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def write_page(page: Callable[[], str], module: str, usual: str) -> int | str:
    """Write a generated page to the file that the command line names; what `sys.exit` takes.

    Parameters
    ----------
    page
        Makes its text.
    module
        The module that is run, for the error.
    usual
        Where the repository keeps the page.
    """
    arguments = sys.argv[1:]
    if len(arguments) != 1:
        return f"{module}: expected one argument, the file to write: {usual}"
    try:
        write_text(Path(arguments[0]), page())
    except (FusiongateError, OSError) as error:
        return f"{module}: {error}"
    return 0
