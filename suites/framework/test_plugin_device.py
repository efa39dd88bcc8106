"""The device that a run selects, and what a GPU that is not there comes to."""

from __future__ import annotations

import pytest
import torch

from .projects import Project

PRINT_DEVICE = """
def test_device(fusion_device, fusion_generator):
    print("on", fusion_device, fusion_generator.device, fusion_generator.initial_seed())
"""


def test_the_host_is_the_cpu(project: Project) -> None:
    project.write("test_device.py", PRINT_DEVICE)
    result = project.run("-s", "--fusiongate-device=host")
    result.assert_outcomes(passed=1)
    assert "fusiongate: device host" in result.outlines
    result.stdout.fnmatch_lines(["*on cpu cpu 0*"])


def test_auto_takes_a_gpu_where_there_is_one(project: Project) -> None:
    """Beside a run that sees no GPU at all, which takes the host."""
    project.write("test_device.py", PRINT_DEVICE)
    here = "cuda:0" if torch.cuda.is_available() else "cpu"
    project.run("-s").stdout.fnmatch_lines(["fusiongate: device auto", f"*on {here} {here} 0*"])

    project.setenv("CUDA_VISIBLE_DEVICES", "")
    project.setenv("HIP_VISIBLE_DEVICES", "")
    project.run("-s").stdout.fnmatch_lines(["*on cpu cpu 0*"])


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    "argument, index, way_out",
    [
        ("--fusiongate-device=cuda:7", 7, "run on a machine that has it, or with --fusiongate-device=host"),
        ("--fusiongate-device=cuda", 0, "run on a machine that has it, or with --fusiongate-device=host"),
        ("--fusiongate-require-fused", 0, "run on a machine with a GPU"),
    ],
)
def test_a_gpu_that_is_not_there_is_one_line(
    project: Project, argument: str, index: int, way_out: str, workers: str
) -> None:
    project.write("test_device.py", PRINT_DEVICE)
    project.setenv("CUDA_VISIBLE_DEVICES", "")
    project.setenv("HIP_VISIBLE_DEVICES", "")
    result = project.run("-n", workers, argument)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        f"ERROR: {argument}: torch {torch.__version__} sees 0 GPUs here, so there is no cuda:{index}: {way_out}"
    ]


def test_a_project_may_parametrise_a_device_fixture_of_its_own(project: Project) -> None:
    project.write(
        "test_own.py",
        """
import pytest

@pytest.fixture(params=["cpu", "meta"])
def device(request):
    return request.param

def test_both(device, fusion_device):
    assert fusion_device.type == "cpu"
""",
    )
    project.run("--fusiongate-device=host").assert_outcomes(passed=2)
