"""Stopwatches of a GPU: events around calls, and events around replays of captured graphs."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fusiongate.errors import TimingError

from .stopwatches import Arm, Rotating, calls_for, poison, undisturbed

__all__ = ["EventStopwatch", "GraphStopwatch"]

_EVENT_TICK_S = 0.5e-6
"""The resolution that CUDA documents for events; the devices' own are often finer."""

_CALLS_BEHIND_A_PLUG = 48
"""Calls of some ten launches each fit the queue of a stream, about a thousand long: a full one stalls the host."""


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
        self._arms = [Rotating(arm, sets) for arm in arms]
        self.calls = [1] * len(self._arms)
        self.made = [0] * len(self._arms)
        self._host_s = [1e-3] * len(self._arms)
        for number, arm in enumerate(self._arms):
            arm.fill()
            stream.synchronize()
            started = time.perf_counter()
            arm.run(4)
            self._host_s[number] = (time.perf_counter() - started) / 4
            stream.synchronize()
            arm.let_go()
        # Twice: one call between two events reads longer than it is, and a second time there are more of them.
        for _ in range(2):
            rough_s = self.rough_seconds()
            self.calls = [min(_CALLS_BEHIND_A_PLUG, calls) for calls in calls_for(rough_s, [1] * len(arms))]
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
        with undisturbed(), torch.cuda.stream(self._events.stream):
            for arm, start, end in zip(order, marks[::2], marks[1::2], strict=True):
                _plug(2 * self._host_s[arm] * self.calls[arm] + 50e-6)
                start.record()
                self._arms[arm].run(self.calls[arm])
                end.record()
                # In the stream's order: what the next arm is given, this one has finished with.
                self._arms[arm].let_go()
                self.made[arm] += self.calls[arm]
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
    """Events around replays of graphs that hold a whole sample's calls, so that the host has no part in it.

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
        self._names = [arm.name for arm in arms]
        self._rotating = [Rotating(arm, sets) for arm in arms]
        # Whole turns of the rotation: each replay begins with the inputs that were used longest ago.
        self.calls = calls_for(seconds, [len(arm.sets) for arm in self._rotating])
        self.made = [0] * len(arms)
        # One pool for all: an arm's outputs are let go when it has been captured, and the next arm's take their place.
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._renew()

    @property
    def tick_s(self) -> float:
        """The clock's resolution in seconds."""
        return self._events.tick_s

    @property
    def host_bound(self) -> bool:
        """Whether the device has waited for the host during a sample."""
        return self._events.host_bound

    def sample(self, order: Sequence[int]) -> list[float]:
        """Capture the arms anew, replay them one after another, and give the seconds of one call in each sample."""
        self._renew()
        marks = self._events.marks(len(order) + 1)
        with undisturbed(), torch.cuda.stream(self._events.stream):
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
        """Replay a graph of an arm over memory that holds other values, and give inputs with the outputs."""
        self._graphs[arm] = self._captured(arm)
        written = list(self._rotating[arm].kept)
        with torch.cuda.stream(self._events.stream):
            for args, output in written:
                poison(output, args)
            self._graphs[arm].replay()
        self._events.stream.synchronize()
        self._rotating[arm].let_go()
        return written

    def _renew(self) -> None:
        # The old graphs go when the new ones are there: the pool would go with the last of them.
        graphs = []
        for arm, rotating in enumerate(self._rotating):
            graphs.append(self._captured(arm))
            rotating.let_go()
        self._graphs = graphs

    def _captured(self, arm: int) -> torch.cuda.CUDAGraph:
        name, calls, stream = self._names[arm], self.calls[arm], self._events.stream
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        # torch.cuda.graph() would collect garbage and empty the allocator's cache, which takes longer than the sample.
        # And a collection in the middle of a capture could destroy another graph there.
        with undisturbed(), warnings.catch_warnings(record=True) as caught, torch.cuda.stream(stream):
            warnings.simplefilter("always")
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._rotating[arm].run(calls)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        if any("graph is empty" in str(warning.message).lower() for warning in caught):
            raise TimingError(f"{name}: nothing was launched while a graph of it was captured, so nothing was timed")
        self.made[arm] += calls
        return graph


def _plug(seconds: float) -> None:
    # Spins for a number of clock cycles: at a lower clock than 2 GHz the plug lasts longer, which does no harm.
    torch.cuda._sleep(int(seconds * 2e9))
