"""Stopwatches: the wall clock of a CPU, a GPU's events, and events around replays of a captured graph.

A sample is many calls, so that it is long beside a tick of its clock. Inputs rotate from call to call, and outputs stay
alive for as many calls as there are sets of inputs, so that their memory rotates too. Nothing waits for the device
between the first and the last sample of a batch.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fusiongate.errors import TimingError
from fusiongate.timing.arms import Arm

__all__ = ["EventStopwatch", "GraphStopwatch", "Stopwatch", "WallStopwatch"]

_SAMPLE_S = 1e-3
"""How long a sample lasts at least, in seconds."""

_EVENT_TICK_S = 0.5e-6
"""The resolution that CUDA documents for events; the devices' own are often finer."""

_CALLS_BEHIND_A_PLUG = 48
"""Calls of some ten launches each fit the queue of a stream, about a thousand long: a full one stalls the host."""


class Stopwatch(Protocol):
    """Times the arms that it was made with, by their numbers."""

    @property
    def kind(self) -> str:
        """What kind of clock it is: ``wall``, ``events`` or ``graph``."""

    @property
    def calls(self) -> Sequence[int]:
        """The calls in one sample of each arm."""

    @property
    def host_bound(self) -> bool:
        """Whether the device has waited for the host during a sample, which then measures the host."""

    @property
    def tick_s(self) -> float:
        """The clock's resolution in seconds."""

    def sample(self, order: Sequence[int]) -> Sequence[float]:
        """Run the arms one after another and give the seconds of one call in each sample."""

    def outputs(self, arm: int) -> list[tuple[tuple[Any, ...], Any]]:
        """Run an arm once more over memory that holds other values, and give inputs with the outputs that it wrote."""


