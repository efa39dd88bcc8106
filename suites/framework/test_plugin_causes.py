"""Failures of one diagnosis are one cause."""

from __future__ import annotations

from fusiongate.plugin.causes import cause_of, causes

MESSAGE = """silu_mul[{cell}], call 2 of 3
  happened: 1 × reference (refused), no launch
  expected: 1 × fused (verified)
  refused: {count} of 4,224 elements are not equal bit for bit (reason: bits), at most 1 ULP apart
{hint}  run: pytest"""

HINT = "  hint: `silu(x)` is not rounded to bfloat16 before it is used\n"


def red(cell: str, count: str = "1,127", hint: str = "") -> dict[str, str]:
    return {"id": cell, "message": MESSAGE.format(cell=cell, count=count, hint=hint)}


def test_the_hint_is_the_cause() -> None:
    assert "`silu(x)` is not rounded to bfloat16 before it is used" == cause_of(red("base", hint=HINT)["message"])


def test_without_a_hint_the_gates_reason_stands_with_what_happened() -> None:
    cause = "1 × reference (refused), no launch, for bits; expected 1 × fused (verified)"
    assert cause == cause_of(red("base")["message"])


def test_a_message_of_another_form_is_known_by_its_first_line() -> None:
    assert "ValueError: boom" == cause_of("ValueError: boom\n  at line 3")


def test_causes_are_grouped_whatever_their_numbers_and_the_largest_comes_first() -> None:
    one, two, three = red("a"), red("b", hint=HINT), red("c", "9", hint=HINT)
    found = causes([one, two, three])

    assert [(2, two, (three,)), (1, one, ())] == [(cause.count, cause.first, cause.others) for cause in found]


def test_what_differs_in_more_than_numbers_is_another_cause() -> None:
    other = {"id": "d", "message": red("d")["message"].replace("reason: bits", "reason: overrun")}
    assert 2 == len(causes([red("a"), other]))


def test_a_row_without_a_message_is_known_by_its_reason() -> None:
    assert ["stride"] == [cause.diagnosis for cause in causes([{"message": None, "reason": "stride"}])]
