"""Three downstream repositories gate a kernel of their own in a dozen lines, and learn which rounding it lacks.

They run as their owners would run them: outside the checkout, in an environment that has the built wheel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
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


def copy_out(project: Project, recipe: str, kernel: str | None = None, name: str | None = None) -> str:
    """Write a recipe into the project, with another kernel if one is given; return the node id of its test."""
    source = recipe_file(recipe).read_text(encoding="utf-8")
    assert source.count(RIGHT[recipe]) == 1
    file = project.write(f"test_{name or recipe}.py", source.replace(RIGHT[recipe], kernel or RIGHT[recipe]))
    return f"{file.name}::test_{recipe}"


@pytest.fixture
def run_from_the_wheel(project: Project, python_with_the_wheel: Path) -> Callable[..., pytest.RunResult]:
    """Run pytest in the project, and see that the wheel's fusiongate is what runs."""
    project.write(
        "conftest.py",
        "import fusiongate\n\n\ndef pytest_report_header():\n    return f'imported: {fusiongate.__file__}'\n",
    )

    def run(*arguments: str) -> pytest.RunResult:
        result = project.run(HOST, *arguments, python=python_with_the_wheel)
        [imported] = [line.removeprefix("imported: ") for line in result.outlines if line.startswith("imported: ")]
        assert Path(imported).is_relative_to(python_with_the_wheel.parents[1])
        return result

    return run


@pytest.mark.parametrize("recipe", RIGHT)
def test_a_recipe_is_short_and_needs_nothing_beside_it(recipe: str) -> None:
    file = recipe_file(recipe)
    assert [path for path in file.parent.rglob("*") if "__pycache__" not in path.parts] == [file]
    code = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(code) <= 15


def test_right_kernels_pass_their_whole_matrices(
    project: Project, run_from_the_wheel: Callable[..., pytest.RunResult]
) -> None:
    """All three in one run, on two workers: what comes of a cell does not depend on the process.

    But for what a compiler takes seconds for: `nox -s suite` runs that too.
    """
    for recipe in RIGHT:
        copy_out(project, recipe)
    result = run_from_the_wheel("-n", "2", "-k", "not compile")
    assert result.ret == pytest.ExitCode.OK
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed", "skipped"}
    cells = Counter(row.subject for row in project.rows("cell"))
    assert set(cells) == set(RIGHT)
    assert cells.total() == sum(outcomes.values())
    counted = {line.split()[0]: line.split() for line in Project.summary(result)[1:4]}
    for recipe in RIGHT:
        _, fused, *_, not_run, red = counted[recipe]
        assert red == "0"
        assert int(fused) > 100
        assert cells[recipe] - int(not_run) > 250


def test_a_missing_rounding_is_named_and_another_fault_is_not_blamed_on_one(
    project: Project, run_from_the_wheel: Callable[..., pytest.RunResult]
) -> None:
    tests = {}
    for recipe, (kernel, _) in ROUNDINGS.items():
        rounding = f"{copy_out(project, recipe, kernel, f'rounding_of_{recipe}')}[base]"
        fault = f"{copy_out(project, recipe, UNRELATED[recipe], f'fault_of_{recipe}')}[base]"
        tests[recipe] = rounding, fault
    result = run_from_the_wheel("-v", *chain.from_iterable(tests.values()))
    assert result.parseoutcomes() == {"failed": 6}
    told = {row.payload["test"]: row.payload["message"] for row in project.rows("cell")}
    for recipe, (rounding, fault) in tests.items():
        hints = [line.partition("hint: ")[2] for line in told[rounding].splitlines() if "hint: " in line]
        assert hints
        assert all(line.startswith(ROUNDINGS[recipe][1]) for line in hints)
        assert f"hint: {hints[0]}" in result.stdout.str()
        assert "are not equal bit for bit" in told[fault]
        assert "rounded" not in told[fault]


