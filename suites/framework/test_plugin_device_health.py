"""A device whose context has gone ends the run of its process, and what is known by then is kept and said.

Simulated: a kernel on the host raises what a GPU's runtime would, and the question whether the device is still there is
answered with no.
"""

from __future__ import annotations

import json
import re

import pytest

from fusiongate.errors import PoisonedDevice
from fusiongate.gate import judging
from fusiongate.gate.device_state import is_poisoned
from fusiongate.plugin.device_health import Poisoning

from .projects import Project

HOST = "--fusiongate-device=host"

OPS = """
import fusiongate as fg
import fusiongate.gate.judging

fusiongate.gate.judging.is_poisoned = lambda args: True

def kernel(x, scale, shift):
    if scale.dtype != x.dtype:
        raise RuntimeError("an illegal memory access was encountered\\nand more lines of advice")
    return x * (1 + scale) + shift

op = fg.Fusion("lost", reference=lambda x, scale, shift: x * (1 + scale) + shift, fused=kernel)
"""

MATRIX = """
import pytest
from ops import op

@pytest.mark.fusion_matrix(op, sizes=[{"B": 2, "S": 5, "D": 16}], must_fuse=[])
def test_lost(fusion_case):
    fusion_case.check()
"""

BASE, MIXED, LATER = (f"test_ops.py::test_lost[{cell}]" for cell in ("base", "mixed", "expanded-channels"))

TOLD = f"cpu cannot be used any more after {MIXED} (RuntimeError: an illegal memory access was encountered)"


@pytest.fixture
def fatal(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose kernel takes the device with it in the cell ``mixed``."""
    # Serially it runs in this process: what it replaces there is put back after the test.
    monkeypatch.setattr(judging, "is_poisoned", is_poisoned)
    project.write("ops.py", OPS)
    project.write("test_ops.py", MATRIX)
    return project


def plain(project: Project, body: str, others: int = 1) -> None:
    """Write a test that ends as ``body`` says, and others after it."""
    later = "".join(f"\ndef test_later_{number}():\n    pass\n" for number in range(others))
    project.write(
        "test_plain.py",
        f"import pytest\nfrom fusiongate.errors import PoisonedDevice\n\ndef test_fatal():\n    {body}\n{later}",
    )


def test_the_run_stops_at_the_cell_and_names_cell_device_and_error(fatal: Project) -> None:
    result = fatal.run(HOST, BASE, MIXED, LATER)
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([f"*Interrupted: fusiongate: {TOLD.replace('[', '?').replace(']', '?')}*"])
    lines = Project.summary(result)
    assert lines[-2:] == [
        f"red: {TOLD}: its process ran no further test",
        "red: 1 test was not run because of that; run what is named above again, in a new process",
    ]
    title = lines.index("not run because of a device that could not be used any more")
    assert lines[title + 1] == f"  {LATER}"


def test_what_is_known_by_then_is_in_the_ledger(fatal: Project) -> None:
    fatal.run(HOST, BASE, MIXED, LATER)
    rows = {row.payload["id"]: row.payload for row in fatal.rows("cell")}
    assert {"base": "fused", "mixed": "red"} == {cell: row["outcome"] for cell, row in rows.items()}
    assert "PoisonedDevice: cpu: the device context is unusable" in rows["mixed"]["message"]


def test_the_paths_seen_by_then_are_recorded_where_that_was_asked_for(fatal: Project) -> None:
    fatal.run(HOST, "--fusiongate-snapshots=kept", "--fusiongate-update-paths", BASE, MIXED, LATER)
    table = json.loads((fatal.path / "kept/cpu/paths/lost.json").read_text())
    assert {"base": ["fused", "verified"]} == table["paths"]


def test_a_run_whose_last_test_it_was_has_left_nothing_out(fatal: Project) -> None:
    result = fatal.run(HOST, BASE, MIXED)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    lines = Project.summary(result)
    assert lines[-1] == f"red: {TOLD}: its process ran no further test"
    assert not any("not run because" in line for line in lines)


@pytest.mark.parametrize("phase", ["setup", "call", "teardown"])
def test_whatever_phase_it_comes_to_light_in(project: Project, phase: str) -> None:
    project.write(
        "test_plain.py",
        f"""
import pytest
from fusiongate.errors import PoisonedDevice

def lose(phase):
    if phase == {phase!r}:
        raise PoisonedDevice("cuda:1", RuntimeError("gone"))

@pytest.fixture
def around():
    lose("setup")
    yield
    lose("teardown")

def test_fatal(around):
    lose("call")

def test_later():
    pass
""",
    )
    result = project.run()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "  test_plain.py::test_later" in Project.summary(result)
    result.stdout.fnmatch_lines(["*Interrupted: fusiongate: cuda:1 cannot be used any more after *::test_fatal (*"])


def test_a_worker_runs_no_further_test_and_the_others_keep_theirs(project: Project) -> None:
    """The fatal test waits until the other worker has begun; each has been given half of the tests."""
    project.write(
        "test_plain.py",
        """
import pathlib, time
import pytest
from fusiongate.errors import PoisonedDevice

HERE = pathlib.Path(__file__).parent

def wait_for(name):
    deadline = time.monotonic() + 60
    while not (HERE / name).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)

