"""Stopwatches: what all of them share, and the wall clock of a CPU; a GPU's are in ``gpu_stopwatches``.

A sample is many calls, so that it is long beside a tick of its clock. Inputs rotate from call to call, and outputs stay
alive for as many calls as there are sets of inputs, so that their memory rotates too. Nothing waits for the device
between the first and the last sample of a unit.

No arm keeps for a whole measurement what could favour it: where an output lies in a device's memory, and which instance
of a graph is replayed, moves a kernel's time by about as much as is looked for, and no number of samples of the same
two instances would tell that from a difference between the kernels. So outputs are let go after each sample, for the
next arm to be given the same memory; and graphs are captured anew for each unit.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fusiongate.comparison.contracts import Contract

__all__ = ["Arm", "Rotating", "Stopwatch", "WallStopwatch", "calls_for", "poison", "undisturbed"]

_SAMPLE_S = 1e-3
"""How long a sample lasts at least, in seconds."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the callables that are measured side by side."""

    name: str
    """Names the arm in results: ``eager``, ``kernel``, ``compile``, ``copy`` or a user's own word."""
    call: Callable[..., Any]
    """Does the work; called with one set of inputs, positionally."""
    inputs: Sequence[tuple[Any, ...]] | None = None
    """Sets of inputs of its own; by default those that all arms share."""
    launches: Callable[[], int] | None = None
    """Counts the kernel launches that were completed so far; a measurement during which a call made none is invalid."""
    contract: Contract | tuple[Contract, ...] | None = None
    """What the output has to be to the first arm's, looked at again after timing; a tuple has one for each of several
    outputs, None lets it differ."""


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

    @property
    def made(self) -> Sequence[int]:
        """The calls of each arm that Python has made for samples so far; a replay is none."""

    def sample(self, order: Sequence[int]) -> Sequence[float]:
        """Run the arms of a unit one after another and give the seconds of one call in each sample."""

    def outputs(self, arm: int) -> list[tuple[tuple[Any, ...], Any]]:
        """Run an arm once more over memory that holds other values, and give inputs with the outputs that it wrote."""


class Rotating:
    """An arm with its place in the rotation and the outputs that it keeps alive."""

    def __init__(self, arm: Arm, sets: Sequence[tuple[Any, ...]]) -> None:
        self.call = arm.call
        self.sets = arm.inputs if arm.inputs is not None else sets
        self._turn = itertools.cycle(self.sets)
        self.kept: deque[tuple[tuple[Any, ...], Any]] = deque(maxlen=len(self.sets))

    def run(self, calls: int) -> None:
        """Make so many calls, each with the next set of inputs."""
        call, turn, kept = self.call, self._turn, self.kept
        for _ in range(calls):
            args = next(turn)
            if len(kept) == kept.maxlen:
                # Freed before the call, the oldest output's memory is what the new one is given.
                kept.popleft()
            kept.append((args, call(*args)))

    def fill(self) -> None:
        """Run over every set once: compilation and first sights are done."""
        self.run(len(self.sets))

    def let_go(self) -> None:
        """Free the outputs, for the next arm to be given their memory."""
        self.kept.clear()

    def rerun(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Run over every set of inputs once; what the memory of the outputs held before is overwritten first."""
        self.fill()
        for args, output in self.kept:
            poison(output, args)
        self.let_go()
        self.fill()
        return list(self.kept)


class WallStopwatch:
    """Wall time, for devices that compute while they are called."""

    kind = "wall"
    host_bound = False

    def __init__(self, arms: Sequence[Arm], sets: Sequence[tuple[Any, ...]]) -> None:
        self._arms = [Rotating(arm, sets) for arm in arms]
        self.tick_s = max(time.get_clock_info("perf_counter").resolution, 1e-7)
        self.calls = [1] * len(self._arms)
        self.made = [0] * len(self._arms)
        for arm in self._arms:
            arm.fill()
            arm.let_go()
        self.calls = calls_for([min(self.sample([number] * 5)) for number in range(len(arms))], [1] * len(arms))

    def sample(self, order: Sequence[int]) -> list[float]:
        """Run the arms one after another and give the seconds of one call in each sample."""
        samples = []
        with undisturbed():
            for arm in order:
                calls, run = self.calls[arm], self._arms[arm].run
                started = time.perf_counter_ns()
                run(calls)
                samples.append((time.perf_counter_ns() - started) * 1e-9 / calls)
                self._arms[arm].let_go()
                self.made[arm] += calls
        return samples

    def outputs(self, arm: int) -> list[tuple[tuple[Any, ...], Any]]:
        """Run an arm once more and give inputs with outputs."""
        return self._arms[arm].rerun()


def calls_for(seconds: Sequence[float], multiples: Sequence[int]) -> list[int]:
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


def poison(output: object, args: tuple[Any, ...]) -> None:
    """Overwrite an output, or each of several, with NaN or other bits, unless it is one of the arguments."""
    given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
    for written in output if isinstance(output, tuple) else (output,):
        if not isinstance(written, Tensor) or written.untyped_storage().data_ptr() in given:
            continue
        if written.is_floating_point() or written.is_complex():
            written.fill_(math.nan)
        else:
            written.bitwise_not_()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the garbage collector out of a sample."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