def test_kernels_that_are_switched_off_turn_a_run_red(project: Project) -> None:
    """Naming the cells that should have launched."""
    test = copy_out(project, "adaln")
    project.setenv("FUSIONGATE_DISABLE", "1")
    result = project.run(HOST, f"{test}[base]", f"{test}[fp16]", f"{test}[grad]")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert Project.summary(result)[-1] == (
        "red: no kernel was launched, and 2 cells had to launch one: adaln[base], adaln[fp16]; "
        "is FUSIONGATE_DISABLE set, or a declines too strict?"
    )


def test_a_declines_made_too_strict_by_one_condition_is_red(project: Project) -> None:
    """By what must fuse, without any table."""
    test = copy_out(project, "adaln")
    path = project.path / "test_adaln.py"
    strict = "fused=kernel, declines=lambda x, scale, shift: None if scale.is_contiguous() else 'stride')"
    path.write_text(path.read_text().replace("fused=kernel)", strict))
    result = project.run(HOST, f"{test}[base]", f"{test}[strided-unbind-4d]")
    result.assert_outcomes(passed=1, failed=1)
    assert "must fuse, but declined: stride" in result.stdout.str()


KINDS = {
    "gather_scale": {
        "mul(factor)": {
            "mul(0.25)": "elements",
            "mul(table.new_tensor(factor, dtype=torch.float16))": "elements",
        },
        "index.flatten()": {"index.flatten().roll(1)": "elements"},
    },
    "qk_norm_rope": {
        "for x in (q, k))\n    return tuple(x.mul": {"for x in (q, q))\n    return tuple(x.mul": "output 2 of 2"},
        "torch.cat([-x.chunk": {"torch.cat([x.chunk": "output 1 of 2"},
        "-1).mul(sin)) for": {"-1).mul(cos)) for": "output 1 of 2"},
    },
    "add_rms_norm": {
        "torch.add(residual, x, out=residual)": {"residual = residual + x": "`residual`, which is written"},
        "weight, eps)\n\n\nop": {
            "None, eps)\n\n\nop": "elements",
            "weight, 10 * eps + 1e-3)\n\n\nop": "elements",
        },
    },
}
"""Kernels of other kinds, with an index and a number, with two outputs, with a written argument: three faults each, as
the code that is replaced and what replaces it, and what the failure has to name."""

TELLING = "base or fp16 or make-fx or nan-inf or permuted or refused"


def test_kernels_with_indices_several_outputs_and_written_arguments_pass(
    project: Project, run_from_the_wheel: Callable[..., pytest.RunResult]
) -> None:
    for recipe in KINDS:
        project.write(f"test_{recipe}.py", recipe_file(recipe).read_text(encoding="utf-8"))
    result = run_from_the_wheel("-k", f"({TELLING}) and not compile")
    assert result.ret == pytest.ExitCode.OK
    assert {"gather_scale", "qk_norm_rope", "add_rms_norm"} == {row.subject for row in project.rows("cell")}
    assert all(row.payload["outcome"] != "red" for row in project.rows("cell"))


def test_each_of_three_faults_in_them_is_one_cause(
    project: Project, run_from_the_wheel: Callable[..., pytest.RunResult]
) -> None:
    named = {}
    for recipe, faults in KINDS.items():
        source = recipe_file(recipe).read_text(encoding="utf-8")
        planted = [(right, wrong, told) for right, wrongs in faults.items() for wrong, told in wrongs.items()]
        assert 3 == len(planted)
        for number, (right, wrong, told) in enumerate(planted):
            assert source.count(right) == 1, right
            project.write(f"test_{recipe}_{number}.py", source.replace(right, wrong))
            named[f"test_{recipe}_{number}.py::test_{recipe}[base]"] = told
    result = run_from_the_wheel("-v", *named)
    assert {"failed": 9} == result.parseoutcomes()
    messages = {row.payload["test"]: row.payload["message"] for row in project.rows("cell")}
    assert [test for test, told in named.items() if told not in messages[test]] == []
