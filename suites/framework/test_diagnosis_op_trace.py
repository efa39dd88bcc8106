"""A reference as a program of operators: what is recorded of it, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.diagnosis.expressions import ATOM, Expression, expression_of, shortened
from fusiongate.diagnosis.op_trace import NotReplayable, parameter_names, record
from fusiongate.diagnosis.roundings import rounding_variants


def of_many(x: Tensor, *rows: Tensor, scale: float = 1.0, **others: object) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("reference", "number", "expected"),
    [
        (of_many, 3, ["x", "rows[0]", "rows[1]"]),
        (of_many, 1, ["x"]),
        # A builtin has no signature.
        (torch.add, 2, ["args[0]", "args[1]"]),
        (lambda x: x, 2, ["x", "args[1]"]),
    ],
)
def test_arguments_are_called_as_the_reference_calls_them(
    reference: Callable[..., Tensor], number: int, expected: list[str]
) -> None:
    assert expected == parameter_names(reference, number)


def writes_where_it_is_told(x: Tensor) -> Tensor:
    return torch.add(x, x, out=torch.empty_like(x))


def writes_to_its_argument(x: Tensor) -> Tensor:
    return x.mul_(2)


def writes_to_a_view(x: Tensor) -> Tensor:
    doubled = 2 * x
    doubled[0].add_(1)
    return doubled


def reads_back(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x


def gives_two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3


def never_ends(x: Tensor) -> Tensor:
    for _ in range(201):
        x = x + 1
    return x


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (writes_where_it_is_told, "add writes to an argument"),
        (writes_to_its_argument, "mul_ writes to memory that another tensor shares"),
        (writes_to_a_view, "add_ writes to memory that another tensor shares"),
        (reads_back, "aten._local_scalar_dense.default returns no tensor, so that its value may steer the reference"),
        (gives_two, "the reference returns no tensor that it made"),
        (never_ends, "the reference has more than 200 operators"),
    ],
)
def test_what_no_straight_line_program_repeats(reference: Callable[..., Any], expected: str) -> None:
    with pytest.raises(NotReplayable) as raised:
        record(reference, [torch.ones(2, 4)])
    assert expected == str(raised.value)


def test_who_uses_a_result_is_seen_through_what_only_hands_it_on() -> None:
    def chain(x: Tensor) -> Tensor:
        return (x * x).view(-1)[None] + 1

    program = record(chain, [torch.ones(2, 4)])
    assert ["mul", "view", "unsqueeze", "add"] == [step.name for step in program.steps]
    assert ["add"] == [step.name for step in program.consumers(0)]


def test_text_that_doubles_each_time_is_not_kept() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(12):
            x = x * x
        return x

    texts = [step.expression for step in record(chain, [torch.ones(2)]).steps]
    assert "x * x" == texts[0]
    assert "…" in texts
    assert max(map(len, texts)) <= 1000


def test_long_text_is_cut_in_its_middle() -> None:
    text = "a" * 70 + "b" * 70
    assert "a" * 48 + " … " + "b" * 48 == shortened(text)
    assert text[:100] == shortened(text[:100])
    assert "a" * 48 + " … " + "b" * 48 == Expression("a" * 1000 + "b" * 1001, ATOM).text


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("_to_copy", (), {"dtype": torch.float32}, "x.float()"),
        ("_to_copy", (), {"dtype": torch.bfloat16}, "x.to(bfloat16)"),
        # Another device or another memory format is the same value.
        ("_to_copy", (), {"device": torch.device("cpu")}, "x"),
        ("slice", (1, 0, 9223372036854775807), {}, "x"),
        ("slice", (1, 2, 9223372036854775807), {}, "x[:, 2:]"),
        ("slice", (0, 0, 8, 2), {}, "x[:8:2]"),
        ("select", (-1, 3), {}, "x[..., 3]"),
        ("sub", (2.0,), {}, "x - 2"),
        ("rsub", (1,), {}, "1 - x"),
        ("add", (0.5,), {"alpha": 2}, "add(x, 0.5, alpha=2)"),
        ("div", (3,), {"rounding_mode": "floor"}, "div(x, 3, rounding_mode='floor')"),
        ("mul", (1e-6,), {}, "eps * x"),
    ],
)
def test_a_call_as_its_author_may_have_written_it(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], expected: str
) -> None:
    assert expected == expression_of(name, [Expression("x", ATOM), *args], kwargs, {1e-6: "eps"}).text


def test_products_that_are_added_may_all_be_contracted() -> None:
    def chain(x: Tensor, y: Tensor) -> Tensor:
        return (x * x + y) + y * y

    sentences = [variant.sentence for variant in rounding_variants(record(chain, [torch.ones(2), torch.ones(2)]))]
    assert "every product is contracted into the add that follows it (fused multiply-add)" in sentences
