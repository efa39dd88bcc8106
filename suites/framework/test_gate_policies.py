"""Policies say which calls are due and refuse what they cannot be made of; rechecks tell which call was wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusiongate.comparison.contracts import Exact, Ulp
from fusiongate.errors import UsageError
from fusiongate.gate import policies
from fusiongate.gate.policies import After, Every, Policy, Recheck, Sampled

from .allocations import Allocations

GOOD, BAD = torch.zeros(3), torch.ones(3)


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


class Device:
    """Flags that turn up when the test says so, as from a device that is behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: list[tuple[Tensor, Tensor]] = []
        monkeypatch.setattr(policies, "_reported", self.report)

    def report(self, differs: Tensor) -> Tensor:
        flag = torch.full((), -1, dtype=torch.int8)
        self.under_way.append((flag, differs))
        return flag

    def catch_up(self, flags: int) -> None:
        for flag, differs in self.under_way[:flags]:
            flag.copy_(differs)
        del self.under_way[:flags]


def test_calls_are_counted_from_one() -> None:
    recheck = Recheck()

    assert [1, 2, 3] == [recheck.count() for _ in range(3)]


def test_on_a_synchronous_device_the_outcome_is_there_at_once() -> None:
    recheck = Recheck()

    recheck.compare(GOOD, GOOD, Exact(), (), 10)
    assert (0, 10) == (recheck.first_wrong(), recheck.last_right)

    recheck.compare(BAD, GOOD, Exact(), (), 20)
    assert (20, 10) == (recheck.first_wrong(), recheck.last_right)


def test_the_contract_decides() -> None:
    recheck = Recheck()
    near = torch.nextafter(BAD, torch.tensor(2.0))

    recheck.compare(near, BAD, Ulp(1), (), 1)
    assert 0 == recheck.first_wrong()

    recheck.compare(near, BAD, Exact(), (), 2)
    assert 2 == recheck.first_wrong()


def test_a_device_that_is_behind_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, recheck = Device(monkeypatch), Recheck()
    for call, actual in ((10, GOOD), (20, GOOD), (30, BAD), (40, BAD)):
        recheck.compare(actual, GOOD, Exact(), (), call)

    assert (0, 0) == (recheck.first_wrong(), recheck.last_right)
    device.catch_up(1)
    assert (0, 10) == (recheck.first_wrong(), recheck.last_right)
    device.catch_up(1)
    assert (0, 20) == (recheck.first_wrong(), recheck.last_right)
    device.catch_up(2)
    assert (30, 20) == (recheck.first_wrong(), recheck.last_right)


def test_comparing_never_waits() -> None:
    with Allocations() as watched:
        Recheck().compare(BAD, GOOD, Exact(), (), 1)

    assert not {"_local_scalar_dense", "nonzero", "is_nonzero"} & set(watched.operators)


def test_a_result_of_another_kind_is_wrong() -> None:
    recheck = Recheck()
    recheck.compare(GOOD.half(), GOOD, Exact(), (), 1)

    assert 1 == recheck.first_wrong()
