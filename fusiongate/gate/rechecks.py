"""Looking again at a verified kernel, without ever waiting for the device.

The comparison runs on the device, and its outcome is copied into pinned memory behind it. A later call reads that
memory, which costs nothing, and may be early: then a still later one reads it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusiongate.comparison.contracts import Contract
from fusiongate.comparison.verdicts import bits_differ

__all__ = ["Recheck"]

_UNKNOWN = -1


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
