"""What README shows is what happens."""

from __future__ import annotations

import re

import pytest

from .projects import Project
from .wheels import SOURCE

README = SOURCE / "README.md"

pytestmark = pytest.mark.skipif(not README.is_file(), reason="needs the source tree")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_continuous_integration_runs_the_first_commands() -> None:
    """With no variable set that a reader has not set."""
    commands = [line.partition("#")[0].strip() for line in blocks("sh")[0].splitlines()]
    script = (SOURCE / ".ci" / "run").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^commands=\(\n(.*?)^\)$", script, re.DOTALL | re.MULTILINE)
    assert [*commands, "nox -s lint"] == re.findall(r'^  "(.*)"$', listed, re.MULTILINE)
    assert ["NO_COLOR=1"] == re.findall(r"\bexport (.*)", script)
    assert "bash .ci/run" in (SOURCE / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")


@pytest.fixture
def project_of_the_readme(project: Project) -> Project:
    """The test of the ten lines, with a kernel that is right."""
    project.write("test_silu_mul.py", next(block for block in blocks("python") if "fusion_matrix" in block))
    project.write(
        "my_kernels.py", "import torch.nn.functional as F\n\n\ndef silu_mul(x, y):\n    return F.silu(x).mul(y)\n"
    )
    return project


def test_the_ten_lines_pass(project_of_the_readme: Project) -> None:
    result = project_of_the_readme.run("--fusiongate-device=host", "test_silu_mul.py::test_silu_mul[base]")
    result.assert_outcomes(passed=1)


def test_the_two_tests_more_are_pasted_and_run(project_of_the_readme: Project) -> None:
    """Without any setting; the time is a GPU's."""
    (tests,) = (block for block in blocks("python") if "md5_snapshot" in block)
    ours = next(block for block in blocks("python") if "fusion_matrix" in block)
    project_of_the_readme.write("test_silu_mul.py", f"{ours}\n\n{tests}")
    options = ("--fusiongate-device=host", "-k", "digests or speed")

    recorded = project_of_the_readme.run(*options, "--snapshot-update")
    again = project_of_the_readme.run(*options)

    recorded.assert_outcomes(passed=1, skipped=1)
    again.assert_outcomes(passed=1, skipped=1)
    recorded.stdout.fnmatch_lines(["1 snapshot generated."])
    again.stdout.fnmatch_lines(["1 snapshot passed."])
    assert [path.name for path in (project_of_the_readme.path / "snapshots").rglob("*.json")] == ["my-block.json"]


def test_the_red_cell_is_what_its_kernel_gives(project_of_the_readme: Project) -> None:
    """Apart from the numbers, which are those of one machine."""
    (kernel,) = (block for block in blocks("python") if "one rounding too few" in block)
    imports = "import torch.nn.functional as F\n\n\n"
    project_of_the_readme.write("my_kernels.py", imports + kernel.replace("def kernel(", "def silu_mul("))
    (shown,) = (block for block in blocks("text") if "hint: " in block)
    result = project_of_the_readme.run("--fusiongate-device=host", "test_silu_mul.py::test_silu_mul[base]")
    result.assert_outcomes(failed=1)
    # What follows three blanks or more explains the line.
    told = [re.split(r"(?<=\S) {3,}", line)[0] for line in shown.splitlines()]
    kept = [line for line in told if re.match(r"silu_mul|  (happened|expected|hint|run): ", line)]
    assert len(kept) == 5
    assert [line for line in kept if line not in result.stdout.str()] == []


@pytest.mark.parametrize("arguments", [(), ("-n", "2")], ids=["serial", "workers"])
def test_a_kernel_with_the_red_cell_is_told_in_sixty_lines(
    project_of_the_readme: Project, arguments: tuple[str, ...]
) -> None:
    (kernel,) = (block for block in blocks("python") if "one rounding too few" in block)
    imports = "import torch.nn.functional as F\n\n\n"
    project_of_the_readme.write("my_kernels.py", imports + kernel.replace("def kernel(", "def silu_mul("))
    result = project_of_the_readme.run("--fusiongate-device=host", "--fusiongate-quick", *arguments)
    assert len(result.outlines) <= 60
    assert "given" not in result.stdout.str()
    told = [line for line in result.outlines if line.startswith("FAILED ")]
    assert [line for line in told if " × `silu(x)` is not rounded" in line], told
