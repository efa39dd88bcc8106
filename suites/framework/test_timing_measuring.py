"""Measurements on the CPU: what is refused, retried and noted, and that the kernel is what was timed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusiongate as fg
from fusiongate.errors import TimingError, UsageError
from fusiongate.timing import measuring
from fusiongate.timing.clocks import Clocks
from fusiongate.timing.measuring import host_seconds, measure
from fusiongate.timing.pairing import Settings
from fusiongate.timing.stopwatches import Arm

QUICK = Settings(seconds=0.02, margin=0.5, precision=None)


def reference(x: Tensor) -> Tensor:
    return x * 2


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, call: Callable[[Tensor], Tensor] = reference) -> None:
        self.call = call
        self.launches = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.launches += 1
        return self.call(x)

    def arm(self, **fields: Any) -> Arm:
        return Arm("kernel", self, launches=lambda: self.launches, **fields)


def busy(seconds: float) -> Callable[[Tensor], Tensor]:
    """A kernel that takes that long."""

    def call(x: Tensor) -> Tensor:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return x * 2

    return call


@pytest.fixture
def x() -> Tensor:
    return torch.ones(64)


def test_a_call_of_known_length_reads_as_long_as_it_is(x: Tensor) -> None:
    """By the shortest sample: on a shared machine the others may hold somebody else's time."""
    taken = measure([Arm("eager", busy(2e-4)), Arm("kernel", busy(4e-4))], (x,), settings=QUICK, hot=True)
    assert 2e-4 == pytest.approx(min(taken.arms["eager"].seconds), rel=0.1)
    assert 4e-4 == pytest.approx(min(taken.arms["kernel"].seconds), rel=0.1)
    assert "wall" == taken.timer


def test_a_kernel_that_is_never_launched_is_no_timing(x: Tensor) -> None:
    silent = Arm("kernel", reference, launches=lambda: 0)
    with pytest.raises(TimingError, match=r"^kernel: \d+ calls made 0 launches: expected one or more each"):
        measure([Arm("eager", reference), silent], (x,), settings=QUICK, hot=True)


def test_a_kernel_that_is_launched_at_first_and_then_no_more_is_no_timing(x: Tensor) -> None:
    """A gate that falls back after first sight: the calls that are timed have to launch, each of them."""
    kernel = Counted()
    gated = Arm(
        "kernel", lambda x: kernel(x) if kernel.launches < 2 else reference(x), launches=lambda: kernel.launches
    )
    with pytest.raises(TimingError, match="0 launches"):
        measure([Arm("eager", reference), gated], (x,), settings=QUICK, hot=True)


def test_an_output_that_is_wrong_after_timing_is_no_timing(x: Tensor) -> None:
    kernel = Counted(lambda x: x * 3)
    with pytest.raises(TimingError, match=r"^kernel: its output was wrong after it had been timed"):
        measure([Arm("eager", reference), kernel.arm(contract=fg.Exact())], (x,), settings=QUICK, hot=True)


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x + 1


@pytest.mark.parametrize("contract", [fg.Exact(), (fg.Ulp(4), fg.Exact())], ids=["one", "each its own"])
def test_each_of_several_outputs_is_looked_at_after_timing(x: Tensor, contract: Any) -> None:
    eager = Arm("eager", two)
    measure([eager, Arm("kernel", two, contract=contract)], (x,), settings=QUICK, hot=True)
    wrong = Arm("kernel", lambda x: (x * 2, x + 2), contract=contract)
    with pytest.raises(TimingError, match="wrong after"):
        measure([eager, wrong], (x,), settings=QUICK, hot=True)


def test_several_outputs_that_are_not_written_are_not_taken_from_an_earlier_call(x: Tensor) -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def writes_once(x: Tensor) -> tuple[Tensor, Tensor]:
        kept.append(kept[0] if kept else two(x))
        return kept[0]

    with pytest.raises(TimingError, match="wrong after"):
        measure([Arm("eager", two), Arm("kernel", writes_once, contract=fg.Exact())], (x,), settings=QUICK, hot=True)


def test_an_output_that_is_not_written_is_not_taken_from_an_earlier_call(x: Tensor) -> None:
    """The memory of the outputs is overwritten before the call whose output is compared."""
    kept: list[Tensor] = []

    def writes_once(x: Tensor) -> Tensor:
        if not kept:
            kept.append(x * 2)
        return kept[0]

    with pytest.raises(TimingError, match="wrong after"):
        measure(
            [Arm("eager", reference), Arm("kernel", writes_once, contract=fg.Exact())], (x,), settings=QUICK, hot=True
        )


