"""Which warnings fail a run of this repository: those about its own code, and none about other people's."""

from __future__ import annotations

import json
import tomllib

import pytest

from .projects import Project
from .wheels import SOURCE

pytestmark = pytest.mark.skipif(not (SOURCE / "pyproject.toml").is_file(), reason="needs the source tree")


@pytest.fixture
def filtered(project: Project) -> Project:
    """A project with this repository's filters, whose tests stand where ours do."""
    with (SOURCE / "pyproject.toml").open("rb") as file:
        filters = tomllib.load(file)["tool"]["pytest"]["filterwarnings"]
    project.write("pytest.toml", f"[pytest]\nfilterwarnings = {json.dumps(filters)}\n")
    (project.path / "pytest.ini").unlink()
    return project


def test_what_is_said_of_our_code_fails(filtered: Project) -> None:
    """Of a test, of the library; and exceptions that no test could have seen."""
    filtered.write(
        "suites/test_ours.py",
        """
import threading, warnings


class Unraisable:
    def __del__(self):
        raise ValueError


def test_of_a_test():
    warnings.warn("old", FutureWarning)


def test_of_the_library():
    warnings.warn_explicit("old", UserWarning, "fusion.py", 1, module="fusiongate.gate.fusion")


def test_in_a_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


def test_unraisable():
    Unraisable()
""",
    )
    filtered.pytester.runpytest_subprocess("--import-mode=importlib", "suites").assert_outcomes(failed=4)


def test_what_is_said_of_other_people_s_code_is_shown(filtered: Project) -> None:
    filtered.write(
        "suites/test_theirs.py",
        """
import pytest, warnings


@pytest.mark.parametrize("module", ["torch.jit._script", "torch.autograd.forward_ad", "fusiongateway", "my_suites"])
def test_one(module):
    warnings.warn_explicit(f"{module} is old", FutureWarning, "theirs.py", 1, module=module)
""",
    )
    result = filtered.pytester.runpytest_subprocess("--import-mode=importlib", "suites")
    result.assert_outcomes(passed=4, warnings=4)
    result.stdout.fnmatch_lines(["*FutureWarning: torch.jit._script is old"])
