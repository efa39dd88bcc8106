"""What tests observe reaches the ledger, from every process and whatever becomes of it; a run is judged as a whole."""

from __future__ import annotations

import signal

import pytest

from fusiongate import ledger

from .observing import cell, prepare
from .projects import Project

MANNERS = [
    pytest.param((), id="serial"),
    pytest.param(("-n", "2", "--dist", "worksteal"), id="worksteal"),
    pytest.param(("-p", "no:xdist"), id="no-xdist"),
    pytest.param(("-p", "no:benchmark"), id="no-benchmark"),
    pytest.param(("-p", "no:cacheprovider"), id="no-cache"),
    pytest.param(("-p", "no:terminal"), id="no-terminal"),
]


@pytest.mark.parametrize("arguments", MANNERS)
def test_rows_reach_the_ledger_in_every_manner_of_running(project: Project, arguments: tuple[str, ...]) -> None:
    prepare(project, **{f"n{n}": f"observe(**{cell(id=f'c{n}')})" for n in range(6)})
    result = project.run(*arguments)
    assert result.ret == pytest.ExitCode.OK

    rows = project.rows("cell")
    assert sorted(row.payload["id"] for row in rows) == [f"c{n}" for n in range(6)]
    assert len({row.run for row in rows}) == 1
    assert len(project.rows("run")) == 1
    assert {row.environment for row in rows} == set(project.ledger.environments)


def test_a_row_is_recorded_in_whatever_phase_it_was_observed(project: Project) -> None:
    prepare(
        project,
        f"""
@pytest.fixture
def around(observe):
    observe(**{cell(id="setup")})
    yield
    observe(**{cell(id="teardown")})

def test_phases(around, observe):
    observe(**{cell(id="call")})
""",
    )
    project.run().assert_outcomes(passed=1)
    assert [row.payload["id"] for row in project.rows("cell")] == ["setup", "call", "teardown"]


def test_two_runs_may_share_a_ledger_in_the_folder_of_ledgers(project: Project) -> None:
    """As the lanes of one job do."""
    prepare(project, beside=f"observe(**{cell(id='a')})", alone=f"observe(**{cell(id='b')})")
    for name in ("beside", "alone"):
        project.run("-k", name, "--fusiongate-ledger=.fusiongate/ledger-both.jsonl").assert_outcomes(
            passed=1, deselected=1
        )
    assert ["a", "b"] == [row.payload["id"] for row in project.rows("cell")]
    assert 2 == len({row.run for row in project.ledger.rows})
    assert (project.path / ".fusiongate" / ".gitignore").is_file()


def test_a_run_without_rows_leaves_nothing_behind(project: Project) -> None:
    prepare(project, plain="pass")
    result = project.run()
    assert Project.summary(result) == []
    assert not (project.path / ".fusiongate").exists()


def test_the_folder_of_ledgers_is_ignored_by_git_and_points_to_the_latest(project: Project) -> None:
    prepare(project, one=f"observe(**{cell()})")
    project.run()
    project.run()
    folder = project.path / ".fusiongate"
    ledgers = sorted(folder.glob("ledger-*.jsonl"))
    assert len(ledgers) == 2
    assert (folder / ".gitignore").read_text().splitlines()[-1] == "*"
    assert (folder / "latest.jsonl").readlink().name in {path.name for path in ledgers}


def test_runs_may_share_a_ledger(project: Project) -> None:
    prepare(project, one=f"observe(**{cell()})")
    for _ in range(2):
        project.run("--fusiongate-ledger=kept/ledger.jsonl")
    rows = [row for row in ledger.read(project.path / "kept" / "ledger.jsonl").rows if row.kind == "cell"]
    assert len({row.run for row in rows}) == 2
    assert not (project.path / ".fusiongate").exists()


def test_a_ledger_that_cannot_be_written_ends_the_run_with_one_line(project: Project) -> None:
    prepare(project, one=f"open('file', 'x').close(); observe(**{cell()})")
    result = project.run("--fusiongate-ledger=file/ledger.jsonl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(
        ["*Exit: fusiongate: */file/ledger.jsonl: the ledger could not be written: *--fusiongate-ledger=PATH*"]
    )


def test_a_killed_run_keeps_the_rows_of_its_finished_tests(project: Project) -> None:
    prepare(
        project,
        a=f"observe(**{cell(id='kept')})",
        b=f"observe(**{cell(id='lost')}); os.kill(os.getpid(), signal.SIGKILL)",
    )
    result = project.run(own_process=True)
    assert result.ret == -signal.SIGKILL
    assert [row.payload["id"] for row in project.rows("cell")] == ["kept"]


def test_a_killed_worker_loses_the_test_it_ran_and_no_other(project: Project) -> None:
    tests = {f"n{n}": f"observe(**{cell(id=f'c{n}')})" for n in range(8)}
    prepare(project, **tests, n8="os.kill(os.getpid(), signal.SIGKILL)")
    result = project.run("-n", "2", "--dist", "worksteal")
    result.assert_outcomes(passed=8, failed=1)
    assert sorted(row.payload["id"] for row in project.rows("cell")) == [f"c{n}" for n in range(8)]


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["serial", "xdist"])
def test_a_test_that_never_reports_fails_the_run(project: Project, arguments: tuple[str, ...]) -> None:
    """As a worker that dies without a word would; here somebody's hook swallows the test."""
    prepare(project, loud="pass", silent="pass")
    swallow = """
def pytest_runtest_protocol(item):
    return True if item.name == "test_silent" else None
"""
    if not arguments:
        assert project.run().ret == pytest.ExitCode.OK
    project.write("conftest.py", (project.path / "conftest.py").read_text() + swallow)
    result = project.run(*arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert Project.summary(result) == [
        "red: 1 test was collected and never reported, so nothing is known of it: test_cells.py::test_silent"
    ]


@pytest.mark.parametrize("arguments", [("-x",), ("-x", "-n", "2"), ("--collect-only",)], ids=" ".join)
def test_a_run_that_was_cut_short_on_purpose_has_nothing_to_explain(
    project: Project, arguments: tuple[str, ...]
) -> None:
    prepare(project, a="assert False", **{f"n{n}": "pass" for n in range(6)})
    assert Project.summary(project.run(*arguments)) == []


def test_deselected_tests_owe_no_report(project: Project) -> None:
    prepare(project, a="pass", b="pass")
    result = project.run("-k", "test_a")
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == pytest.ExitCode.OK


def test_a_run_that_was_to_launch_and_launched_nothing_fails(project: Project) -> None:
    idle = cell(outcome="reference", reason="disabled", launches=0)
    prepare(project, a=f"observe(**{idle})", b=f"observe(**{cell(id='other', launches=0)})")
    result = project.run()
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert Project.summary(result)[-1] == (
        "red: no kernel was launched, and 2 cells had to launch one: modulate[base], modulate[other]; "
        "is FUSIONGATE_DISABLE set, or a declines too strict?"
    )


def test_a_run_that_is_told_to_end_sums_up_what_it_has_seen(project: Project) -> None:
    """As a time limit tells it."""
    ends = f"observe(**{cell()}); os.kill(os.getpid(), signal.SIGTERM)"
    prepare(project, first=f"observe(**{cell(id='a')})", second=ends, third=f"observe(**{cell(id='c')})")
    result = project.run(own_process=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert Project.summary(result)[1].split()[:2] == ["modulate", "1"]
