"""Failures of one diagnosis are one cause."""

from __future__ import annotations

import pytest

from fusiongate.plugin.causes import Cause, cause_of, causes

from .observing import cell, prepare
from .projects import Project

MESSAGE = """silu_mul[{cell}], call 2 of 3
  happened: 1 × reference (refused), no launch
  expected: 1 × fused (verified)
  refused: {count} of 4,224 elements are not equal bit for bit (reason: bits), at most 1 ULP apart
{hint}  run: pytest"""

HINT = "  hint: `silu(x)` is not rounded to bfloat16 before it is used\n"


def red(cell: str, count: str = "1,127", hint: str = "") -> dict[str, str]:
    return {"id": cell, "message": MESSAGE.format(cell=cell, count=count, hint=hint)}


def message(payload: dict[str, str]) -> str:
    return payload["message"]


def test_the_hint_is_the_cause() -> None:
    assert "`silu(x)` is not rounded to bfloat16 before it is used" == cause_of(red("base", hint=HINT)["message"])


def test_without_a_hint_the_gates_reason_stands_with_what_happened() -> None:
    cause = "1 × reference (refused), no launch, for bits; expected 1 × fused (verified)"
    assert cause == cause_of(red("base")["message"])


def test_a_message_of_another_form_is_known_by_its_first_line() -> None:
    assert "ValueError: boom" == cause_of("ValueError: boom\n  at line 3")


def test_causes_are_grouped_whatever_their_numbers_and_the_largest_comes_first() -> None:
    one, two, three = red("a"), red("b", hint=HINT), red("c", "9", hint=HINT)
    found = causes([one, two, three], message)

    assert [(2, two, (three,)), (1, one, ())] == [(cause.count, cause.first, cause.others) for cause in found]


def test_what_differs_in_more_than_numbers_is_another_cause() -> None:
    other = {"id": "d", "message": red("d")["message"].replace("reason: bits", "reason: overrun")}
    assert 2 == len(causes([red("a"), other], message))


def test_a_cause_says_how_many_it_has() -> None:
    assert ["boom", "3 × boom"] == [str(Cause("boom", 1, ())), str(Cause("boom", 1, (2, 3)))]


RED = """
import pytest
import torch.nn.functional as F
import fusiongate as fg

def kernel(x, y):
    return (F.silu(x.float()) * y.float()).to(x.dtype)

op = fg.Fusion("silu_mul", reference=lambda x, y: F.silu(x) * y, fused=kernel)

@pytest.mark.fusion_matrix(op, inputs={"x": "B S D", "y": "B S D"}, sizes=[{"B": 2, "S": 33, "D": 64}])
def test_silu_mul(fusion_case):
    fusion_case.check()

def test_other():
    assert 1 == 2
"""


TRACED = "compiling or deterministic or dispatch or fake or functorch or jit or make or meta or vmap"
FEW = f"(base or sliced or permuted or test_other) and not ({TRACED})"
"""Without what loads a compiler."""


def told_once_in_few_lines(result: pytest.RunResult) -> None:
    told = [line for line in result.outlines if "`silu(x)` is not rounded to " in line]
    summary = [line for line in result.outlines if line.startswith("FAILED ")]
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert 1 == sum(line.startswith("E ") for line in told)
    assert 2 == len(summary)
    assert 1 == sum("× `silu(x)` is not" in line for line in summary)
    assert any(line.startswith("  ") and "× `silu(x)` is not rounded" in line and "more" in line for line in told)
    assert " same cause" in result.outlines[-1]
    # A rounding that is missing everywhere fits on a screen, beside what else is wrong.
    assert len(result.outlines) < 100


def test_one_fault_is_told_once_in_few_lines(project: Project) -> None:
    project.write("test_red.py", RED)
    told_once_in_few_lines(project.run("-k", FEW, "test_red.py"))


OBSERVED = """
@pytest.mark.parametrize("number", range(12))
def test_cell(observe, number):
    message = {message!r}.replace("NUMBER", str(number))
    observe(**{cell} | {{"id": f"c{{number}}", "message": message}})
    raise AssertionError(message)
"""


def test_workers_tell_of_one_fault_once(project: Project) -> None:
    """Whichever of them saw it first; what they send needs no kernel, which each would load torch for."""
    body = OBSERVED.format(message=red("NUMBER", hint=HINT)["message"], cell=cell(outcome="red"))
    prepare(project, body, other="assert 1 == 2")
    told_once_in_few_lines(project.run("-n", "2"))


def test_every_failure_is_told_on_request(project: Project) -> None:
    project.write("test_red.py", RED)
    result = project.run("-v", "-k", FEW, "test_red.py")

    assert 10 < sum(line.startswith("E ") and "hint:" in line for line in result.outlines)
    assert " same cause" not in result.outlines[-1]
