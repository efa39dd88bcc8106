"""The marker turns a subject's matrix into tests, and what becomes of each cell is recorded whatever that is."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from fusiongate.cli import main

from . import toys
from .projects import Project

TOY = "test_ops.py::test_toy"
GREEN = [f"{TOY}[base]", f"{TOY}[fp16]", f"{TOY}[mixed]", f"{TOY}[strided-unbind-4d]"]
HOST = "--fusiongate-device=host"


def collected(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if line.startswith(TOY)]


def test_each_cell_is_a_test_in_the_order_of_the_ids(project: Project) -> None:
    toys.prepare(project)
    names = [line.rstrip("]") for line in collected(project.run("--collect-only", "-q"))]
    assert names[0] == f"{TOY}[base"
    assert names[1:] == sorted(names[1:])
    assert len(names) > 100
    assert {name.rstrip("]") for name in GREEN} < set(names)


def test_cells_are_not_filtered_by_hardware(project: Project) -> None:
    toys.prepare(project)
    here = collected(project.run("--collect-only", "-q"))
    project.setenv("CUDA_VISIBLE_DEVICES", "")
    assert collected(project.run("--collect-only", "-q", HOST)) == here


def test_what_comes_of_a_cell_is_recorded(project: Project) -> None:
    """By workers too: test_downstream.py has a run of theirs."""
    toys.prepare(project)
    result = project.run(HOST, *GREEN)
    result.assert_outcomes(passed=4)
    assert Project.summary(result)[:6] == [
        "subject  fused  reference  refused  raises  not run  red",
        "toy          3          1        0       0        0    0",
        "",
        "reasons",
        "  fused      verified     3",
        "  reference  mixed-dtype  1",
    ]
    rows = {row.payload["id"]: row for row in project.rows("cell")}
    assert sorted(rows) == ["base", "fp16", "mixed", "strided-unbind-4d"]
    base = rows["base"]
    assert base.subject == "toy"
    known = {
        "layout": "row-broadcast",
        "dtype": "bf16",
        "size": "B2S5D16",
        "outcome": "fused",
        "reason": "verified",
        "expected": "fused",
        "must_fuse": True,
        "launches": 3,
        "checks": 3,
        "selected": "host",
        "test": f"{TOY}[base]",
    }
    assert {name: base.payload[name] for name in known} == known
    assert rows["mixed"].payload["must_fuse"] is False


def test_a_red_cell_tells_its_story_at_the_test_s_own_line(project: Project) -> None:
    toys.prepare(project, kernel="(x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)")
    result = project.run(HOST, *GREEN[:1])
    result.assert_outcomes(failed=1)
    assert "CellFailure: toy[base], call " in result.stdout.str()
    assert not [line for line in result.outlines if "cells.py" in line or "check.py" in line]
    (row,) = project.rows("cell")
    assert row.payload["outcome"] == "red"
    assert row.payload["launches"] is None
    assert row.payload["reason"] == row.payload["message"].splitlines()[0]
    assert Project.summary(result)[1] == "toy          0          0        0       0        0    1"


def test_a_kernel_that_raises_is_red(project: Project) -> None:
    toys.prepare(project, kernel="missing")
    result = project.run(HOST, *GREEN[:1])
    result.assert_outcomes(failed=1)
    assert project.rows("cell")[0].payload["outcome"] == "red"


def test_a_cell_that_this_machine_cannot_run_is_skipped_by_name(project: Project) -> None:
    toys.prepare(project)
    result = project.run(HOST, "-rs", f"{TOY}[other]")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * not run: needs a second GPU"])
    assert "  needs a second GPU (1): toy[other]" in Project.summary(result)
    assert result.ret == pytest.ExitCode.OK


def test_operands_and_reference_are_there_for_checks_of_one_s_own(project: Project) -> None:
    """Such a test has not checked the cell, and the summary does not say that it had."""
    toys.prepare(
        project,
        toys.TESTS.replace(
            "    fusion_case.check()",
            """
    x, scale, shift = fusion_case.args
    assert fusion_case.path == "fused"
    assert fusion_case.reason == "verified"
    assert fusion_case.id == "base" == fusion_case.cell.id
    assert fusion_case.expected.equal(x * (1 + scale) + shift)
""",
        ),
    )
    result = project.run(HOST, *GREEN[:1])
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["unchecked: the test did not call fusion_case.check(), *write checked=False in *"])
    assert Project.summary(result)[:2] == [
        "subject  fused  reference  refused  raises  not run  red  unchecked",
        "toy          0          0        0       0        0    0          1",
    ]

    tests = (project.path / "test_ops.py").read_text(encoding="utf-8")
    project.write("test_ops.py", tests.replace("fusion_matrix(", "fusion_matrix(checked=False, subject=", 1))
    project.run(HOST, *GREEN[:1]).assert_outcomes(passed=1)


def test_a_method_of_a_unittest_class_is_refused_and_never_passes_unseen(project: Project) -> None:
    toys.prepare(
        project,
        """
import unittest
import pytest
from ops import toy

@pytest.mark.fusion_matrix(toy)
class TestMarked(unittest.TestCase):
    def test_silent(self):
        pass

class TestAsking(unittest.TestCase):
    def test_asks(self, fusion_case):
        fusion_case.check()

    def test_other(self):
        pass
