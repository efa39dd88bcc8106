"""A measurement: arms side by side on one device, checked to have launched, to be undisturbed, and to stay right."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fusiongate.diagnosis.hints import compare
from fusiongate.errors import TimingError, UsageError
from fusiongate.gate.device_state import wait_for

from . import cold_cache as rotation
from .clocks import Clocks, clock_reader, disturbance
from .gpu_stopwatches import EventStopwatch, GraphStopwatch
from .intervals import Interval, Ratio, median_interval
from .pairing import Paired, Schedule, Settings, orders, pair
from .stopwatches import Arm, Stopwatch, WallStopwatch

__all__ = ["ArmTimes", "Measurement", "Timer", "common_device", "host_seconds", "measure"]

Timer = Literal["auto", "graph", "events"]

_WARM_UP_S = 0.02
"""How long the arms run unmeasured after everything is in place, in seconds: the clocks rise under load."""

_COMPARED = 8
"""The outputs of an arm that are compared after timing, spread over the sets of inputs."""


@dataclass(frozen=True, slots=True)
class ArmTimes:
    """The times of one arm."""

    name: str
    """The arm's name."""
    seconds: tuple[float, ...]
    """The device time of one call in each sample, in seconds."""
    median: Interval
    """The median of them with its interval, at the settings' confidence."""
    calls: int
    """The calls in one sample."""
    launches: int | None
    """The launches counted while the arm was captured or run; None for an arm that counts none."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came of measuring arms side by side."""

    arms: Mapping[str, ArmTimes]
    """The arms by name, the reference first."""
    ratios: Mapping[str, Ratio]
    """The ratio of each arm but the reference to it."""
    timer: str
    """``graph``, ``events`` or ``wall``."""
    hot: bool
    """Whether the caches were left warm."""
    copies: int
    """The sets of inputs in rotation."""
    bytes_moved: int
    """The bytes that one call has to move at least."""
    attempts: int
    """How often the measurement was begun."""
    notes: tuple[str, ...]
    """What a reader has to know: a disturbed device, a host too slow, a cache too large to be cold."""
    clocks: tuple[Clocks, ...]
    """The readings before and after each look at the data; empty where no library gives any."""
    elapsed_s: float
    """The time that the samples of the last attempt took, in seconds."""


def measure(
    arms: Sequence[Arm],
    args: tuple[Any, ...],
    *,
    settings: Settings | None = None,
    timer: Timer = "auto",
    hot: bool = False,
    coin: random.Random | None = None,
) -> Measurement:
    """Measure arms side by side on the device of their arguments.

    Each arm is called a few times first, which covers compilation. Then all of them are sampled in pairs, see
    :mod:`fusiongate.timing.pairing`; afterwards the outputs of arms with a contract are compared with the first arm's.

    Parameters
    ----------
    arms
        At least two; the first is the reference, and no two share a name.
    args
        The arguments of one call, with at least one tensor; all tensors on one device.
    settings
        Time, margin, confidence.
    timer
        On a GPU, ``graph`` or ``events``; ``auto`` captures where that is possible. A CPU has wall time only.
    hot
        Use the same inputs for every call, so that what fits the caches is found there.
    coin
        Draws the orders.

    Raises
    ------
    UsageError
        The arms or arguments cannot be measured together.
    TimingError
        A counted arm launched too little, or an output was wrong after timing.
    """
    settings = settings or Settings()
    _check_arms(arms)
    device = common_device(args)
    cache = 0 if hot else rotation.cache_bytes(device)
    with torch.no_grad():
        moved = rotation.bytes_moved(args, arms[0].call(*args))
    copies = 1 if hot else rotation.copies_needed(moved, cache)
    before = _launches(arms)
    with torch.no_grad():
        watch = _stopwatch(arms, rotation.rotation(args, copies), device, timer)
        taken = _checked(watch, arms, settings, device, coin or random.Random())
    launched = [after - start for start, after in zip(before, _launches(arms), strict=True)]
    notes = [taken.note()] if taken.disturbance else []
    if moved * copies < cache:
        notes.insert(0, f"not all cold: {copies} sets of inputs hold {moved * copies} bytes, and the caches {cache}")
    if watch.host_bound:
        notes.append("the device waited for the host in some samples")
    return Measurement(
        arms={
            arm.name: _times(arm, taken.paired, number, watch.calls[number], launched[number], settings)
            for number, arm in enumerate(arms)
        },
        ratios={arms[number].name: ratio for number, ratio in taken.paired.ratios.items()},
        timer=watch.kind,
        hot=hot,
        copies=copies,
        bytes_moved=moved,
        attempts=taken.number,
        notes=tuple(notes),
        clocks=taken.clocks,
        elapsed_s=taken.paired.elapsed_s,
    )


