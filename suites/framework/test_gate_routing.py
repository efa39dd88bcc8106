"""A call's way is found once: kept by call key, and given up where too many are kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusiongate.gate.policies import Policy
from fusiongate.gate.routing import Router
from fusiongate.gate.signatures import call_key
from fusiongate.gate.states import Gate, Slot

from .planted import chain, rows


def router(policy: Policy | None = None) -> Router:
    return Router(Gate("op", policy or Policy()), chain, None)


def accepts(*args: Tensor) -> str | None:
    return None


def test_the_same_call_has_the_same_slot() -> None:
    ways, args = router(), rows()
    first = ways.find(("a key",), args, accepts)

    assert isinstance(first, Slot)
    assert first is ways.find(("another key",), args, accepts)
    assert {("a key",): first, ("another key",): first} == ways.known


def test_reasons_are_kept_too() -> None:
    ways = router()

    assert "rank" == ways.find(("a key",), rows(), lambda *args: "rank")
    assert {("a key",): "rank"} == ways.known


def test_a_full_gate_keeps_no_ways() -> None:
    ways = router(Policy(capacity=1))
    ways.find(("one",), rows(1), accepts)

    assert "capacity" == ways.find(("two",), rows(2), accepts)
    assert [("one",)] == list(ways.known)


def test_too_many_ways_are_given_up_together() -> None:
    ways = router(Policy(capacity=1))
    for number in range(20):
        ways.find((number,), rows(), accepts)

    assert [(16,), (17,), (18,), (19,)] == list(ways.known)


def test_a_complex_call_is_looked_at_each_time() -> None:
    """Whether it is lazily conjugated is not in its key."""
    ways = Router(Gate("op", Policy()), lambda z: z, None)
    z = torch.zeros(2, dtype=torch.complex64)
    key = call_key((z,))

    assert isinstance(ways.find(key, (z,), accepts), Slot)
    assert "tracing" == ways.find(key, (z.conj(),), accepts)
    assert {} == ways.known


@pytest.mark.parametrize(
    "args, named, expected",
    [
        ((1, 2), {}, (1, 2)),
        ((1,), {"b": 2}, (1, 2)),
        ((), {"b": 2, "a": 1}, (1, 2)),
        ((1, 2), {"d": 5}, (1, 2, 3, 5)),
        ((1, 2), {"c": 9}, (1, 2, 9)),
    ],
)
def test_named_arguments_take_their_places(
    args: tuple[int, ...], named: dict[str, int], expected: tuple[int, ...]
) -> None:
    def reference(a: int, b: int, c: int = 3, d: int = 4) -> Tensor:
        raise AssertionError("called")

    assert expected == Router(Gate("op", Policy()), reference, None).positional(args, named)
