"""Ledgers made up for the tests of the report, and a report read back as a browser would."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fusiongate import ledger
from fusiongate.report.evidence import gather
from fusiongate.report.page import page

from .recorded_runs import environment_record

__all__ = ["Page", "cell", "digest", "timing", "told", "write_ledger"]

Observation = tuple[str, str, Mapping[str, Any]]
"""Kind, subject and payload of a row."""

_VOID = {"input", "meta"}


def cell(name: str = "bf16", subject: str = "modulate", **fields: Any) -> Observation:
    """A cell that was fused, with some fields changed."""
    payload = {
        "id": name,
        "layout": "row-broadcast",
        "outcome": "fused",
        "reason": "verified",
        "test": f"test_matrix.py::test_it[{name}]",
        "expected": "fused",
        "launches": 6,
        "must_fuse": False,
        **fields,
    }
    return "cell", subject, payload


def digest(preset: str = "ltx2", md5: str = "aa", reference: str | None = None, **fields: Any) -> Observation:
    """A preset of two steps with the given md5 at the end, with some fields changed."""
    payload = {
        "outcome": "same",
        "story": None,
        "size": "tiny",
        "seed": 0,
        "fused": {"step 0": {"x": "00 bfloat16 2×8"}, "output": {"x": f"{md5} bfloat16 2×8"}},
        "reference": {"step 0": {"x": "00 bfloat16 2×8"}, "output": {"x": f"{reference or md5} bfloat16 2×8"}},
        "calls": {"fused (verified)": 4, "reference (first-sight)": 2},
        "test": f"test_snapshots.py::test_it[{preset}]",
        **fields,
    }
    return "digest", preset, payload


def timing(subject: str = "modulate", arm: str = "kernel", **info: Any) -> Observation:
    """A timing of 60 µs at a fifth of eager's time, with some of its figures changed."""
    payload = {
        "subject": subject,
        "shape": "2x8",
        "dtype": "bfloat16",
        "arm": arm,
        "seconds": [60e-6, 61e-6],
        "calls": 17,
        "info": {
            "fusiongate": 1,
            "reference": "eager",
            "median_s": {"value": 60e-6, "low": 59e-6, "high": 61e-6},
            "ratio": {"value": 0.2, "low": 0.19, "high": 0.21},
            **info,
        },
        "clock_limits": {},
    }
    return "timing", subject, payload


def write_ledger(path: Path, *observations: Observation, run: str = "20260101T000000Z-abc", **environment: Any) -> Path:
    """Append a run of the given observations, made in the environment with the given fields changed."""
    described = environment_record(**environment)
    key = ledger.environment_key(described)
    with ledger.Writer(path, run) as writer:
        writer.append("run", "environment", key, described)
        for kind, subject, payload in observations:
            writer.append(kind, subject, key, payload)
    return path


class Page(HTMLParser):
    """A page as a tree of open elements, of which the tables, the text and everything that is named are kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        """Every element with its attributes."""
        self.tables: dict[str, list[list[str]]] = {}
        """The rows of each table by its caption, headings first."""
        self.texts: dict[str, list[str]] = {}
        """The text of every element by its tag, in the order of their ends."""
        self._open: list[tuple[str, list[str]]] = []
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {[tag for tag, _ in self._open]}"

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        """Open an element."""
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append((tag, []))
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])

    def handle_endtag(self, tag: str) -> None:
        """Close an element, which has to be the one that was opened last."""
        opened, parts = self._open.pop()
        assert opened == tag
        text = "".join(parts)
        self.texts.setdefault(tag, []).append(text)
        if tag in ("th", "td"):
            self._rows[-1].append(text)
        elif tag == "table":
            self.tables[self.texts["caption"][-1]] = self._rows

    def handle_data(self, data: str) -> None:
        """Keep text with every element that is open."""
        for _, parts in self._open:
            parts.append(data)


def told(ledgers: Sequence[Path], timings: Sequence[Path] = ()) -> Page:
    """The page about some files, read back."""
    return Page(page(gather(ledgers, timings)))


def rewritten(path: Path, line: int, **fields: Any) -> Path:
    """The ledger with some fields of a line changed; lines count from nought."""
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | fields)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