def host_seconds(arm: Arm, args: tuple[Any, ...], *, batches: int = 15, calls: int = 40) -> float:
    """The host time of one call in seconds: until it returns, not until the device is done.

    The median of batches that are short enough for the device's queue never to fill.
    """
    device = common_device(args)
    medians = []
    with torch.no_grad():
        for _ in range(batches + 1):
            wait_for(device)
            started = time.perf_counter_ns()
            for _ in range(calls):
                arm.call(*args)
            medians.append((time.perf_counter_ns() - started) * 1e-9 / calls)
    wait_for(device)
    return sorted(medians[1:])[batches // 2]


def _check_arms(arms: Sequence[Arm]) -> None:
    names = [arm.name for arm in arms]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UsageError(f"arms {', '.join(names) or 'none'}: expected two or more of different names")


def common_device(args: tuple[Any, ...]) -> torch.device:
    """The device of arguments, nested tensors included.

    Raises
    ------
    UsageError
        There is no tensor among them, they lie on several devices, or on one that has no stopwatch.
    """
    devices = {leaf.device for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)}
    if len(devices) != 1:
        raise UsageError(f"arguments on {len(devices)} devices: expected at least one tensor, and all on one device")
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"arguments on {device}: expected them on a CPU or on a GPU that torch calls cuda")
    return device


def _stopwatch(arms: Sequence[Arm], sets: Sequence[tuple[Any, ...]], device: torch.device, timer: Timer) -> Stopwatch:
    if device.type == "cpu":
        return WallStopwatch(arms, sets)
    with torch.cuda.device(device):  # only on a GPU: a CPU has one stopwatch
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            events = EventStopwatch(arms, sets, device, stream)
        if timer == "events":
            return events
        try:
            return _captured(arms, sets, device, stream, events.rough_seconds())
        except RuntimeError as error:
            if timer == "graph":
                raise UsageError(
                    f"timer='graph': an arm cannot be captured: {error}; expected timer='events'"
                ) from error
            # What a failed capture has left on the stream must not reach the samples.
            torch.cuda.synchronize(device)
            return events


def _captured(  # only on a GPU: a CPU captures nothing
    arms: Sequence[Arm],
    sets: Sequence[tuple[Any, ...]],
    device: torch.device,
    stream: torch.cuda.Stream,
    seconds: Sequence[float],
) -> GraphStopwatch:
    before = _launches(arms)
    watch = GraphStopwatch(arms, sets, device, stream, seconds)
    for arm, start, after, calls in zip(arms, before, _launches(arms), watch.calls, strict=True):
        _expect_launches(arm, after - start, calls)
    return watch


def _launches(arms: Sequence[Arm]) -> list[int]:
    """What each arm has counted so far; 0 for one that counts nothing."""
    return [0 if arm.launches is None else arm.launches() for arm in arms]


def _expect_launches(arm: Arm, launches: int, calls: int) -> None:
    if arm.launches is not None and launches < calls:
        raise TimingError(
            f"{arm.name}: {calls} calls made {launches} launches: expected one or more each; a timing without its "
            f"kernel is none: explain() tells what the gate says of these arguments"
        )


