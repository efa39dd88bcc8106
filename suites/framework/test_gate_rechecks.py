"""Rechecks tell which call was wrong and which was right last, also when the device is behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusiongate.comparison.contracts import Exact, Ulp
from fusiongate.gate import rechecks
from fusiongate.gate.rechecks import Recheck

from .allocations import Allocations

GOOD, BAD = torch.zeros(3), torch.ones(3)


class Device:
    """Flags that turn up when the test says so, as from a device that is behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: list[tuple[Tensor, Tensor]] = []
        monkeypatch.setattr(rechecks, "_reported", self.report)

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
