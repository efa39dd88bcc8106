"""What measures time or fills a GPU's memory is marked, so that two runs cover everything and nothing twice."""

from __future__ import annotations

from .projects import Project

LANES = """
import pytest
import torch
import fusiongate as fg
from fusiongate.matrix.inputs import HUGE_ELEMENTS

op = fg.Fusion("twice", reference=lambda x: x * 2, fused=lambda x: x + x)
SIZES = [{"B": 2, "D": 8}, {"B": HUGE_ELEMENTS // 8, "D": 8}]

@pytest.mark.fusion_matrix(op, inputs={"x": "B D"}, sizes=SIZES, must_fuse=[], pairs=False)
def test_cells(fusion_case):
    fusion_case.check()

def test_timing(device_benchmark):
    x = torch.ones(2, 8)
    device_benchmark(op, x, seconds=0.01, margin=0.5, precision=None)

@pytest.mark.alone
def test_marked():
    pass

def test_plain():
    pass
"""


def collected(project: Project, *arguments: str) -> set[str]:
    project.write("test_lanes.py", LANES)
    lines = project.run("--collect-only", "-q", "--fusiongate-device=host", *arguments).outlines
    return {line.removeprefix("test_lanes.py::") for line in lines if "::" in line}


def test_what_measures_and_what_fills_the_memory_runs_alone(project: Project) -> None:
    assert {"test_cells[B33554432D8]", "test_timing", "test_marked"} == collected(project, "-m", "alone")


def test_two_lanes_are_everything_and_nothing_twice(project: Project) -> None:
    everything = collected(project)
    beside, alone = collected(project, "-m", "not alone"), collected(project, "-m", "alone")
    assert "test_cells[base]" in beside
    assert "test_plain" in beside
    assert everything == beside | alone
    assert not beside & alone


def test_a_lane_without_must_fuse_cells_is_green_and_a_serial_run_has_everything(project: Project) -> None:
    project.write("test_lanes.py", LANES)
    alone = project.run("-m", "alone", "--fusiongate-device=host")
    alone.assert_outcomes(passed=2, skipped=1, deselected=alone.parseoutcomes()["deselected"])
    assert "  needs a GPU: 268,435,456 elements (1): twice[B33554432D8]" in project.summary(alone)
    assert 0 == alone.ret
