"""Long work tells where it is: a bar on a terminal, and elsewhere a line at least every ten seconds."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from fusiongate import progress
from fusiongate.progress import Progress, track

STEPS = """
import sys, time
from fusiongate import progress

progress._INTERVAL_S = 0.05
for number in progress.track(range(3), "counting", ["one", "two [2]", "three"]):
    time.sleep(0.8 if number else 0)
    print("counted", number, flush=True)
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.05)


def test_a_line_comes_before_ten_seconds_are_over() -> None:
    assert progress._INTERVAL_S < 10


def test_what_is_done_at_once_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert [1, 2] == list(track([1, 2], "counting", ["one", "two"]))
    assert ("", "") == capsys.readouterr()


def slow() -> Iterator[int]:
    yield 1
    time.sleep(0.3)
    yield 2


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "steps, told", [(["one", "two"], "counting: two (1 of 2 done, 0 s)"), (2, "counting (1 of 2 done, 0 s)")]
)
def test_a_log_gets_lines_that_name_the_step(
    capsys: pytest.CaptureFixture[str], steps: list[str] | int, told: str
) -> None:
    for _ in track(slow(), "counting", steps):
        pass
    out, err = capsys.readouterr()
    assert "" == out
    assert {told} == set(err.splitlines())


@pytest.mark.usefixtures("impatient")
def test_nothing_is_said_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> None:
        with Progress("counting", 2):
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    capsys.readouterr()
    time.sleep(0.2)
    assert ("", "") == capsys.readouterr()


def test_a_terminal_gets_a_bar_and_the_pipe_its_results() -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert [f"counted {number}" for number in range(3)] == done.stdout.decode().splitlines()
    assert re.search(r"counting: two \[2\] .*━.*1/3", shown)
    assert "done," not in shown
