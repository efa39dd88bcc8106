"""Intervals that hold their level on few, quantised and heavy-tailed values, and what one says against a margin.

Exact ranks, in the place of normal theory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Interval",
    "Outcome",
    "Ratio",
    "fewest_values",
    "median_interval",
    "outcome_of",
    "signed_rank_interval",
]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the range that the data leave open."""

    value: float
    """The estimate."""
    low: float
    """The lower end, minus infinity where the values are too few for the level."""
    high: float
    """The upper end, infinity where the values are too few for the level."""

    def to_json(self) -> dict[str, float | None]:
        """The interval as an object of JSON's own types; an end that is unknown is null."""
        return {name: end if math.isfinite(end) else None for name, end in asdict(self).items()}


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


def signed_rank_interval(values: Sequence[float] | NDArray[np.float64], level: float) -> Interval:
    """The Hodges-Lehmann estimate of a centre of symmetry, with the interval of the signed-rank test.

    The interval holds every centre that Wilcoxon's exact signed-rank test does not reject. Its ends are order
    statistics of the Walsh averages (Hollander, Wolfe and Chicken, *Nonparametric Statistical Methods*, 3.3). It is
    closed, so that ties, which quantised clocks make, can only raise its coverage (Noether 1967).

    Parameters
    ----------
    values
        Independent values, each distributed symmetrically around the centre; they may have different distributions.
    level
        The largest probability that the centre lies outside, such as 0.01.
    """
    data = np.asarray(values, dtype=np.float64)
    first, second = np.triu_indices(data.size)
    averages = np.sort((data[first] + data[second]) / 2)
    cut = _signed_rank_cut(data.size, level)
    if cut == 0:
        return Interval(float(np.median(averages)), -math.inf, math.inf)
    return Interval(float(np.median(averages)), float(averages[cut - 1]), float(averages[-cut]))


def median_interval(values: Sequence[float] | NDArray[np.float64], level: float) -> Interval:
    """The median of independent values of any distribution, with the interval of the sign test.

    Parameters
    ----------
    values
        At least one value.
    level
        The largest probability that the distribution's median lies outside.
    """
    # Here, because it takes half as long as torch, and most processes that import this measure nothing.
    from scipy.stats import quantile_test

    data = np.asarray(values, dtype=np.float64)
    interval = quantile_test(data).confidence_interval(1 - level)
    low, high = (float(end) for end in interval)
    return Interval(
        float(np.median(data)), -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
    )


def fewest_values(level: float) -> int:
    """The fewest values for which :func:`signed_rank_interval` is finite: all signs alike must be rarer than that."""
    return math.ceil(1 - math.log2(level))


@functools.lru_cache(maxsize=1024)
def _signed_rank_cut(number: int, level: float) -> int:
    """The largest c for which the statistic is below c, or as far at the other end, with probability <= level."""
    cumulative = np.cumsum(_signed_rank_distribution(number))
    return int(np.searchsorted(cumulative, level / 2, side="right"))


@functools.lru_cache(maxsize=64)
def _signed_rank_distribution(number: int) -> NDArray[np.float64]:
    """The probability of each value of the sum of positive ranks when each of ``number`` signs is a fair coin."""
    probabilities = np.zeros(number * (number + 1) // 2 + 1)
    probabilities[0] = 1.0
    for rank in range(1, number + 1):
        shifted = np.zeros_like(probabilities)
        shifted[rank:] = probabilities[:-rank]
        probabilities = (probabilities + shifted) / 2
    return probabilities
