"""The ratio of two arms, its interval, and what that says against a margin."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Outcome", "Ratio", "outcome_of"]


class Outcome(StrEnum):
    """What an interval of a ratio says against a margin."""

    FASTER = "faster"
    """The whole interval lies below 1 − margin."""
    SLOWER = "slower"
    """The whole interval lies above 1 + margin."""
    SAME = "same"
    """The whole interval lies within 1 ± margin."""
    INCONCLUSIVE = "inconclusive"
    """The interval reaches across an end of the margin."""


def outcome_of(low: float, high: float, margin: float) -> Outcome:
    """Judge the interval of a ratio of times.

    Parameters
    ----------
    low, high
        The interval's ends; 1 means equally long, less means faster.
    margin
        The difference that does not matter, such as 0.003.
    """
    if high < 1 - margin:
        return Outcome.FASTER
    if low > 1 + margin:
        return Outcome.SLOWER
    if 1 - margin <= low and high <= 1 + margin:
        return Outcome.SAME
    return Outcome.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class Ratio:
    """One arm's time over the reference's, measured in pairs."""

    value: float
    """The estimate; below 1 the arm is faster."""
    low: float
    """The lower end of the interval."""
    high: float
    """The upper end of the interval."""
    margin: float
    """The difference that does not matter."""
    confidence: float
    """The probability with which the interval holds the true ratio, all looks at the data included."""
    pairs: int
    """The pairs of samples behind it."""
    looks: int
    """How often the interval was looked at before the measurement stopped."""

    @property
    def outcome(self) -> Outcome:
        """What the interval says against the margin."""
        return outcome_of(self.low, self.high, self.margin)

    @property
    def speedup(self) -> float:
        """How many times as fast as the reference the arm is."""
        return 1 / self.value

    def __str__(self) -> str:
        return (
            f"{self.outcome}: {self.value:.4f} of the reference's time, {self.low:.4f} to {self.high:.4f} "
            f"at {self.confidence:.1%}, margin ±{self.margin:.1%}, {self.pairs} pairs"
        )

    def to_json(self) -> dict[str, Any]:
        """The ratio as an object of JSON's own types; an end that is unknown is null."""
        fields = {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in asdict(self).items()
        }
        return {**fields, "outcome": str(self.outcome)}
