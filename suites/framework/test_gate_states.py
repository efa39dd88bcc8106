"""The gate's own states, without any tensor: verdicts, refusals, recovery and capacity."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fusiongate.gate.policies import After, Policy
from fusiongate.gate.states import Gate, Reason, State

ONE, TWO, THREE = ("one",), ("two",), ("three",)


class Clock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def slot_of(gate: Gate, signature: tuple[str, ...]) -> Any:
    slot = gate.slot(signature)
    assert slot is not None
    return slot


def kinds(gate: Gate) -> list[str]:
    return [event.kind for event in gate.events]


def test_a_signature_begins_unseen() -> None:
    gate = Gate("op", Policy())

    assert State.UNSEEN == gate.state(ONE)
    assert gate.peek(ONE) is None
    assert slot_of(gate, ONE) is gate.peek(ONE)
    assert State.UNSEEN == gate.state(ONE)
    assert [ONE] == gate.signatures


def test_a_verdict_is_for_one_signature() -> None:
    gate = Gate("op", Policy())

    gate.verify(slot_of(gate, ONE), "equal")
    gate.refuse(slot_of(gate, TWO), Reason.REFUSED, "other bits")

    assert (State.VERIFIED, State.REFUSED, State.UNSEEN) == (gate.state(ONE), gate.state(TWO), gate.state(THREE))
    assert ["verified", "refused"] == kinds(gate)
    assert ["verified: equal", "refused: other bits"] == [str(event) for event in gate.events]
    assert [ONE, TWO] == [event.signature for event in gate.events]


def test_a_refusal_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("op", Policy())
    slot = slot_of(gate, ONE)

    gate.refuse(slot, Reason.REFUSED, "other bits")
    gate.refuse(slot, Reason.REFUSED, "again other bits")

    assert [("fusiongate", logging.WARNING, "op: other bits")] == caplog.record_tuples


def test_a_quiet_refusal_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("op", Policy())
    with caplog.at_level(logging.DEBUG):
        gate.refuse(slot_of(gate, ONE), Reason.REFUSED, "other bits", quiet=True)

    assert [logging.DEBUG] == [record.levelno for record in caplog.records]


def test_a_kernel_that_cannot_be_built_is_said_once_for_all_signatures(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("op", Policy())
    for signature in (ONE, TWO, THREE):
        gate.refuse(slot_of(gate, signature), Reason.NO_KERNEL, "no compiler")

    assert ["op: no compiler"] == caplog.messages
    assert [Reason.NO_KERNEL] * 3 == [slot_of(gate, signature).reason for signature in (ONE, TWO, THREE)]


def test_scope_process_refuses_everything_from_then_on() -> None:
    gate = Gate("op", Policy(scope="process"))
    gate.verify(slot_of(gate, ONE), "equal")

    gate.refuse(slot_of(gate, TWO), Reason.REFUSED, "other bits")

    assert [State.REFUSED] * 3 == [gate.state(ONE), gate.state(TWO), gate.state(THREE)]
    assert State.REFUSED == slot_of(gate, THREE).state


def test_a_gate_at_capacity_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("op", Policy(capacity=2))

    slots = [gate.slot((str(number),)) for number in range(10_000)]

    assert 2 == sum(slot is not None for slot in slots)
    assert 2 == len(gate.signatures)
    assert ["capacity"] == kinds(gate)
    assert 1 == len(caplog.messages)
    assert "op: holds 2 signatures and takes no more" in caplog.messages[0]
    assert "Policy(capacity=…)" in caplog.messages[0]


def test_recovery_by_calls() -> None:
    gate = Gate("op", Policy(recover=After(calls=3)))
    slot = slot_of(gate, ONE)
    gate.refuse(slot, Reason.REFUSED, "other bits")

    assert [False, False, True] == [gate.recovers(slot) for _ in range(3)]
    assert State.UNSEEN == gate.state(ONE)
    assert ["refused", "recovering"] == kinds(gate)


def test_recovery_by_seconds() -> None:
    clock = Clock()
    gate = Gate("op", Policy(recover=After(seconds=60)), clock)
    slot = slot_of(gate, ONE)
    gate.refuse(slot, Reason.REFUSED, "other bits")

    clock.now += 59.9
    before = gate.recovers(slot)
    clock.now += 0.1

    assert (False, True) == (before, gate.recovers(slot))


def test_recovery_by_whichever_comes_first() -> None:
    clock = Clock()
    gate = Gate("op", Policy(recover=After(seconds=60, calls=2)), clock)
    one, two = slot_of(gate, ONE), slot_of(gate, TWO)
    gate.refuse(one, Reason.REFUSED, "other bits")
    gate.refuse(two, Reason.REFUSED, "other bits")

    by_calls = [gate.recovers(one), gate.recovers(one)]
    clock.now += 61

    assert ([False, True], True) == (by_calls, gate.recovers(two))


def test_a_second_refusal_waits_as_long_as_the_first() -> None:
    gate = Gate("op", Policy(recover=After(calls=2)))
    slot = slot_of(gate, ONE)

    rounds = []
    for _ in range(3):
        gate.refuse(slot, Reason.REFUSED, "other bits")
        rounds.append([gate.recovers(slot), gate.recovers(slot)])

    assert [[False, True]] * 3 == rounds


def test_without_recovery_a_refusal_is_for_good() -> None:
    gate = Gate("op", Policy())
    slot = slot_of(gate, ONE)
    gate.refuse(slot, Reason.REFUSED, "other bits")

    assert not any(gate.recovers(slot) for _ in range(1000))


def test_recovery_in_scope_process_lets_new_signatures_in_again() -> None:
    gate = Gate("op", Policy(scope="process", recover=After(calls=1)))
    slot = slot_of(gate, ONE)
    gate.refuse(slot, Reason.REFUSED, "other bits")

    gate.recovers(slot)

    assert (State.UNSEEN, State.UNSEEN) == (gate.state(ONE), gate.state(TWO))


def test_whoever_keeps_verdicts_is_told_before_they_change() -> None:
    gate = Gate("op", Policy(scope="process"))
    states: list[State] = []
    gate.on_withdrawal = lambda: states.append(gate.state(ONE))
    slot = slot_of(gate, ONE)

    gate.verify(slot, "equal")
    gate.withdraw(slot)
    gate.verify(slot, "equal")
    gate.refuse(slot_of(gate, TWO), Reason.REFUSED, "other bits")

    assert [State.UNSEEN, State.VERIFIED] == states[:2]
    assert State.REFUSED == gate.state(ONE)


def test_the_last_thousand_events_are_kept() -> None:
    gate = Gate("op", Policy())
    for number in range(1200):
        gate.record("out-of-memory", ONE, str(number))

    assert ["200", "1199"] == [gate.events[0].message, gate.events[-1].message]
    assert 1000 == len(gate.events)