def test_inputs_rotate_over_memory_of_their_own_when_cold_and_not_when_hot(x: Tensor) -> None:
    for hot, expected in ((True, 1), (False, 512)):
        seen: Counter[int] = Counter()

        def kernel(x: Tensor, seen: Counter[int] = seen) -> Tensor:
            seen[x.data_ptr()] += 1
            return x * 2

        taken = measure([Arm("eager", reference), Arm("kernel", kernel)], (x,), settings=QUICK, hot=hot)
        assert (expected, expected) == (taken.copies, len(seen))
        assert max(seen.values()) - min(seen.values()) <= 1


def test_a_rotation_that_the_caches_still_hold_is_noted(x: Tensor) -> None:
    taken = measure([Arm("eager", reference), Arm("kernel", reference)], (x,), settings=QUICK)
    assert ["not all cold"] == [note.split(":")[0] for note in taken.notes]


def test_an_arm_may_have_inputs_of_its_own(x: Tensor) -> None:
    own = [(torch.zeros(2),), (torch.zeros(3),)]
    sizes: set[int] = set()

    def other(y: Tensor) -> Tensor:
        sizes.add(y.numel())
        return y

    measure([Arm("eager", reference), Arm("copy", other, inputs=own)], (x,), settings=QUICK, hot=True)
    assert {2, 3} == sizes


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Clocks]:
    """The readings that the device will give, the last of them for ever."""
    given = [Clocks(1980, 3201)]

    def read() -> Clocks:
        return given.pop(0) if len(given) > 1 else given[0]

    monkeypatch.setattr(measuring, "clock_reader", lambda device: read)
    return given


def test_a_throttled_measurement_is_begun_again(x: Tensor, readings: list[Clocks]) -> None:
    readings[:] = [Clocks(1980, 3201), Clocks(1200, 3201, ("power brake",)), Clocks(1980, 3201)]
    taken = measure([Arm("eager", reference), Arm("kernel", reference)], (x,), settings=QUICK, hot=True)
    assert 2 == taken.attempts
    assert () == taken.notes
    assert {1980} == {reading.core_mhz for reading in taken.clocks}


def test_throttling_that_does_not_end_is_said(x: Tensor, readings: list[Clocks]) -> None:
    readings[:] = [Clocks(1980, 3201, ("power brake",))]
    taken = measure([Arm("eager", reference), Arm("kernel", reference)], (x,), settings=QUICK, hot=True)
    assert 3 == taken.attempts
    assert ("the device was throttled: power brake, in each of 3 attempts",) == taken.notes


def test_without_retries_a_disturbance_is_said_at_once(x: Tensor, readings: list[Clocks]) -> None:
    readings[:] = [Clocks(1980, 3201), Clocks(1500, 3201)]
    settings = Settings(seconds=0.02, margin=0.5, precision=None, retries=0)
    taken = measure([Arm("eager", reference), Arm("kernel", reference)], (x,), settings=settings, hot=True)
    assert 1 == taken.attempts
    assert ("the core clock moved between 1500 and 1980 MHz",) == taken.notes


def test_the_same_kernel_twice_on_a_cpu_is_not_called_faster_or_slower(x: Tensor) -> None:
    settings = Settings(seconds=0.05, margin=0.1, precision=None)
    arms = [Arm("a", busy(5e-5)), Arm("b", busy(5e-5))]
    outcomes = [str(measure(arms, (x,), settings=settings, hot=True).ratios["b"].outcome) for _ in range(5)]
    assert not {"faster", "slower"} & set(outcomes)


def test_host_time_is_of_one_call(x: Tensor) -> None:
    assert 2e-4 == pytest.approx(host_seconds(Arm("a", busy(2e-4)), (x,), batches=5, calls=3), rel=0.5)


@pytest.mark.parametrize("names", [[], ["eager"], ["eager", "eager"]])
def test_arms_that_cannot_be_told_apart_are_refused(names: list[str], x: Tensor) -> None:
    with pytest.raises(UsageError, match="expected two or more of different names"):
        measure([Arm(name, reference) for name in names], (x,), settings=QUICK)


@pytest.mark.parametrize("args", [(), (1.0,), (torch.empty(2), torch.empty(2, device="meta"))])
def test_arguments_without_one_device_are_refused(args: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match="expected at least one tensor, and all on one device"):
        measure([Arm("eager", reference), Arm("kernel", reference)], args)


def test_a_device_without_a_stopwatch_is_refused() -> None:
    with pytest.raises(UsageError, match="on a CPU or on a GPU that torch calls cuda"):
        measure([Arm("eager", reference), Arm("kernel", reference)], (torch.empty(2, device="meta"),))