""",
    )
    result = project.run(HOST, "-k", "Marked or Asking")
    result.assert_outcomes(errors=2, passed=1)
    result.stdout.fnmatch_lines(
        ["*fusion_matrix and the fixture fusion_case make a test a cell, and a method of unitt*"]
    )


def test_junit_knows_outcome_reason_and_launches(project: Project) -> None:
    toys.prepare(project)
    project.run(HOST, "--junitxml=junit.xml", *GREEN[:1])
    properties = ET.parse(project.path / "junit.xml").iter("property")
    assert {each.get("name"): each.get("value") for each in properties} == {
        "fusiongate.outcome": "fused",
        "fusiongate.reason": "verified",
        "fusiongate.launches": "3",
    }


def test_several_markers_are_told_apart_by_their_subjects(project: Project) -> None:
    toys.prepare(
        project,
        toys.TESTS.replace(
            "@pytest.mark",
            "import dataclasses\ntwin = dataclasses.replace(toy, name='twin')\n"
            "@pytest.mark.fusion_matrix(twin, sizes=SIZES)\n@pytest.mark",
        ),
    )
    project.run(HOST, f"{TOY}[toy-base]", f"{TOY}[twin-base]").assert_outcomes(passed=2)
    assert sorted(row.subject for row in project.rows("cell")) == ["toy", "twin"]


def test_a_project_s_own_device_fixture_multiplies_only_what_asks_for_it(project: Project) -> None:
    toys.prepare(project)
    project.write(
        "conftest.py", 'import pytest\n@pytest.fixture(params=["a", "b"])\ndef device(request): return request.param\n'
    )
    project.run(HOST, *GREEN).assert_outcomes(passed=4)


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        pytest.param(
            "(fusion_case)",
            "()",
            "test_ops.py::test_toy: @pytest.mark.fusion_matrix gives its cells through the fixture fusion_case: "
            "expected it among the test's parameters",
            id="without-the-fixture",
        ),
        pytest.param(
            "sizes=SIZES",
            "layouts=SIZES",
            "test_ops.py::test_toy: @pytest.mark.fusion_matrix: *unexpected keyword argument 'layouts'",
            id="unknown-argument",
        ),
        pytest.param(
            "sizes=SIZES",
            "must_fuse=['diagonal']",
            "test_ops.py::test_toy: @pytest.mark.fusion_matrix: must_fuse=*no layout of toy begins with 'diagonal'*",
            id="unknown-layout",
        ),
        pytest.param(
            "fusion_matrix(toy, sizes=SIZES)",
            "fusion_matrix()",
            "test_ops.py::test_toy: @pytest.mark.fusion_matrix: *missing 1 required positional argument: 'subject'",
            id="without-a-subject",
        ),
    ],
)
def test_a_marker_that_means_nothing_is_one_line_of_a_collection_error(
    project: Project, old: str, new: str, complaint: str
) -> None:
    toys.prepare(project, toys.TESTS.replace(old, new))
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([complaint])
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_the_fixture_without_its_marker_is_one_line(project: Project) -> None:
    toys.prepare(project, "def test_toy(fusion_case):\n    pass\n")
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["fusion_case needs a matrix: mark the test with @pytest.mark.fusion_matrix(op)"])


def test_a_quick_run_has_each_axis_alone_and_leaves_a_subject_after_three_cells_of_one_cause(project: Project) -> None:
    toys.prepare(project)
    names = collected(project.run("--collect-only", "-q", "--fusiongate-quick"))
    assert f"{TOY}[base]" == names[0]
    assert 20 < len(names) < 90
    assert f"{TOY}[fp16-permuted]" not in names

    toys.prepare(project, kernel="x * (1 + scale) - shift")
    result = project.run(HOST, "--fusiongate-quick", "-k", "base or fp16 or fp32 or sliced or nan-inf or large")
    outcomes = result.parseoutcomes()
    assert 3 == outcomes["failed"] + outcomes.get("same", 0)
    assert 4 == outcomes["skipped"]
    assert [line for line in Project.summary(result) if "--fusiongate-quick: 3 cells of toy are red already" in line]


def test_a_cell_is_explained_from_the_ledger_of_its_run(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toys.prepare(project)
    project.run(HOST, f"{TOY}[nan-inf]", f"{TOY}[mixed]").assert_outcomes(passed=2)
    monkeypatch.chdir(project.path)
    capsys.readouterr()

    assert 0 == main(["explain", "toy[nan-inf]"])
    told = capsys.readouterr().out.splitlines()
    assert "toy[nan-inf]" == told[0]
    assert "  data: nan-inf: NaN and both infinities in one element of each eight, in every operand." in told
    assert "  came of it: fused (verified), launches: 3" in told
    assert f'  alone: pytest "{TOY}[nan-inf]"' == told[-1]

    assert 0 == main(["explain", f"{TOY}[mixed]"])
    assert "  came of it: reference (mixed-dtype), launches: 0" in capsys.readouterr().out.splitlines()
    assert 2 == main(["explain", "no-such-cell"])
    assert "has no cell 'no-such-cell': expected the id of one of its 2" in capsys.readouterr().err


def test_a_repository_begins_with_tests_that_pass_and_a_workflow(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == main(["init", str(project.path)])
    assert project.run(HOST, "--snapshot-update", "-k", "base or digests").ret == pytest.ExitCode.OK
    again = project.run(HOST, "-k", "base or digests")
    assert again.ret == pytest.ExitCode.OK
    assert (project.path / ".github/workflows/fusiongate-nightly.yml").read_text().startswith("name: nightly\n")

    capsys.readouterr()
    assert 2 == main(["init", str(project.path)])
    assert "is there already, and nothing was written" in capsys.readouterr().err
