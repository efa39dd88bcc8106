"""Workers of pytest-xdist stay on the caller's GPUs, each with its own first, and only when that is asked for."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from .projects import Project

PRINT_GPU = """
import os, time
import pytest

@pytest.mark.parametrize("number", range(6))
def test_gpu(number, worker_id):
    with open("seen.txt", "a") as stream:
        print(worker_id, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("HIP_VISIBLE_DEVICES"), file=stream)
    time.sleep(0.1)
"""


@pytest.fixture
def pinned(project: Project) -> Project:
    project.write("test_gpu.py", PRINT_GPU)
    project.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8f3a")
    return project


def seen(project: Project) -> set[str]:
    return set((project.path / "seen.txt").read_text().splitlines())


def auto(project: Project, *arguments: str) -> int:
    """How many workers `-n auto` starts, as pytest-xdist asks for it."""
    config = project.pytester.parseconfig(*arguments)
    count: int = config.hook.pytest_xdist_auto_num_workers(config=config)
    return count


def with_cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(number)))


@pytest.mark.parametrize(
    "cores, arguments, expected",
    [
        pytest.param(64, (), 28, id="several-a-gpu"),
        pytest.param(64, ("--fusiongate-workers-per-gpu=3",), 6, id="as-many-as-asked"),
        pytest.param(12, (), 12, id="a-core-each"),
        pytest.param(1, (), 2, id="no-gpu-idle"),
    ],
)
def test_auto_is_several_workers_for_each_of_the_callers_gpus(
    pinned: Project, monkeypatch: pytest.MonkeyPatch, cores: int, arguments: tuple[str, ...], expected: int
) -> None:
    with_cores(monkeypatch, cores)
    assert expected == auto(pinned, "--fusiongate-pin-gpus", *arguments)


@pytest.mark.parametrize("order", [("fusiongate.plugin.hooks", "xdist"), ("xdist", "fusiongate.plugin.hooks")])
def test_the_gpus_are_counted_whichever_plugin_is_loaded_first(
    pinned: Project, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """Entry points come in the order of folders on a disk."""
    with_cores(monkeypatch, 64)
    # Pytest-xdist would count the cores with this, where it is installed.
    monkeypatch.setitem(sys.modules, "psutil", None)
    plugins = [word for name in (*order, "pytest_benchmark", "syrupy") for word in ("-p", name)]
    assert 28 == auto(pinned, "--disable-plugin-autoload", *plugins, "--fusiongate-pin-gpus")


def test_a_number_of_workers_that_somebody_has_set_stays(pinned: Project) -> None:
    pinned.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "3")
    assert 3 == auto(pinned, "--fusiongate-pin-gpus")


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_of_workers_that_is_none_is_one_line(pinned: Project, number: str) -> None:
    result = pinned.run(f"--fusiongate-workers-per-gpu={number}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        f"ERROR: --fusiongate-workers-per-gpu={number}: expected a number of workers, such as 8"
    ]


def test_each_worker_sees_a_gpu_of_its_own_first_and_the_others_after_it(pinned: Project) -> None:
    result = pinned.run("-n", "3", "--fusiongate-pin-gpus")
    result.assert_outcomes(passed=6)
    assert seen(pinned) == {
        "gw0 5,GPU-8f3a 5,GPU-8f3a",
        "gw1 GPU-8f3a,5 GPU-8f3a,5",
        "gw2 5,GPU-8f3a 5,GPU-8f3a",
    }


def test_the_replacement_of_a_crashed_worker_keeps_its_list(pinned: Project) -> None:
    pinned.write("test_gpu.py", PRINT_GPU + "    if worker_id == 'gw0': os.abort()\n")
    pinned.run("-n", "1", "--fusiongate-pin-gpus", own_process=True)
    assert seen(pinned) == {"gw0 5,GPU-8f3a 5,GPU-8f3a", "gw1 5,GPU-8f3a 5,GPU-8f3a"}


def test_nothing_is_pinned_unasked(pinned: Project) -> None:
    pinned.run("-n", "2").assert_outcomes(passed=6)
    assert {line.split()[1] for line in seen(pinned)} == {"5,GPU-8f3a"}


@pytest.mark.parametrize("listed", ["", "-1", "-1,0"])
def test_a_list_without_gpus_is_one_line(pinned: Project, listed: str) -> None:
    pinned.setenv("CUDA_VISIBLE_DEVICES", listed)
    result = pinned.run("-n", "2", "--fusiongate-pin-gpus")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        f"ERROR: --fusiongate-pin-gpus: CUDA_VISIBLE_DEVICES={listed} names no GPU to pin a worker to"
    ]


def test_amd_s_own_list_counts_first(pinned: Project) -> None:
    pinned.setenv("HIP_VISIBLE_DEVICES", "3")
    pinned.run("-n", "1", "--fusiongate-pin-gpus").assert_outcomes(passed=6)
    assert seen(pinned) == {"gw0 3 3"}


def test_a_gpu_that_was_asked_for_and_is_not_there_is_what_is_said(pinned: Project) -> None:
    """Although the workers are counted before the options are looked at."""
    pinned.setenv("CUDA_VISIBLE_DEVICES", "")
    result = pinned.run("-n", "auto", "--fusiongate-pin-gpus", "--fusiongate-require-fused")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in result.errlines if line)
    assert line.startswith("ERROR: --fusiongate-require-fused: torch ")


def test_without_a_list_each_gpu_that_torch_sees_has_its_workers(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    project.write("test_gpu.py", PRINT_GPU)
    project.run("-n", "auto", "--fusiongate-pin-gpus", "--fusiongate-workers-per-gpu=1").assert_outcomes(passed=6)
    assert {"gw0 0,1 0,1", "gw1 1,0 1,0"} == seen(project)


def test_without_a_list_and_without_a_gpu_there_is_nothing_to_pin_to(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = project.run("-n", "auto", "--fusiongate-pin-gpus")
    (line,) = (line for line in result.errlines if line)
    why = f"torch {torch.__version__} sees no GPU here to pin a worker to: leave the option out"
    assert f"ERROR: --fusiongate-pin-gpus: {why}" == line
