"""The report: one static page over runs and machines, which loads nothing and needs no other file."""

from __future__ import annotations

import base64
import hashlib
from typing import Final

from .evidence import Evidence
from .text import template_text, templates
from .view import contents

__all__ = ["MARK", "page"]

MARK: Final = (
    '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="generator" content="fusiongate report">\n'
)
"""How every report begins; a file that does not is somebody else's."""


def page(evidence: Evidence) -> str:
    """The page's text.

    It folds, filters and obeys the keyboard by a script of its own; the page's policy names that one by its hash, so
    that no text of a ledger could run, or load anything, even if it were to slip through as markup.
    """
    script = template_text("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        templates(html=True)
        .get_template("page.html.j2")
        .render(**contents(evidence), style=template_text("page.css"), script=script, script_hash=f"sha256-{digest}")
    )
