"""The plugin is there wherever fusiongate is installed, and costs a run that does not use it nothing."""

from __future__ import annotations

import pytest

from .projects import Project

WITHOUT_TORCH = """
import sys

def test_torch():
    assert "torch" not in sys.modules
"""
PLANTED = "def pytest_report_header():\n    import torch\n"


@pytest.mark.parametrize("arguments", [(), ("-n", "1"), ("--fusiongate-device=host",)], ids=" ".join)
def test_a_run_that_needs_no_torch_does_not_load_it(project: Project, arguments: tuple[str, ...]) -> None:
    project.write("test_torch.py", WITHOUT_TORCH)
    project.run(*arguments, own_process=True).assert_outcomes(passed=1)


def test_a_planted_import_of_torch_is_seen(project: Project) -> None:
    project.write("test_torch.py", WITHOUT_TORCH)
    project.write("conftest.py", PLANTED)
    project.run(own_process=True).assert_outcomes(failed=1)


def test_the_plugin_can_be_left_out(project: Project) -> None:
    project.write("test_plain.py", "def test_plain(): pass\n")
    result = project.run("-p", "no:fusiongate", own_process=True)
    result.assert_outcomes(passed=1)
    assert not [line for line in result.outlines if line.startswith("fusiongate:")]


def test_markers_are_registered(project: Project) -> None:
    text = project.run("--markers").stdout.str()
    assert "@pytest.mark.fusion_matrix(subject, inputs=fusiongate.ADALN, " in text
