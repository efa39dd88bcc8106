"""Looking again at a verified kernel, without ever waiting for the device.

The comparison runs on the device, and its outcome is copied into pinned memory behind it. A later call reads that memory,
which costs nothing, and may be early: then a still later one reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .contracts import Contract
from .verdicts import bits_differ

__all__ = ["Recheck"]


class Recheck:
    """The rechecks of one signature.

    Parameters
    ----------
    device
        Where the outputs are.
    """

    __slots__ = ("_bad", "_pinned", "latest")

    def __init__(self, device: torch.device) -> None:
        asynchronous = device.type == "cuda"
        self._bad = torch.zeros((), dtype=torch.int64, device=device)
        self._pinned = torch.zeros((), dtype=torch.int64, pin_memory=True) if asynchronous else None
        self.latest = 0
        """The number of the last call that was compared; its outcome may be under way."""

    def compare(self, actual: Tensor, expected: Tensor, contract: Contract, args: Sequence[Any], call: int) -> None:
        """Compare one call's result, and note the call's number if it is the first that is wrong."""
        differs = bits_differ(actual, expected, contract, args)
        self._bad = torch.where(differs & (self._bad == 0), call, self._bad)
        self.latest = call
        if self._pinned is not None:
            self._pinned.copy_(self._bad, non_blocking=True)

    def first_wrong(self) -> int:
        """The number of the first call known to have been wrong; 0 while none is. Never waits."""
        return int((self._bad if self._pinned is None else self._pinned).item())
