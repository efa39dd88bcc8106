"""Policies say which calls are due, and refuse what they cannot be made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fusiongate.errors import UsageError
from fusiongate.gate.policies import After, Every, Policy, Sampled


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Every(0), "Every(0): expected a whole number of calls, at least 1"),
        (lambda: Every(True), "Every(True): expected a whole number of calls, at least 1"),
        (lambda: Every(1.5), "Every(1.5): expected a whole number of calls, at least 1"),  # type: ignore[arg-type]
        (lambda: Sampled(0), "Sampled(0): expected a share of the calls, above 0 and at most 1"),
        (lambda: Sampled(1.01), "Sampled(1.01): expected a share of the calls, above 0 and at most 1"),
        (lambda: Sampled(True), "Sampled(True): expected a share of the calls, above 0 and at most 1"),
        (After, "After(): expected seconds=, calls= or both"),
        (lambda: After(seconds=0), "After(seconds=0): expected a positive number"),
        (lambda: After(calls=-1), "After(calls=-1): expected a positive number"),
        (lambda: Policy(scope="module"), "Policy(scope='module'): expected 'signature' or 'process'"),  # type: ignore[arg-type]
        (lambda: Policy(capacity=0), "Policy(capacity=0): expected a whole number, at least 1"),
        (lambda: Policy(recheck=5), "Policy(recheck=5): expected Every(n), Sampled(share) or None"),  # type: ignore[arg-type]
        (lambda: Policy(recover=5), "Policy(recover=5): expected After(seconds=, calls=) or None"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_policy_says_what_is_expected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        make()

    assert message == str(raised.value)


def test_every_looks_at_each_nth_call() -> None:
    assert [3, 6, 9] == [call for call in range(1, 11) if Every(3).due(call)]
    assert all(Every(1).due(call) for call in range(1, 5))


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 1.0])
def test_sampled_looks_at_its_share(share: float) -> None:
    looked_at = sum(Sampled(share).due(call) for call in range(1, 50_001))

    assert share == pytest.approx(looked_at / 50_000, rel=0.3)


def test_sampled_keeps_no_state_and_follows_no_period() -> None:
    """Two gates under one policy look at the same calls, and a program that repeats itself is looked at everywhere."""
    calls = [call for call in range(1, 20_000) if Sampled(0.05).due(call)]

    assert calls == [call for call in range(1, 20_000) if Sampled(0.05).due(call)]
    assert set(range(28)) == {call % 28 for call in calls}
