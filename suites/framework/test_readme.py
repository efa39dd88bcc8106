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
