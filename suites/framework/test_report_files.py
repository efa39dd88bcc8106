"""The command ``report``: which ledger it takes, where it writes, and what it refuses without touching anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusiongate.cli import main
from fusiongate.report.evidence import gather
from fusiongate.report.page import MARK, page

from .recorded_runs import write_run
from .reported import cell, write_ledger


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run the command in."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def listing(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder with its content, folders with None."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_the_newest_ledger_is_told_by_default(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, name in enumerate(("b", "c", "a")):
        path = write_ledger(project / ".fusiongate" / f"ledger-{name}.jsonl", cell(), run=name)
        os.utime(path, (1e9 + age, 1e9 + age))

    assert 0 == main(["report"])

    newest = Path(".fusiongate/ledger-a.jsonl")
    assert f"fusiongate-report.html: made from {newest}\n" == capsys.readouterr().out
    assert page(gather([newest], [])) == Path("fusiongate-report.html").read_text(encoding="utf-8")


def test_ledgers_and_timings_are_told_together_where_the_user_says(project: Path) -> None:
    ledgers = [write_ledger(project / f"{name}.jsonl", cell(), run=name) for name in "ab"]
    runs = [write_run(project / f"{name}.json") for name in "cd"]
    options = [f"--timings={run}" for run in runs]

    assert 0 == main(["report", *map(str, ledgers), *options, "--output", "made/on/demand.html"])
    assert page(gather(ledgers, runs)) == Path("made/on/demand.html").read_text(encoding="utf-8")


def test_an_older_report_is_replaced(project: Path) -> None:
    path = write_ledger(project / "l.jsonl", cell())
    (project / "r.html").write_text(f"{MARK}old")

    assert 0 == main(["report", str(path), "--output", "r.html"])
    assert page(gather([path], [])) == (project / "r.html").read_text(encoding="utf-8")


def test_a_ledger_that_is_cut_short_is_told_and_warned_of(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_ledger(project / "l.jsonl", cell(), cell("b"))
    path.write_bytes(path.read_bytes()[:-30])

    assert 0 == main(["report", "l.jsonl"])
    error = capsys.readouterr().err
    assert error.startswith("fusiongate: l.jsonl, line 3: half a row of ")
    assert error.endswith("; the report says so\n")
    assert 1 == error.count("\n")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", ".fusiongate: holds no ledger: run the tests first, or name a ledger: fusiongate report LEDGER"),
        ("absent.jsonl", "absent.jsonl: the ledger could not be read: No such file or directory"),
        ("folder", "folder: the ledger could not be read: Is a directory"),
        ("pipe", "pipe: the ledger could not be read: Not a regular file"),
        ("foreign.json", "foreign.json, line 1: Object missing required field `schema`; expected the fields"),
        ("cut.jsonl", "cut.jsonl, line 2: not JSON: "),
        ("empty.jsonl", "empty.jsonl: holds no observation: expected a ledger"),
        ("good.jsonl --timings foreign.json", "foreign.json: holds no timings of fusiongate's"),
        ("good.jsonl --timings good.jsonl", "good.jsonl: no JSON, or cut short"),
        (
            "good.jsonl --output foreign.json",
            "foreign.json: exists and is no report of fusiongate's: nothing is written",
        ),
        ("good.jsonl --output good.jsonl", "good.jsonl: exists and is no report of fusiongate's: nothing is written"),
        ("good.jsonl --output folder", "folder: the report cannot be written: Is a directory; name another --output"),
        ("good.jsonl --output pipe", "pipe: the report cannot be written: Not a regular file"),
        ("good.jsonl --output good.jsonl/r.html", "good.jsonl/r.html: the report cannot be written: good.jsonl is no"),
        ("good.jsonl --output /proc/r.html", "/proc/r.html: the report cannot be written: "),
        ("a\x1b[31m.jsonl", r"a\x1b[31m.jsonl: the ledger could not be read"),
    ],
)
def test_input_that_cannot_be_used_is_one_line_and_touches_nothing(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    write_ledger(project / "good.jsonl", cell())
    lines = (project / "good.jsonl").read_text(encoding="utf-8").splitlines()
    (project / "cut.jsonl").write_text(f"{lines[0]}\n{lines[1][:40]}\n{lines[1]}\n", encoding="utf-8")
    (project / "foreign.json").write_text('{"a": 1}\n')
    (project / "empty.jsonl").write_text("")
    (project / "folder").mkdir()
    os.mkfifo(project / "pipe")
    before = listing(project)

    assert 2 == main(["report", *arguments.split()])

    captured = capsys.readouterr()
    assert "" == captured.out
    assert f"fusiongate: {message}" == captured.err[: len(message) + len("fusiongate: ")]
    assert 1 == len(captured.err.splitlines())
    assert before == listing(project)


def test_a_page_that_cannot_be_replaced_leaves_the_old_one(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ledger(project / "l.jsonl", cell())
    (project / "r.html").write_text(f"{MARK}old")
    before = listing(project)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    assert 2 == main(["report", "l.jsonl", "--output", "r.html"])
    assert "fusiongate: r.html: the report cannot be written: No space left on device; name another --output\n" == (
        capsys.readouterr().err
    )
    assert before == listing(project)