@dataclass(frozen=True, slots=True)
class _Attempt:
    paired: Paired
    clocks: tuple[Clocks, ...]
    number: int
    """Counted from 1."""
    disturbance: str | None

    def note(self) -> str:
        return f"{self.disturbance}, in each of {self.number} attempts" if self.number > 1 else str(self.disturbance)


def _checked(
    watch: Stopwatch, arms: Sequence[Arm], settings: Settings, device: torch.device, coin: random.Random
) -> _Attempt:
    """Measure, then hold each arm to its launches and to its contract."""
    launched, made = _launches(arms), list(watch.made)
    taken = _measured(watch, len(arms), settings, device, coin)
    for number, (arm, after) in enumerate(zip(arms, _launches(arms), strict=True)):
        _expect_launches(arm, after - launched[number], watch.made[number] - made[number])
        _check_outputs(watch, number, arm, arms[0])
    return taken


def _measured(watch: Stopwatch, arms: int, settings: Settings, device: torch.device, coin: random.Random) -> _Attempt:
    """Measure, and begin again where the device was disturbed, as often as the settings allow."""
    read = clock_reader(device)
    unit_s, sample_s = _warmed_up(watch, arms, coin)
    schedule = Schedule.plan(settings, unit_s)
    for attempt in itertools.count(1):
        readings: list[Clocks] = []
        is_last = attempt > settings.retries

        def goes_on(readings: list[Clocks] = readings, is_last: bool = is_last) -> bool:
            reading = read()
            if reading is not None:
                readings.append(reading)
            return is_last or disturbance(readings) is None

        goes_on()
        paired = pair(
            watch,
            arms,
            schedule,
            settings,
            resolution=lambda: [watch.tick_s / seconds for seconds in sample_s],
            coin=coin,
            between_looks=goes_on,
        )
        spoilt = disturbance(readings)
        if spoilt is None or is_last:
            return _Attempt(paired, tuple(readings), attempt, spoilt)
    raise AssertionError("unreachable: the last attempt returns")


def _warmed_up(watch: Stopwatch, arms: int, coin: random.Random) -> tuple[float, list[float]]:
    """Run units unmeasured for a while; give the wall time of the last one, and how long a sample of each arm is."""
    begun = time.perf_counter()
    while True:
        (order,) = orders(arms, 1, coin)
        started = time.perf_counter()
        seconds = watch.sample(order)
        ended = time.perf_counter()
        if ended - begun >= _WARM_UP_S and started > begun:
            shortest = [
                min(s for s, arm in zip(seconds, order, strict=True) if arm == number) for number in range(arms)
            ]
            samples = [one * calls for one, calls in zip(shortest, watch.calls, strict=True)]
            return ended - started, samples


def _check_outputs(watch: Stopwatch, number: int, arm: Arm, reference: Arm) -> None:
    if arm.contract is None:
        return
    written = watch.outputs(number)
    for args, output in written[:: math.ceil(len(written) / _COMPARED)]:
        expected = reference.call(*args)
        several = isinstance(expected, tuple)
        pairs = zip(output, expected, strict=True) if several else ((output, expected),)
        for place, pair_of_outputs in enumerate(pairs):
            contract = arm.contract[place] if isinstance(arm.contract, tuple) else arm.contract
            # Only of a single output can the reference's own steps tell what went wrong.
            verdict = compare(*pair_of_outputs, contract, None if several else reference.call, args)
            if not verdict.ok:
                raise TimingError(f"{arm.name}: its output was wrong after it had been timed: {verdict}")


def _times(arm: Arm, paired: Paired, number: int, calls: int, launched: int, settings: Settings) -> ArmTimes:
    seconds = tuple(float(value) for value in paired.seconds[:, :, number].ravel())
    median = median_interval(seconds, 1 - settings.confidence)
    return ArmTimes(arm.name, seconds, median, calls, None if arm.launches is None else launched)
