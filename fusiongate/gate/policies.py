"""Policies: when a gate looks again at a kernel, what a refusal refuses, and when one may be tried again.

Looking again never waits for the device: the comparison runs there, and its outcome is copied into pinned memory behind
it. A later call reads that memory, which costs nothing, and may be early: then a still later one reads it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fusiongate.comparison.contracts import Contract
from fusiongate.comparison.verdicts import bits_differ
from fusiongate.errors import UsageError

__all__ = ["After", "Every", "Policy", "Recheck", "Sampled"]

_UNKNOWN = -1
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Every:
    """Look again at every n-th fused call of a signature."""

    n: int
    """Calls from one look to the next."""

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise UsageError(f"Every({self.n!r}): expected a whole number of calls, at least 1")

    def due(self, call: int) -> bool:
        """Whether the call with this number, counted from 1, is one to look at."""
        return call % self.n == 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """Look again at a random share of a signature's fused calls; the same calls in every run."""

    share: float
    """Of all calls, above 0 and at most 1."""

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise UsageError(f"Sampled({self.share!r}): expected a share of the calls, above 0 and at most 1")

    def due(self, call: int) -> bool:
        """Whether the call with this number, counted from 1, is one to look at."""
        # SplitMix64's finalizer (Steele, Lea and Flood, 2014): a generator with a state would be one for all gates.
        mixed = call * 0x9E3779B97F4A7C15 & _WORD
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
        return (mixed ^ mixed >> 31) < self.share * (_WORD + 1)


@dataclass(frozen=True, slots=True)
class After:
    """Give a refused signature another first sight: after some time, some calls, or whichever comes first."""

    seconds: float | None = None
    """Since it was refused."""
    calls: int | None = None
    """Since it was refused, the one that tries again included."""

    def __post_init__(self) -> None:
        if self.seconds is None and self.calls is None:
            raise UsageError("After(): expected seconds=, calls= or both")
        for name, value in (("seconds", self.seconds), ("calls", self.calls)):
            if value is not None and not value > 0:
                raise UsageError(f"After({name}={value!r}): expected a positive number")

    def due(self, seconds: float, calls: int) -> bool:
        """Whether it is time."""
        by_time = self.seconds is not None and seconds >= self.seconds
        return by_time or (self.calls is not None and calls >= self.calls)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a gate behaves."""

    scope: Literal["signature", "process"] = "signature"
    """What a refusal refuses: the signature, or everything that goes through the gate from then on."""
    recheck: Every | Sampled | None = None
    """When to compare a verified kernel again."""
    recover: After | None = None
    """When to try a refused signature again."""
    capacity: int = 256
    """Signatures that the gate holds; further ones take the reference."""

    def __post_init__(self) -> None:
        if self.scope not in ("signature", "process"):
            raise UsageError(f"Policy(scope={self.scope!r}): expected 'signature' or 'process'")
        if type(self.capacity) is not int or self.capacity < 1:
            raise UsageError(f"Policy(capacity={self.capacity!r}): expected a whole number, at least 1")
        if self.recheck is not None and not isinstance(self.recheck, (Every, Sampled)):
            raise UsageError(f"Policy(recheck={self.recheck!r}): expected Every(n), Sampled(share) or None")
        if self.recover is not None and not isinstance(self.recover, After):
            raise UsageError(f"Policy(recover={self.recover!r}): expected After(seconds=, calls=) or None")


class Recheck:
    """The fused calls of one signature since it was verified, and what is known about those that were looked at."""

    __slots__ = ("_calls", "_pending", "last_right")

    def __init__(self) -> None:
        # next() on it is atomic, and so are a deque's methods: threads share both without a lock.
        self._calls = itertools.count(1)
        self._pending: deque[tuple[int, Tensor]] = deque()
        self.last_right = 0
        """The number of the last call that is known to have been right; 0 is first sight."""

    def count(self) -> int:
        """Count a fused call, and give its number."""
        return next(self._calls)

    def compare(self, actual: Tensor, expected: Tensor, contract: Contract, args: Sequence[Any], call: int) -> None:
        """Compare one call's result; the outcome comes by :meth:`first_wrong`, now or later."""
        # One flag a comparison: the next one may run on another stream.
        self._pending.append((call, _reported(bits_differ(actual, expected, contract, args))))

    def first_wrong(self) -> int:
        """The number of the first call that is newly known to have been wrong; 0 while none is. Never waits."""
        while self._pending:
            try:
                call, flag = self._pending.popleft()
            except IndexError:
                # Another thread took it.
                return 0
            outcome = int(flag.item())
            if outcome == _UNKNOWN:
                self._pending.appendleft((call, flag))
                return 0
            if outcome:
                return call
            self.last_right = max(self.last_right, call)
        return 0


def _reported(differs: Tensor) -> Tensor:
    """A flag in the host's memory that will hold 0 or 1, and holds something else until the device has got so far."""
    flag = differs.to(torch.int8)
    if not flag.is_cuda:
        return flag
    pinned = torch.full((), _UNKNOWN, dtype=torch.int8, pin_memory=True)  # only on a GPU: pins memory
    return pinned.copy_(flag, non_blocking=True)  # only on a GPU: pins memory
