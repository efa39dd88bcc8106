"""A call's way is found once: kept by call key, and given up where too many are kept."""

from __future__ import annotations

from typing import Any

import torch

from fusiongate.gate.policies import Policy
from fusiongate.gate.routing import Router
from fusiongate.gate.signatures import call_key
from fusiongate.gate.spec import FusionSpec
from fusiongate.gate.states import Gate, Slot

from .planted import chain, right, rows


def router(policy: Policy = Policy(), **options: Any) -> Router:  # noqa: B008  # frozen
    spec = FusionSpec(**{"name": "op", "reference": chain, "fused": right, "policy": policy, **options})
    return Router(Gate("op", policy), spec)


def test_the_same_call_has_the_same_slot() -> None:
    ways, args = router(), rows()
    first = ways.find(("a key",), args)

    assert isinstance(first, Slot)
    assert first is ways.find(("another key",), args)
    assert {("a key",): first, ("another key",): first} == ways.known


def test_reasons_are_kept_too() -> None:
    ways = router(declines=lambda *args: "rank")

    assert "rank" == ways.find(("a key",), rows())
    assert {("a key",): "rank"} == ways.known


def test_a_full_gate_keeps_no_ways() -> None:
    ways = router(Policy(capacity=1))
    ways.find(("one",), rows(1))

    assert "capacity" == ways.find(("two",), rows(2))
    assert [("one",)] == list(ways.known)


def test_too_many_ways_are_given_up_together() -> None:
    ways = router(Policy(capacity=1))
    for number in range(20):
        ways.find((number,), rows())

    assert [(16,), (17,), (18,), (19,)] == list(ways.known)


def test_a_complex_call_is_looked_at_each_time() -> None:
    """Whether it is lazily conjugated is not in its key."""
    ways = router(reference=lambda z: z)
    z = torch.zeros(2, dtype=torch.complex64)
    key = call_key((z,))

    assert isinstance(ways.find(key, (z,)), Slot)
    assert "tracing" == ways.find(key, (z.conj(),))
    assert {} == ways.known
