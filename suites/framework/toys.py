"""A project with a subject of its own that runs anywhere: a function with a predicate, its kernel in plain torch."""

from __future__ import annotations

from .projects import Project

__all__ = ["prepare"]

OPS = """
from fusiongate.subjects import Subject

def reference(x, scale, shift):
    return x * (1 + scale) + shift

def launch(x, scale, shift):
    return {kernel}

def declines(x, scale, shift):
    if x.dtype != scale.dtype:
        return "mixed-dtype"
    if scale.dim() < 3:
        return "rank"
    return {stricter}

def call(x, scale, shift):
    return reference(x, scale, shift) if declines(x, scale, shift) else launch(x, scale, shift)

toy = Subject("toy", call=call, reference=reference, fused="ops:launch", declines=declines)
"""

TESTS = """
import pytest
from ops import toy

SIZES = [{"B": 2, "S": 5, "D": 16}]

@pytest.mark.fusion_matrix(toy, sizes=SIZES)
def test_toy(fusion_case):
    fusion_case.check()
"""


def prepare(
    project: Project, tests: str = TESTS, *, kernel: str = "x * (1 + scale) + shift", stricter: str = "None"
) -> None:
    """Write the subject and its tests.

    Parameters
    ----------
    project
        The project that they are written to.
    tests
        The test module.
    kernel
        The kernel's expression, by default a right one.
    stricter
        A further reason to decline, or None: an expression.
    """
    project.write("ops.py", OPS.format(kernel=kernel, stricter=stricter))
    project.write("test_ops.py", tests)
