"""Workers of pytest-xdist stay on the caller's GPUs, one each, and only when that is asked for."""

from __future__ import annotations

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


def test_auto_is_one_worker_for_each_of_the_callers_gpus(pinned: Project) -> None:
    result = pinned.run("-n", "auto", "--fusiongate-pin-gpus")
    result.assert_outcomes(passed=6)
    assert seen(pinned) == {"gw0 5 5", "gw1 GPU-8f3a GPU-8f3a"}


def test_the_replacement_of_a_crashed_worker_keeps_its_gpu(pinned: Project) -> None:
    pinned.write("test_gpu.py", PRINT_GPU + "    if worker_id == 'gw0': os.abort()\n")
    pinned.run("-n", "1", "--fusiongate-pin-gpus", own_process=True)
    assert seen(pinned) == {"gw0 5 5", "gw1 5 5"}


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
    pinned.run("-n", "auto", "--fusiongate-pin-gpus").assert_outcomes(passed=6)
    assert seen(pinned) == {"gw0 3 3"}


def test_a_gpu_that_was_asked_for_and_is_not_there_is_what_is_said(pinned: Project) -> None:
    """Although the workers are counted before the options are looked at."""
    pinned.setenv("CUDA_VISIBLE_DEVICES", "")
    result = pinned.run("-n", "auto", "--fusiongate-pin-gpus", "--fusiongate-require-fused")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = (line for line in result.errlines if line)
    assert line.startswith("ERROR: --fusiongate-require-fused: torch ")


def test_without_a_list_each_gpu_that_torch_sees_has_its_worker(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    project.write("test_gpu.py", PRINT_GPU)
    project.run("-n", "auto", "--fusiongate-pin-gpus").assert_outcomes(passed=6)
    assert {"gw0 0 0", "gw1 1 1"} == seen(project)


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
