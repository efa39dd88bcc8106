"""The page as a whole: it holds everything, loads nothing, and obeys no text."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from fusiongate.report.evidence import gather
from fusiongate.report.page import MARK, page

from .recorded_runs import environment_record, row, write_run
from .reported import Page, cell, digest, timing, told, write_ledger

HOSTILE = "<script>alert('\"')</script>\x1b[31m&amp;\x00\u202e\"><img src=x onerror=y>"
SHOWN = "<script>alert('\"')</script>\\x1b[31m&amp;\\x00\\u202e\"><img src=x onerror=y>"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_the_parts_are_linked_and_there(path: Path) -> None:
    page = told([write_ledger(path, cell())])

    links = [one["href"] for tag, one in page.tags if tag == "a"]
    parts = [f"#{one['id']}" for tag, one in page.tags if tag == "section" and "id" in one]
    expected = [
        "#attention",
        "#changes",
        "#cells",
        "#live",
        "#timings",
        "#presets",
        "#absences",
        "#runs",
        "#environments",
    ]
    assert expected == links == parts


def test_it_loads_nothing_and_runs_nothing_but_its_own_script(tmp_path: Path, path: Path) -> None:
    text = page(gather([write_ledger(path, cell(), digest(), timing())], [write_run(tmp_path / "run.json")]))
    read = Page(text)

    assert text.startswith(MARK)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in read.tags}
    assert not [name for _, one in read.tags for name in one if name == "src" or name.startswith("on")]
    assert not re.findall(r"https?:|url\(|@import", text)
    policies = [one["content"] for _, one in read.tags if one.get("http-equiv") == "Content-Security-Policy"]
    (script,) = read.texts["script"]
    digest_of_script = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert [f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest_of_script}'"] == policies


def test_hostile_text_is_shown_wherever_it_stands(tmp_path: Path) -> None:
    """Every string that a ledger or a recorded run brings is the same piece of markup and control characters."""
    path = tmp_path / "<b>&\x1b.jsonl"
    fields = {"device_name": HOSTILE, "libraries": {HOSTILE: HOSTILE}, "switches": {HOSTILE: HOSTILE}}
    every = {name: HOSTILE for name, value in environment_record().items() if isinstance(value, str)} | fields
    write_ledger(
        path,
        cell(HOSTILE, HOSTILE, layout=HOSTILE, reason=HOSTILE, test=HOSTILE, not_compared=HOSTILE),
        cell("red", HOSTILE, outcome="red", message=HOSTILE),
        cell("absent", HOSTILE, outcome="not run", reason=HOSTILE),
        digest(HOSTILE, HOSTILE, outcome="nondeterministic", story=HOSTILE, size=HOSTILE, calls={HOSTILE: 1}),
        timing(HOSTILE, arm=HOSTILE, reference=HOSTILE, sources=HOSTILE),
        run=HOSTILE,
        **every,
    )
    recorded = row(f"{HOSTILE}[{HOSTILE}]")
    recorded["params"]["arm"] = HOSTILE
    text = page(gather([path], [write_run(tmp_path / "<i>\x07.json", recorded, **every)]))
    read = Page(text)

    plain = Page(page(gather([write_ledger(tmp_path / "plain.jsonl", cell())], [])))
    shapes = {"h3", "ul", "li", "pre", "b", "svg", "rect", "line"}
    assert {tag for tag, _ in read.tags} <= {tag for tag, _ in plain.tags} | shapes
    assert not re.findall("[\x00-\x09\x0b-\x1f\x7f\u202e]", text)
    assert SHOWN == read.texts["pre"][0]
    assert SHOWN == read.tables["What may move bits"][2][1]
    assert {rf"{tmp_path}/<b>&\x1b.jsonl", rf"{tmp_path}/<i>\x07.json"} <= set(read.texts["li"])
    assert f"{SHOWN}[{SHOWN}]" in read.texts["li"]
    assert f"Timings of {SHOWN.partition('[')[0]}" in read.tables


def test_what_differs_between_environments_stands_first(path: Path) -> None:
    write_ledger(path, cell(), run="1", libraries={"triton": "3.6"})
    write_ledger(path, cell(), run="2", libraries={}, driver="590.1")

    page = told([path])

    assert [
        ["setting", "environment 1", "environment 2"],
        ["driver", "580.1", "590.1"],
        ["library triton", "3.6", "none"],
    ] == page.tables["What differs between the environments"]
    assert ["platform", "cuda-sm_90", "cuda-sm_90"] == page.tables["What may move bits"][1]


def test_each_run_is_a_row_of_the_history(path: Path) -> None:
    write_ledger(path, cell(outcome="red", message="m"), digest(outcome="recorded"), run="1")
    write_ledger(path, cell(), cell("b"), digest(), timing(), run="2", threads=4)

    page = told([path])

    assert [
        ["1", "0", "0", "0", "0", "0", "1", "0", "0", "1 recorded", "1"],
        ["2", "2", "0", "0", "0", "0", "0", "0", "1", "1 same", "2"],
    ] == page.tables["Runs in the order of their start, with their cells by outcome"][1:]
    assert "Above, what several runs saw in one environment counts as the last of them saw it." in page.texts["p"]


def test_a_ledger_that_is_cut_short_needs_attention(path: Path) -> None:
    write_ledger(path, cell(), cell("b"))
    path.write_bytes(path.read_bytes()[:-1])

    page = told([path])

    assert "The ledger is cut short" == page.texts["h3"][0]
    assert f"{path}, line 3: half a row" in page.texts["pre"][0]


def test_the_same_files_make_the_same_page(path: Path) -> None:
    write_ledger(path, cell(), digest(), timing())
    assert page(gather([path], [])) == page(gather([path], []))
