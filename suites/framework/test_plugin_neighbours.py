"""Plugins that stand beside ours in other projects."""

from __future__ import annotations

import pytest

from fusiongate.ledger import Row

from .observing import cell, prepare
from .projects import Project

FLAKY = f"""
TRIES = []

def test_flaky(observe):
    TRIES.append(1)
    if len(TRIES) == 1:
        observe(**{cell(id="shy", outcome="red", reason="bits differ", message="bits differ", launches=None)})
        pytest.fail("bits differ")
    observe(**{cell(id="shy")})

def test_red(observe):
    observe(**{cell(id="junk", outcome="red", reason="overrun", message="overrun", launches=None)})
    pytest.fail("overrun")

def test_of_another_kind():
    TRIES.append(1)
    assert len(TRIES) > 3

def test_green(observe):
    observe(**{cell()})
"""


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["serial", "workers"])
def test_a_red_cell_that_is_green_when_tried_again_is_flaky_and_red(
    project: Project, arguments: tuple[str, ...]
) -> None:
    """And what is tried three times is counted once."""
    prepare(project, FLAKY)
    result = project.run("--reruns=2", *arguments)

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines = Project.summary(result)
    assert [
        "subject   fused  reference  refused  raises  not run  red",
        "modulate      1          0        0       0        0    2",
    ] == lines[:2]
    assert "red: 1 test flaky, red at first and green when tried again: test_cells.py::test_flaky" in lines
    assert "  flaky: bits differ: test_flaky" in lines
    last: dict[str, Row] = {row.payload["id"]: row for row in project.rows("cell")}
    assert {"shy": "red", "junk": "red", "base": "fused"} == {
        name: row.payload["outcome"] for name, row in last.items()
    }
    assert last["shy"].payload["reason"] == "flaky: green when it was tried again, and red at first: bits differ"


def test_a_run_without_red_cells_may_try_again_what_it_likes(project: Project) -> None:
    prepare(project, FLAKY)
    result = project.run("--reruns=4", "-k", "another or green")
    assert result.ret == pytest.ExitCode.OK
    assert not [line for line in Project.summary(result) if "flaky" in line]


TWO_RED = f"""
def test_a(observe):
    observe(**{cell(id="a", outcome="red", reason="overrun", message="overrun", launches=None)})
    pytest.fail("overrun")

def test_b(observe):
    observe(**{cell(id="b")})

def test_c(observe):
    observe(**{cell(id="c", outcome="red", reason="overrun", message="overrun", launches=None)})
    pytest.fail("overrun")
"""


def test_a_run_that_stops_at_the_first_failure_sums_up_what_it_saw(project: Project) -> None:
    prepare(project, TWO_RED)
    result = project.run("-x")
    assert Project.summary(result)[1].split() == ["modulate", *"000001"]
    assert "  overrun: test_a" in Project.summary(result)


def test_what_failed_last_runs_again_alone(project: Project) -> None:
    """Failures that were not told whole among them."""
    prepare(project, TWO_RED)
    project.run()
    assert {"a", "b", "c"} == {row.payload["id"] for row in project.rows("cell")}
    project.run("--lf")
    assert {"a", "c"} == {row.payload["id"] for row in project.rows("cell")}


def test_collecting_alone_judges_nothing_and_writes_nothing(project: Project) -> None:
    prepare(project, TWO_RED)
    result = project.run("--collect-only", "-q")
    assert result.ret == pytest.ExitCode.OK
    assert [] == Project.summary(result)
    assert not (project.path / ".fusiongate").exists()
