"""Three downstream repositories gate a kernel of their own in a dozen lines, and learn which rounding it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from .projects import Project

RECIPES = Path(__file__).parents[1] / "downstream"
HOST = "--fusiongate-device=host"

RIGHT = {
    "adaln": "x.mul(1 + scale).add(shift)",
    "residual_gate": "residual.add(update.mul(gate))",
    "silu_mul": "F.silu(x).mul(y)",
}
"""The kernel of each recipe."""

ROUNDINGS = {
    "adaln": (
        "(x.float() * (1 + scale).float() + shift.float()).to(x.dtype)",
        "`x * (1 + scale)` is not rounded to bfloat16",
    ),
    "residual_gate": (
        "(residual.float() + update.float() * gate.float()).to(residual.dtype)",
        "`update * gate` is not rounded to bfloat16",
    ),
    "silu_mul": (
        "(F.silu(x.float()) * y.float()).to(x.dtype)",
        "`silu(x)` is not rounded to bfloat16",
    ),
}
"""The same kernel without one of its roundings, and what the hint has to say about it."""

UNRELATED = {
    "adaln": "x.mul(1 + scale).sub(shift)",
    "residual_gate": "residual.add(update.mul(gate.roll(1, 0)))",
    "silu_mul": "F.silu(x).mul(y.roll(1, 1))",
}
"""A fault that has nothing to do with rounding: the wrong sign, another batch's rows, another token's."""


def recipe_file(recipe: str) -> Path:
    return RECIPES / f"{recipe.replace('_', '-')}-op" / f"test_{recipe}.py"


def install(project: Project, recipe: str, kernel: str | None = None) -> str:
    """Copy a recipe out, with another kernel if one is given; return the node id of its test."""
    source = recipe_file(recipe).read_text(encoding="utf-8")
    assert source.count(RIGHT[recipe]) == 1
    project.write(f"test_{recipe}.py", source.replace(RIGHT[recipe], kernel or RIGHT[recipe]))
    return f"test_{recipe}.py::test_{recipe}"


@pytest.mark.parametrize("recipe", RIGHT)
def test_a_recipe_is_short_and_needs_nothing_beside_it(recipe: str) -> None:
    file = recipe_file(recipe)
    assert [path for path in file.parent.rglob("*") if "__pycache__" not in path.parts] == [file]
    code = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(code) <= 15


@pytest.mark.parametrize("recipe", RIGHT)
def test_a_right_kernel_takes_its_path_with_the_reference_s_bits(project: Project, recipe: str) -> None:
    test = install(project, recipe)
    result = project.run(HOST, f"{test}[base]", f"{test}[fp16]", f"{test}[grad]")
    result.assert_outcomes(passed=3)
    assert Project.summary(result)[1].split() == [recipe, "2", "1", "0", "0", "0", "0"]


@pytest.mark.parametrize("recipe", RIGHT)
def test_a_right_kernel_passes_its_whole_matrix_on_two_workers(project: Project, recipe: str) -> None:
    install(project, recipe)
    result = project.run(HOST, "-n", "2", "--dist", "worksteal")
    outcomes = result.parseoutcomes()
    assert result.ret == pytest.ExitCode.OK
    assert set(outcomes) == {"passed", "skipped"}
    assert outcomes["passed"] > 250
    fused = int(Project.summary(result)[1].split()[1])
    assert fused > 100


@pytest.mark.parametrize("recipe", RIGHT)
def test_a_missing_rounding_is_named(project: Project, recipe: str) -> None:
    kernel, hint = ROUNDINGS[recipe]
    result = project.run(HOST, f"{install(project, recipe, kernel)}[base]")
    result.assert_outcomes(failed=1)
    hints = [line.partition("hint: ")[2] for line in result.outlines if "hint: " in line]
    assert hints
    assert all(line.startswith(hint) for line in hints)


@pytest.mark.parametrize("recipe", RIGHT)
def test_an_unrelated_fault_is_not_blamed_on_a_rounding(project: Project, recipe: str) -> None:
    result = project.run(HOST, f"{install(project, recipe, UNRELATED[recipe])}[base]")
    result.assert_outcomes(failed=1)
    assert "are not equal bit for bit" in result.stdout.str()
    assert "is not rounded" not in result.stdout.str()


def test_kernels_that_are_switched_off_turn_a_run_red(project: Project) -> None:
    """Naming the cells that should have launched."""
    test = install(project, "adaln")
    project.setenv("FUSIONGATE_DISABLE", "1")
    result = project.run(HOST, f"{test}[base]", f"{test}[fp16]", f"{test}[grad]")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert Project.summary(result)[-1] == (
        "red: no kernel was launched, and 2 cells had to launch one: adaln[base], adaln[fp16]; "
        "is FUSIONGATE_DISABLE set, or a declines too strict?"
    )


def test_a_declines_made_too_strict_by_one_condition_is_red(project: Project) -> None:
    """By what must fuse, without any table."""
    test = install(project, "adaln")
    path = project.path / "test_adaln.py"
    strict = "fused=kernel, declines=lambda x, scale, shift: None if scale.is_contiguous() else 'stride')"
    path.write_text(path.read_text().replace("fused=kernel)", strict))
    result = project.run(HOST, f"{test}[base]", f"{test}[strided-unbind-4d]")
    result.assert_outcomes(passed=1, failed=1)
    assert "must fuse, but declined: stride" in result.stdout.str()
