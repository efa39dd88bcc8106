"""A project whose tests observe cells of their own making: what is recorded, merged and summed up needs no kernel."""

from __future__ import annotations

from typing import Any

from .projects import Project

__all__ = ["cell", "prepare"]

CONFTEST = """
import os, signal
import pytest
from fusiongate.platforms import Environment
from fusiongate.plugin.rows import record

# To ask for this machine's takes torch, in every worker.
HERE = Environment(
    platform="cpu-made-up", device_name="none", torch="none", runtime=None, driver=None, python="3", threads=1,
    libraries={}, switches={},
)

@pytest.fixture
def observe(request):
    def observe(**cell):
        record(request.node, "cell", cell["subject"], cell, HERE)
    return observe
"""


def cell(**values: Any) -> dict[str, Any]:
    """Give a cell row's payload, as the matrix's fixture records it."""
    row = {
        "id": "base",
        "subject": "modulate",
        "outcome": "fused",
        "reason": "verified",
        "launches": 3,
        "expected": "fused",
        "must_fuse": True,
        "not_compared": None,
    }
    return row | values


def prepare(project: Project, *bodies: str, **tests: str) -> None:
    """Write a project with one test for each of ``tests``: its name, its body, and ``observe(**cell)`` in it."""
    project.write("conftest.py", CONFTEST)
    functions = [f"def test_{name}(observe):\n    {body}\n" for name, body in tests.items()]
    project.write("test_cells.py", "import os, signal\nimport pytest\n\n" + "\n".join([*bodies, *functions]))
