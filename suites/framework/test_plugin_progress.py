"""With ``--fusiongate-progress`` the log of a run is never silent for long; without it, it is pytest's own."""

from __future__ import annotations

import re

import pytest

from fusiongate import progress

from .projects import Project

SLOW = """
import time

def test_slow():
    time.sleep(1.5)

def test_quick():
    pass
"""


@pytest.fixture
def slow(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.1)
    project.write("test_slow.py", SLOW)
    return project


def told(result: pytest.RunResult) -> set[str]:
    result.assert_outcomes(passed=2)
    found = re.findall(r"^fusiongate: \d+ s: (.*)$", result.stdout.str(), re.MULTILINE)
    return {re.sub(r"\d+ s", "… s", line) for line in found}


@pytest.mark.parametrize("manner", [(), ("-n", "2"), ("-p", "no:xdist")], ids=["serial", "workers", "no-xdist"])
def test_a_log_tells_what_is_running(slow: Project, manner: tuple[str, ...]) -> None:
    lines = told(slow.run("--fusiongate-progress", *manner))
    done = "1 of 2 tests" if "-n" in manner else "0 of 2 tests"
    assert f"{done} done; running, the longest for … s: test_slow.py::test_slow" in lines


def test_workers_that_collect_are_told_of(slow: Project) -> None:
    assert "collecting" in told(slow.run("--fusiongate-progress", "-n", "1"))


def test_what_a_test_captures_stays_its_own(slow: Project) -> None:
    """In a process of its own, whose descriptors pytest takes for each test."""
    slow.write("conftest.py", "from fusiongate import progress\nprogress._INTERVAL_S = 0.1\n")
    slow.write("test_slow.py", SLOW + "    assert False\n")
    result = slow.run("--fusiongate-progress", own_process=True)
    _, _, failure = result.stdout.str().partition("= FAILURES =")
    assert "fusiongate: " in result.stdout.str()
    assert "test_quick" in failure
    assert "fusiongate: " not in failure


def test_nothing_is_told_unasked(slow: Project) -> None:
    assert set() == told(slow.run())