class _Rotating:
    """An arm with its place in the rotation and the outputs that it keeps alive."""

    def __init__(self, arm: Arm, sets: Sequence[tuple[Any, ...]]) -> None:
        self.call = arm.call
        self.sets = arm.inputs if arm.inputs is not None else sets
        self._turn = itertools.cycle(self.sets)
        self.kept: deque[tuple[tuple[Any, ...], Any]] = deque(maxlen=len(self.sets))

    def run(self, calls: int) -> None:
        call, turn, kept = self.call, self._turn, self.kept
        for _ in range(calls):
            args = next(turn)
            if len(kept) == kept.maxlen:
                # Freed before the call, the oldest output's memory is what the new one is given.
                kept.popleft()
            kept.append((args, call(*args)))

    def fill(self) -> None:
        """Run over every set once: compilation and first sights are done, and the outputs have their memory."""
        self.run(len(self.sets))

    def rerun(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Run over every set of inputs once; what the memory of the outputs held before is overwritten first."""
        for args, output in self.kept:
            _poison(output, args)
        self.kept.clear()
        self.fill()
        return list(self.kept)


class WallStopwatch:
    """Wall time, for devices that compute while they are called."""

    kind = "wall"
    host_bound = False

    def __init__(self, arms: Sequence[Arm], sets: Sequence[tuple[Any, ...]]) -> None:
        self._arms = [_Rotating(arm, sets) for arm in arms]
        self.tick_s = max(time.get_clock_info("perf_counter").resolution, 1e-7)
        self.calls = [1] * len(self._arms)
        for arm in self._arms:
            arm.fill()
        self.calls = _calls([min(self.sample([number] * 5)) for number in range(len(arms))], [1] * len(arms))

    def sample(self, order: Sequence[int]) -> list[float]:
        """Run the arms one after another and give the seconds of one call in each sample."""
        samples = []
        with _undisturbed():
            for arm in order:
                calls, run = self.calls[arm], self._arms[arm].run
                started = time.perf_counter_ns()
                run(calls)
                samples.append((time.perf_counter_ns() - started) * 1e-9 / calls)
        return samples

    def outputs(self, arm: int) -> list[tuple[tuple[Any, ...], Any]]:
        """Run an arm once more and give inputs with outputs."""
        return self._arms[arm].rerun()


class _Events:
    """What the stopwatches of a GPU share: pairs of events, and the smallest step that their times have shown."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.device = device
        self.stream = stream
        self.host_bound = False
        self.tick_s = _EVENT_TICK_S
        self._seen: set[float] = set()

    def marks(self, number: int) -> list[torch.cuda.Event]:
        return [torch.cuda.Event(enable_timing=True) for _ in range(number)]

    def elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        seconds = float(start.elapsed_time(end)) * 1e-3
        if seconds <= 0:
            raise TimingError(f"a sample on {self.device} took no time: nothing was launched in it")
        return seconds

    def learn_tick(self, seconds: Sequence[float]) -> None:
        """Take the smallest difference between two samples for the clock's tick, where it is finer than documented."""
        self._seen.update(seconds)
        ordered = sorted(self._seen)
        steps = [b - a for a, b in itertools.pairwise(ordered) if b - a > 1e-10]
        self.tick_s = min([_EVENT_TICK_S, *steps])


class EventStopwatch:
    """Events around batches of calls, for what cannot be captured in a graph.

    Before each sample the stream is plugged with a kernel that spins until the host has queued the whole sample, so
    that the device never waits for the host in between.
    """

    kind = "events"

    def __init__(
        self, arms: Sequence[Arm], sets: Sequence[tuple[Any, ...]], device: torch.device, stream: torch.cuda.Stream
    ) -> None:
        self._events = _Events(device, stream)
        self._arms = [_Rotating(arm, sets) for arm in arms]
        self.calls = [1] * len(self._arms)
        self._host_s = [1e-3] * len(self._arms)
        for number, arm in enumerate(self._arms):
            arm.fill()
            stream.synchronize()
            started = time.perf_counter()
            arm.run(4)
            self._host_s[number] = (time.perf_counter() - started) / 4
            stream.synchronize()
        # Twice: one call between two events reads longer than it is, and a second time there are more of them.
        for _ in range(2):
            rough_s = self.rough_seconds()
            self.calls = [min(_CALLS_BEHIND_A_PLUG, calls) for calls in _calls(rough_s, [1] * len(arms))]
        self._events.host_bound = False

    def rough_seconds(self) -> list[float]:
        """The seconds of one call of each arm, by a few samples."""
        return [min(self.sample([number] * 3)) for number in range(len(self._arms))]

    @property
    def tick_s(self) -> float:
        """The clock's resolution in seconds."""
        return self._events.tick_s

    @property
    def host_bound(self) -> bool:
        """Whether the device has waited for the host during a sample."""
        return self._events.host_bound

    def sample(self, order: Sequence[int]) -> list[float]:
        """Run the arms one after another and give the seconds of one call in each sample."""
        marks = self._events.marks(2 * len(order))
        with _undisturbed(), torch.cuda.stream(self._events.stream):
            for arm, start, end in zip(order, marks[::2], marks[1::2], strict=True):
                _plug(2 * self._host_s[arm] * self.calls[arm] + 50e-6)
                start.record()
                self._arms[arm].run(self.calls[arm])
                end.record()
                # The plug is still spinning if the host was quick enough; asking does not wait.
                self._events.host_bound |= start.query()
            self._events.stream.synchronize()
        totals = [self._events.elapsed(start, end) for start, end in zip(marks[::2], marks[1::2], strict=True)]
        self._events.learn_tick(totals)
        return [total / self.calls[arm] for total, arm in zip(totals, order, strict=True)]

    def outputs(self, arm: int) -> list[tuple[tuple[Any, ...], Any]]:
        """Run an arm once more over memory that holds other values, and give inputs with the outputs that it wrote."""
        with torch.cuda.stream(self._events.stream):
            written = self._arms[arm].rerun()
        self._events.stream.synchronize()
        return written


class GraphStopwatch:
    """Events around replays of a graph that holds a whole sample's calls, so that the host has no part in it.

    Raises
    ------
    RuntimeError
        If an arm cannot be captured.
    """

    kind = "graph"

    def __init__(
        self,
        arms: Sequence[Arm],
        sets: Sequence[tuple[Any, ...]],
        device: torch.device,
        stream: torch.cuda.Stream,
        seconds: Sequence[float],
    ) -> None:
        self._events = _Events(device, stream)
        rotating = [_Rotating(arm, sets) for arm in arms]
        # Whole turns of the rotation: each replay begins with the inputs that were used longest ago.
        self.calls = _calls(seconds, [len(arm.sets) for arm in rotating])
        self._graphs = [
            _captured(arm.name, turn, calls, stream)
            for arm, turn, calls in zip(arms, rotating, self.calls, strict=True)
        ]
        self._kept = [list(turn.kept) for turn in rotating]

    @property
    def tick_s(self) -> float:
        """The clock's resolution in seconds."""
        return self._events.tick_s

    @property
    def host_bound(self) -> bool:
        """Whether the device has waited for the host during a sample."""
        return self._events.host_bound

    def sample(self, order: Sequence[int]) -> list[float]:
        """Replay the arms' graphs one after another and give the seconds of one call in each sample."""
        marks = self._events.marks(len(order) + 1)
        with _undisturbed(), torch.cuda.stream(self._events.stream):
            # Replayed once unmeasured: the first work on an idle device starts late.
            self._graphs[order[0]].replay()
            marks[0].record()
            for arm, mark in zip(order, marks[1:], strict=True):
                self._graphs[arm].replay()
                mark.record()
            self._events.host_bound |= marks[-1].query()
            self._events.stream.synchronize()
        totals = [self._events.elapsed(start, end) for start, end in itertools.pairwise(marks)]
        self._events.learn_tick(totals)
        return [total / self.calls[arm] for total, arm in zip(totals, order, strict=True)]

    def outputs(self, arm: int) -> list[tuple[tuple[Any, ...], Any]]:
        """Replay an arm's graph once more over memory that holds other values, and give inputs with the outputs."""
        with torch.cuda.stream(self._events.stream):
            for args, output in self._kept[arm]:
                _poison(output, args)
            self._graphs[arm].replay()
        self._events.stream.synchronize()
        return self._kept[arm]


def _captured(name: str, rotating: _Rotating, calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    # torch.cuda.graph() would collect garbage and empty the allocator's cache, which takes longer than the sample.
    # And a collection in the middle of a capture could destroy another graph there.
    with _undisturbed(), warnings.catch_warnings(record=True) as caught, torch.cuda.stream(stream):
        warnings.simplefilter("always")
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            rotating.run(calls)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    if any("graph is empty" in str(warning.message).lower() for warning in caught):
        raise TimingError(f"{name}: nothing was launched while a graph of it was captured, so nothing was timed")
    return graph


def _calls(seconds: Sequence[float], multiples: Sequence[int]) -> list[int]:
    """The calls of a sample for each arm, multiples of what is given, so that it lasts long enough.

    Arms of about the same length get the same number: what a sample costs once would otherwise weigh more in one.
    """
    calls: dict[int, int] = {}
    for number in sorted(range(len(seconds)), key=lambda number: seconds[number]):
        alike = [
            other for other in calls if seconds[number] < 1.2 * seconds[other] and multiples[number] == multiples[other]
        ]
        needed = multiples[number] * math.ceil(_SAMPLE_S / (seconds[number] * multiples[number]))
        calls[number] = calls[alike[0]] if alike else needed
    return [calls[number] for number in range(len(seconds))]


def _plug(seconds: float) -> None:
    # Spins for a number of clock cycles: at a lower clock than 2 GHz the plug lasts longer, which does no harm.
    torch.cuda._sleep(int(seconds * 2e9))


def _poison(output: object, args: tuple[Any, ...]) -> None:
    given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
    if not isinstance(output, Tensor) or output.untyped_storage().data_ptr() in given:
        return
    if output.is_floating_point() or output.is_complex():
        output.fill_(math.nan)
    else:
        output.bitwise_not_()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the garbage collector out of a sample."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
