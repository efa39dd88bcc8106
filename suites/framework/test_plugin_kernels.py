"""Fixtures give our kernels with a gate that no other test has taught anything."""

from __future__ import annotations

import pytest

from .projects import Project

FIXTURES = ["modulate", "rms_norm_modulate", "composite_rms_norm_modulate"]

TWICE = """
import pytest
import torch
import fusiongate as fg

@pytest.mark.parametrize("time", ["first", "second"])
def test_fresh({name}, time, fusion_device):
    x = torch.randn(2, 8, 512, dtype=torch.bfloat16, device=fusion_device)
    row = torch.randn(2, 1, 512, dtype=torch.bfloat16, device=fusion_device)
    args = (x, row, row) if "rms" not in "{name}" else (x, row, row, 1e-6)
    assert {name}.launches == 0
    assert {name}(*args).equal({name}.reference(*args))
    assert {name}.explain(*args).path == "fused"
    assert {name}.launches > 0

def test_shipped():
    op = fg.kernels.{name}
    assert op.launches == 0 == op.host.launches
"""


@pytest.mark.parametrize("name", FIXTURES)
def test_each_test_gets_a_fresh_gate_and_the_shipped_one_is_left_alone(project: Project, name: str) -> None:
    project.write("test_fresh.py", TWICE.format(name=name))
    project.run("--fusiongate-device=host").assert_outcomes(passed=3)


def test_under_host_the_kernels_are_their_host_builds(project: Project) -> None:
    lines = [f"def test_{name}({name}):\n    print('is', {name}.name)\n" for name in FIXTURES]
    project.write("test_names.py", "\n".join(lines))
    result = project.run("-s", "--fusiongate-device=host")
    result.assert_outcomes(passed=3)
    for name in FIXTURES:
        assert f"is {name}.host" in result.stdout.str()
