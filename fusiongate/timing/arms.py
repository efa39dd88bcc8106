"""What is measured: an arm is a callable with the inputs that it is given in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusiongate.comparison.contracts import Contract

__all__ = ["Arm"]


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
    contract: Contract | None = None
    """What the output has to be to the first arm's, looked at again after timing; None where it may differ."""
