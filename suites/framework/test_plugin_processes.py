"""Workers of pytest-xdist share the machine's cores unless somebody has said otherwise, and processes end swiftly."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .projects import Project

PRINT_THREADS = """
import os
import pytest

@pytest.mark.parametrize("number", range(4))
def test_threads(number):
    with open("seen.txt", "a") as stream:
        print(os.environ.get("OMP_NUM_THREADS"), file=stream)
"""

TORCH_S_THREADS = """
def test_threads():
    import torch  # here, so that one worker loads it

    assert 1 == torch.get_num_threads()
"""


@pytest.fixture
def counting(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    project.write("test_threads.py", PRINT_THREADS)
    return project


def seen(project: Project, *arguments: str) -> set[str]:
    project.run(*arguments).assert_outcomes(passed=4)
    return set((project.path / "seen.txt").read_text().splitlines())


def test_each_worker_has_its_share_of_the_cores(counting: Project) -> None:
    assert {"3"} == seen(counting, "-n", "2")


def test_more_workers_than_cores_have_a_thread_each_and_torch_goes_by_it(
    counting: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    counting.write("test_threads.py", TORCH_S_THREADS)
    counting.run("-n", "2").assert_outcomes(passed=1)


def test_a_number_of_threads_that_somebody_has_set_stays(counting: Project) -> None:
    counting.setenv("OMP_NUM_THREADS", "5")
    assert {"5"} == seen(counting, "-n", "2")


def test_a_number_of_threads_for_one_worker_stays(counting: Project) -> None:
    assert {"4", "3"} == seen(counting, "-d", "--tx", "popen//env:OMP_NUM_THREADS=4", "--tx", "popen")


def test_a_run_without_workers_is_left_alone(counting: Project) -> None:
    assert {"None"} == seen(counting, "-p", "no:xdist")


IN_A_CIRCLE = """
class Last:
    def __init__(self):
        self.me = self

    def __del__(self):
        print("searched for garbage")

def test_kept():
    Last.kept = Last()
"""


def test_a_process_ends_without_a_search_for_garbage(project: Project) -> None:
    project.write("test_kept.py", IN_A_CIRCLE)
    result = project.run(own_process=True)
    result.assert_outcomes(passed=1)
    assert "searched for garbage" not in result.outlines
    # Without us the same module's object is found, and says so.
    alone = [sys.executable, "-c", "import test_kept; test_kept.test_kept()"]
    told = subprocess.run(alone, cwd=project.path, capture_output=True, text=True, check=True).stdout
    assert told == "searched for garbage\n"