@pytest.mark.parametrize("number", range(20))
def test_numbered(number, worker_id):
    with (HERE / "ran").open("a") as ran:
        ran.write(f"{number} {worker_id}\\n")
    if number == 0:
        wait_for("begun")
        raise PoisonedDevice("cuda:0", RuntimeError("gone"))
    (HERE / "begun").touch()
    wait_for("ran")
""",
    )
    result = project.run("-n", "2", "--dist", "worksteal")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    ran = dict(line.split() for line in (project.path / "ran").read_text().splitlines())
    lost = ran.pop("0")
    assert set(ran.values()) == {"gw0", "gw1"} - {lost}
    result.assert_outcomes(passed=len(ran), failed=1)

    lines = Project.summary(result)
    story = f"cuda:0 in {lost} cannot be used any more after test_plain.py::test_numbered[0] (RuntimeError: gone)"
    assert f"red: {story}: its process ran no further test" == lines[-2]
    # At least one: a worker always has the test after the one that it runs.
    unstarted = {str(number) for number in range(1, 20)} - set(ran)
    assert unstarted
    assert {f"  test_plain.py::test_numbered[{number}]" for number in unstarted} == {
        line for line in lines if line.startswith("  test_plain.py")
    }
    assert re.match(rf"red: {len(unstarted)} tests? w\w+ not run because of that", lines[-1])


def test_a_cell_on_a_worker_reaches_the_ledger_too(fatal: Project) -> None:
    result = fatal.run(HOST, "-n", "1", BASE, MIXED)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    outcomes = {row.payload["id"]: row.payload["outcome"] for row in fatal.rows("cell")}
    assert outcomes["mixed"] == "red"


def test_an_expected_failure_is_no_reason_to_go_on(project: Project) -> None:
    project.write(
        "test_plain.py",
        """
import pytest
from fusiongate.errors import PoisonedDevice

@pytest.mark.xfail(raises=PoisonedDevice, strict=True)
def test_fatal():
    raise PoisonedDevice("cuda:0", RuntimeError("gone"))

def test_later():
    pass
""",
    )
    result = project.run()
    result.assert_outcomes(xfailed=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_a_test_that_catches_it_goes_on(project: Project) -> None:
    plain(project, "with pytest.raises(PoisonedDevice): raise PoisonedDevice('cuda:0', RuntimeError('simulated'))")
    result = project.run()
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.OK


GPU = """
import pytest, torch

@pytest.fixture(scope="session", autouse=True)
def one_gpu(request):
    from fusiongate.plugin.device import select
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "is_initialized", lambda: {initialised})
    patch.setattr(torch.cuda, "synchronize", synchronize)
    select(request.config)
    yield
    patch.undo()

def synchronize(device):
    {answer}
"""


@pytest.mark.parametrize(
    "answer, initialised, ends",
    [
        ("raise RuntimeError('CUDA error: an illegal memory access was encountered')", True, True),
        ("error = torch.AcceleratorError(); error.error_code = 900; raise error", True, False),
        ("raise RuntimeError('CUDA error: no context')", False, False),
        ("return None", True, False),
    ],
    ids=["gone", "capturing", "never-used", "there"],
)
def test_after_any_failure_on_a_gpu_it_is_asked_whether_it_is_still_there(
    project: Project, answer: str, initialised: bool, ends: bool
) -> None:
    """An asynchronous fault comes to light in whatever waits for the device first, as an error of its own kind."""
    project.write("conftest.py", GPU.format(answer=answer, initialised=initialised))
    plain(project, "raise RuntimeError('CUDA error: unspecified launch failure')")
    result = project.run()
    if ends:
        result.assert_outcomes(failed=1)
        assert result.ret == pytest.ExitCode.INTERRUPTED
        assert (
            "red: cuda:0 cannot be used any more after test_plain.py::test_fatal "
            "(RuntimeError: CUDA error: unspecified launch failure): its process ran no further test"
        ) in Project.summary(result)
    else:
        result.assert_outcomes(failed=1, passed=1)
        assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_an_error_is_told_in_one_line_without_anything_that_moves_a_cursor(project: Project) -> None:
    plain(project, r"raise PoisonedDevice('cuda:0', RuntimeError('gone\x1b[2J\nsecond line'))")
    result = project.run()
    assert r"(RuntimeError: gone\x1b[2J): its process" in Project.summary(result)[-2]


def test_githubs_summary_names_what_was_not_run(project: Project) -> None:
    plain(project, "raise PoisonedDevice('cuda:0', RuntimeError('gone'))", others=7)
    project.setenv("GITHUB_ACTIONS", "true")
    project.setenv("GITHUB_STEP_SUMMARY", str(project.path / "summary.md"))
    project.run()
    text = (project.path / "summary.md").read_text()
    assert "<details><summary>Not run: a device that could not be used any more (7)</summary>" in text
    assert 7 == text.count("- test\\_plain.py::test\\_later\\_")


def test_the_story_reads_as_a_sentence() -> None:
    lost = PoisonedDevice("cuda:0", RuntimeError("gone"))
    told = Poisoning("test_a.py::test_b", f"{lost.device} in gw1", "RuntimeError: gone")
    assert "cuda:0 in gw1 cannot be used any more after test_a.py::test_b (RuntimeError: gone)" == str(told)
