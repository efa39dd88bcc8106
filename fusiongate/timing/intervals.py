"""Intervals that hold their level on few, quantised and heavy-tailed values: exact ranks instead of normal theory."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Interval", "fewest_values", "median_interval", "signed_rank_interval"]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the range that the data leave open."""

    value: float
    """The estimate."""
    low: float
    """The lower end, minus infinity where the values are too few for the level."""
    high: float
    """The upper end, infinity where the values are too few for the level."""

    @property
    def half_width(self) -> float:
        """Half the distance between the ends."""
        return (self.high - self.low) / 2

    def to_json(self) -> dict[str, float | None]:
        """The interval as an object of JSON's own types; an end that is unknown is null."""
        return {name: end if math.isfinite(end) else None for name, end in asdict(self).items()}


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
    from scipy.stats import binom

    data = np.sort(np.asarray(values, dtype=np.float64))
    # The binomial's quantile may itself be one too far: what has to hold is that both tails stay within the level.
    cut = int(binom.ppf(level / 2, data.size, 0.5))
    if cut > 0 and binom.cdf(cut - 1, data.size, 0.5) > level / 2:
        cut -= 1
    if cut == 0:
        return Interval(float(np.median(data)), -math.inf, math.inf)
    return Interval(float(np.median(data)), float(data[cut - 1]), float(data[-cut]))


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
